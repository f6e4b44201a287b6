// SPDX-License-Identifier: Apache-2.0
// IdTable: ChunkId -> a small number, for policies. Open addressing in flat blocks (SplitTable), because a
// hash map with a node per entry costs an allocation and two cache misses for each chunk inserted and
// removed. The owner stores the ids: `id_of(value)` returns the id of a value. Every call is O(1), growth
// included.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/split_table.h"
#include "policy/eviction_policy.h"

namespace kv_offload {

class IdTable {
 public:
  static constexpr std::uint32_t kNone = SplitTable::kNone;

  // Returns kNone if the id is not in the table.
  template <typename IdOf>
  std::uint32_t find(ChunkId id, IdOf id_of) const {
    return table_.find(tag(id), [&](std::uint32_t value) { return id_of(value) == id; });
  }
  // Returns the value of `id`. If there is none, adds make(). make() must not call this table. If it throws,
  // or on bad_alloc, nothing visible has changed.
  template <typename IdOf, typename Make>
  std::uint32_t find_or_add(ChunkId id, IdOf id_of, Make make) {
    return table_.find_or_add(
        tag(id), [&](std::uint32_t value) { return id_of(value) == id; }, make);
  }
  // REQUIRES: the id is in the table.
  template <typename IdOf>
  void erase(ChunkId id, IdOf id_of) {
    table_.erase(tag(id), [&](std::uint32_t value) { return id_of(value) == id; });
  }
  void prefetch(ChunkId id) const { table_.prefetch(tag(id)); }
  std::size_t size() const { return table_.size(); }
  // The high bits of an id's hash. The first and the last of these choose its cell.
  static std::uint32_t tag(ChunkId id) { return static_cast<std::uint32_t>(hash(id) >> 32); }
  // Bits of an id's hash that do not choose its cell in tables of up to this many ids: ids selected by these
  // bits are spread over the whole table.
  static constexpr std::size_t kIdsOfSpareBits = SplitTable::kMostOfUsedBits;
  static std::uint32_t spare_bits(ChunkId id) {
    return tag(id) << SplitTable::kFirstBits >> (SplitTable::kFirstBits + SplitTable::kLastBits);
  }
  // Returns the most cells that a find() checks.
  std::size_t longest_probe() const { return table_.longest_probe(); }

 private:
  // The high bits of the product, because ids may differ in a few bits only.
  static std::uint64_t hash(ChunkId id) { return id * 0x9E3779B97F4A7C15ull; }

  SplitTable table_;
};

}  // namespace kv_offload
