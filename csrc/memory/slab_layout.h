// How an area is cut into slabs. Private to RowAllocator.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace kv_offload {

struct SlabExtent {
  std::uint32_t start;  // page in the area
  std::uint32_t pages;
};

// The rows of one size, and how many groups have it.
struct RowSize {
  std::uint32_t pages;
  std::uint32_t groups;
};

// Slabs in ascending order; together the whole area. `sizes` are different and
// one row of every group fits the area. Every size finds, in the slabs that the
// other sizes leave, one row for each of its groups when each size takes the
// smallest slab that fits, largest size first.
//
// - One size: one slab.
// - Else equal slabs, the last one shorter: of the slab sizes that leave <= 1% (or
//   the least possible) unused, counting rows that do not divide it and half a
//   slab per size, the largest up to 16 of the largest rows.
// - An area of a few rows only: a slab for a row of each group, then equal slabs.
std::vector<SlabExtent> cut_slabs(std::uint32_t area_pages, std::span<const RowSize> sizes);

}  // namespace kv_offload
