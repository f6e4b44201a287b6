// Sealing: records are encrypted and authenticated under keys that their owner keeps in files.
//
// A master key of 32 bytes is never used on data. By HMAC-SHA256 it gives a key that seals, one that names
// (for each namespace, sealed_names.h), and an id that says in each header which key sealed. Each record has
// a key of its own: HMAC-SHA256 of a fresh random salt of 32 bytes under the key that seals. So every
// AES-256-GCM key seals one message, and a fixed nonce is safe without a counter that restarts, replicas or
// copies of a disk could bring back.
//
// Built on OpenSSL; without it has_sealing() is false, and keys cannot be loaded.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/status.h"
#include "base/types.h"
#include "storage/record.h"

struct evp_cipher_ctx_st;
struct evp_md_ctx_st;

namespace kv_offload {

// Was OpenSSL there when this was built.
bool has_sealing();

// HMAC-SHA256 under one key, whose two hashes are begun once. What OpenSSL 3 gives in one call looks its
// parts up each time, for longer than it hashes. Any thread. Cleared in memory when it goes.
class KeyedHash {
 public:
  static constexpr std::size_t kBlockBytes = 64;  // of SHA-256
  using Hash = std::array<std::uint8_t, 32>;

  // Throws ResourceError: OpenSSL gives no SHA-256. REQUIRES: at most kBlockBytes.
  explicit KeyedHash(std::span<const std::uint8_t> key);
  ~KeyedHash();
  KeyedHash(const KeyedHash&) = delete;
  KeyedHash& operator=(const KeyedHash&) = delete;

  // False: OpenSSL has failed.
  bool of(std::span<const std::uint8_t> from, Hash* hash) const;

 private:
  [[maybe_unused]] evp_md_ctx_st* inner_;  // without OpenSSL nobody uses it
  [[maybe_unused]] evp_md_ctx_st* outer_;
};

// The first seals and names; all of them open. Any thread: nothing changes after construction. Cleared in
// memory when it goes.
class SealingKeys {
 public:
  static constexpr std::size_t kMasterBytes = 32;
  static constexpr std::size_t kMostKeys = 8;
  using Master = std::array<std::uint8_t, kMasterBytes>;
  using KeyId = std::array<std::uint8_t, 16>;
  using Derived = KeyedHash::Hash;

  // Throws InvalidArgument: no key, too many, one twice; ResourceError: no OpenSSL in this build.
  explicit SealingKeys(std::span<const Master> masters);
  ~SealingKeys();
  SealingKeys(const SealingKeys&) = delete;
  SealingKeys& operator=(const SealingKeys&) = delete;

  // Of files with 32 bytes each: regular, of this user or root, no permissions for others; 0440 where root
  // owns it and its group is one of this process's, too. Throws ResourceError that says what to change, and
  // nothing of what a file holds.
  static std::shared_ptr<const SealingKeys> from_files(const std::vector<std::string>& paths);

  std::size_t size() const { return keys_.size(); }
  const KeyId& id(std::size_t which) const { return keys_[which].id; }
  std::optional<std::size_t> find(const KeyId& id) const;
  // For the names of records in a namespace.
  Derived name_key(std::size_t which, const NamespaceId& namespace_id) const;

 private:
  friend class RecordCipher;
  struct Key {
    KeyId id;
    std::unique_ptr<const KeyedHash> seals, names;
  };
  std::vector<Key> keys_;
};

// Puts a fresh salt and the id of the first key into *seal.
Status begin_seal(const SealingKeys& keys, Seal* seal);

// One record on its way through AES-256-GCM, in steps of any size. One thread.
class RecordCipher {
 public:
  enum class Direction : std::uint8_t { kSeal, kOpen };
  // More than this under one key is not safe.
  static constexpr std::uint64_t kMostBytes = (std::uint64_t{1} << 36) - 32;

  RecordCipher();
  ~RecordCipher();
  RecordCipher(const RecordCipher&) = delete;
  RecordCipher& operator=(const RecordCipher&) = delete;

  // kCorrupt: none of the keys sealed it. The header's fields (encode_sealed_fields) are vouched for, too.
  Status begin(Direction direction, const SealingKeys& keys, const RecordHeader& header);
  // from and to are the same place, or apart. REQUIRES: began.
  Status step(const std::byte* from, std::byte* to, std::size_t bytes);
  Status finish_seal(Seal* seal);
  // kCorrupt: it is not what a holder of the key sealed under these fields; what was opened is worth nothing.
  Status finish_open(const Seal& seal);

 private:
  [[maybe_unused]] evp_cipher_ctx_st* context_;
};

}  // namespace kv_offload
