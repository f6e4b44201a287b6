// IdTable: ChunkId -> a small number, for policies: open addressing in flat blocks (SplitTable), because a
// hash map with a node per entry costs an allocation and two cache misses for each chunk that comes and goes.
// The owner has the ids: `id_of(value)` is the id under which that value stands. Every call O(1), growing
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

  // kNone: not there.
  template <typename IdOf>
  std::uint32_t find(ChunkId id, IdOf id_of) const {
    return table_.find(tag(id), [&](std::uint32_t value) { return id_of(value) == id; });
  }
  // The value of `id`; kNone when it was not there until now: to be set before the
  // next call.
  template <typename IdOf>
  std::uint32_t& at(ChunkId id, IdOf id_of) {
    return table_.at(tag(id), [&](std::uint32_t value) { return id_of(value) == id; });
  }
  // REQUIRES: there.
  template <typename IdOf>
  void erase(ChunkId id, IdOf id_of) {
    table_.erase(tag(id), [&](std::uint32_t value) { return id_of(value) == id; });
  }
  void prefetch(ChunkId id) const { table_.prefetch(tag(id)); }
  std::size_t size() const { return table_.size(); }
  // The high bits of an id's hash; the first and the last of these choose its cell.
  static std::uint32_t tag(ChunkId id) { return static_cast<std::uint32_t>(hash(id) >> 32); }
  // Bits of an id's hash that do not choose its cell in tables of up to so many ids: ids that were chosen
  // by these lie all over the table.
  static constexpr std::size_t kIdsOfSpareBits = SplitTable::kMostOfUsedBits;
  static std::uint32_t spare_bits(ChunkId id) {
    return tag(id) << SplitTable::kFirstBits >> (SplitTable::kFirstBits + SplitTable::kLastBits);
  }
  // The most cells that a find() looks at.
  std::size_t longest_probe() const { return table_.longest_probe(); }

 private:
  // The high bits of the product: ids may differ in a few bits only.
  static std::uint64_t hash(ChunkId id) { return id * 0x9E3779B97F4A7C15ull; }

  SplitTable table_;
};

}  // namespace kv_offload
