// SPDX-License-Identifier: Apache-2.0
// RowAllocator: allocates the rows of an area to size classes.
//
// One class per group (groups of equal row size share one). The area is cut into slabs. A slab belongs to one
// class while any of its rows is in use, and returns to the pool when the last row is freed. So a hybrid
// model's groups share memory by demand, and each row has the size of its class. The slab size is chosen from
// the row sizes so that rows waste <= 3% of the area; an area with one class is one slab. Rows that are
// allocated together are adjacent where possible (copies merge).
//
// Not thread-safe: the scheduler thread owns it. Only capacity_rows() and the constructor walk the slabs. All
// other calls are O(1) or O(log n) for each row that they allocate or free.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "base/types.h"

namespace kv_offload {

class RowAllocator {
 public:
  // row_bytes[g]: bytes of a row of group position g in each area (the largest shard of any rank); rounded up
  // to 4 KiB here. Throws InvalidArgument, naming both sizes, if the area cannot hold one row of every group.
  RowAllocator(std::uint64_t area_bytes, std::vector<std::uint64_t> row_bytes);
  ~RowAllocator();

  // Allocates one row for group position g, adjacent to this class's last row if that place is free. Returns
  // kNoRow if neither the class nor the pool has a free row. (An allocated row stays valid until free().)
  RowId allocate(std::uint32_t group);
  // Allocates exactly this row for group position g, as an earlier allocator of the same sizes did. Returns
  // false and changes nothing if the row is in use or is not a row of the class.
  bool claim(std::uint32_t group, RowId row);
  // True if rows of another class are in use in the slab of this row.
  bool is_in_slab_of_other_class(std::uint32_t group, RowId row) const;
  // REQUIRES: allocated and not freed; checked, throws std::logic_error (a row freed twice would be allocated
  // twice).
  void free(RowId row);

  // For a group g that finds no row and whose own class has nothing to evict. Returns the rows in use of the
  // slab of another class that is cheapest to empty: the one with the fewest rows in use, among those where
  // movable(row) holds for ALL of them. Evicting these rows frees the slab for g.
  // One call checks a bounded number of the emptiest slabs, then of all slabs in order of their place. It
  // returns an empty list if none of these qualifies. The next call continues after the last slab by place,
  // and after the last of equally full ones. So each slab is checked in the end, however many emptier ones
  // are pinned.
  std::vector<RowId> slab_to_reclaim(std::uint32_t group, const std::function<bool(RowId)>& movable);

  std::uint64_t row_bytes(std::uint32_t group) const;  // padded
  std::uint64_t rows_in_use() const;
  std::uint64_t bytes_in_use() const;                      // rows in use * padded row bytes, one area
  std::uint64_t capacity_rows(std::uint32_t group) const;  // if this class had the whole area
  std::uint64_t wasted_bytes() const;  // of the area: unusable for rows with the current slabs

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace kv_offload
