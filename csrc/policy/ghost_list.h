// GhostList: which of the last N departed entries were here. Lossy and bounded:
// a direct-mapped table, where a later departure may overwrite an earlier one's
// memory. 16 bytes a cell, twice as many cells as entries are remembered.
#pragma once

#include <bit>
#include <cstdint>
#include <vector>

#include "policy/eviction_policy.h"

namespace kv_offload {

class GhostList {
 public:
  // The newest of them all. `remembered`: how many departures count from now on.
  void add(ChunkId id, std::size_t remembered) {
    length_ = remembered;
    if (cells_.size() < 2 * remembered) grow(std::bit_ceil(2 * remembered));
    cells_[place(id)] = {id, ++last_};
  }
  bool contains(ChunkId id) const {
    if (cells_.empty()) return false;
    const Cell& cell = cells_[place(id)];
    return cell.id == id && last_ - cell.stamp < length_;
  }
  std::size_t cells() const { return cells_.size(); }

 private:
  struct Cell {
    ChunkId id = 0;
    std::uint64_t stamp = 0;
  };
  std::size_t place(ChunkId id) const { return (id >> 16) & (cells_.size() - 1); }
  void grow(std::size_t cells) {
    std::vector<Cell> old(cells);
    old.swap(cells_);
    for (const Cell& cell : old) {
      if (cell.id == 0) continue;
      Cell& home = cells_[place(cell.id)];
      if (home.stamp < cell.stamp) home = cell;
    }
  }

  std::vector<Cell> cells_;
  std::uint64_t last_ = 0;
  std::size_t length_ = 0;
};

}  // namespace kv_offload
