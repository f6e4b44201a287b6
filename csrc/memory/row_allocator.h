// RowAllocator: hands out the rows of an area to size classes.
//
// One class per group (groups of equal row size share one). The area is cut
// into slabs; a slab belongs to one class while any of its rows is in use, and
// returns to the pool when the last is freed, so that a hybrid model's groups
// share memory by demand and none takes rows of another's size. The slab size is
// chosen from the row sizes so that rows waste <= 3% of the area; an area with
// one class is one slab. Rows that are allocated together are adjacent where
// possible (copies merge).
//
// Not thread-safe: the scheduler thread owns it. No call but capacity_rows() and the constructor walks the
// slabs: each is O(1) or O(log n) for each row that it takes or gives back.
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
  // row_bytes[g]: bytes of a row of group position g in each area (the largest
  // shard of any rank); rounded up to 4 KiB here. Throws InvalidArgument when
  // the area does not hold at least one row of every group, naming both sizes.
  RowAllocator(std::uint64_t area_bytes, std::vector<std::uint64_t> row_bytes);
  ~RowAllocator();

  // One row for group position g, next to the last one handed out to this
  // class where that is free; kNoRow when neither the class nor the pool has
  // any. (An allocated row stays valid until free().)
  RowId allocate(std::uint32_t group);
  // This very row for group position g, as an earlier allocator of the same sizes handed
  // it out. False, and nothing has changed, where it is in use or is no row of the class.
  bool claim(std::uint32_t group, RowId row);
  // REQUIRES: allocated and not freed; checked, throws std::logic_error (a row
  // freed twice would be handed out twice).
  void free(RowId row);

  // When group g finds no row and its own class has nothing to evict: the rows
  // in use of the other class's slab that is cheapest to empty, i.e. with the
  // fewest rows in use for which movable(row) holds for ALL rows. Evicting all of them makes the slab free
  // for g. Empty when no such slab is among those that one call looks at: a bounded number, the emptiest
  // first; of slabs that are equally full the next call tries others.
  std::vector<RowId> slab_to_reclaim(std::uint32_t group, const std::function<bool(RowId)>& movable);

  std::uint64_t row_bytes(std::uint32_t group) const;  // padded
  std::uint64_t rows_in_use() const;
  std::uint64_t bytes_in_use() const;                      // rows in use * padded row bytes, one area
  std::uint64_t capacity_rows(std::uint32_t group) const;  // if this class had everything
  std::uint64_t wasted_bytes() const;  // of the area: can never hold a row with today's slabs

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace kv_offload
