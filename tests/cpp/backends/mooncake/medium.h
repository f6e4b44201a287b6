// SPDX-License-Identifier: Apache-2.0
// The medium of the mooncake tier, for the tests that all tier kinds pass.
#pragma once

#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "backends/mooncake/fake.h"
#include "backends/mooncake/tier.h"
#include "tier/remote_medium.h"
#include "tier/tier_driver.h"

namespace kv_offload::testing {

class MooncakeMedium : public RemoteMedium {
 public:
  using Verb = FakeMooncake::Verb;

  MooncakeTierOptions options(const ThreadPoolTierOptions& pooled = {}) {
    MooncakeTierOptions options;
    static_cast<ThreadPoolTierOptions&>(options) = pooled;
    options.client.launch = store.launch();
    options.client.setup = "{}";
    options.client.shortest_pause = options.client.longest_pause = std::chrono::milliseconds(1);
    options.place = "master:1";
    options.namespace_id.fill(0x11);
    return options;
  }
  std::unique_ptr<Tier> open(const ThreadPoolTierOptions& pooled) override {
    return make_mooncake_tier(options(pooled));
  }

  // Returns the name of the only record of this key, whatever its epoch.
  std::string name_of(const ChunkKey& key) const {
    for (const std::string& name : store.names()) {
      if (name.ends_with(":" + key.hex())) return name;
    }
    ADD_FAILURE() << "no record of " << key.hex();
    return {};
  }
  std::string epoch_name() const {
    for (const std::string& name : store.names()) {
      if (name.ends_with(":epoch")) return name;
    }
    return {};
  }
  void lose(const ChunkKey& key) override { store.remove(name_of(key)); }
  void damage(const ChunkKey& key) override {
    const std::string name = name_of(key);
    std::string value = store.value(name);
    value.at(5000) ^= 1;
    store.set_value(name, value);
  }
  void fail_transfers(bool fail) override {
    store.faults.fail(Verb::kRead, fail);
    store.faults.fail(Verb::kWrite, fail);
  }
  void fail_resets(bool fail) override { store.faults.fail(Verb::kEpoch, fail); }
  void block(OpKind kind) override { store.faults.block(kind == OpKind::kRead ? Verb::kRead : Verb::kWrite); }
  void release() override { store.faults.release(); }
  void wait_for_blocked(int threads) override { store.faults.wait_for_blocked(threads); }
  void wait_for_let_go() override {
    EXPECT_TRUE(holds_soon([&] { return store.channels() == 0; }));
  }

  void kill() override { store.kill(); }
  void start() override { store.start(); }
  void stand_still() override { store.stand_still(true); }
  void go_on() override { store.stand_still(false); }
  void set_full(bool full) override { store.set_full(full); }
  void go_wrong(unsigned seed, unsigned permille) override {
    store.faults.at_random(seed, permille, {"-200", "-703", "-800", "-900", "-1"});
  }
  std::size_t went_wrong(Mishap mishap) const override { return store.faults.happened(mishap); }
  std::vector<std::string> names() const override { return store.names(); }
  std::string value(const std::string& name) const override { return store.value(name); }
  void set_value(const std::string& name, const std::string& value) override { store.set_value(name, value); }
  void remove(const std::string& name) override { store.remove(name); }
  std::size_t reads() const override { return store.faults.seen(Verb::kRead); }
  int connections() const override { return store.channels(); }

  FakeMooncake store;
};

}  // namespace kv_offload::testing
