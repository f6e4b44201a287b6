// IdTable: ChunkId -> a small number, for policies: open addressing in one flat
// array, because a hash map with a node per entry costs an allocation and two cache
// misses for each chunk that comes and goes. Every call O(1); memory 16 bytes a
// cell, a load of 0.25 to 0.5.
#pragma once

#include <bit>
#include <cassert>
#include <cstdint>
#include <utility>
#include <vector>

#include "policy/eviction_policy.h"

namespace kv_offload {

class IdTable {
 public:
  static constexpr std::uint32_t kNone = 0xFFFFFFFFu;

  IdTable() : cells_(kMinCells) {}

  // kNone: not there.
  std::uint32_t find(ChunkId id) const {
    const Cell& cell = cells_[locate(id)];
    return cell.id == id ? cell.value : kNone;
  }
  // The value of `id`, kNone when it was not there until now: to be set before the
  // next call. REQUIRES: id is not 0.
  std::uint32_t& at(ChunkId id) {
    assert(id != 0);
    if (2 * (size_ + 1) > cells_.size()) grow();
    Cell& cell = cells_[locate(id)];
    if (cell.id == 0) {
      cell.id = id;
      ++size_;
    }
    return cell.value;
  }
  // REQUIRES: there. Moves later cells of the run back over the hole: no tombstones.
  void erase(ChunkId id) {
    const std::size_t mask = cells_.size() - 1;
    std::size_t hole = locate(id);
    assert(cells_[hole].id == id);
    for (std::size_t at = (hole + 1) & mask; cells_[at].id != 0; at = (at + 1) & mask) {
      if (((at - home(cells_[at].id)) & mask) >= ((at - hole) & mask)) {
        cells_[hole] = cells_[at];
        hole = at;
      }
    }
    cells_[hole] = Cell{};
    --size_;
  }
  std::size_t size() const { return size_; }

 private:
  static constexpr std::size_t kMinCells = 64;
  struct Cell {
    ChunkId id = 0;
    std::uint32_t value = kNone;
  };

  // The high bits of the product: ids may differ in a few bits only.
  std::size_t home(ChunkId id) const {
    return id * 0x9E3779B97F4A7C15ull >> (64 - std::bit_width(cells_.size() - 1));
  }
  std::size_t locate(ChunkId id) const {
    std::size_t at = home(id);
    while (cells_[at].id != 0 && cells_[at].id != id) at = (at + 1) & (cells_.size() - 1);
    return at;
  }
  void grow() {
    const std::vector<Cell> old = std::exchange(cells_, std::vector<Cell>(2 * cells_.size()));
    for (const Cell& cell : old) {
      if (cell.id != 0) cells_[locate(cell.id)] = cell;
    }
  }

  std::vector<Cell> cells_;
  std::size_t size_ = 0;
};

}  // namespace kv_offload
