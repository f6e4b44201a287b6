// SPDX-License-Identifier: Apache-2.0
// ShardBlocks: iterates over the shards of a payload as one string of bytes, in blocks. A block that spans
// several shards is gathered into a scratch buffer, and scattered from it.
//
// One thread. The shards and the scratch buffer must outlive it.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>

#include "base/types.h"

namespace kv_offload {

inline std::uint64_t unpadded_bytes(std::span<const Shard> shards) {
  std::uint64_t bytes = 0;
  for (const Shard& shard : shards) bytes += shard.size();
  return bytes;
}

class ShardBlocks {
 public:
  // scratch: room for block_bytes.
  ShardBlocks(std::span<const Shard> shards, std::size_t block_bytes, std::byte* scratch)
      : shards_(shards), block_bytes_(block_bytes), left_(unpadded_bytes(shards)), scratch_(scratch) {
    skip_empty();
  }

  // Sets the size of the current block and those after it. REQUIRES: the scratch buffer has room for it.
  void limit(std::size_t block_bytes) { block_bytes_ = block_bytes; }
  std::uint64_t left() const { return left_; }
  std::size_t bytes() const { return static_cast<std::size_t>(std::min<std::uint64_t>(left_, block_bytes_)); }
  // Returns the block in its shard, or the scratch buffer for one that spans shards.
  std::byte* place() const { return in_one_shard() ? shards_[shard_].data() + at_ : scratch_; }
  void gather() const {
    if (!in_one_shard())
      each_part([](std::byte* part, std::byte* there, std::size_t n) { std::memcpy(there, part, n); });
  }
  void scatter() const {
    if (!in_one_shard())
      each_part([](std::byte* part, std::byte* there, std::size_t n) { std::memcpy(part, there, n); });
  }
  void next() {
    std::size_t remaining = bytes();
    left_ -= remaining;
    while (remaining > 0) {
      const std::size_t part = std::min(remaining, shards_[shard_].size() - at_);
      at_ += part;
      remaining -= part;
      skip_empty();
    }
  }

 private:
  bool in_one_shard() const { return shards_[shard_].size() - at_ >= bytes(); }
  void skip_empty() {
    while (shard_ < shards_.size() && at_ == shards_[shard_].size()) {
      ++shard_;
      at_ = 0;
    }
  }
  template <typename Copy>
  void each_part(const Copy& copy) const {
    std::size_t shard = shard_, at = at_, done = 0;
    while (done < bytes()) {
      const std::size_t part = std::min(bytes() - done, shards_[shard].size() - at);
      if (part > 0)
        copy(shards_[shard].data() + at, scratch_ + done, part);  // an empty shard may have no address
      done += part;
      ++shard;
      at = 0;
    }
  }

  std::span<const Shard> shards_;
  std::size_t block_bytes_;
  std::size_t shard_ = 0, at_ = 0;
  std::uint64_t left_;
  std::byte* scratch_;
};

}  // namespace kv_offload
