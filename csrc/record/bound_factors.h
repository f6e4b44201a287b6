// SPDX-License-Identifier: Apache-2.0
// BoundFactors: factors by which a calibration lowers the error bounds of a payload's groups of 64 numbers.
//
// A payload consists of shards of equal size, and a shard of blocks. A factor belongs to the position of a
// group within a block and to the number of its shard: the same layer and head in every block.
//
// Threads: any; immutable.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "base/types.h"

namespace kv_offload {

class BoundFactors {
 public:
  // factors: by shard and by group of a block, each above 0 and at most 1. Throws InvalidArgument for others,
  // and if their number is not a multiple of `shards`.
  BoundFactors(std::vector<float> factors, std::size_t shards);

  // Returns the number of groups of each shard; 0: the factors do not fit these shards.
  std::size_t groups_of_each(std::span<const Shard> shards, std::size_t group_bytes) const;
  // group: in the joined shards. REQUIRES: of_each is the result of groups_of_each() and not 0, and the
  // shards have this group.
  float of(std::uint64_t group, std::size_t of_each) const {
    return factors_[group / of_each * in_block_ + group % of_each % in_block_];
  }
  bool operator==(const BoundFactors&) const = default;

 private:
  std::vector<float> factors_;
  std::size_t shards_, in_block_;  // in_block_: groups of a block of a shard
};

}  // namespace kv_offload
