// SPDX-License-Identifier: Apache-2.0
// Types that all layers share: chunk keys, rows, shards, sizes.
#pragma once

#include <array>
#include <compare>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <span>
#include <string>
#include <string_view>

namespace kv_offload {

inline constexpr std::size_t kPageBytes = 4096;  // alignment of every shard, record, transfer

constexpr std::size_t round_up(std::size_t value, std::size_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}
constexpr std::size_t round_down(std::size_t value, std::size_t multiple) {
  return value / multiple * multiple;
}

// Returns lower-case hex, two digits per byte.
std::string hex_of(std::span<const std::uint8_t> bytes);

// The key of a chunk: vLLM's OffloadKey, i.e. the (opaque) hash bytes of the chunk's last hash unit followed
// by 4 bytes of big-endian group id. Hashes are chained, so a key identifies its whole prefix. 5..47 bytes;
// value type.
class ChunkKey {
 public:
  static constexpr std::size_t kMaxBytes = 47;
  static constexpr std::size_t kMinBytes = 5;

  ChunkKey() = default;
  // Throws InvalidArgument when the length is out of range.
  explicit ChunkKey(std::string_view bytes);
  // Skips the check, for the lookup path. REQUIRES: fits(bytes.size()).
  static ChunkKey unchecked(const char* data, std::size_t size) {
    ChunkKey key;
    key.size_ = static_cast<std::uint8_t>(size);
    std::memcpy(key.bytes_.data(), data, size);
    return key;
  }
  static constexpr bool fits(std::size_t size) { return size >= kMinBytes && size <= kMaxBytes; }

  std::string_view bytes() const { return {bytes_.data(), size_}; }
  std::size_t size() const { return size_; }
  // Returns vLLM's ORIGINAL group id, from the last four bytes.
  std::uint32_t group_id() const {
    const auto* tail = reinterpret_cast<const unsigned char*>(bytes_.data()) + size_ - 4;
    return std::uint32_t{tail[0]} << 24 | std::uint32_t{tail[1]} << 16 | std::uint32_t{tail[2]} << 8 |
           std::uint32_t{tail[3]};
  }
  // Returns lower-case hex of all bytes.
  std::string hex() const;
  // Throws InvalidArgument for any text that hex() cannot produce.
  static ChunkKey from_hex(std::string_view hex);

  bool operator==(const ChunkKey& other) const { return bytes_ == other.bytes_ && size_ == other.size_; }
  auto operator<=>(const ChunkKey& other) const { return bytes() <=> other.bytes(); }

  struct Hash {
    std::size_t operator()(const ChunkKey& key) const {
      // The bytes are a digest already: combine the head and the tail (group).
      std::uint64_t head;
      std::memcpy(&head, key.bytes_.data(), sizeof(head));
      std::uint64_t mixed = head ^ (std::uint64_t{key.group_id()} * 0x9E3779B97F4A7C15ull);
      mixed ^= mixed >> 32;
      return static_cast<std::size_t>(mixed * 0xD6E8FEB86659FD93ull);
    }
  };

 private:
  std::array<char, kMaxBytes> bytes_{};  // zero padded, so that == can compare all bytes
  std::uint8_t size_ = 0;
};
static_assert(sizeof(ChunkKey) == 48);

// The position of a row: its first 4 KiB page inside EVERY area of the region. (An area is one rank's part; a
// row has the same position in each.) 2^32 pages = 16 TiB per area.
using RowId = std::uint32_t;
inline constexpr RowId kNoRow = 0xFFFFFFFFu;

// The number that identifies the result of a store or load job in the control page. Never 0, never reused
// within a run.
using Ticket = std::uint64_t;
inline constexpr Ticket kNoTicket = 0;

// One rank's bytes of one chunk in memory. In the canonical layout: the bytes of some of its KV heads.
using Shard = std::span<std::byte>;

// The layout of one selected KV cache group. `position` (its index in the vector) is the index for
// block_indices and group_sizes. `group_id` is vLLM's original id, as in the keys.
struct GroupGeometry {
  std::uint32_t group_id = 0;
  // Bytes of one shard in each area of the region, unpadded; 0 if the area has none.
  std::array<std::uint64_t, 64> shard_bytes{};
  // In the canonical layout a shard is a part of the KV heads, and an area's row holds several shards, each
  // starting at a 4 KiB boundary. Otherwise a shard is the rank's whole part.
  std::uint32_t shards_per_area = 1;
  std::uint32_t tokens_per_chunk = 0;
};

// "32GiB", "32Gi", "500 GB", "1048576" -> bytes; below 1 MiB a unit is needed. Throws InvalidArgument.
std::uint64_t parse_byte_size(std::string_view text);
// 34359738368 -> "32.0 GiB"
std::string format_bytes(std::uint64_t bytes);

}  // namespace kv_offload

template <>
struct std::hash<kv_offload::ChunkKey> : kv_offload::ChunkKey::Hash {};
