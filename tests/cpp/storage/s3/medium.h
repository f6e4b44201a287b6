// The s3 tier's medium for the tests that all kinds of tiers pass: a small store of the tests.
#pragma once

#include <memory>
#include <string>
#include <thread>

#include "storage/s3/server.h"
#include "storage/s3/tier.h"
#include "storage/tier_driver.h"
#include "storage/tier_medium.h"

namespace kv_offload::testing {

class S3Medium final : public Medium {
 public:
  using Verb = S3Server::Verb;

  S3TierOptions options(const PooledTierOptions& pooled = {}) const {
    S3TierOptions options;
    static_cast<PooledTierOptions&>(options) = pooled;
    options.bucket = server.address();
    options.namespace_id.fill(0x11);
    options.pause = [held = held_](Nanos) {};
    return options;
  }
  std::unique_ptr<Tier> open(const PooledTierOptions& pooled) override {
    return make_s3_tier(options(pooled));
  }

  // The name of the record of this key; of the only one, whatever its epoch.
  std::string name_of(const ChunkKey& key) const {
    for (const std::string& name : server.keys()) {
      if (name.ends_with("/" + key.hex())) return name;
    }
    ADD_FAILURE() << "no record of " << key.hex();
    return {};
  }
  void lose(const ChunkKey& key) override { EXPECT_TRUE(server.remove(name_of(key))); }
  void damage(const ChunkKey& key) override {
    const std::string name = name_of(key);
    std::string value = server.get(name);
    ASSERT_GT(value.size(), 5000u);
    value[5000] ^= 1;
    server.set(name, value);
  }
  void fail_transfers(bool fail) override {
    server.fail(Verb::kRead, fail);
    server.fail(Verb::kWrite, fail);
  }
  void fail_resets(bool fail) override { server.fail(Verb::kEpoch, fail); }
  void block(OpKind kind) override { server.block(kind == OpKind::kRead ? Verb::kRead : Verb::kWrite); }
  void release() override { server.release(); }
  void wait_for_blocked(int threads) override { server.wait_for_blocked(threads); }
  void wait_for_let_go() override {
    while (held_.use_count() > 1) std::this_thread::yield();
  }

  S3Server server;

 private:
  const std::shared_ptr<int> held_ = std::make_shared<int>();  // by each store
};

}  // namespace kv_offload::testing
