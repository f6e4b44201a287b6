// SPDX-License-Identifier: Apache-2.0
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

// A row size, and the number of groups that have it.
struct RowSize {
  std::uint32_t pages;
  std::uint32_t groups;
};

// Returns slabs in ascending order that cover the whole area. REQUIRES: `sizes` are different, and one row of
// every group fits in the area. If each size takes the smallest slabs that fit, largest size first, every
// size finds one row for each of its groups.
//
// - One size: one slab.
// - Else equal slabs, the last one shorter. Among the slab sizes that leave <= 1% (or the least possible)
//   unused, the largest one up to 16 of the largest rows. Unused counts the remainder of rows that do not
//   divide the slab, and half a slab per size.
// - An area of a few rows only: a slab for a row of each group, then equal slabs.
std::vector<SlabExtent> cut_slabs(std::uint32_t area_pages, std::span<const RowSize> sizes);

}  // namespace kv_offload
