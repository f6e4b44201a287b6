// SPDX-License-Identifier: Apache-2.0
#include "cache/chunk_groups.h"

#include <algorithm>

#include "base/refused_chunks.h"
#include "base/status.h"
#include "record/record.h"

namespace kv_offload {
ChunkGroups::ChunkGroups(const CacheOptions& options, std::uint32_t areas)
    : areas_(areas), kinds_are_known_(!options.full_attention.empty()) {
  if (options.groups.empty()) throw_invalid("no chunk groups were given; a cache needs at least one");
  if (options.groups.size() > kMostGroups) {
    throw_invalid("{} groups were given; at most {} are possible", options.groups.size(), kMostGroups);
  }
  if (kinds_are_known_ && options.full_attention.size() != options.groups.size()) {
    throw_invalid("full_attention has {} entries for {} groups; give one per group or none",
                  options.full_attention.size(), options.groups.size());
  }
  for (std::size_t position = 0; position < options.groups.size(); ++position) {
    Group group;
    group.geometry = options.groups[position];
    group.id = group.geometry.group_id;
    group.tokens = group.geometry.tokens_per_chunk;
    // If vLLM does not report it, a single group has full attention.
    group.full_attention = kinds_are_known_ ? options.full_attention[position] : options.groups.size() == 1;
    for (std::uint32_t area = 0; area < areas; ++area) {
      group.bytes += group.geometry.shards_per_area * round_up(group.geometry.shard_bytes[area], kPageBytes);
    }
    if (areas * group.geometry.shards_per_area > kMaxShards) {
      throw_invalid("group {} has {} shards in each of {} areas; a record has at most {}", group.id,
                    group.geometry.shards_per_area, areas, kMaxShards);
    }
    if (group.bytes == 0 || group.tokens == 0) {
      throw_invalid("group {} has chunks of {} bytes and {} tokens; both must be more than 0", group.id,
                    group.bytes, group.tokens);
    }
    has_windows_ |= !group.full_attention;
    bytes_per_token_ += static_cast<double>(group.bytes) / group.tokens;
    groups_.push_back(group);
  }
}

std::uint32_t ChunkGroups::require_position(const ChunkKey& key, std::uint32_t at_least) const {
  const auto position = position_of(key);
  if (!position)
    throw_invalid("chunk {} belongs to group {}, which is not configured", key.hex(), key.group_id());
  if (*position < at_least) {
    throw_invalid("chunk {} of group position {} follows a chunk of position {}; order keys by group",
                  key.hex(), *position, at_least);
  }
  return *position;
}

std::vector<std::uint64_t> ChunkGroups::row_bytes() const {
  std::vector<std::uint64_t> bytes;
  for (const Group& group : groups_) {
    const auto begin = group.geometry.shard_bytes.begin();
    const std::uint64_t largest = *std::max_element(begin, begin + areas_);
    const std::uint32_t shards = group.geometry.shards_per_area;
    bytes.push_back(shards == 1 ? largest : shards * round_up(largest, kPageBytes));
  }
  return bytes;
}

}  // namespace kv_offload
