// Record: a chunk's bytes on a tier. 4 KiB header, then the payload as it is stored: raw (the shards in rank
// order, each padded with zeros to 4 KiB) or encoded (payload_codec.h, padded with zeros to 4 KiB as a
// whole); sealed or not (sealing.h). All integers little-endian.
//
//   offset size
//        0    8  magic "KVOREC1\n"
//        8    4  format version (kRecordVersion)
//       12    4  header bytes (4096)
//       16   32  namespace id
//       48    4  key length   52   48  key, zero padded
//      100    4  group position
//      104    4  number of shards
//      108    4  codec
//      112    8  stored bytes, padded to 4 KiB
//      120    8  checksum (XXH3-64 of the padded stored bytes)
//      128    8  creation time, unix nanoseconds
//      136  8*64 bytes of each shard, unpadded
//      648    4  element: what the payload is made of
//      652    4  sealing (0: none, 1: AES-256-GCM)
//      656    8  stored bytes, unpadded
//      664   16  id of the key that sealed      680   32  salt      712   16  tag
//      728 ..    zeros
//     4088    8  header checksum (XXH3-64 of bytes 0..4087)
//
// What lies where and why: specs/RECORD_FORMAT.md. Nothing read from a header is used as a size or an offset
// before verify.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "base/status.h"
#include "base/types.h"
#include "storage/payload_codec.h"

namespace kv_offload {

inline constexpr std::uint32_t kRecordVersion = 2;
inline constexpr std::size_t kRecordHeaderBytes = kPageBytes;
inline constexpr std::size_t kMaxShards = 64;

using NamespaceId = std::array<std::uint8_t, 32>;

enum class Sealing : std::uint32_t { kNone = 0, kAes256Gcm = 1 };

// All zero: not sealed.
struct Seal {
  std::array<std::uint8_t, 16> key_id{};
  std::array<std::uint8_t, 32> salt{};
  std::array<std::uint8_t, 16> tag{};
  bool operator==(const Seal&) const = default;
};

struct RecordHeader {
  NamespaceId namespace_id{};
  ChunkKey key;
  std::uint32_t group = 0;
  std::vector<std::uint64_t> shard_bytes;  // unpadded, 1..64 entries
  std::uint64_t payload_bytes = 0;         // raw, each shard padded; follows from shard_bytes
  Codec codec = Codec::kRaw;
  Element element = Element::kBytes;
  std::uint64_t stored_bytes = 0;  // unpadded; raw: payload_bytes, encoded: fewer pages than that
  std::uint64_t checksum = 0;      // of what is stored, padded
  std::uint64_t created_unix_nanos = 0;
  Sealing sealing = Sealing::kNone;
  Seal seal;

  std::uint64_t padded_stored_bytes() const { return round_up(stored_bytes, kPageBytes); }
  std::uint64_t record_bytes() const { return kRecordHeaderBytes + padded_stored_bytes(); }
};

// Writes all 4096 bytes. REQUIRES: page.size() == kRecordHeaderBytes.
void encode_header(const RecordHeader& header, std::span<std::byte> page);
// kCorrupt naming the field and both values, when anything does not verify.
Status decode_header(std::span<const std::byte> page, RecordHeader* header);
// The version of a header that is whole and that another release has written; 0: it is no such header.
std::uint32_t other_version(std::span<const std::byte> page);
// What a seal vouches for beside the payload: the page as it is encoded, with zeros for the two checksums and
// the tag, which are not known before the payload is sealed. REQUIRES: page.size() == kRecordHeaderBytes.
void encode_sealed_fields(const RecordHeader& header, std::span<std::byte> page);
// After decode: does it describe this key, group and these shards. kCorrupt if not.
Status match_header(const RecordHeader& header, const NamespaceId& namespace_id, const ChunkKey& key,
                    std::uint32_t group, std::span<const Shard> shards);

// XXH3-64 of what is stored, as it comes in pieces.
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
// The header of a raw record of these shards, written now; its checksum is left to who sums them.
RecordHeader make_header(const NamespaceId& namespace_id, const ChunkKey& key, std::uint32_t group,
                         std::span<const Shard> shards);
// A record that another release has written: neither ours nor damaged.
Status of_another_version(std::uint32_t version);

}  // namespace kv_offload
