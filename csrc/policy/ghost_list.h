// GhostList: which of the last N departed entries were here. Lossy and bounded:
// a direct-mapped table, where a later departure may overwrite an earlier one's
// memory. 16 bytes a cell, twice as many cells as entries are remembered.
//
// It grows by single cells (linear hashing): a new cell takes over its part of one older cell.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>

#include "base/segmented_vector.h"
#include "base/steps.h"
#include "policy/eviction_policy.h"

namespace kv_offload {

class GhostList {
 public:
  // The newest of them all. `remembered`: how many departures count from now on.
  void add(ChunkId id, std::size_t remembered) {
    length_ = remembered;
    // So many cells at once keep up with departures, and are all that these need.
    for (int i = 0; i < kCellsAtOnce && cells_.size() < 2 * remembered; ++i) add_cell();
    cells_[place(id)] = {id, ++last_};
  }
  bool contains(ChunkId id) const {
    if (cells_.empty()) return false;
    const Cell& cell = cells_[place(id)];
    return cell.id == id && last_ - cell.stamp < length_;
  }
  std::size_t cells() const { return cells_.size(); }

 private:
  static constexpr int kCellsAtOnce = 16;
  struct Cell {
    ChunkId id = 0;
    std::uint64_t stamp = 0;
  };
  std::size_t place(ChunkId id) const {
    const std::size_t mask = std::bit_ceil(cells_.size()) - 1;
    const std::size_t place = (id >> 16) & mask;
    return place < cells_.size() ? place : place & mask / 2;
  }
  void add_cell() {
    const std::size_t added = cells_.size();
    cells_.push_back(Cell{});
    count_steps(1);
    if (added == 0) return;
    Cell& older = cells_[added - std::bit_floor(added)];
    if (older.id != 0 && place(older.id) == added) std::swap(older, cells_[added]);
  }

  SegmentedVector<Cell> cells_;
  std::uint64_t last_ = 0;
  std::size_t length_ = 0;
};

}  // namespace kv_offload
