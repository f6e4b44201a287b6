// SPDX-License-Identifier: Apache-2.0
#include "base/split_table.h"

namespace kv_offload {

void SplitTable::grow(std::uint32_t tag) {
  may_split(directory_[index_of(tag)]) ? split(tag) : lengthen(tag);
}

// Returns false if one block is full and the others are empty: the directory would be larger than all blocks
// together.
bool SplitTable::may_split(const Place& place) const {
  if (place.mask + 1 < kCells) return false;
  const unsigned depth = blocks_[place.block].depth;
  if (depth < depth_) return true;
  return depth < kMostDepth && directory_.size() * kCells / 2 <= 8 * size_;
}

void SplitTable::split(std::uint32_t tag) {
  if (blocks_[directory_[index_of(tag)].block].depth == depth_) double_directory();
  const Place old = directory_[index_of(tag)];
  const std::size_t cells = std::size_t{old.mask} + 1;
  const std::vector<Cell> moved(old.cells, old.cells + cells);
  const Place second = make_block(cells);  // the last call that may throw
  Block& first_block = blocks_[old.block];
  Block& second_block = blocks_[second.block];
  const std::size_t places = std::size_t{1} << (depth_ - first_block.depth);
  const std::size_t begin = first_place_of(tag, first_block.depth);
  const std::uint32_t bit = std::uint32_t{1} << (31 - first_block.depth);
  second_block.depth = ++first_block.depth;
  clear(old);
  first_block.used = 0;
  for (const Cell& cell : moved) {
    if (cell.value == kNone) continue;
    const bool is_second = (cell.tag & bit) != 0;
    put(is_second ? second : old, cell);
    ++(is_second ? second_block : first_block).used;
  }
  std::fill_n(directory_.begin() + static_cast<std::ptrdiff_t>(begin + places / 2), places / 2, second);
  count_steps(first_block.used + second_block.used + places / 8);
}

// Doubles the block, in separately allocated memory.
void SplitTable::lengthen(std::uint32_t tag) {
  const Place old = directory_[index_of(tag)];
  Block& block = blocks_[old.block];
  const std::size_t cells = 2 * (std::size_t{old.mask} + 1);
  Place longer{nullptr, static_cast<std::uint32_t>(cells - 1), old.block};
  ZeroedMemory own;
  if (cells == kCells) {
    longer.cells = cells_of_slab();
  } else {
    own = ZeroedMemory(cells * sizeof(Cell));
    longer.cells = static_cast<Cell*>(own.data());
  }
  clear(longer);
  for (std::size_t at = 0; at <= old.mask; ++at) {
    if (old.cells[at].value != kNone) put(longer, old.cells[at]);
  }
  const std::size_t places = std::size_t{1} << (depth_ - block.depth);
  std::fill_n(directory_.begin() + static_cast<std::ptrdiff_t>(first_place_of(tag, block.depth)), places,
              longer);
  block.own = std::move(own);
  count_steps(block.used + places / 8);
}

void SplitTable::double_directory() {
  std::vector<Place> twice(2 * directory_.size());
  for (std::size_t i = 0; i < twice.size(); ++i) twice[i] = directory_[i / 2];
  directory_.swap(twice);
  ++depth_;
  count_steps(directory_.size() / 8);  // the copy is sequential, so a place costs an eighth of a cell
}

SplitTable::Place SplitTable::make_block(std::size_t cells) {
  Place place{nullptr, static_cast<std::uint32_t>(cells - 1), static_cast<std::uint32_t>(blocks_.size())};
  blocks_.emplace_back();
  try {
    if (cells == kCells) {
      place.cells = cells_of_slab();
    } else {
      blocks_.back().own = ZeroedMemory(cells * sizeof(Cell));
      place.cells = static_cast<Cell*>(blocks_.back().own.data());
    }
  } catch (...) {
    blocks_.pop_back();
    throw;
  }
  clear(place);
  return place;
}

SplitTable::Cell* SplitTable::cells_of_slab() {
  if (slab_remaining_ == 0) {
    const std::size_t blocks = std::clamp<std::size_t>(2 * last_slab_, 1, kMostBlocksOfSlab);
    slabs_.emplace_back(blocks * kCells * sizeof(Cell));
    next_of_slab_ = static_cast<Cell*>(slabs_.back().data());
    last_slab_ = slab_remaining_ = blocks;
  }
  --slab_remaining_;
  return std::exchange(next_of_slab_, next_of_slab_ + kCells);
}

std::size_t SplitTable::longest_probe() const {
  std::size_t longest = 0;
  for (const Place& place : directory_) {
    std::size_t run = 0;
    // Twice around: a run may continue at the beginning.
    for (std::size_t i = 0; i <= 2 * std::size_t{place.mask}; ++i) {
      run = place.cells[i & place.mask].value == kNone ? 0 : run + 1;
      longest = std::max(longest, run + 1);
    }
  }
  return longest;
}

}  // namespace kv_offload
