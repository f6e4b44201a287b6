// SPDX-License-Identifier: Apache-2.0
// SplitTable: a hash table of small numbers that grows in steps of bounded work (extendible hashing). The
// owner stores the keys. It passes a 32-bit tag of each key, and a predicate that decides whether a value is
// the one searched for.
//
// Cells are in blocks of kCells. The first bits of a tag select the block through a directory, and the last
// bits select the cell. On a collision the next cells are used (linear probing, no tombstones). A half-full
// block is split into two, which moves at most kCells / 2 cells and leaves all other blocks unchanged. The
// directory doubles from time to time; it takes 16 bytes per thousand values. A block whose tags are all
// alike is lengthened instead; tags of digests never are.
//
// Memory: 8 bytes per cell, at a load of 0.25 to 0.5. Large tables keep their blocks adjacent on huge pages.
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
  static constexpr std::size_t kCells = 4096;  // per block; a single block may have fewer
  // The first and last bits of a tag that select its cell in tables of less than kMostOfUsedBits values.
  static constexpr unsigned kFirstBits = 8, kLastBits = 12;
  static constexpr std::size_t kMostOfUsedBits = std::size_t{1} << 18;
  static_assert(std::size_t{1} << kLastBits == kCells);

  SplitTable() { directory_.push_back(make_block(kFirstCells)); }
  SplitTable(SplitTable&&) = default;
  SplitTable& operator=(SplitTable&&) = default;

  // Returns the value, or kNone. `is(value)` is true for the searched value.
  template <typename Is>
  std::uint32_t find(std::uint32_t tag, Is is) const {
    return locate(directory_[index_of(tag)], tag, is)->value;
  }
  // Returns the value. If there is none, adds make(), which must not be kNone. make() must not call this
  // table. If it throws, or on bad_alloc, nothing visible has changed.
  template <typename Is, typename Make>
  std::uint32_t find_or_add(std::uint32_t tag, Is is, Make make) {
    make_room(tag);
    const Place& place = directory_[index_of(tag)];
    Cell& cell = *locate(place, tag, is);
    if (cell.value != kNone) return cell.value;
    const std::uint32_t value = make();
    assert(value != kNone);
    cell = {tag, value};
    ++blocks_[place.block].used;
    ++size_;
    return value;
  }
  // Erases a value. REQUIRES: it exists. Moves later cells of the run back into the hole.
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
  // Returns the maximum number of cells that a find() looks at.
  std::size_t longest_probe() const;

 private:
  static constexpr std::size_t kFirstCells = 64;
  static constexpr unsigned kMostDepth = 32 - kLastBits;
  static constexpr std::size_t kMostBlocksOfSlab = 64;  // 2 MiB
  struct Cell {
    std::uint32_t tag;  // avoids loading the owner's cache line on a collision, and when cells move
    std::uint32_t value;
  };
  struct Place {
    Cell* cells = nullptr;
    std::uint32_t mask = 0;
    std::uint32_t block = 0;
  };
  struct Block {
    std::uint32_t used = 0;
    std::uint32_t depth = 0;  // number of leading tag bits that all its cells share
    ZeroedMemory own;         // its cells, if they are not part of a slab
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
  // The directory places of a block are adjacent.
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
  std::size_t slab_remaining_ = 0;  // unused blocks
  std::size_t last_slab_ = 0;       // its number of blocks
};

}  // namespace kv_offload
