// SPDX-License-Identifier: Apache-2.0
// EncryptedKeyTier: a tier that names its records by keyed digests. Chunk keys are hashes of prompts: anyone
// who can list a directory or a server could learn from them which prompts were seen. This layer sits between
// the cache and a tier of encrypted records and replaces each key with a digest. The digest is 16 bytes:
// AES-256-CBC-MAC of exactly 48 bytes (the key's length, the key, zeros), under a key derived from the master
// key for this namespace. The key's four group bytes follow unchanged, because records of a group have one
// size. To the tier below, a digest is a ChunkKey.
//
// With several encryption keys, a record may be present under any of them. It is read from the first key that
// has it and written under the first key, or under that of its tenant. Parts of a prompt may be stored under
// different keys, so every name is then looked up (KeyOrder::kNone).
//
// Computing a digest takes about 80 ns, and a waiting request's keys are looked up in every step. So the
// digests of the last kMostKnown keys are kept, in the order of their first arrival (digest_cache.h). With
// several encryption keys, the one under which a record was last found is tried first.
//
// A digest cannot be turned back into its key. This process remembers the keys that it wrote or read, up to
// kMostRemembered, and does not report removals of other records. Some keys are forgotten earlier, once three
// quarters of that many are remembered (digest_key_map.h).
//
// Threads: see Tier.
#pragma once

#include <memory>

#include "record/encryption.h"
#include "tier/tier.h"

namespace kv_offload {

// Returns the tier itself if `keys` is null. Throws ResourceError if OpenSSL lacks the cipher.
std::unique_ptr<Tier> with_encrypted_keys(std::unique_ptr<Tier> tier,
                                          std::shared_ptr<const EncryptionKeys> keys,
                                          const NamespaceId& namespace_id);

// Computes digests under one key. One thread.
class NameDigest {
 public:
  static constexpr std::size_t kBytes = 20;

  NameDigest(const EncryptionKeys& keys, std::size_t which, const NamespaceId& namespace_id);
  ~NameDigest();
  NameDigest(const NameDigest&) = delete;
  NameDigest& operator=(const NameDigest&) = delete;

  ChunkKey of(const ChunkKey& key) const;

 private:
  [[maybe_unused]] struct evp_cipher_ctx_st* context_;
};

// kMostRemembered: keys that EncryptedKeyTier remembers by their digests. kMostKnown: keys that it remembers
// with their digests, enough for four prompts of a million tokens. Each of them takes 64 bytes, plus 16 bytes
// per encryption key.
inline constexpr std::size_t kMostRemembered = std::size_t{1} << 20;
inline constexpr std::size_t kMostKnown = std::size_t{1} << 18;

}  // namespace kv_offload
