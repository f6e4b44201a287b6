// SPDX-License-Identifier: Apache-2.0
// Neighbours: the chunks that other engines of this host hold in their memory and that this engine may load
// from there.
//
// A borrowed row is pinned in its owner's region, once for this engine, while it has holds here. Its RowId is
// that of HostRegion::neighbour_row(), so the ranks read it like a row of their own.
//
// A neighbour is used once every worker has mapped its region, and until it has ended and none of its rows is
// held. At most half of a neighbour's rows are borrowed at once, so that readers cannot keep an owner from
// all of its memory.
//
// Threads: one (the scheduler's), and a thread that looks for new neighbours.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#include "base/clock.h"
#include "base/thread_annotations.h"
#include "base/types.h"
#include "memory/host_region.h"
#include "memory/neighbour_region.h"

namespace kv_offload {

class Neighbours {
 public:
  // `row_bytes`: of each group position, padded. `interval`: between two searches for neighbours; 0 = poll()
  // searches, and there is no thread. The region must outlive this.
  Neighbours(HostRegion& region, const SharedRowsLayout& layout, std::string identity,
             std::vector<std::uint64_t> row_bytes, Nanos interval);
  ~Neighbours();
  Neighbours(const Neighbours&) = delete;
  Neighbours& operator=(const Neighbours&) = delete;

  struct Borrowed {
    RowId row = kNoRow;
    std::uint32_t depth = 0;
  };
  // Pins the row of a neighbour that has this chunk, with one hold. Throws std::bad_alloc; nothing is held
  // then.
  std::optional<Borrowed> borrow(const ChunkKey& key, std::uint32_t group);
  // True if a neighbour has the chunk now.
  bool has(const ChunkKey& key, std::uint32_t group) const;
  // Adds a hold, ends one. The last one unpins the row. REQUIRES: the row is held.
  void hold(RowId row) noexcept { ++holds_.find(row)->second; }
  void release(RowId row) noexcept;
  bool owns(RowId row) const { return row >= first_row_; }
  // The number in the name of the region that this row is in.
  unsigned number_of(RowId row) const;

  // Takes in new neighbours and leaves those that have ended.
  void poll(Nanos now);
  // Nothing is borrowed any more. Rows that are held stay pinned.
  void stop();
  std::size_t size() const { return stopped_ ? 0 : usable(); }
  // Reasons why regions are not used, each once.
  std::vector<std::string> take_problems();

 private:
  struct Neighbour {
    std::unique_ptr<NeighbourRegion> region;  // null: the slot is free
    std::size_t held = 0;                     // rows
    bool is_mapped = false;                   // by every worker
    bool has_ended = false;
  };
  std::optional<SharedRowsView::Found> find_in(const Neighbour& neighbour, const ChunkKey& key,
                                               std::uint32_t group) const;
  std::uint32_t slot_of(RowId row) const { return row / slot_rows_ - 1; }
  std::size_t usable() const;
  void search();
  void run_thread();
  void take_in();
  void leave_ended();

  HostRegion& region_;
  const SharedRowsLayout layout_;
  const std::string identity_;
  const std::vector<std::uint64_t> row_bytes_;
  const Nanos interval_;
  const RowId first_row_;              // of slot 0
  const RowId slot_rows_;              // between two slots
  std::vector<Neighbour> neighbours_;  // by slot
  std::unordered_map<RowId, std::uint32_t> holds_;
  std::optional<Nanos> checked_at_;
  bool stopped_ = false;

  mutable Mutex mutex_;
  CondVar wake_;
  bool closing_ GUARDED_BY(mutex_) = false;
  std::array<bool, 256> known_ GUARDED_BY(mutex_){};  // numbers that are not searched
  std::array<std::string, 256> refused_ GUARDED_BY(mutex_);
  std::vector<std::unique_ptr<NeighbourRegion>> found_ GUARDED_BY(mutex_);
  std::vector<std::string> problems_ GUARDED_BY(mutex_);
  std::thread thread_;  // last member: stopped first
};

}  // namespace kv_offload
