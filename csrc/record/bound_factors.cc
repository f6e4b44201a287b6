// SPDX-License-Identifier: Apache-2.0
#include "record/bound_factors.h"

#include <algorithm>
#include <utility>

#include "base/status.h"

namespace kv_offload {

BoundFactors::BoundFactors(std::vector<std::vector<OfGroup>> shards, std::vector<std::uint8_t> weights)
    : shards_(std::move(shards)), weights_(std::move(weights)) {
  const std::size_t rows = weights_.size() / kQuantizedGroup;
  if (weights_.size() % kQuantizedGroup != 0 || rows > kMostWeightRows)
    throw_invalid("{} weights: expected at most {} rows of {}", weights_.size(), kMostWeightRows,
                  kQuantizedGroup);
  const auto wrong = std::find_if(weights_.begin(), weights_.end(),
                                  [](std::uint8_t code) { return code > ChannelWeights::kMostCode; });
  if (wrong != weights_.end())
    throw_invalid("weight {}: expected at most {}", *wrong, ChannelWeights::kMostCode);
  if (shards_.empty()) throw_invalid("bound factors without shards");
  for (const std::vector<OfGroup>& block : shards_) {
    for (const OfGroup& group : block) {
      if (!(group.factor > 0 && group.factor <= 1))
        throw_invalid("bound factor {}: expected a number above 0 and at most 1", group.factor);
      if (group.row > rows) throw_invalid("row {} of the weights: there are {}", group.row, rows);
    }
  }
  for (std::size_t row = 0; row < rows; ++row) rows_.emplace_back(weights_.data() + row * kQuantizedGroup);
}

std::vector<std::uint64_t> BoundFactors::begins_of(std::span<const Shard> shards, Element element) const {
  if (shards.size() != shards_.size() || (is_fp8(element) && !weights_.empty())) return {};
  const std::size_t group_bytes = group_bytes_of(element);
  std::vector<std::uint64_t> begins{0};
  for (std::size_t i = 0; i < shards.size(); ++i) {
    const std::size_t block_bytes = shards_[i].size() * group_bytes;
    if (block_bytes == 0 ? shards[i].size() != 0 : shards[i].size() % block_bytes != 0) return {};
    begins.push_back(begins.back() + shards[i].size() / group_bytes);
  }
  return begins;
}

}  // namespace kv_offload
