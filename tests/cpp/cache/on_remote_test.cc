// SPDX-License-Identifier: Apache-2.0
// Caches that share one server, for each kind of remote tier. One cache hits the records of another at once,
// and each record is read once, regardless of the number of requests.
#include <gtest/gtest.h>

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "backends/mooncake/medium.h"
#include "backends/redis/medium.h"
#include "cache/cache_fixture.h"
#include "tier/presence.h"
#ifdef KV_OFFLOAD_S3
#include "backends/s3/medium.h"
#endif

namespace kv_offload {
namespace {

using std::chrono::seconds;
using testing::RemoteMedium;

struct RemoteKind {
  std::string name;
  std::function<std::unique_ptr<RemoteMedium>()> make;
};

class OnRemoteTest : public CacheTest, public ::testing::WithParamInterface<RemoteKind> {
 protected:
  OnRemoteTest() {
    for (auto& engine : engines_) {
      WorldOptions options;
      options.rows = 64;
      options.cache.load_policy = LoadPolicy::kAlways;
      options.make_tier = [this](const Clock& clock) {
        ThreadPoolTierOptions pooled;
        pooled.name = GetParam().name;
        pooled.op_timeout = seconds(60);
        pooled.clock = &clock;
        return medium_->open(pooled);
      };
      engine = std::make_unique<World>(std::move(options));
    }
    as(0);
  }
  ~OnRemoteTest() override {
    as(0);
    engines_[0] = std::move(world_);
  }
  // The test actions apply to this engine from now on.
  void as(std::size_t engine) {
    if (world_) engines_[current_] = std::move(world_);
    world_ = std::move(engines_[engine]);
    current_ = engine;
  }
  bool until(const std::function<bool()>& condition) {
    const auto give_up = std::chrono::steady_clock::now() + seconds(120);
    while (!condition()) {
      if (std::chrono::steady_clock::now() > give_up) return false;
      step();
      std::this_thread::yield();
    }
    return true;
  }
  void store_and_write(const Names& names) {
    store(names);
    EXPECT_TRUE(until([&] { return cache().stats().pinned_chunks == 0; }));
  }
  // Waits like vLLM and returns the letters of the last scan.
  std::string ask(RequestHandle request, const Names& wanted) {
    std::string seen;
    EXPECT_TRUE(until([&] {
      seen = scan(request, wanted);
      return seen.find_first_of("PR") == std::string::npos;
    }));
    return seen;
  }
  std::string ask(const Names& wanted) {
    const RequestHandle request = begin();
    const std::string seen = ask(request, wanted);
    if (seen == std::string(wanted.size(), 'H')) load(request, wanted);
    end(request);
    return seen;
  }
  double read_bytes() { return world().metrics.value("kv_offload_read_bytes_total", {GetParam().name}); }

  std::unique_ptr<RemoteMedium> medium_ = GetParam().make();
  std::unique_ptr<World> engines_[2];  // null at the current engine's index
  std::size_t current_ = 0;
};

// The clocks do not advance, so a hit must not depend on an expired lookup result.
TEST_P(OnRemoteTest, one_engine_hits_the_records_of_the_other_at_once) {
  for (const char* name : {"a", "b", "c", "d"}) {
    const Names prompt{std::string(name) + ".1", std::string(name) + ".2", std::string(name) + ".3"};
    as(0);
    store_and_write(prompt);
    as(1);
    EXPECT_EQ(ask(prompt), "HHH") << name;
  }
  EXPECT_EQ(read_bytes(), 4 * 3 * 2 * 4096);
}

// The lookup found no record; the cached negative result expires soon.
TEST_P(OnRemoteTest, a_chunk_looked_up_too_early_is_hit_soon) {
  const Names prompt{"a", "b", "c"};
  as(1);
  EXPECT_EQ(ask(prompt), "M");
  as(0);
  store_and_write(prompt);
  as(1);
  pass_time(PresenceCache::kMinAbsent);
  EXPECT_EQ(ask(prompt), "HHH");
}

TEST_P(OnRemoteTest, a_burst_over_one_missing_prefix_reads_it_once) {
  const Names prefix{"a", "b", "c", "d"};
  store_and_write(prefix);
  as(1);
  std::vector<RequestHandle> burst;
  for (int i = 0; i < 50; ++i) burst.push_back(begin());
  for (const RequestHandle request : burst) EXPECT_EQ(scan(request, prefix).find('H'), std::string::npos);
  for (const RequestHandle request : burst) EXPECT_EQ(ask(request, prefix), "HHHH");
  for (const RequestHandle request : burst) {
    load(request, prefix);
    end(request);
  }
  EXPECT_EQ(medium_->reads(), 4u) << "as counted by the server";
  EXPECT_EQ(cache().stats().pinned_chunks, 0u);
}

// Some requests arrive while the reads of earlier ones are in flight.
TEST_P(OnRemoteTest, a_later_request_waits_for_the_reads_already_in_flight) {
  const Names prefix{"a", "b", "c", "d"};
  store_and_write(prefix);
  as(1);
  medium_->block(OpKind::kRead);
  std::vector<RequestHandle> burst;
  const auto scan_all = [&] {
    for (const RequestHandle request : burst) (void)scan(request, prefix);
    step();
  };
  for (int i = 0; i < 25; ++i) burst.push_back(begin());
  EXPECT_TRUE(until([&] {
    scan_all();
    return medium_->reads() == 4;
  }));
  for (int i = 0; i < 25; ++i) burst.push_back(begin());
  for (int i = 0; i < 3; ++i) scan_all();
  medium_->release();
  for (const RequestHandle request : burst) {
    EXPECT_EQ(ask(request, prefix), "HHHH");
    load(request, prefix);
    end(request);
  }
  EXPECT_EQ(medium_->reads(), 4u);
}

INSTANTIATE_TEST_SUITE_P(
    Kinds, OnRemoteTest,
    ::testing::Values(RemoteKind{"mooncake", [] { return std::make_unique<testing::MooncakeMedium>(); }},
                      RemoteKind{"redis", [] { return std::make_unique<testing::RedisMedium>(); }}
#ifdef KV_OFFLOAD_S3
                      ,
                      RemoteKind{"s3", [] { return std::make_unique<testing::S3Medium>(); }}
#endif
                      ),
    [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace kv_offload
