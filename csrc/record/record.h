// SPDX-License-Identifier: Apache-2.0
// Record: a chunk's bytes on a tier. A 4 KiB header, then the stored payload: raw (the shards in rank order,
// each zero-padded to 4 KiB) or encoded (payload_codec.h, zero-padded to 4 KiB as a whole); encrypted or not
// (encryption.h). All integers are little-endian.
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
//      648    4  element: number format of the payload; fp8 only in lossy records
//      652    4  encryption (0: none, 1: AES-256-GCM)
//      656    8  stored bytes, unpadded
//      664   16  id of the encryption key      680   32  salt      712   16  tag
//      728   64  name of the tenant that was charged for the write, zero padded; zeros: none
//      792    4  largest relative error of keys (Loss in lossy_codec.h), float32; 0: stored without loss
//      796    4  relative error of the whole payload, float32
//      800    4  largest relative error of values, float32
//      804 ..    zeros
//     4088    8  header checksum (XXH3-64 of bytes 0..4087)
//
// docs/record-format.md explains the layout. A header value is never used as a size or an offset before the
// header was verified.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"
#include "base/types.h"
#include "record/lossy_codec.h"
#include "record/payload_codec.h"

namespace kv_offload {

inline constexpr std::uint32_t kRecordVersion = 2;
inline constexpr std::size_t kRecordHeaderBytes = kPageBytes;
inline constexpr std::size_t kMaxShards = 64;
inline constexpr std::size_t kMaxTenantName = 64;

using NamespaceId = std::array<std::uint8_t, 32>;

enum class Cipher : std::uint32_t { kNone = 0, kAes256Gcm = 1 };

// All zero: not encrypted.
struct CipherFields {
  std::array<std::uint8_t, 16> key_id{};
  std::array<std::uint8_t, 32> salt{};
  std::array<std::uint8_t, 16> tag{};
  bool operator==(const CipherFields&) const = default;
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
  Loss loss;                       // zero unless codec is kLossy
  std::uint64_t checksum = 0;      // of the padded stored bytes
  std::uint64_t created_unix_nanos = 0;
  Cipher cipher = Cipher::kNone;
  CipherFields cipher_fields;
  std::string tenant;  // is_tenant_name(), or empty: none

  std::uint64_t padded_stored_bytes() const { return round_up(stored_bytes, kPageBytes); }
  std::uint64_t record_bytes() const { return kRecordHeaderBytes + padded_stored_bytes(); }
};

// True for 1 to 64 letters, digits, "_", "." and "-".
bool is_tenant_name(std::string_view name);
// Writes all 4096 bytes. REQUIRES: page.size() == kRecordHeaderBytes.
void encode_header(const RecordHeader& header, std::span<std::byte> page);
// Returns kCorrupt, naming the field and both values, if any check fails.
Status decode_header(std::span<const std::byte> page, RecordHeader* header);
// Returns the version of an intact header that another release wrote; 0 if the page is anything else.
std::uint32_t other_version(std::span<const std::byte> page);
// Writes the header fields that the encryption tag authenticates in addition to the payload. This is the
// encoded page with zeros for the two checksums and the tag, which are unknown before the payload is
// encrypted. REQUIRES: page.size() == kRecordHeaderBytes.
void encode_authenticated_fields(const RecordHeader& header, std::span<std::byte> page);
// Call after decode_header(). Returns kCorrupt if the header does not describe this key, group and these
// shards.
Status match_header(const RecordHeader& header, const NamespaceId& namespace_id, const ChunkKey& key,
                    std::uint32_t group, std::span<const Shard> shards);

// Incremental XXH3-64 of the stored bytes.
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

// Zeroes the bytes from the end of each shard to the next 4 KiB boundary. They belong to the row; zeroing
// makes the bytes on disk depend on the shards alone.
void zero_padding(std::span<const Shard> shards);
// Returns the header of a raw record of these shards, created now. The caller sets the checksum.
RecordHeader make_header(const NamespaceId& namespace_id, const ChunkKey& key, std::uint32_t group,
                         std::span<const Shard> shards);
// Returns the status for a record that another release wrote: neither ours nor damaged.
Status of_another_version(std::uint32_t version);

}  // namespace kv_offload
