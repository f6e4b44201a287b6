// Record: a chunk's bytes on a tier. 4 KiB header, then the payload: the shards
// in rank order, each padded with zeros to 4 KiB. All integers little-endian.
//
//   offset size
//        0    8  magic "KVOREC1\n"
//        8    4  format version (kRecordVersion)
//       12    4  header bytes (4096)
//       16   32  namespace id
//       48    4  key length   52   48  key, zero padded
//      100    4  group position
//      104    4  number of shards
//      108    4  reserved, 0
//      112    8  payload bytes (padded, = sum of round_up(shard, 4096))
//      120    8  payload checksum (XXH3-64 of the padded payload)
//      128    8  creation time, unix nanoseconds
//      136  8*64 bytes of each shard, unpadded
//      648 ..    zeros
//     4088    8  header checksum (XXH3-64 of bytes 0..4087)
//
// Nothing read from a header is used as a size or an offset before verify.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "base/status.h"
#include "base/types.h"

namespace kv_offload {

inline constexpr std::uint32_t kRecordVersion = 1;
inline constexpr std::size_t kRecordHeaderBytes = kPageBytes;
inline constexpr std::size_t kMaxShards = 64;

using NamespaceId = std::array<std::uint8_t, 32>;

struct RecordHeader {
  NamespaceId namespace_id{};
  ChunkKey key;
  std::uint32_t group = 0;
  std::vector<std::uint64_t> shard_bytes;  // unpadded, 1..64 entries
  std::uint64_t payload_bytes = 0;         // padded
  std::uint64_t payload_checksum = 0;
  std::uint64_t created_unix_nanos = 0;
};

// Writes all 4096 bytes. REQUIRES: page.size() == kRecordHeaderBytes.
void encode_header(const RecordHeader& header, std::span<std::byte> page);
// kCorrupt naming the field and both values, when anything does not verify.
Status decode_header(std::span<const std::byte> page, RecordHeader* header);
// The version of a header that is whole and that another release has written; 0: it is no such header.
std::uint32_t other_version(std::span<const std::byte> page);
// After decode: does it describe this key, group and these shards. kCorrupt if not.
Status match_header(const RecordHeader& header, const NamespaceId& namespace_id, const ChunkKey& key,
                    std::uint32_t group, std::span<const Shard> shards);

// XXH3-64 of a padded payload that comes in pieces.
class PayloadChecksum {
 public:
  PayloadChecksum();
  ~PayloadChecksum();
  PayloadChecksum(const PayloadChecksum&) = delete;
  PayloadChecksum& operator=(const PayloadChecksum&) = delete;
  void add(std::span<const std::byte> bytes);
  std::uint64_t value() const;

 private:
  void* state_;
};

// XXH3-64 over the shards in order, each padded with zeros to 4 KiB.
std::uint64_t payload_checksum(std::span<const Shard> shards);
std::uint64_t padded_payload_bytes(std::span<const Shard> shards);

// Makes the bytes behind each shard, up to the next 4 KiB, zero. They belong to
// the row; what is on disk is then determined by the shards alone.
void zero_padding(std::span<const Shard> shards);
// The header of a record of these shards, written now; its checksum is left to who sums them.
RecordHeader make_header(const NamespaceId& namespace_id, const ChunkKey& key, std::uint32_t group,
                         std::span<const Shard> shards);
// After header_page and shards were read, with this checksum over the padded
// shards: is all of it what `key` of `group` in this namespace must be.
Status verify_record(std::span<const std::byte> header_page, const NamespaceId& namespace_id,
                     const ChunkKey& key, std::uint32_t group, std::span<const Shard> shards,
                     std::uint64_t payload_checksum);

}  // namespace kv_offload
