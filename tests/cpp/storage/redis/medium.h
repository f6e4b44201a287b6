// The redis tier's medium for the tests that all kinds of tiers pass: a server of its own behind a proxy.
#pragma once

#include <chrono>
#include <memory>
#include <string>
#include <thread>

#include "storage/redis/server.h"
#include "storage/redis/tier.h"
#include "storage/tier_driver.h"
#include "storage/tier_medium.h"

namespace kv_offload::testing {

class RedisMedium final : public Medium {
 public:
  using Verb = RedisProxy::Verb;

  RedisTierOptions options(const PooledTierOptions& pooled = {}) const {
    RedisTierOptions options;
    static_cast<PooledTierOptions&>(options) = pooled;
    options.server = proxy.address();
    options.namespace_id.fill(0x11);
    return options;
  }
  std::unique_ptr<Tier> open(const PooledTierOptions& pooled) override {
    return make_redis_tier(options(pooled));
  }

  // The name of the record of this key; of the only one, whatever its epoch.
  std::string name_of(const ChunkKey& key) const {
    for (const std::string& name : server.keys()) {
      if (name.ends_with(":" + key.hex())) return name;
    }
    ADD_FAILURE() << "no record of " << key.hex();
    return {};
  }
  void lose(const ChunkKey& key) override { EXPECT_EQ(server.call({"DEL", name_of(key)}).integer, 1); }
  void damage(const ChunkKey& key) override { server.call({"SETRANGE", name_of(key), "5000", "x"}); }
  void fail_transfers(bool fail) override {
    proxy.fail(Verb::kRead, fail);
    proxy.fail(Verb::kWrite, fail);
  }
  void fail_resets(bool fail) override { proxy.fail(Verb::kEpoch, fail); }
  void block(OpKind kind) override { proxy.block(kind == OpKind::kRead ? Verb::kRead : Verb::kWrite); }
  void release() override { proxy.release(); }
  void wait_for_blocked(int threads) override { proxy.wait_for_blocked(threads); }
  void wait_for_let_go() override {
    while (proxy.connections() > 0) std::this_thread::yield();
  }

  RedisProcess server;
  RedisProxy proxy{server};
};

}  // namespace kv_offload::testing
