// SPDX-License-Identifier: Apache-2.0
#include "record/bound_factors.h"

#include <algorithm>
#include <utility>

#include "base/status.h"

namespace kv_offload {

BoundFactors::BoundFactors(std::vector<float> factors, std::size_t shards)
    : factors_(std::move(factors)), shards_(shards), in_block_(shards == 0 ? 0 : factors_.size() / shards) {
  if (in_block_ == 0 || in_block_ * shards_ != factors_.size())
    throw_invalid("{} bound factors for {} shards", factors_.size(), shards_);
  const auto wrong = std::find_if(factors_.begin(), factors_.end(),
                                  [](float factor) { return !(factor > 0 && factor <= 1); });
  if (wrong != factors_.end())
    throw_invalid("bound factor {}: expected a number above 0 and at most 1", *wrong);
}

std::size_t BoundFactors::groups_of_each(std::span<const Shard> shards, std::size_t group_bytes) const {
  const std::size_t bytes = shards.empty() ? 0 : shards[0].size();
  const bool fit = shards.size() == shards_ && bytes % (in_block_ * group_bytes) == 0 &&
                   std::all_of(shards.begin(), shards.end(),
                               [bytes](const Shard& shard) { return shard.size() == bytes; });
  return fit ? bytes / group_bytes : 0;
}

}  // namespace kv_offload
