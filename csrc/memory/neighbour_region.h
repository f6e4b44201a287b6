// SPDX-License-Identifier: Apache-2.0
// NeighbourRegion: the scheduler's access to the rows of another engine of this host: its table of rows, and
// the pins that this engine sets there. (The bytes are read by the workers: HostRegion::map_neighbours.)
//
// A region is used only if it is a regular file of the same user that no other user may access, has the same
// sizes as the own region, and a table of the same identity. Everything else is refused with a reason.
//
// While this object or a worker's mapping exists, this engine holds a reader number in the region. If all its
// processes die, the owner clears the pins of that number.
//
// Threads: one at a time. is_alive(): one more.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>

#include "memory/host_region.h"
#include "memory/shared_rows.h"

namespace kv_offload {

class NeighbourRegion {
 public:
  // Attaches to the region with the own region's share_for and this number. Returns nullptr if there is none,
  // if it is the own one or its processes have ended, or if it must not be used; then `problem` says why.
  // Fails with a problem if kMostReaders engines read there already.
  static std::unique_ptr<NeighbourRegion> attach(const HostRegion& own, unsigned number,
                                                 const SharedRowsLayout& layout, std::string_view identity,
                                                 std::string* problem);
  ~NeighbourRegion();
  NeighbourRegion(const NeighbourRegion&) = delete;
  NeighbourRegion& operator=(const NeighbourRegion&) = delete;

  NeighbourArea area() const { return area_; }
  // A number for people, e.g. in logs: the same in all engines that see it.
  unsigned number() const { return area_.number; }

  std::optional<SharedRowsView::Found> find(const ChunkKey& key) const { return rows_->find(key); }
  SharedRowsFilter filter() const { return rows_->filter(); }
  bool pin(const SharedRowsView::Found& found) { return rows_->pin(area_.reader, found); }
  void unpin(RowId row) { rows_->unpin(area_.reader, row); }
  // Its owner's eviction counts a use of this row.
  void mark_used(RowId row) { rows_->mark_used(row); }
  // False: the owner has closed its table, its scheduler has ended, or another engine has taken the region
  // over (then attach() finds it again). Rows that are pinned stay valid. Removes the shared name of a region
  // without processes if it has no kept name.
  bool is_alive();

 private:
  NeighbourRegion() = default;
  void map(const SharedRowsLayout& layout, std::uint64_t offset, std::string_view identity);
  // Locks a free reader number.
  bool take_number();
  // False if the region has meanwhile ended or got another owner. REQUIRES: take_number().
  bool begin_reading();
  bool is_named() const;  // path_ is still a name of the file
  // Leaves a file with a second name alone: an engine that adopts it would find it locked. A start removes
  // its shared name.
  void remove_name() const;

  NeighbourArea area_;
  std::string path_;
  int fd_ = -1;
  std::span<std::byte> table_, pins_;  // mapped
  std::optional<SharedRowsView> rows_;
};

// Returns the number of the own region: neighbours know this engine by it (NeighbourRegion::number). Nothing
// if the region is not shared, or not any more.
std::optional<unsigned> shared_number(const HostRegion& own);

}  // namespace kv_offload
