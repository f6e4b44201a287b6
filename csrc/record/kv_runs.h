// SPDX-License-Identifier: Apache-2.0
// KvRuns: which bytes of a payload are keys and which are values.
#pragma once

#include <cstdint>
#include <span>

#include "base/types.h"

namespace kv_offload {

// Each shard consists of runs of keys, each followed by a run of values, from its first byte on: one head of
// one token, or all tokens of one head of a block. Both 0: the layout is not known.
struct KvRuns {
  std::uint32_t key_bytes = 0, value_bytes = 0;

  bool known() const { return key_bytes > 0 && value_bytes > 0; }
  std::uint64_t period() const { return std::uint64_t{key_bytes} + value_bytes; }
  // Returns unknown runs unless every shard is a multiple of the period; the pattern then continues across
  // shards.
  KvRuns in(std::span<const Shard> shards) const {
    if (!known()) return {};
    for (const Shard& shard : shards) {
      if (shard.size() % period() != 0) return {};
    }
    return *this;
  }
  // Returns whether all of these bytes of the joined shards are values; false if the layout is not known.
  bool all_values(std::uint64_t at, std::uint64_t bytes) const {
    return known() && at % period() >= key_bytes && at % period() + bytes <= period();
  }
  bool operator==(const KvRuns&) const = default;
};

}  // namespace kv_offload
