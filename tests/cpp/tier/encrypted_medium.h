// SPDX-License-Identifier: Apache-2.0
// Keys for the tests of encrypted records, and a medium that uses them.
#pragma once

#include <memory>
#include <utility>
#include <vector>

#include "record/encryption.h"
#include "tier/encrypted_key_tier.h"
#include "tier/tier_medium.h"

namespace kv_offload::testing {

// Returns keys made of master keys, each of which repeats one number 32 times.
inline std::shared_ptr<const EncryptionKeys> keys_of(std::initializer_list<int> numbers) {
  std::vector<EncryptionKeys::Master> masters;
  for (const int number : numbers) masters.emplace_back().fill(static_cast<std::uint8_t>(number));
  return std::make_shared<const EncryptionKeys>(masters);
}

// The same, with one key for each of the tenants 1, 2, ...; 0: none.
inline std::shared_ptr<const EncryptionKeys> keys_of(std::initializer_list<int> numbers,
                                                     std::initializer_list<int> of_tenants) {
  std::vector<EncryptionKeys::Master> masters;
  for (const int number : numbers) masters.emplace_back().fill(static_cast<std::uint8_t>(number));
  std::vector<std::vector<EncryptionKeys::Master>> own(1);
  for (const int number : of_tenants) {
    own.emplace_back();
    if (number != 0) own.back().emplace_back().fill(static_cast<std::uint8_t>(number));
  }
  return std::make_shared<const EncryptionKeys>(masters, own);
}

// Tests name records by plain keys; the medium stores them under digests.
class EncryptedMedium final : public Medium {
 public:
  explicit EncryptedMedium(std::unique_ptr<Medium> medium) : medium_(std::move(medium)) {
    namespace_id_.fill(0x11);
    digest_ = std::make_unique<NameDigest>(*keys_, 0, namespace_id_);
  }
  std::unique_ptr<Tier> open(const ThreadPoolTierOptions& options) override {
    ThreadPoolTierOptions encrypted = options;
    encrypted.form.keys = keys_;
    return medium_->open(encrypted);
  }
  void lose(const ChunkKey& key) override { medium_->lose(digest_->of(key)); }
  void damage(const ChunkKey& key) override { medium_->damage(digest_->of(key)); }
  void fail_transfers(bool fail) override { medium_->fail_transfers(fail); }
  void fail_resets(bool fail) override { medium_->fail_resets(fail); }
  void block(OpKind kind) override { medium_->block(kind); }
  void release() override { medium_->release(); }
  void wait_for_blocked(int threads) override { medium_->wait_for_blocked(threads); }
  void wait_for_let_go() override { medium_->wait_for_let_go(); }

 private:
  const std::shared_ptr<const EncryptionKeys> keys_ = keys_of({1});
  NamespaceId namespace_id_;
  std::unique_ptr<NameDigest> digest_;
  std::unique_ptr<Medium> medium_;
};

}  // namespace kv_offload::testing
