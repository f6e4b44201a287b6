// SPDX-License-Identifier: Apache-2.0
#include "record/record.h"

#include <algorithm>
#include <bit>
#include <chrono>
#include <cstring>
#include <new>

#include "base/xxh3.h"

namespace kv_offload {
namespace {

constexpr char kRecordMagic[] = "KVOREC1\n";
constexpr std::size_t kChecksumAt = kRecordHeaderBytes - 8;
constexpr std::size_t kShardsAt = 136;
constexpr std::size_t kShardsEnd = kShardsAt + 8 * kMaxShards;
constexpr std::size_t kElementAt = kShardsEnd, kCipherAt = 652, kStoredAt = 656;
constexpr std::size_t kKeyIdAt = 664, kSaltAt = 680, kTagAt = 712, kTenantAt = 728;
constexpr std::size_t kCipherEnd = kTenantAt, kLossAt = kTenantAt + kMaxTenantName, kEnd = kLossAt + 12;
alignas(64) constexpr std::byte kZeroPage[kPageBytes]{};

template <typename T>
void put(std::span<std::byte> page, std::size_t at, T value) {
  for (std::size_t i = 0; i < sizeof(T); ++i) page[at + i] = static_cast<std::byte>(value >> (8 * i));
}

template <typename T>
T get(std::span<const std::byte> page, std::size_t at) {
  T value = 0;
  for (std::size_t i = 0; i < sizeof(T); ++i) value |= static_cast<T>(page[at + i]) << (8 * i);
  return value;
}

template <typename A, typename B>
Status wrong(std::string_view field, const A& found, const B& expected) {
  return Status::error(StatusKind::kCorrupt,
                       fmt::format("record header: {} is {}, expected {}", field, found, expected));
}

bool all_zero(std::span<const std::byte> bytes) {
  return std::all_of(bytes.begin(), bytes.end(), [](std::byte b) { return b == std::byte{0}; });
}

void encode_fields(const RecordHeader& header, std::span<std::byte> page) {
  std::memset(page.data(), 0, page.size());
  std::memcpy(page.data(), kRecordMagic, 8);
  put(page, 8, kRecordVersion);
  put(page, 12, static_cast<std::uint32_t>(kRecordHeaderBytes));
  std::memcpy(page.data() + 16, header.namespace_id.data(), header.namespace_id.size());
  put(page, 48, static_cast<std::uint32_t>(header.key.size()));
  std::memcpy(page.data() + 52, header.key.bytes().data(), header.key.size());
  put(page, 100, header.group);
  put(page, 104, static_cast<std::uint32_t>(header.shard_bytes.size()));
  put(page, 108, static_cast<std::uint32_t>(header.codec));
  put(page, 112, header.padded_stored_bytes());
  put(page, 128, header.created_unix_nanos);
  for (std::size_t i = 0; i < header.shard_bytes.size(); ++i) {
    put(page, kShardsAt + 8 * i, header.shard_bytes[i]);
  }
  put(page, kElementAt, static_cast<std::uint32_t>(header.element));
  put(page, kCipherAt, static_cast<std::uint32_t>(header.cipher));
  put(page, kStoredAt, header.stored_bytes);
  std::memcpy(page.data() + kKeyIdAt, header.cipher_fields.key_id.data(), header.cipher_fields.key_id.size());
  std::memcpy(page.data() + kSaltAt, header.cipher_fields.salt.data(), header.cipher_fields.salt.size());
  if (is_tenant_name(header.tenant))
    std::memcpy(page.data() + kTenantAt, header.tenant.data(), header.tenant.size());
  put(page, kLossAt, std::bit_cast<std::uint32_t>(header.loss.keys));
  put(page, kLossAt + 4, std::bit_cast<std::uint32_t>(header.loss.rms));
  put(page, kLossAt + 8, std::bit_cast<std::uint32_t>(header.loss.values));
}

}  // namespace

bool is_tenant_name(std::string_view name) {
  return !name.empty() && name.size() <= kMaxTenantName && std::all_of(name.begin(), name.end(), [](char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '_' ||
           c == '.' || c == '-';
  });
}

void encode_header(const RecordHeader& header, std::span<std::byte> page) {
  encode_fields(header, page);
  put(page, 120, header.checksum);
  std::memcpy(page.data() + kTagAt, header.cipher_fields.tag.data(), header.cipher_fields.tag.size());
  put(page, kChecksumAt, static_cast<std::uint64_t>(XXH3_64bits(page.data(), kChecksumAt)));
}

void encode_authenticated_fields(const RecordHeader& header, std::span<std::byte> page) {
  encode_fields(header, page);
}

std::uint32_t other_version(std::span<const std::byte> page) {
  if (page.size() != kRecordHeaderBytes || std::memcmp(page.data(), kRecordMagic, 8) != 0 ||
      get<std::uint64_t>(page, kChecksumAt) != XXH3_64bits(page.data(), kChecksumAt))
    return 0;
  const auto version = get<std::uint32_t>(page, 8);
  return version == kRecordVersion ? 0 : version;
}

Status of_another_version(std::uint32_t version) {
  return Status::error(StatusKind::kNotFound,
                       fmt::format("record version {} is not supported by this release", version));
}

namespace {

Loss loss_in(std::span<const std::byte> page) {
  return {std::bit_cast<float>(get<std::uint32_t>(page, kLossAt)),
          std::bit_cast<float>(get<std::uint32_t>(page, kLossAt + 4)),
          std::bit_cast<float>(get<std::uint32_t>(page, kLossAt + 8))};
}

// Checks the loss that the header states, and that no other codec states one.
Status check_loss(std::span<const std::byte> page, Codec codec, Element element) {
  if (codec != Codec::kLossy)
    return all_zero(page.subspan(kLossAt, kEnd - kLossAt)) ? Status::ok() : wrong("loss", "set", "zero");
  if (!LossyCodec::handles(element))
    return wrong("element of a lossy record", static_cast<std::uint32_t>(element), "1..4");
  const Loss loss = loss_in(page);
  // Also false for NaN.
  for (const float largest : {loss.keys, loss.values}) {
    if (!(largest >= 0 && largest <= LossyCodec::rounded_up(LossyCodec::kMostError)))
      return wrong("largest loss", largest, fmt::format("0..{}", LossyCodec::kMostError));
  }
  const float largest = std::max(loss.keys, loss.values);
  if (!(loss.rms >= 0 && loss.rms <= largest)) return wrong("loss", loss.rms, fmt::format("0..{}", largest));
  return Status::ok();
}

// Checks how the payload is stored. `padded`: its bytes when it is raw.
Status check_stored(std::span<const std::byte> page, std::uint64_t padded) {
  const auto codec = get<std::uint32_t>(page, 108);
  if (codec == 2 || codec == 3 || codec > static_cast<std::uint32_t>(Codec::kLossy))
    return wrong("codec", codec, "0, 1 or 4");
  const auto element = get<std::uint32_t>(page, kElementAt);
  // Without loss, fp8 is stored as bytes.
  const Element last = static_cast<Codec>(codec) == Codec::kLossy ? Element::kE5m2 : Element::kFp16;
  if (element > static_cast<std::uint32_t>(last))
    return wrong("element", element, fmt::format("0..{}", static_cast<std::uint32_t>(last)));
  if (Status status = check_loss(page, static_cast<Codec>(codec), static_cast<Element>(element)); !status)
    return status;
  const auto stored = get<std::uint64_t>(page, kStoredAt), stored_padded = get<std::uint64_t>(page, 112);
  if (codec == 0 && stored != padded) return wrong("stored bytes", stored, padded);
  // Bounds every record, whatever its header says, by the length of a raw one.
  if (codec != 0 && (stored == 0 || stored >= padded || round_up(stored, kPageBytes) >= padded))
    return wrong("stored bytes", stored, fmt::format("fewer pages than raw, {}", padded));
  if (stored_padded != round_up(stored, kPageBytes))
    return wrong("padded stored bytes", stored_padded, round_up(stored, kPageBytes));
  const auto encryption = get<std::uint32_t>(page, kCipherAt);
  if (encryption > static_cast<std::uint32_t>(Cipher::kAes256Gcm))
    return wrong("encryption", encryption, "0..1");
  if (encryption == 0 && !all_zero(page.subspan(kKeyIdAt, kCipherEnd - kKeyIdAt)))
    return wrong("cipher fields", "set", "zero");
  return Status::ok();
}

}  // namespace

Status decode_header(std::span<const std::byte> page, RecordHeader* header) {
  if (page.size() != kRecordHeaderBytes) return wrong("length", page.size(), kRecordHeaderBytes);
  if (std::memcmp(page.data(), kRecordMagic, 8) != 0) {
    return wrong("magic", fmt::format("{:#018x}", get<std::uint64_t>(page, 0)), "KVOREC1");
  }
  const auto checksum = get<std::uint64_t>(page, kChecksumAt);
  const std::uint64_t computed = XXH3_64bits(page.data(), kChecksumAt);
  if (checksum != computed) {
    return wrong("checksum", fmt::format("{:#018x}", checksum), fmt::format("{:#018x}", computed));
  }
  // The bytes are intact from here on. They may still belong to another version or namespace.
  const auto version = get<std::uint32_t>(page, 8);
  if (version != kRecordVersion) return wrong("version", version, kRecordVersion);
  const auto length = get<std::uint32_t>(page, 12);
  if (length != kRecordHeaderBytes) return wrong("header length", length, kRecordHeaderBytes);
  const auto key_length = get<std::uint32_t>(page, 48);
  if (!ChunkKey::fits(key_length)) {
    return wrong("key length", key_length,
                 fmt::format("{}..{}", std::size_t{ChunkKey::kMinBytes}, std::size_t{ChunkKey::kMaxBytes}));
  }
  if (!all_zero(page.subspan(52 + key_length, 48 - key_length))) return wrong("key padding", "set", "zero");
  const auto shards = get<std::uint32_t>(page, 104);
  if (shards < 1 || shards > kMaxShards) return wrong("number of shards", shards, "1..64");
  std::uint64_t padded = 0;
  std::vector<std::uint64_t> shard_bytes(shards);
  for (std::size_t i = 0; i < shards; ++i) {
    shard_bytes[i] = get<std::uint64_t>(page, kShardsAt + 8 * i);
    if (shard_bytes[i] > (std::uint64_t{1} << 48))
      return wrong("shard bytes", shard_bytes[i], "at most 2^48");
    padded += round_up(shard_bytes[i], kPageBytes);
  }
  const std::size_t used = kShardsAt + 8 * std::size_t{shards};
  if (!all_zero(page.subspan(used, kShardsEnd - used))) return wrong("unused shards", "set", "zero");
  if (!all_zero(page.subspan(kEnd, kChecksumAt - kEnd))) return wrong("padding", "set", "zero");
  const char* name = reinterpret_cast<const char*>(page.data()) + kTenantAt;
  const std::string_view tenant(
      name, static_cast<std::size_t>(std::find(name, name + kMaxTenantName, '\0') - name));
  if (!tenant.empty() && !is_tenant_name(tenant))
    return wrong("tenant", "not a name", "letters, digits, _.-");
  if (!all_zero(page.subspan(kTenantAt + tenant.size(), kMaxTenantName - tenant.size())))
    return wrong("tenant padding", "set", "zero");
  if (Status status = check_stored(page, padded); !status) return status;

  std::memcpy(header->namespace_id.data(), page.data() + 16, header->namespace_id.size());
  header->key = ChunkKey::unchecked(reinterpret_cast<const char*>(page.data()) + 52, key_length);
  header->group = get<std::uint32_t>(page, 100);
  header->shard_bytes = std::move(shard_bytes);
  header->payload_bytes = padded;
  header->codec = static_cast<Codec>(get<std::uint32_t>(page, 108));
  header->element = static_cast<Element>(get<std::uint32_t>(page, kElementAt));
  header->stored_bytes = get<std::uint64_t>(page, kStoredAt);
  header->loss = loss_in(page);
  header->checksum = get<std::uint64_t>(page, 120);
  header->created_unix_nanos = get<std::uint64_t>(page, 128);
  header->cipher = static_cast<Cipher>(get<std::uint32_t>(page, kCipherAt));
  std::memcpy(header->cipher_fields.key_id.data(), page.data() + kKeyIdAt,
              header->cipher_fields.key_id.size());
  std::memcpy(header->cipher_fields.salt.data(), page.data() + kSaltAt, header->cipher_fields.salt.size());
  std::memcpy(header->cipher_fields.tag.data(), page.data() + kTagAt, header->cipher_fields.tag.size());
  header->tenant = tenant;
  return Status::ok();
}

Status match_header(const RecordHeader& header, const NamespaceId& namespace_id, const ChunkKey& key,
                    std::uint32_t group, std::span<const Shard> shards) {
  if (header.namespace_id != namespace_id) {
    return wrong("namespace", hex_of(header.namespace_id), hex_of(namespace_id));
  }
  if (header.key != key) return wrong("key", header.key.hex(), key.hex());
  if (header.group != group) return wrong("group", header.group, group);
  if (header.shard_bytes.size() != shards.size()) {
    return wrong("number of shards", header.shard_bytes.size(), shards.size());
  }
  for (std::size_t i = 0; i < shards.size(); ++i) {
    if (header.shard_bytes[i] != shards[i].size()) {
      return wrong(fmt::format("bytes of shard {}", i), header.shard_bytes[i], shards[i].size());
    }
  }
  return Status::ok();
}

PayloadChecksum::PayloadChecksum() : state_(XXH3_createState()) {
  if (state_ == nullptr) throw std::bad_alloc();
  XXH3_64bits_reset(static_cast<XXH3_state_t*>(state_));
}
PayloadChecksum::~PayloadChecksum() { XXH3_freeState(static_cast<XXH3_state_t*>(state_)); }
void PayloadChecksum::add(std::span<const std::byte> bytes) {
  XXH3_64bits_update(static_cast<XXH3_state_t*>(state_), bytes.data(), bytes.size());
}
std::uint64_t PayloadChecksum::value() const {
  return XXH3_64bits_digest(static_cast<const XXH3_state_t*>(state_));
}

std::uint64_t payload_checksum(std::span<const Shard> shards) {
  if (shards.size() == 1 && shards[0].size() % kPageBytes == 0) {
    return XXH3_64bits(shards[0].data(), shards[0].size());
  }
  PayloadChecksum checksum;
  for (const Shard& shard : shards) {
    checksum.add(shard);
    checksum.add({kZeroPage, round_up(shard.size(), kPageBytes) - shard.size()});
  }
  return checksum.value();
}

std::uint64_t padded_payload_bytes(std::span<const Shard> shards) {
  std::uint64_t bytes = 0;
  for (const Shard& shard : shards) bytes += round_up(shard.size(), kPageBytes);
  return bytes;
}

void zero_padding(std::span<const Shard> shards) {
  for (const Shard& shard : shards) {
    std::byte* pad = shard.data() + shard.size();
    std::byte* end = shard.data() + round_up(shard.size(), kPageBytes);
    // Check first: a row with clean padding is only read, so readers may share it.
    if (std::any_of(pad, end, [](std::byte b) { return b != std::byte{0}; })) {
      std::memset(pad, 0, static_cast<std::size_t>(end - pad));
    }
  }
}

RecordHeader make_header(const NamespaceId& namespace_id, const ChunkKey& key, std::uint32_t group,
                         std::span<const Shard> shards) {
  RecordHeader header;
  header.namespace_id = namespace_id;
  header.key = key;
  header.group = group;
  for (const Shard& shard : shards) header.shard_bytes.push_back(shard.size());
  header.payload_bytes = header.stored_bytes = padded_payload_bytes(shards);
  const auto since_epoch = std::chrono::system_clock::now().time_since_epoch();
  header.created_unix_nanos =
      static_cast<std::uint64_t>(std::chrono::duration_cast<std::chrono::nanoseconds>(since_epoch).count());
  return header;
}

}  // namespace kv_offload
