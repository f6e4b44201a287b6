// IdTable: ChunkId -> a small number, for policies: open addressing in one flat
// array, because a hash map with a node per entry costs an allocation and two cache
// misses for each chunk that comes and goes. The owner has the ids: `id_of(value)`
// is the id under which that value stands. Every call O(1); memory 8 bytes a cell,
// a load of 0.25 to 0.5.
#pragma once

#include <algorithm>
#include <bit>
#include <cassert>
#include <cstdint>
#include <utility>

#include "base/table_vector.h"
#include "policy/eviction_policy.h"

namespace kv_offload {

class IdTable {
 public:
  static constexpr std::uint32_t kNone = 0xFFFFFFFFu;

  IdTable() : cells_(kMinCells) {}

  // kNone: not there.
  template <typename IdOf>
  std::uint32_t find(ChunkId id, IdOf id_of) const {
    return cells_[locate(id, id_of)].value;
  }
  // The value of `id`; kNone when it was not there until now: to be set before the
  // next call.
  template <typename IdOf>
  std::uint32_t& at(ChunkId id, IdOf id_of) {
    if (2 * (size_ + 1) > cells_.size()) grow();
    Cell& cell = cells_[locate(id, id_of)];
    if (cell.value == kNone) {
      cell.tag = tag(id);
      ++size_;
    }
    return cell.value;
  }
  // REQUIRES: there. Moves later cells of the run back over the hole: no tombstones.
  template <typename IdOf>
  void erase(ChunkId id, IdOf id_of) {
    const std::size_t mask = cells_.size() - 1;
    std::size_t hole = locate(id, id_of);
    assert(cells_[hole].value != kNone);
    for (std::size_t at = (hole + 1) & mask; cells_[at].value != kNone; at = (at + 1) & mask) {
      if (((at - home(cells_[at].tag)) & mask) >= ((at - hole) & mask)) {
        cells_[hole] = cells_[at];
        hole = at;
      }
    }
    cells_[hole] = Cell{};
    --size_;
  }
  void prefetch(ChunkId id) const { __builtin_prefetch(&cells_[home(tag(id))]); }
  std::size_t size() const { return size_; }
  // The high bits of an id's hash; the lowest of these choose its cell.
  static std::uint32_t tag(ChunkId id) { return static_cast<std::uint32_t>(hash(id) >> 32); }
  // Bits of an id's hash that do not choose its cell in tables of up to so many cells: ids that were chosen
  // by these lie all over the table.
  static constexpr std::size_t kCellsOfSpareBits = std::size_t{1} << 19;
  static std::uint64_t spare_bits(ChunkId id) {
    return hash(id) >> (32 + std::countr_zero(kCellsOfSpareBits));
  }
  // The most cells that a find() looks at.
  std::size_t longest_probe() const {
    std::size_t longest = 0, run = 0;
    for (std::size_t i = 0; i < 2 * cells_.size(); ++i) {  // twice: a run may go on at the beginning
      run = cells_[i % cells_.size()].value == kNone ? 0 : run + 1;
      longest = std::max(longest, run + 1);
    }
    return longest;
  }

 private:
  static constexpr std::size_t kMinCells = 64;
  // The tag saves the owner's cache line on a collision, and when cells move.
  struct Cell {
    std::uint32_t tag = 0;
    std::uint32_t value = kNone;
  };

  // The high bits of the product: ids may differ in a few bits only.
  static std::uint64_t hash(ChunkId id) { return id * 0x9E3779B97F4A7C15ull; }
  std::size_t home(std::uint32_t tag) const { return tag & (cells_.size() - 1); }
  template <typename IdOf>
  std::size_t locate(ChunkId id, IdOf id_of) const {
    const std::uint32_t wanted = tag(id);
    std::size_t at = home(wanted);
    while (cells_[at].value != kNone && (cells_[at].tag != wanted || id_of(cells_[at].value) != id)) {
      at = (at + 1) & (cells_.size() - 1);
    }
    return at;
  }
  // By their tags alone: to ask the owner for a million ids would be as many cache misses in one call.
  void grow() {
    const TableVector<Cell> old = std::exchange(cells_, TableVector<Cell>(2 * cells_.size()));
    for (const Cell& cell : old) {
      if (cell.value == kNone) continue;
      std::size_t at = home(cell.tag);
      while (cells_[at].value != kNone) at = (at + 1) & (cells_.size() - 1);
      cells_[at] = cell;
    }
  }

  TableVector<Cell> cells_;
  std::size_t size_ = 0;
};

}  // namespace kv_offload
