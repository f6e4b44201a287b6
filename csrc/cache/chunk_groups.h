// ChunkGroups: the groups of chunks that one cache keeps, by position. Fixed from
// construction on; every other class of the cache reads sizes and names from here.
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
    std::uint32_t id = 0;         // vLLM's, found in the keys
    std::uint32_t tokens = 0;     // per chunk
    std::uint64_t bytes = 0;      // of a chunk in all areas, padded
    bool full_attention = false;  // known to be
    GroupGeometry geometry;
  };

  // `areas`: of the region. Throws InvalidArgument (no group, too many, one without bytes or tokens,
  // full_attention of another length).
  ChunkGroups(const CacheOptions& options, std::uint32_t areas);

  std::size_t size() const { return groups_.size(); }
  const Group& operator[](std::size_t position) const { return groups_[position]; }
  auto begin() const { return groups_.begin(); }
  auto end() const { return groups_.end(); }

  // The group of a key; nullopt when it is none of these.
  std::optional<std::uint32_t> position_of(const ChunkKey& key) const {
    const std::uint32_t id = key.group_id();
    for (std::uint32_t position = 0; position < groups_.size(); ++position) {
      if (groups_[position].id == id) return position;
    }
    return std::nullopt;
  }
  // Throws InvalidArgument when it is none of these, or one before `at_least`.
  std::uint32_t require_position(const ChunkKey& key, std::uint32_t at_least) const;

  // Whether vLLM said which groups have full attention (releases up to 0.32 do not).
  bool kinds_are_known() const { return kinds_are_known_; }
  bool has_windows() const { return has_windows_; }  // or may have
  // Of a prompt, before its first chunk in this group, which ends at `first_end` (0 = not known).
  double tokens_before(std::uint32_t position, std::uint32_t first_end) const {
    const std::uint32_t chunk = groups_[position].tokens;
    return first_end > chunk ? first_end - chunk : 0;
  }
  double bytes_per_token() const { return bytes_per_token_; }
  // Bytes of a row in each area, by position: the largest of any rank.
  std::vector<std::uint64_t> row_bytes() const;

 private:
  std::vector<Group> groups_;
  std::uint32_t areas_;
  bool kinds_are_known_;
  bool has_windows_ = false;
  double bytes_per_token_ = 0;
};

}  // namespace kv_offload
