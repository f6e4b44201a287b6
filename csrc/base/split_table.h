// SplitTable: a hash table of small numbers that grows in steps of bounded work (extendible hashing). The
// owner has the keys: it gives a 32-bit tag of each, and tells whether a value is the one that it looks for.
//
// Cells lie in blocks of kCells; a directory says by the first bits of a tag which block it is in, the last
// bits choose the cell, and collisions go into the cells behind it (linear probing, no tombstones). A block
// that is half full is split into two, which moves at most kCells / 2 cells; all other blocks stay as they
// are. The directory doubles from time to time: it has 16 bytes for each thousand values. Blocks whose tags
// are all alike, which no digest's are, become longer instead.
//
// Memory: 8 bytes a cell, a load of 0.25 to 0.5. Blocks lie side by side on huge pages where there are many.
#pragma once

#include <algorithm>
#include <cassert>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <utility>
#include <vector>

#include "base/steps.h"
#include "base/zeroed_memory.h"

namespace kv_offload {

class SplitTable {
 public:
  static constexpr std::uint32_t kNone = 0xFFFFFFFFu;
  static constexpr std::size_t kCells = 4096;  // of a block; while there is one block it may have fewer
  // The bits of a tag that choose its cell in tables of less than kMostOfUsedBits values: so many first ones
  // and so many last ones.
  static constexpr unsigned kFirstBits = 8, kLastBits = 12;
  static constexpr std::size_t kMostOfUsedBits = std::size_t{1} << 18;
  static_assert(std::size_t{1} << kLastBits == kCells);

  SplitTable() { directory_.push_back(make_block(kFirstCells)); }
  SplitTable(SplitTable&&) = default;
  SplitTable& operator=(SplitTable&&) = default;

  // kNone: not there. `is(value)`: is it the one?
  template <typename Is>
  std::uint32_t find(std::uint32_t tag, Is is) const {
    return locate(directory_[index_of(tag)], tag, is)->value;
  }
  // The value; kNone when it was not there until now: to be set before the next call. Throws bad_alloc and
  // has changed nothing that can be seen.
  template <typename Is>
  std::uint32_t& at(std::uint32_t tag, Is is) {
    make_room(tag);
    const Place& place = directory_[index_of(tag)];
    Cell& cell = *locate(place, tag, is);
    if (cell.value == kNone) {
      cell.tag = tag;
      ++blocks_[place.block].used;
      ++size_;
    }
    return cell.value;
  }
  // REQUIRES: there. Moves later cells of the run back over the hole.
  template <typename Is>
  void erase(std::uint32_t tag, Is is) {
    const Place& place = directory_[index_of(tag)];
    Cell* const cells = place.cells;
    const std::uint32_t mask = place.mask;
    auto hole = static_cast<std::uint32_t>(locate(place, tag, is) - cells);
    assert(cells[hole].value != kNone);
    for (std::uint32_t at = (hole + 1) & mask; cells[at].value != kNone; at = (at + 1) & mask) {
      if (((at - cells[at].tag) & mask) >= ((at - hole) & mask)) {
        cells[hole] = cells[at];
        hole = at;
      }
    }
    cells[hole].value = kNone;
    --blocks_[place.block].used;
    --size_;
  }
  void prefetch(std::uint32_t tag) const {
    const Place& place = directory_[index_of(tag)];
    __builtin_prefetch(&place.cells[tag & place.mask]);
  }
  std::size_t size() const { return size_; }
  // The most cells that a find() looks at.
  std::size_t longest_probe() const;

 private:
  static constexpr std::size_t kFirstCells = 64;
  static constexpr unsigned kMostDepth = 32 - kLastBits;
  static constexpr std::size_t kMostBlocksOfSlab = 64;  // 2 MiB
  struct Cell {
    std::uint32_t tag;  // saves the owner's cache line on a collision, and when cells move
    std::uint32_t value;
  };
  struct Place {
    Cell* cells = nullptr;
    std::uint32_t mask = 0;
    std::uint32_t block = 0;
  };
  struct Block {
    std::uint32_t used = 0;
    std::uint32_t depth = 0;  // the first bits of a tag that all in it have in common
    ZeroedMemory own;         // its cells, when they are not part of a slab
  };

  std::size_t index_of(std::uint32_t tag) const {
    return static_cast<std::size_t>(std::uint64_t{tag} << depth_ >> 32);
  }
  template <typename Is>
  static Cell* locate(const Place& place, std::uint32_t tag, Is is) {
    std::uint32_t at = tag & place.mask;
    while (place.cells[at].value != kNone && (place.cells[at].tag != tag || !is(place.cells[at].value))) {
      at = (at + 1) & place.mask;
    }
    return &place.cells[at];
  }
  static void put(const Place& place, const Cell& cell) {
    std::uint32_t at = cell.tag & place.mask;
    while (place.cells[at].value != kNone) at = (at + 1) & place.mask;
    place.cells[at] = cell;
  }
  static void clear(const Place& place) {
    std::memset(place.cells, 0xFF, (std::size_t{place.mask} + 1) * sizeof(Cell));
  }

  void make_room(std::uint32_t tag) {
    while (true) {
      const Place& place = directory_[index_of(tag)];
      if (2 * (std::size_t{blocks_[place.block].used} + 1) <= std::size_t{place.mask} + 1) return;
      grow(tag);
    }
  }
  void grow(std::uint32_t tag);
  bool may_split(const Place& place) const;
  void split(std::uint32_t tag);
  void lengthen(std::uint32_t tag);
  void double_directory();
  // The places of a block are side by side.
  std::size_t first_place_of(std::uint32_t tag, unsigned depth) const {
    return static_cast<std::size_t>(std::uint64_t{tag} << depth >> 32) << (depth_ - depth);
  }
  Place make_block(std::size_t cells);
  Cell* cells_of_slab();

  std::vector<Place> directory_;
  unsigned depth_ = 0;  // the directory has 2^depth_ places
  std::size_t size_ = 0;
  std::vector<Block> blocks_;
  std::vector<ZeroedMemory> slabs_;
  Cell* next_of_slab_ = nullptr;
  std::size_t left_of_slab_ = 0;  // blocks
  std::size_t last_slab_ = 0;     // how many blocks it had
};

}  // namespace kv_offload
