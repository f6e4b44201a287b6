// SPDX-License-Identifier: Apache-2.0
// ChunkGroups: the chunk groups of one cache, by position. Immutable after construction; every other class of
// the cache reads group sizes and names from here.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "base/types.h"
#include "cache/cache_types.h"

namespace kv_offload {

class ChunkGroups {
 public:
  struct Group {
    std::uint32_t id = 0;         // vLLM's group id, as found in the keys
    std::uint32_t tokens = 0;     // per chunk
    std::uint64_t bytes = 0;      // per chunk, over all areas, padded
    bool full_attention = false;  // false if not known
    GroupGeometry geometry;
  };

  // `areas`: number of areas in the region. Throws InvalidArgument (no groups, too many groups, a group
  // without bytes or tokens, or a full_attention whose length differs from the number of groups).
  ChunkGroups(const CacheOptions& options, std::uint32_t areas);

  std::size_t size() const { return groups_.size(); }
  const Group& operator[](std::size_t position) const { return groups_[position]; }
  auto begin() const { return groups_.begin(); }
  auto end() const { return groups_.end(); }

  // Returns the group position of a key; nullopt if no group has its id.
  std::optional<std::uint32_t> position_of(const ChunkKey& key) const {
    const std::uint32_t id = key.group_id();
    for (std::uint32_t position = 0; position < groups_.size(); ++position) {
      if (groups_[position].id == id) return position;
    }
    return std::nullopt;
  }
  // Throws InvalidArgument if no group matches, or if the position is less than `at_least`.
  std::uint32_t require_position(const ChunkKey& key, std::uint32_t at_least) const;

  // True if vLLM reported which groups have full attention (releases up to 0.32 do not).
  bool kinds_are_known() const { return kinds_are_known_; }
  bool has_windows() const { return has_windows_; }  // true also when unknown
  // Returns the prompt tokens before the first chunk in this group; that chunk ends at `first_end` (0 =
  // unknown).
  double tokens_before(std::uint32_t position, std::uint32_t first_end) const {
    const std::uint32_t chunk = groups_[position].tokens;
    return first_end > chunk ? first_end - chunk : 0;
  }
  double bytes_per_token() const { return bytes_per_token_; }
  // Returns the row size in each area, by position: the largest of any rank, in bytes.
  std::vector<std::uint64_t> row_bytes() const;

 private:
  std::vector<Group> groups_;
  std::uint32_t areas_;
  bool kinds_are_known_;
  bool has_windows_ = false;
  double bytes_per_token_ = 0;
};

}  // namespace kv_offload
