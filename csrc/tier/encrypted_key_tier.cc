// SPDX-License-Identifier: Apache-2.0
#include "tier/encrypted_key_tier.h"

#include <algorithm>
#include <cstring>
#include <optional>
#include <unordered_map>
#include <utility>
#include <vector>

#include "base/steps.h"
#include "tier/digest_cache.h"
#include "tier/digest_key_map.h"

#ifdef KV_OFFLOAD_ENCRYPTION
#include <openssl/crypto.h>
#include <openssl/evp.h>
#endif

namespace kv_offload {
namespace {

// Returns the rank of a presence: contains() returns the highest one among all encryption keys.
int weight_of(Presence presence) {
  switch (presence) {
    case Presence::kAbsent:
      return 0;
    case Presence::kStaleMiss:
      return 1;
    case Presence::kLookupFailed:
      return 2;
    case Presence::kLookupPending:
      return 3;
    case Presence::kSkipped:
      return 4;
    case Presence::kUnknown:
      return 5;
    case Presence::kPresent:
      return 6;
  }
  return 0;
}

class EncryptedKeyTier final : public Tier {
 public:
  EncryptedKeyTier(std::unique_ptr<Tier> tier, std::shared_ptr<const EncryptionKeys> encryption_keys,
                   const NamespaceId& namespace_id)
      : encryption_keys_(std::move(encryption_keys)),
        ways_(encryption_keys_->size()),
        names_(ways_, kMostKnown,
               [this](const ChunkKey& key, std::size_t way) { return digest_of(key, way); }),
        tier_(std::move(tier)) {
    for (std::size_t i = 0; i < ways_; ++i)
      digests_.push_back(std::make_unique<NameDigest>(*encryption_keys_, i, namespace_id));
  }
  ~EncryptedKeyTier() override { close(); }

  std::string_view name() const override { return tier_->name(); }
  void submit(std::vector<TierOp> ops) override;
  bool cancel(OpId id) override { return tier_->cancel(id); }
  void poll(std::vector<Completion>* completions, std::vector<TierRemoval>* removals) override;
  bool has_removals() const override { return tier_->has_removals(); }
  Presence contains(const ChunkKey& key) const override;
  void forget_miss(const ChunkKey& key) override {
    const DigestCache::Place place = names_.place_of(key);
    for (std::size_t i = 0; i < ways_; ++i) tier_->forget_miss(names_.name(place, i));
  }
  void prefetch_presence(std::vector<ChunkKey> keys, const LookupOptions& options) override;
  void touch(const ChunkKey& key) override;
  void used(const TierUses& uses) override;
  Status reset(std::uint64_t startup_id) override { return tier_->reset(startup_id); }
  void begin_reset(std::uint64_t startup_id) override { tier_->begin_reset(startup_id); }
  bool can_reset() const override { return tier_->can_reset(); }
  void refresh_epoch() override { tier_->refresh_epoch(); }
  TierStats stats() const override { return tier_->stats(); }
  TierAvailability availability() const override { return tier_->availability(); }
  std::vector<TierPart> parts() const override { return tier_->parts(); }
  std::string epoch_problem() const override { return tier_->epoch_problem(); }
  std::string codec_reason() const override { return tier_->codec_reason(); }
  void close() override { tier_->close(); }
  double estimate_read_seconds(std::uint64_t bytes) const override {
    return tier_->estimate_read_seconds(bytes);
  }

 private:
  // Takes about 80 ns; names_ caches the digests of recent keys.
  ChunkKey digest_of(const ChunkKey& key, std::size_t way) const { return digests_[way]->of(key); }
  // Returns a key number under which the record is present, preferring the one found last; 0 if there is
  // none.
  std::size_t way_of(DigestCache::Place place) const;
  EntryInfo translated(DigestCache::Place place, EntryInfo entry_info, std::size_t way) const;

  const std::shared_ptr<const EncryptionKeys> encryption_keys_;
  const std::size_t ways_;
  std::vector<std::unique_ptr<NameDigest>> digests_;  // one for each encryption key
  mutable DigestCache names_;
  DigestKeyMap keys_{kMostRemembered};
  std::unordered_map<OpId, ChunkKey> in_flight_;
  const std::unique_ptr<Tier> tier_;
};

std::size_t EncryptedKeyTier::way_of(DigestCache::Place place) const {
  if (ways_ == 1) return 0;
  std::uint32_t& last = names_.way(place);
  if (tier_->contains(names_.name(place, last)) == Presence::kPresent) return last;
  for (std::uint32_t i = 0; i < ways_; ++i) {
    if (i == last || tier_->contains(names_.name(place, i)) != Presence::kPresent) continue;
    return last = i;
  }
  return 0;
}

// A policy knows only the id of the parent chunk. The parent's name is known if its key arrived lately, which
// is the case for chunks of one prompt.
EntryInfo EncryptedKeyTier::translated(DigestCache::Place place, EntryInfo entry_info,
                                       std::size_t way) const {
  entry_info.id = chunk_id(names_.name(place, way));
  if (entry_info.parent == 0) return entry_info;
  const std::optional<DigestCache::Place> parent = names_.find(entry_info.parent);
  entry_info.parent = parent ? chunk_id(names_.name(*parent, way)) : 0;
  return entry_info;
}

void EncryptedKeyTier::submit(std::vector<TierOp> ops) {
  std::vector<OpId> begun;
  begun.reserve(ops.size());
  try {
    for (TierOp& op : ops) {
      const ChunkKey key = op.key;
      const DigestCache::Place place = names_.place_of(key);
      std::size_t way = 0;
      if (op.kind != OpKind::kWrite) {
        way = way_of(place);
      } else {
        op.encryption_key = way = encryption_keys_->key_of_tenant(op.entry_info.tenant);
        names_.way(place) = static_cast<std::uint32_t>(way);
      }
      in_flight_.insert_or_assign(op.id, key);
      begun.push_back(op.id);
      op.entry_info = translated(place, op.entry_info, way);
      op.key = names_.name(place, way);
      keys_.remember(op.key, key);
    }
    // Nothing after this call may throw: the caller reuses the rows of ops that were refused.
    tier_->submit(std::move(ops));
  } catch (...) {
    for (const OpId id : begun) in_flight_.erase(id);
    throw;
  }
}

void EncryptedKeyTier::poll(std::vector<Completion>* completions, std::vector<TierRemoval>* removals) {
  const std::size_t first = completions->size(), first_removal = removals->size();
  tier_->poll(completions, removals);
  const auto is_not_reportable = [&](TierRemoval& removal) {
    const ChunkKey digest = removal.key;
    // Written or found again since. Keeps its key, for the next removal.
    if (tier_->contains(digest) == Presence::kPresent) return true;
    const auto key = keys_.take(digest, [&](const ChunkKey& candidate) {
      for (std::size_t i = 0; i < ways_; ++i) {
        if (digest_of(candidate, i) == digest) return true;
      }
      return false;
    });
    if (!key) return true;
    removal.key = *key;
    return ways_ > 1 && contains(*key) == Presence::kPresent;  // still present under another key
  };
  removals->erase(std::remove_if(removals->begin() + static_cast<std::ptrdiff_t>(first_removal),
                                 removals->end(), is_not_reportable),
                  removals->end());
  for (std::size_t i = first; i < completions->size(); ++i) {
    Completion& completion = (*completions)[i];
    const auto found = in_flight_.find(completion.id);
    if (found == in_flight_.end()) continue;
    // A previous record of this key may be among the removals, which forgot the digest.
    if (completion.status) keys_.remember(completion.key, found->second);
    completion.key = found->second;
    in_flight_.erase(found);
  }
}

Presence EncryptedKeyTier::contains(const ChunkKey& key) const {
  const DigestCache::Place place = names_.place_of(key);
  std::uint32_t& last = names_.way(place);
  Presence all = tier_->contains(names_.name(place, last));
  for (std::uint32_t i = 0; i < ways_ && all != Presence::kPresent; ++i) {
    if (i == last) continue;
    const Presence one = tier_->contains(names_.name(place, i));
    if (one == Presence::kPresent) {
      last = i;
      return one;
    }
    if (weight_of(one) > weight_of(all)) all = one;
  }
  return all;
}

// With several encryption keys, each may hold a part of the prompt: after a chunk that is missing under one
// key, later chunks may still be present under it.
void EncryptedKeyTier::prefetch_presence(std::vector<ChunkKey> keys, const LookupOptions& options) {
  LookupOptions each = options;
  if (ways_ > 1) each.order = KeyOrder::kNone;
  for (std::size_t i = 0; i < ways_; ++i) {
    std::vector<ChunkKey> digests;
    digests.reserve(keys.size());
    for (const ChunkKey& key : keys) digests.push_back(names_.name(names_.place_of(key), i));
    tier_->prefetch_presence(std::move(digests), each);
  }
}

void EncryptedKeyTier::touch(const ChunkKey& key) {
  const DigestCache::Place place = names_.place_of(key);
  tier_->touch(names_.name(place, way_of(place)));
}

void EncryptedKeyTier::used(const TierUses& uses) {
  auto translated_uses = std::make_shared<std::vector<TierUse>>();
  translated_uses->reserve(uses->size());
  for (const TierUse& use : *uses) {
    const DigestCache::Place place = names_.place_of(use.key);
    const std::size_t way = way_of(place);
    translated_uses->push_back({names_.name(place, way), translated(place, use.entry_info, way)});
  }
  tier_->used(std::move(translated_uses));
}

}  // namespace

#ifdef KV_OFFLOAD_ENCRYPTION

namespace {
constexpr std::size_t kMacBytes = 16;
}

NameDigest::NameDigest(const EncryptionKeys& keys, std::size_t which, const NamespaceId& namespace_id)
    : context_(EVP_CIPHER_CTX_new()) {
  EncryptionKeys::Derived key = keys.name_key(which, namespace_id);
  const bool ok = context_ != nullptr &&
                  EVP_EncryptInit_ex(context_, EVP_aes_256_ecb(), nullptr, key.data(), nullptr) == 1 &&
                  EVP_CIPHER_CTX_set_padding(context_, 0) == 1;
  OPENSSL_cleanse(key.data(), key.size());
  if (ok) return;
  EVP_CIPHER_CTX_free(context_);
  throw_resource("AES-256 is not available in OpenSSL");
}
NameDigest::~NameDigest() { EVP_CIPHER_CTX_free(context_); }

// CBC chained by hand from single blocks: restarting OpenSSL's own CBC takes longer than this whole function.
ChunkKey NameDigest::of(const ChunkKey& key) const {
  count_steps(1);
  unsigned char text[3 * kMacBytes] = {}, block[kMacBytes] = {};
  static_assert(sizeof(text) == 1 + ChunkKey::kMaxBytes);
  text[0] = static_cast<unsigned char>(key.size());
  std::memcpy(text + 1, key.bytes().data(), key.size());
  for (std::size_t at = 0; at < sizeof(text); at += kMacBytes) {
    for (std::size_t i = 0; i < kMacBytes; ++i) block[i] ^= text[at + i];
    int length = 0;
    // Cannot fail: nothing is allocated, and the block is complete.
    if (EVP_EncryptUpdate(context_, block, &length, block, kMacBytes) != 1 || length != kMacBytes)
      throw_resource("OpenSSL failed to compute a record name");
  }
  char name[kBytes];
  std::memcpy(name, block, kMacBytes);
  std::memcpy(name + kMacBytes, key.bytes().data() + key.size() - 4, 4);
  return ChunkKey::unchecked(name, sizeof(name));
}

#else

NameDigest::NameDigest(const EncryptionKeys&, std::size_t, const NamespaceId&) : context_(nullptr) {}
NameDigest::~NameDigest() = default;
ChunkKey NameDigest::of(const ChunkKey& key) const { return key; }

#endif

std::unique_ptr<Tier> with_encrypted_keys(std::unique_ptr<Tier> tier,
                                          std::shared_ptr<const EncryptionKeys> keys,
                                          const NamespaceId& namespace_id) {
  if (!keys) return tier;
  return std::make_unique<EncryptedKeyTier>(std::move(tier), std::move(keys), namespace_id);
}

}  // namespace kv_offload
