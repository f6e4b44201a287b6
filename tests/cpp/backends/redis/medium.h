// SPDX-License-Identifier: Apache-2.0
// The medium of the redis tier, for the tests that all tier kinds pass: a separate server behind a proxy.
#pragma once

#include <chrono>
#include <memory>
#include <string>
#include <thread>

#include "backends/redis/server.h"
#include "backends/redis/tier.h"
#include "tier/remote_medium.h"
#include "tier/tier_driver.h"

namespace kv_offload::testing {

class RedisMedium : public RemoteMedium {
 public:
  using Verb = RedisProxy::Verb;

  RedisTierOptions options(const ThreadPoolTierOptions& pooled = {}) const {
    RedisTierOptions options;
    static_cast<ThreadPoolTierOptions&>(options) = pooled;
    options.server = proxy.address();
    options.namespace_id.fill(0x11);
    return options;
  }
  std::unique_ptr<Tier> open(const ThreadPoolTierOptions& pooled) override {
    return make_redis_tier(options(pooled));
  }

  // Returns the name of the only record of this key, whatever its epoch.
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
    proxy.faults.fail(Verb::kRead, fail);
    proxy.faults.fail(Verb::kWrite, fail);
  }
  void fail_resets(bool fail) override { proxy.faults.fail(Verb::kEpoch, fail); }
  void block(OpKind kind) override { proxy.faults.block(kind == OpKind::kRead ? Verb::kRead : Verb::kWrite); }
  void release() override { proxy.faults.release(); }
  void wait_for_blocked(int threads) override { proxy.faults.wait_for_blocked(threads); }
  void wait_for_let_go() override {
    EXPECT_TRUE(holds_soon([&] { return proxy.connections() == 0; }));
  }

  void kill() override { server.kill(); }
  void start() override { server.start(); }
  void stand_still() override { server.stop_process(); }
  void go_on() override { server.continue_process(); }
  void set_full(bool full) override {
    server.call({"CONFIG", "SET", "maxmemory-policy", "noeviction"});
    server.call({"CONFIG", "SET", "maxmemory", full ? "1" : "0"});
  }
  void go_wrong(unsigned seed, unsigned permille) override {
    proxy.faults.at_random(seed, permille,
                           {"-OOM command not allowed when used memory > 'maxmemory'.\r\n",
                            "-LOADING Redis is loading the dataset in memory\r\n", "-ERR something\r\n"});
  }
  std::size_t went_wrong(Mishap mishap) const override { return proxy.faults.happened(mishap); }
  std::vector<std::string> names() const override { return server.keys(); }
  std::string value(const std::string& name) const override { return server.call({"GET", name}).text; }
  void set_value(const std::string& name, const std::string& value) override {
    server.call({"SET", name, value});
  }
  void remove(const std::string& name) override { server.call({"DEL", name}); }
  std::size_t reads() const override { return proxy.faults.seen(Verb::kRead); }
  int connections() const override { return proxy.connections(); }

  RedisProcess server;
  RedisProxy proxy{server};
};

}  // namespace kv_offload::testing
