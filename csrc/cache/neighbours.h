// SPDX-License-Identifier: Apache-2.0
// Neighbours: the chunks that other engines of this host hold in their memory and that this engine may load
// from there.
//
// A borrowed row is pinned in its owner's region, once for this engine, while it has holds here. Its RowId is
// that of HostRegion::neighbour_row(), so the ranks read it like a row of their own.
//
// A neighbour is used once every worker has mapped its region, and until it has ended and none of its rows is
// held. The borrowed rows of a neighbour take at most half of an area's bytes. This bounds one reader:
// several readers together can pin more, and an area with rows of several sizes can run out of empty slabs
// earlier.
//
// Most lookups are for chunks that no neighbour has. may_have() answers these from the filters of the
// neighbours' tables alone. The first call in a step takes the lock once; until the end of the step, the
// background thread unmaps none of these tables.
//
// Threads: any, except for may_have(), prefetch(), leave_filters(), poll() and stop(), which only one thread
// calls (the scheduler's). A thread looks for new neighbours and unmaps those that have ended, even while the
// engine is idle. No method waits for its system calls.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
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
  // does the thread's work. The region must outlive this.
  Neighbours(HostRegion& region, const SharedRowsLayout& layout, std::string identity,
             std::vector<std::uint64_t> row_bytes, Nanos interval);
  ~Neighbours();
  Neighbours(const Neighbours&) = delete;
  Neighbours& operator=(const Neighbours&) = delete;

  struct Borrowed {
    RowId row = kNoRow;
    std::uint32_t depth = 0;
  };
  // False: no neighbour has this chunk. True: one may have it; see borrow() and use(). End a step that
  // makes such calls with poll() or leave_filters(): otherwise a neighbour that has ended stays mapped.
  bool may_have(const ChunkKey& key) {
    const std::span<const SharedRowsFilter> all = filters();
    if (all.empty()) return false;
    const SharedRowsFilter::Place place = all.front().place_of(ChunkKey::Hash{}(key));
    for (const SharedRowsFilter& filter : all) {
      if (filter.may_have(place)) return true;
    }
    return false;
  }
  // Hints that may_have(key) follows soon.
  void prefetch(const ChunkKey& key) {
    const std::span<const SharedRowsFilter> all = filters();
    if (all.empty()) return;
    const SharedRowsFilter::Place place = all.front().place_of(ChunkKey::Hash{}(key));
    for (const SharedRowsFilter& filter : all) filter.prefetch(place);
  }
  void leave_filters();
  // Pins the row of a neighbour that has this chunk, with one hold. Throws std::bad_alloc; nothing is held
  // then.
  std::optional<Borrowed> borrow(const ChunkKey& key, std::uint32_t group);
  // True if a neighbour has this chunk now. Its owner's eviction then counts a use.
  bool use(const ChunkKey& key, std::uint32_t group);
  // Adds or ends a hold. The end of the last one unpins the row. REQUIRES: the row is held.
  void hold(RowId row) noexcept;
  void release(RowId row) noexcept;
  bool owns(RowId row) const { return row >= first_row_; }
  // The number in the name of the region that this row is in.
  unsigned number_of(RowId row) const;

  // Takes in the neighbours that were found.
  void poll();
  // Nothing is borrowed or searched any more. Rows that are held stay pinned, and their regions mapped.
  void stop();
  std::size_t size() const;
  // Reasons why regions are not used, each once, and those that were added.
  std::vector<std::string> take_problems();
  void add_problem(std::string problem);

 private:
  struct Neighbour {
    std::unique_ptr<NeighbourRegion> region;  // null: the slot is free. Only check() resets it
    std::uint64_t held_bytes = 0;             // of the borrowed rows, in each area
    bool is_mapped = false;                   // by every worker
    bool has_ended = false;
    bool is_filter_read = false;       // in filters_: not unmapped
    std::uint32_t refused_checks = 0;  // consecutive checks in which a worker could not map it
  };
  struct Hold {
    std::uint32_t holds = 0;
    std::uint64_t bytes = 0;
  };
  // What has the number in the name of a region.
  struct Number {
    bool is_known = false;             // attached: not searched
    bool is_reported = false;          // that workers cannot map it
    std::uint32_t skipped_checks = 0;  // before it is searched again
    std::string refused;               // the last reason, reported already
  };
  static bool is_usable(const Neighbour& neighbour) {
    return neighbour.region != nullptr && neighbour.is_mapped && !neighbour.has_ended;
  }
  std::span<const SharedRowsFilter> filters() {
    if (!reads_filters_) read_filters();
    return filters_;
  }
  void read_filters();
  std::optional<SharedRowsView::Found> find_in(const Neighbour& neighbour, const ChunkKey& key,
                                               std::uint32_t group) const REQUIRES(mutex_);
  std::uint32_t slot_of(RowId row) const { return row / slot_rows_ - 1; }
  bool is_over() const REQUIRES(mutex_);
  void run_thread();
  // What the thread does in each interval.
  void check();
  void search();
  // Returns the ended ones of those that were found and not taken in.
  std::vector<const NeighbourRegion*> find_ended();
  void leave_ended(const std::vector<const NeighbourRegion*>& ended_found);
  void take_in() REQUIRES(mutex_);

  HostRegion& region_;
  const SharedRowsLayout layout_;
  const std::string identity_;
  const std::vector<std::uint64_t> row_bytes_;
  const Nanos interval_;
  const RowId first_row_;  // of slot 0
  const RowId slot_rows_;  // between two slots
  // Filters of the usable neighbours, while reads_filters_. Only the scheduler's thread uses these two.
  std::vector<SharedRowsFilter> filters_;
  bool reads_filters_ = false;

  mutable Mutex mutex_;
  CondVar wake_;
  bool closing_ GUARDED_BY(mutex_) = false;
  bool stopped_ GUARDED_BY(mutex_) = false;
  // The slots in use and those before them; a call then visits no others.
  std::span<Neighbour> used() REQUIRES(mutex_) { return {neighbours_.data(), used_slots_}; }
  void forget_filters() REQUIRES(mutex_);
  std::vector<Neighbour> neighbours_ GUARDED_BY(mutex_);  // by slot
  std::size_t used_slots_ GUARDED_BY(mutex_) = 0;
  std::unordered_map<RowId, Hold> holds_ GUARDED_BY(mutex_);
  std::array<Number, 256> numbers_ GUARDED_BY(mutex_){};
  std::vector<std::unique_ptr<NeighbourRegion>> found_ GUARDED_BY(mutex_);  // not taken in yet; like `region`
  std::vector<std::string> problems_ GUARDED_BY(mutex_);
  std::thread thread_;  // last member: stopped first
};

}  // namespace kv_offload
