// SPDX-License-Identifier: Apache-2.0
// Encryption: records are encrypted and authenticated with keys that their owner keeps in files.
//
// A master key of 32 bytes is never used on data. HMAC-SHA256 derives three values from it: the encryption
// key, the naming key (one per namespace, encrypted_key_tier.h), and an id that each header stores to
// identify its key. Each record has its own key: HMAC-SHA256 of a fresh random 32-byte salt under the
// encryption key. So every AES-256-GCM key encrypts a single message, and a fixed nonce is safe. No counter
// exists that restarts, replicas or disk copies could reset.
//
// Built on OpenSSL; without it has_encryption() is false, and keys cannot be loaded.
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
#include "record/record.h"

struct evp_cipher_ctx_st;
struct evp_md_ctx_st;

namespace kv_offload {

// True if this build has OpenSSL.
bool has_encryption();

// HMAC-SHA256 under one key, with both hashes prepared once. OpenSSL 3's one-call HMAC looks its algorithms
// up each time, which takes longer than the hash. Any thread. Its memory is cleared on destruction.
class KeyedHash {
 public:
  static constexpr std::size_t kBlockBytes = 64;  // of SHA-256
  using Hash = std::array<std::uint8_t, 32>;

  // Throws ResourceError if OpenSSL lacks SHA-256. REQUIRES: key.size() <= kBlockBytes.
  explicit KeyedHash(std::span<const std::uint8_t> key);
  ~KeyedHash();
  KeyedHash(const KeyedHash&) = delete;
  KeyedHash& operator=(const KeyedHash&) = delete;

  // Returns false if OpenSSL failed.
  bool of(std::span<const std::uint8_t> from, Hash* hash) const;

 private:
  [[maybe_unused]] evp_md_ctx_st* inner_;  // unused without OpenSSL
  [[maybe_unused]] evp_md_ctx_st* outer_;
};

// The first key encrypts and names; all of them decrypt. The records of a tenant that has keys of its own are
// encrypted and named with the first of those. Any thread: immutable after construction. Its memory is
// cleared on destruction.
class EncryptionKeys {
 public:
  static constexpr std::size_t kMasterBytes = 32;
  static constexpr std::size_t kMostKeys = 8;
  using Master = std::array<std::uint8_t, kMasterBytes>;
  using KeyId = std::array<std::uint8_t, 16>;
  using Derived = KeyedHash::Hash;

  // of_tenants: the keys of each tenant, by number; those without an entry, or with an empty one, use
  // `masters`. Throws InvalidArgument for no key, too many keys of one tenant or a duplicate; ResourceError
  // if this build has no OpenSSL.
  explicit EncryptionKeys(std::span<const Master> masters,
                          std::span<const std::vector<Master>> of_tenants = {});
  ~EncryptionKeys();
  EncryptionKeys(const EncryptionKeys&) = delete;
  EncryptionKeys& operator=(const EncryptionKeys&) = delete;

  // Reads files of exactly 32 bytes. Each must be a regular file, owned by this user or root, without
  // permissions for others. Mode 0440 is accepted if root owns the file and its group is one of this
  // process's. Throws ResourceError that says what to change and never quotes the file's contents.
  static std::shared_ptr<const EncryptionKeys> from_files(
      const std::vector<std::string>& paths, const std::vector<std::vector<std::string>>& of_tenants = {});

  std::size_t size() const { return keys_.size(); }
  const KeyId& id(std::size_t which) const { return keys_[which].id; }
  std::optional<std::size_t> find(const KeyId& id) const;
  // Returns the number of the key that encrypts the records of this tenant.
  std::size_t key_of_tenant(std::size_t tenant) const {
    return tenant < first_of_tenant_.size() ? first_of_tenant_[tenant] : 0;
  }
  // Returns the key that names the records of a namespace.
  Derived name_key(std::size_t which, const NamespaceId& namespace_id) const;

 private:
  friend class RecordCipher;
  struct Key {
    KeyId id;
    std::unique_ptr<const KeyedHash> encrypts, names;
  };
  void add(std::span<const Master> masters);
  std::vector<Key> keys_;
  std::vector<std::size_t> first_of_tenant_;
};

// Puts a fresh salt and the id of key number `which` into *cipher_fields.
Status begin_encrypt(const EncryptionKeys& keys, CipherFields* cipher_fields, std::size_t which = 0);

// Encrypts or decrypts one record with AES-256-GCM, in steps of any size. One thread.
class RecordCipher {
 public:
  enum class Direction : std::uint8_t { kEncrypt, kDecrypt };
  // Limit of AES-GCM for one key and nonce.
  static constexpr std::uint64_t kMostBytes = (std::uint64_t{1} << 36) - 32;

  RecordCipher();
  ~RecordCipher();
  RecordCipher(const RecordCipher&) = delete;
  RecordCipher& operator=(const RecordCipher&) = delete;

  // Also authenticates the header's fields (encode_authenticated_fields). kCorrupt: none of the keys
  // encrypted the record.
  Status begin(Direction direction, const EncryptionKeys& keys, const RecordHeader& header);
  // from and to must be identical or not overlap. REQUIRES: begin() succeeded.
  Status step(const std::byte* from, std::byte* to, std::size_t bytes);
  Status finish_encrypt(CipherFields* cipher_fields);
  // kCorrupt: the record was not encrypted with this key and these header fields; discard the decrypted
  // bytes.
  Status finish_decrypt(const CipherFields& cipher_fields);

 private:
  [[maybe_unused]] evp_cipher_ctx_st* context_;
};

}  // namespace kv_offload
