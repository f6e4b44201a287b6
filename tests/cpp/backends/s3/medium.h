// SPDX-License-Identifier: Apache-2.0
// The medium of the s3 tier, for the tests that all tier kinds pass: the tests' own small store.
#pragma once

#include <fmt/format.h>

#include <memory>
#include <string>
#include <string_view>
#include <thread>

#include "backends/s3/server.h"
#include "backends/s3/tier.h"
#include "tier/remote_medium.h"
#include "tier/tier_driver.h"

namespace kv_offload::testing {

class S3Medium : public RemoteMedium {
 public:
  using Verb = S3Server::Verb;

  S3TierOptions options(const ThreadPoolTierOptions& pooled = {}) const {
    S3TierOptions options;
    static_cast<ThreadPoolTierOptions&>(options) = pooled;
    options.bucket = server.address();
    options.namespace_id.fill(0x11);
    options.pause = [held = held_](Nanos) {};
    return options;
  }
  std::unique_ptr<Tier> open(const ThreadPoolTierOptions& pooled) override {
    return make_s3_tier(options(pooled));
  }

  // Returns the name of the only record of this key, whatever its epoch.
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
    server.faults.fail(Verb::kRead, fail);
    server.faults.fail(Verb::kWrite, fail);
  }
  void fail_resets(bool fail) override { server.faults.fail(Verb::kEpoch, fail); }
  void block(OpKind kind) override {
    server.faults.block(kind == OpKind::kRead ? Verb::kRead : Verb::kWrite);
  }
  void release() override { server.faults.release(); }
  void wait_for_blocked(int threads) override { server.faults.wait_for_blocked(threads); }
  void wait_for_let_go() override {
    EXPECT_TRUE(holds_soon([&] { return held_.use_count() == 1; }));
  }

  void kill() override { server.kill(); }
  void start() override { server.start(); }
  void stand_still() override {
    for (const Verb verb : S3Server::kVerbs) server.faults.block(verb);
  }
  void go_on() override { server.faults.release(); }
  void set_full(bool full) override {
    server.answer(Verb::kWrite, refusal("507 Insufficient Storage", "InsufficientStorage"),
                  full ? 1 << 30 : 0);
  }
  void go_wrong(unsigned seed, unsigned permille) override {
    server.faults.at_random(seed, permille,
                            {refusal("503 Slow Down", "SlowDown"), refusal("500 Oops", "InternalError"),
                             refusal("507 Insufficient Storage", "InsufficientStorage")});
  }
  std::size_t went_wrong(Mishap mishap) const override { return server.faults.happened(mishap); }
  std::vector<std::string> names() const override { return server.keys(); }
  std::string value(const std::string& name) const override { return server.get(name); }
  void set_value(const std::string& name, const std::string& value) override { server.set(name, value); }
  void remove(const std::string& name) override { server.remove(name); }
  std::size_t reads() const override { return server.faults.seen(Verb::kRead); }
  int connections() const override { return server.connections(); }

  S3Server server;

 private:
  static std::string refusal(std::string_view status, std::string_view code) {
    const std::string body = fmt::format("<Error><Code>{}</Code></Error>", code);
    return fmt::format("HTTP/1.1 {}\r\nContent-Length: {}\r\n\r\n{}", status, body.size(), body);
  }

  const std::shared_ptr<int> held_ = std::make_shared<int>();  // each open store holds a reference
};

}  // namespace kv_offload::testing
