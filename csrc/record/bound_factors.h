// SPDX-License-Identifier: Apache-2.0
// BoundFactors: what a calibration says about the groups of 64 numbers of a payload. A factor lowers the
// error bound of a group. A row of weights distributes the error of a group over its channels.
//
// A payload consists of shards, and a shard of equal blocks. A factor and a row belong to the position of a
// group within a block, and to the number of its shard: the same layer and head in every block.
//
// Threads: any; immutable.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "base/types.h"
#include "record/group_quantizer.h"

namespace kv_offload {

inline constexpr std::size_t kMostWeightRows = 4096;  // part of the format of lossy payloads

class BoundFactors {
 public:
  struct OfGroup {
    float factor = 1;       // above 0, at most 1
    std::uint16_t row = 0;  // of the weights, from 1; 0: all weights are 1
    bool operator==(const OfGroup&) const = default;
  };

  // shards: by shard, the groups of a block; none: the shard has no bytes. weights: rows of kQuantizedGroup
  // codes of ChannelWeights. Throws InvalidArgument for impossible factors, rows and weights.
  explicit BoundFactors(std::vector<std::vector<OfGroup>> shards, std::vector<std::uint8_t> weights = {});

  // Returns where each shard begins, in groups, and where the last one ends; empty: the factors do not fit
  // these shards.
  std::vector<std::uint64_t> begins_of(std::span<const Shard> shards, Element element) const;
  // group: from the beginning of the shard. REQUIRES: the shard exists.
  OfGroup of(std::size_t shard, std::uint64_t group) const {
    const std::vector<OfGroup>& block = shards_[shard];
    return block[group % block.size()];
  }
  // Codes of all rows.
  std::span<const std::uint8_t> weights() const { return weights_; }
  // REQUIRES: row is 1..weights().size() / kQuantizedGroup.
  const ChannelWeights& weights_of(std::size_t row) const { return rows_[row - 1]; }
  bool operator==(const BoundFactors& other) const {
    return shards_ == other.shards_ && weights_ == other.weights_;
  }

 private:
  std::vector<std::vector<OfGroup>> shards_;
  std::vector<std::uint8_t> weights_;
  std::vector<ChannelWeights> rows_;
};

}  // namespace kv_offload
