// SealedNames: a tier whose records are named by keyed digests. Chunk keys are hashes of prompts: who lists a
// directory or a server could tell by them which prompts were seen. Between the cache and a tier of sealed
// records each key is exchanged for a digest: AES-256-CBC-MAC of exactly 48 bytes (its length, the key,
// zeros) under a key that is derived from the master key for this namespace, 16 bytes; behind
// them the key's four bytes of the group stay as they are, because records of a group have one size. A digest
// is a ChunkKey for all that lies below.
//
// With several keys a record is present under any of them, read from the first that has it, and written under
// the first. The parts of a prompt may lie under different ones, so every name is asked for then
// (KeyOrder::kNone).
//
// A digest takes some 80 ns, and the keys of a request that waits are looked up in every step: the digests of
// the last kMostKnown keys are kept, in the order in which the keys came (known_names.h). Under several keys
// the one under which a record was found last is tried first.
//
// A digest does not lead back to its key: what this process wrote or read is remembered, up to
// kMostRemembered keys, and removals of others are told to nobody. Some are forgotten earlier, once three
// quarters of that are there (keys_of_digests.h).
//
// Threads: as Tier.
#pragma once

#include <memory>

#include "storage/sealing.h"
#include "storage/tier.h"

namespace kv_offload {

// The tier itself without keys. Throws ResourceError: OpenSSL gives no cipher.
std::unique_ptr<Tier> with_sealed_names(std::unique_ptr<Tier> tier, std::shared_ptr<const SealingKeys> keys,
                                        const NamespaceId& namespace_id);

// What makes the digests of one key. One thread.
class NameDigest {
 public:
  static constexpr std::size_t kBytes = 20;

  NameDigest(const SealingKeys& keys, std::size_t which, const NamespaceId& namespace_id);
  ~NameDigest();
  NameDigest(const NameDigest&) = delete;
  NameDigest& operator=(const NameDigest&) = delete;

  ChunkKey of(const ChunkKey& key) const;

 private:
  [[maybe_unused]] struct evp_cipher_ctx_st* context_;
};

// How many keys SealedNames remembers by their digests, and how many with their digests: four prompts of a
// million tokens, 64 bytes each and 16 more for every key on the list.
inline constexpr std::size_t kMostRemembered = std::size_t{1} << 20;
inline constexpr std::size_t kMostKnown = std::size_t{1} << 18;

}  // namespace kv_offload
