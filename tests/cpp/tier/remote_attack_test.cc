// SPDX-License-Identifier: Apache-2.0
// Two engines share one server that suffers every fault, for each remote tier kind. No byte may be wrong,
// every op ends once, nothing hangs, nothing grows, and the server works again afterwards.
#include <gtest/gtest.h>
#include <unistd.h>

#include <array>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <set>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "backends/mooncake/fake.h"
#include "backends/mooncake/medium.h"
#include "backends/redis/medium.h"
#include "backends/redis/server.h"
#include "base/status.h"
#include "test_iterations.h"
#include "tier/loopback_server.h"
#ifdef KV_OFFLOAD_S3
#include "backends/s3/medium.h"
#include "backends/s3/server.h"
#endif

namespace kv_offload {
namespace {

using namespace testing;
using std::chrono::milliseconds;
using std::chrono::seconds;
using std::chrono::steady_clock;

constexpr std::uint32_t kKeys = 48;
constexpr std::size_t kMostInFlight = 24;

bool is_long() { return std::getenv("KV_OFFLOAD_LONG") != nullptr; }
std::size_t attack_ops() {
  const std::size_t usual = is_long() ? 100'000 : 1'000;
  return kSanitized ? usual / 4 : usual;
}

// Returns the shard sizes of a key, always the same ones.
ShardSizes sizes_of(std::uint32_t number) {
  static const std::array<ShardSizes, 3> kShapes{ShardSizes{8192}, ShardSizes{300}, ShardSizes{5000, 4096}};
  return kShapes[number % kShapes.size()];
}

// An engine that shares the server, and the content that it expects.
class AttackedEngine {
 public:
  AttackedEngine(RemoteMedium& medium, FakeClock& clock) : medium_(medium), clock_(clock) {}
  ~AttackedEngine() { close(); }

  void open() {
    ThreadPoolTierOptions options;
    options.name = "tier";
    options.clock = &clock_;
    options.op_timeout = milliseconds(250);
    for (int tries = 0; !tier_; ++tries) {
      ASSERT_LT(tries, 1000) << "every attempt to open was refused";
      try {
        tier_ = medium_.open(options);
      } catch (const ResourceError&) {  // a garbled answer may look like a refusal
      }
    }
    weights_ = 0;
  }
  void close() {
    if (!tier_) return;
    tier_->close();
    poll();
    EXPECT_TRUE(rows_.empty()) << rows_.size() << " ops of a closed engine did not end";
    tier_.reset();
  }
  void reset(std::uint32_t weights) {
    (void)tier_->reset();
    weights_ = weights;  // its own new weights
  }
  OpId submit(OpKind kind, std::uint32_t number, Nanos deadline = Nanos{0}) {
    InFlight one{kind, number, weights_, std::make_shared<Row>(sizes_of(number))};
    if (kind == OpKind::kWrite) one.row->fill(one.content());
    std::vector<TierOp> ops(1);
    ops[0].id = ++last_id_;
    ops[0].kind = kind;
    ops[0].key = key_of(number);
    ops[0].shards = one.row->shards();
    ops[0].memory = one.row;
    ops[0].deadline = deadline;
    rows_.emplace(last_id_, std::move(one));
    tier_->submit(std::move(ops));
    return last_id_;
  }
  void ask_for(std::uint32_t first, std::uint32_t count, KeyOrder order) {
    std::vector<ChunkKey> keys;
    for (std::uint32_t i = 0; i < count; ++i) keys.push_back(key_of((first + i) % kKeys));
    for (const ChunkKey& key : keys) (void)tier_->contains(key);
    tier_->prefetch_presence(std::move(keys), order);
  }
  void poll() {
    std::vector<Completion> completions;
    std::vector<TierRemoval> removals;
    tier_->poll(&completions, &removals);
    for (const Completion& completion : completions) {
      const auto found = rows_.find(completion.id);
      ASSERT_NE(found, rows_.end()) << "an op ended twice";
      const InFlight& one = found->second;
      ++ended[completion.status.kind()];
      if (completion.status && one.kind == OpKind::kRead) {
        ++reads;
        EXPECT_TRUE(one.row->holds(one.content())) << "wrong bytes of record " << one.number;
      }
      rows_.erase(found);
    }
  }
  // Waits until all but `rest` ops in flight have ended.
  bool drain(std::size_t rest = 0) {
    return holds_soon([&] {
      poll();
      return rows_.size() <= rest;
    });
  }
  // Also waits for the tier's own lookups.
  bool settle() {
    return drain() && holds_soon([&] { return tier_->stats().queued_reads == 0; });
  }
  bool is_on() const {
    const TierStats stats = tier_->stats();
    return stats.readable && stats.writable;
  }
  Status write_and_read(std::uint32_t number) {
    for (const OpKind kind : {OpKind::kWrite, OpKind::kRead}) {
      ended.clear();
      submit(kind, number);
      if (!drain()) return Status::error(StatusKind::kTimeout, "the op did not end");
      if (!ended.contains(StatusKind::kOk)) return Status::error(StatusKind::kIo, "it failed");
    }
    return Status::ok();
  }
  Tier& tier() { return *tier_; }

  std::map<StatusKind, std::size_t> ended;
  std::size_t reads = 0;  // ended ok

 private:
  struct InFlight {
    OpKind kind;
    std::uint32_t number, weights;
    std::shared_ptr<Row> row;
    std::uint32_t content() const { return number + 1000003 * weights; }
  };
  RemoteMedium& medium_;
  FakeClock& clock_;
  std::uint32_t weights_ = 0;
  OpId last_id_ = 0;
  std::map<OpId, InFlight> rows_;  // outlives the tier
  std::unique_ptr<Tier> tier_;
};

std::size_t resident_bytes() {
  std::size_t pages = 0, resident = 0;
  std::ifstream("/proc/self/statm") >> pages >> resident;
  return resident * static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
}

struct RemoteKind {
  std::string name;
  std::function<std::unique_ptr<RemoteMedium>()> make;
};

class RemoteAttack : public ::testing::TestWithParam<RemoteKind> {
 protected:
  void SetUp() override {
    for (auto& engine : engines_) {
      engine = std::make_unique<AttackedEngine>(*medium_, clock_);
      ASSERT_NO_FATAL_FAILURE(engine->open());
    }
  }
  std::uint32_t draw(std::uint32_t below) { return random_() % below; }
  AttackedEngine& any_engine() { return *engines_[draw(2)]; }

  void one_op(AttackedEngine& engine) {
    const std::uint32_t number = draw(kKeys);
    switch (draw(20)) {
      case 0:
        return engine.ask_for(number, 1 + draw(16), draw(2) == 0 ? KeyOrder::kNone : KeyOrder::kPrefix);
      case 1:
        engine.submit(OpKind::kRead, number, clock_.now() + milliseconds(1));
        break;
      case 2:
        (void)engine.tier().cancel(engine.submit(OpKind::kWrite, number));
        break;
      default:
        engine.submit(draw(2) == 0 ? OpKind::kRead : OpKind::kWrite, number);
    }
    ++submitted_;
  }
  // Corrupts one stored record.
  void spoil() {
    const std::vector<std::string> names = medium_->names();
    if (names.empty()) return;
    const std::string& name = names[draw(static_cast<std::uint32_t>(names.size()))];
    std::string value = medium_->value(name);
    if (value.size() <= 8 || draw(4) == 0) return medium_->remove(name);
    switch (draw(4)) {
      case 0:
        value[draw(static_cast<std::uint32_t>(value.size()))] ^= 1;
        break;
      case 1:
        value.resize(draw(static_cast<std::uint32_t>(value.size())));
        break;
      case 2:
        value[8] = static_cast<char>(value[8] + 1);  // another version
        break;
      default: {  // Another key's record. A record of this key from another epoch would be valid and hold
                  // other bytes.
        const std::string& other = names[draw(static_cast<std::uint32_t>(names.size()))];
        if (other.ends_with(std::string_view(name).substr(name.size() - key_of(0).hex().size()))) return;
        value = medium_->value(other);
      }
    }
    medium_->set_value(name, value);
    ++spoilt_;
  }
  // Causes one outage of the whole server, with ops in flight, and ends it.
  void outage(std::uint32_t which) {
    const auto meanwhile = [&] {
      for (int i = 0; i < 20; ++i) one_op(any_engine());
      for (auto& engine : engines_) EXPECT_TRUE(engine->drain());
    };
    for (int i = 0; i < 4; ++i) one_op(any_engine());
    switch (which) {
      case 0:
        medium_->kill();
        meanwhile();
        medium_->start();
        break;
      case 1:
        medium_->stand_still();
        meanwhile();
        medium_->go_on();
        break;
      case 2:
        medium_->set_full(true);
        meanwhile();
        medium_->set_full(false);
        break;
      case 3:
        for (const std::string& name : medium_->names()) medium_->remove(name);  // the server evicts
        meanwhile();
        break;
      case 4:
        any_engine().reset(++last_weights_);
        meanwhile();
        break;
      default: {
        AttackedEngine& restarted = any_engine();
        restarted.close();
        ASSERT_NO_FATAL_FAILURE(restarted.open());
      }
    }
  }
  static constexpr std::uint32_t kOutages = 6;
  // Waits until tiers that were switched off are due for a probe.
  void rest() {
    for (auto& engine : engines_) {
      EXPECT_TRUE(engine->settle());
      engine->poll();
    }
    clock_.advance(seconds(61));
  }

  std::size_t reads() const { return engines_[0]->reads + engines_[1]->reads; }
  std::size_t ok() const {
    std::size_t sum = 0;
    for (const auto& engine : engines_) sum += engine->ended[StatusKind::kOk];
    return sum;
  }
  std::string how_they_ended() const {
    std::map<std::string_view, std::size_t> how;
    for (const auto& engine : engines_) {
      for (const auto& [kind, times] : engine->ended) how[to_string(kind)] += times;
    }
    return ::testing::PrintToString(how);
  }

  FakeClock clock_;
  std::mt19937 random_{20261123};
  std::unique_ptr<RemoteMedium> medium_ = GetParam().make();
  std::array<std::unique_ptr<AttackedEngine>, 2> engines_;
  std::size_t submitted_ = 0, spoilt_ = 0;
  std::uint32_t last_weights_ = 0;
};

TEST_P(RemoteAttack, no_server_fault_causes_wrong_bytes_and_every_op_ends_once) {
  const std::size_t ops = attack_ops();
  medium_->go_wrong(7, 30);
  std::size_t resident = 0;
  // On a slow machine many ops time out, and their tier is then off for a while: the attack goes on until
  // enough ops succeeded.
  const auto was_attacked = [&] {
    bool all = reads() >= ops / 50 && ok() >= ops / 10 && spoilt_ > 0;
    for (std::size_t mishap = 0; mishap < kMishaps; ++mishap)
      all = all && medium_->went_wrong(static_cast<Mishap>(mishap)) > 0;
    return all;
  };
  while (submitted_ < ops || !was_attacked()) {
    ASSERT_LT(submitted_, 20 * ops) << "too few ops reach the server: " << how_they_ended();
    AttackedEngine& engine = any_engine();
    if (!engine.is_on()) rest();
    one_op(engine);
    ASSERT_TRUE(engine.drain(kMostInFlight)) << "ops that do not end";
    if (draw(8) == 0) clock_.advance(milliseconds(1));
    if (draw(40) == 0) spoil();
    if (draw(is_long() ? 200 : 60) == 0) outage(draw(kOutages));
    if (resident == 0 && submitted_ > ops / 2) resident = resident_bytes();
    if (HasFailure()) return;
  }
  for (std::uint32_t which = 0; which < kOutages; ++which) {
    outage(which);
    if (HasFailure()) return;
  }
  for (auto& engine : engines_) EXPECT_TRUE(engine->drain());
  if (is_long() && !kSanitized) {  // a short run would not show growth
    EXPECT_LT(resident_bytes(), resident + (64u << 20));
  }
  // The server may not have noticed the end of a closed engine yet.
  EXPECT_TRUE(holds_soon([&] { return medium_->connections() <= 2 * (4 + 2 + 2); })) << "one per thread";
  std::size_t ended = 0;
  for (const auto& engine : engines_) {
    for (const auto& [kind, times] : engine->ended) ended += times;
  }
  EXPECT_EQ(ended, submitted_);
  if (is_long()) std::printf("%s\n", how_they_ended().c_str());

  medium_->go_wrong(7, 0);
  for (auto& engine : engines_) {
    EXPECT_TRUE(holds_soon([&] {
      rest();
      return engine->write_and_read(kKeys + 1).is_ok();
    })) << "it works again";
  }
}

INSTANTIATE_TEST_SUITE_P(Kinds, RemoteAttack,
                         ::testing::Values(RemoteKind{"mooncake",
                                                      [] { return std::make_unique<MooncakeMedium>(); }},
                                           RemoteKind{"redis", [] { return std::make_unique<RedisMedium>(); }}
#ifdef KV_OFFLOAD_S3
                                           ,
                                           RemoteKind{"s3", [] { return std::make_unique<S3Medium>(); }}
#endif
                                           ),
                         [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace kv_offload
