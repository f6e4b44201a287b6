// SPDX-License-Identifier: Apache-2.0
// Wraps a medium: records are encoded where that saves space.
#pragma once

#include <memory>
#include <utility>

#include "record/compression_choice.h"
#include "tier/tier_medium.h"

namespace kv_offload::testing {

inline std::shared_ptr<CompressionChoice> always_encoded(Element element = Element::kBytes) {
  return std::make_shared<CompressionChoice>(
      CompressionOptions{.compress = Compress::kZstd, .elements = {element}});
}

class EncodedMedium final : public Medium {
 public:
  explicit EncodedMedium(std::unique_ptr<Medium> medium) : medium_(std::move(medium)) {}
  std::unique_ptr<Tier> open(const ThreadPoolTierOptions& options) override {
    ThreadPoolTierOptions encoded = options;
    encoded.form.compression = always_encoded();
    return medium_->open(encoded);
  }
  void lose(const ChunkKey& key) override { medium_->lose(key); }
  void damage(const ChunkKey& key) override { medium_->damage(key); }
  void fail_transfers(bool fail) override { medium_->fail_transfers(fail); }
  void fail_resets(bool fail) override { medium_->fail_resets(fail); }
  void block(OpKind kind) override { medium_->block(kind); }
  void release() override { medium_->release(); }
  void wait_for_blocked(int threads) override { medium_->wait_for_blocked(threads); }
  void wait_for_let_go() override { medium_->wait_for_let_go(); }

 private:
  std::unique_ptr<Medium> medium_;
};

}  // namespace kv_offload::testing
