// SPDX-License-Identifier: Apache-2.0
// An engine on two hosts whose tiers are stores that other engines use at the same time: a Redis server, an
// S3 bucket or a Mooncake Store for both hosts, or one for each. A host that opens an epoch of other weights
// than the other host would load wrong bytes, so each read compares the bytes of all parts.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cerrno>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "backends/mooncake/medium.h"
#include "backends/redis/medium.h"
#include "backends/s3/medium.h"
#include "cache/tier_figures.h"
#include "hosts/two_hosts.h"
#include "metrics/metrics.h"
#include "tier/circuit_breaker.h"
#include "tier/epoch_registry.h"

namespace kv_offload {
namespace {

using namespace testing;
using ::testing::Contains;
using ::testing::ElementsAre;
using ::testing::EndsWith;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;
using ::testing::StartsWith;

// The keys of a store: the records and the startup epoch of a namespace. kReplacesEpochs: a start replaces
// the epochs of the hosts if they differ, so that the engine shares the new one with those that start later.
struct RedisStoreAccess : RedisMedium {
  static constexpr bool kReplacesEpochs = true;
  using Options = RedisTierOptions;
  static constexpr const char* kType = "redis";
  static constexpr const char* kNoConnection = "db 0: the connection was lost: ";
  static constexpr const char* kPlace = " (unix:///";
  static std::unique_ptr<Tier> open_tier(const Options& options) { return make_redis_tier(options); }
  static std::string prefix_of(const Options& options) {
    return fmt::format("kv_offload:{}:", hex_of(options.namespace_id));
  }
  std::string epoch(const Options& options) const {
    return server.call({"GET", prefix_of(options) + "epoch"}).text;
  }
  void set_epoch(const Options& options, const std::string& name) {
    server.call({"SET", prefix_of(options) + "epoch", name});
  }
  void remove_epoch(const Options& options) { server.call({"DEL", prefix_of(options) + "epoch"}); }
  void refuse_removals() { server.call({"ACL", "SETUSER", "default", "-del"}); }
  void refuse_replacements() { server.call({"ACL", "SETUSER", "default", "-multi"}); }
  void block_replacement() { proxy.faults.block(Verb::kMulti); }  // after WATCH and GET
  std::size_t epochs_read() const { return proxy.faults.seen(Verb::kEpoch); }
};
struct S3StoreAccess : S3Medium {
  static constexpr bool kReplacesEpochs = true;
  using Options = S3TierOptions;
  static constexpr const char* kType = "s3";
  static constexpr const char* kNoConnection = ": no response from the store: ";
  static constexpr const char* kPlace = " (s3://bucket at http://127.0.0.1:";
  static std::unique_ptr<Tier> open_tier(const Options& options) { return make_s3_tier(options); }
  static std::string prefix_of(const Options& options) {
    return fmt::format("kv_offload/{}/", hex_of(options.namespace_id));
  }
  std::string epoch(const Options& options) const { return server.get(prefix_of(options) + "epoch"); }
  void set_epoch(const Options& options, const std::string& name) {
    server.set(prefix_of(options) + "epoch", name);
  }
  void remove_epoch(const Options& options) { server.remove(prefix_of(options) + "epoch"); }
  void refuse_removals() {
    server.answer(Verb::kRemove, "HTTP/1.1 403 Forbidden\r\nContent-Length: 0\r\n\r\n", 1 << 30);
  }
  void refuse_replacements() { server.ignore_conditions(true); }
  void block_replacement() { server.faults.block(Verb::kEpoch, 2); }  // after two GETs
  std::size_t epochs_read() const { return server.faults.seen(Verb::kEpoch); }
};
struct MooncakeStoreAccess : MooncakeMedium {
  static constexpr bool kReplacesEpochs = false;
  using Options = MooncakeTierOptions;
  static constexpr const char* kType = "mooncake";
  static constexpr const char* kNoConnection = ": Mooncake's master does not answer";
  static constexpr const char* kPlace = " (master:1: ";
  static std::unique_ptr<Tier> open_tier(const Options& options) { return make_mooncake_tier(options); }
  static std::string prefix_of(const Options& options) {
    return fmt::format("kv_offload:{}:", hex_of(options.namespace_id));
  }
  std::vector<std::string> names() const override {  // of records
    std::vector<std::string> names = store.names();
    std::erase_if(names, [](const std::string& name) { return name.ends_with(":epoch"); });
    return names;
  }
  std::string epoch(const Options& options) const { return store.value(prefix_of(options) + "epoch"); }
  void set_epoch(const Options& options, const std::string& name) {
    store.set_value(prefix_of(options) + "epoch", name);
  }
  void remove_epoch(const Options& options) { store.remove(prefix_of(options) + "epoch"); }
  void refuse_removals() { store.refuse_removals(true); }
  std::size_t epochs_read() const { return store.faults.seen(Verb::kEpoch); }
};

template <typename Store>
class SharedStores : public TwoHosts {
 protected:
  using Options = typename Store::Options;

  ~SharedStores() override { stop(); }

  Store& store(std::uint32_t host) { return stores_[has_common_store_ ? 0 : host]; }
  // Each host has a separate namespace, for its part.
  Options store_options(std::uint32_t host) {
    ThreadPoolTierOptions pooled;
    pooled.name = Store::kType;
    pooled.clock = &clock_;
    pooled.op_timeout = kPatience;
    Options options = store(host).options(pooled);
    options.namespace_id.fill(static_cast<std::uint8_t>(0x11 * (host + 1)));
    options.read_only = is_read_only_;
    return options;
  }
  std::unique_ptr<Tier> open_alone(std::uint32_t host, EpochChoice epoch = {}) {
    Options options = store_options(host);
    options.epoch = epoch;
    return Store::open_tier(options);
  }
  std::unique_ptr<Tier> open_part(std::uint32_t host, EpochChoice epoch) override {
    if (before_open_) before_open_(host, epoch);
    auto tier = open_alone(host, epoch);
    opened_[host] = tier->stats().epoch_id;
    return tier;
  }
  std::string epoch(std::uint32_t host) { return store(host).epoch(store_options(host)); }
  void set_epoch(std::uint32_t host, const std::string& name) {
    store(host).set_epoch(store_options(host), name);
  }
  std::size_t epochs_read(std::uint32_t host) { return store(host).epochs_read(); }
  void remove_epoch(std::uint32_t host) { store(host).remove_epoch(store_options(host)); }
  std::size_t records_on(std::uint32_t host) {
    std::size_t count = 0;
    for (const std::string& name : store(host).names())
      count += name.starts_with(Store::prefix_of(store_options(host)));
    return count;
  }
  std::string record_on(std::uint32_t host) {
    for (const std::string& name : store(host).names()) {
      if (name.starts_with(Store::prefix_of(store_options(host)))) return name;
    }
    ADD_FAILURE() << "no record on host " << host;
    return {};
  }
  // Another engine in the same epochs that is reset: new weights, under the same name.
  void reset_elsewhere() {
    for (std::uint32_t host = 0; host < kHosts; ++host) {
      const auto tier = open_alone(host);
      EXPECT_TRUE(tier->reset().is_ok());
      tier->close();
    }
  }
  // Upkeep follows the clock of the tiers.
  template <typename Condition>
  bool eventually(Condition condition) {
    return holds_soon([&] {
      clock_.advance(std::chrono::seconds(1));
      poll();
      return condition();
    });
  }
  // Both hosts have opened the same epoch, whichever.
  bool hosts_agree() const { return opened_[0] != 0 && opened_[0] == opened_[1]; }
  void expect_usable() {
    if (!Store::kReplacesEpochs && !hosts_agree()) expect_usable_alone();
    EXPECT_TRUE(hosts_agree());
    EXPECT_TRUE(write(1).is_ok());
    EXPECT_TRUE(read(1).is_ok());
    restart();
    EXPECT_TRUE(has(1)) << "the hosts use different epochs";
    EXPECT_TRUE(read(1).is_ok());
  }
  // The hosts are reset, which begins an epoch of this engine alone and a common one for later engines.
  void expect_usable_alone() {
    EXPECT_TRUE(eventually([&] { return tier_->stats().readable && tier_->stats().writable; }));
    EXPECT_TRUE(write(1).is_ok());
    EXPECT_TRUE(read(1).is_ok());
    EXPECT_EQ(EpochRegistry::id_of(epoch(0)), EpochRegistry::id_of(epoch(1)));
    restart();
    EXPECT_FALSE(has(1)) << "it may have other weights than engines that start after the reset";
  }

  FakeClock clock_;
  Store stores_[kHosts];
  bool has_common_store_ = true, is_read_only_ = false;
  std::function<void(std::uint32_t, const EpochChoice&)> before_open_;
  std::uint64_t opened_[kHosts] = {};  // epoch IDs
};

using Stores = ::testing::Types<RedisStoreAccess, S3StoreAccess, MooncakeStoreAccess>;
struct StoreNames {
  template <typename Store>
  static std::string GetName(int) {
    return Store::kType;
  }
};
TYPED_TEST_SUITE(SharedStores, Stores, StoreNames);
template <typename Store>
class ReplacingStores : public SharedStores<Store> {};
using StoresWithConditions = ::testing::Types<RedisStoreAccess, S3StoreAccess>;
TYPED_TEST_SUITE(ReplacingStores, StoresWithConditions, StoreNames);

const std::string kFirst(EpochRegistry::kNameDigits, 'a'), kSecond(EpochRegistry::kNameDigits, 'b');

// ---- round trips

TYPED_TEST(SharedStores, chunks_are_loaded_again_after_a_restart) {
  for (const bool is_common : {true, false}) {
    this->has_common_store_ = is_common;
    this->start();
    EXPECT_TRUE(this->hosts_agree());
    EXPECT_FALSE(this->has(1));
    ASSERT_TRUE(this->write(1).is_ok());
    EXPECT_TRUE(this->read(1).is_ok());
    this->restart();
    EXPECT_TRUE(this->has(1));
    EXPECT_TRUE(this->read(1).is_ok());
    EXPECT_FALSE(this->has(2));
    EXPECT_EQ(this->records_on(0), 1u);
    EXPECT_EQ(this->records_on(1), 1u);
    this->stop();
    this->store(0).kill();
    this->store(0).start();
  }
}

TYPED_TEST(SharedStores, a_chunk_with_a_part_missing_is_a_miss_and_its_other_part_is_removed) {
  for (const std::uint32_t lost : {0u, 1u}) {
    this->start();
    ASSERT_TRUE(this->write(1).is_ok());
    this->store(lost).remove(this->record_on(lost));
    EXPECT_EQ(this->read(1).kind(), StatusKind::kNotFound) << "host " << lost;
    EXPECT_FALSE(this->has(1));
    ASSERT_TRUE(holds_soon([&] {
      this->poll();
      return this->records_on(1 - lost) == 0;
    })) << "host "
        << lost;
    ASSERT_TRUE(this->write(1).is_ok());
    EXPECT_TRUE(this->read(1).is_ok());
    this->stop();
  }
}

TYPED_TEST(SharedStores, a_store_that_refuses_removals_takes_writes) {
  constexpr std::uint32_t kCount = CircuitBreaker::kFailuresToTrip + 2;
  this->has_common_store_ = false;
  this->start();
  for (std::uint32_t number = 1; number <= kCount; ++number) ASSERT_TRUE(this->write(number).is_ok());
  this->store(1).refuse_removals();
  for (const std::string& name : this->store(0).names()) this->store(0).remove(name);
  for (std::uint32_t number = 1; number <= kCount; ++number)
    EXPECT_EQ(this->read(number).kind(), StatusKind::kNotFound);
  for (std::uint32_t number = 1; number <= kCount; ++number) {
    EXPECT_TRUE(this->write(number).is_ok());
    EXPECT_TRUE(this->read(number).is_ok());
  }
  EXPECT_EQ(this->tier_->stats().breaker_trips, 0u);
  Metrics metrics;
  TierFigures().publish("far", this->tier_->parts(), metrics);
  EXPECT_GE(metrics.value("kv_offload_host_failures_total", {"1", "far", "remove", "declined"}), kCount);
}

TYPED_TEST(SharedStores, a_read_only_tier_that_removes_nothing_counts_no_failure) {
  this->start();
  ASSERT_TRUE(this->write(1).is_ok());
  this->stop();
  this->is_read_only_ = true;
  for (const std::uint32_t host : {0u, 1u}) {
    TierDriver user(this->open_alone(host));
    const Status removed = user.finish(user.start(OpKind::kRemove, 1, {8192})).status;
    EXPECT_EQ(removed.kind(), StatusKind::kDeclined);
    EXPECT_EQ(removed.error_number(), EROFS) << "AllHostsTier does not count it";
  }
  EXPECT_EQ(this->records_on(0), 1u);
}

TYPED_TEST(SharedStores, removing_a_missing_part_records_its_absence) {
  TierDriver user(this->open_alone(0));
  ASSERT_TRUE(user.write(1));
  this->store(0).remove(this->record_on(0));
  EXPECT_EQ(user.tier().contains(key_of(1)), Presence::kPresent);
  (void)user.finish(user.start(OpKind::kRemove, 1, {8192}));
  EXPECT_EQ(user.tier().contains(key_of(1)), Presence::kAbsent);
  EXPECT_TRUE(user.write(1));
  EXPECT_TRUE(user.read(1));
}

TYPED_TEST(SharedStores, engines_that_run_at_once_share_their_chunks) {
  this->start();
  ASSERT_TRUE(this->write(1).is_ok());
  const std::uint64_t id = this->opened_[0];
  for (std::uint32_t host = 0; host < 2; ++host) {
    const auto tier = this->open_alone(host, {7, false, 0});
    EXPECT_EQ(tier->stats().epoch_id, id);
    tier->close();
  }
  EXPECT_TRUE(this->read(1).is_ok());
}

// ---- stores that fail

TYPED_TEST(SharedStores, a_lookup_that_fails_on_one_host_is_no_missing_part) {
  this->has_common_store_ = false;
  this->start();
  ASSERT_TRUE(this->write(1).is_ok());
  this->restart();  // what the hosts have is not known
  this->store(1).kill();
  this->removals_.clear();
  EXPECT_FALSE(this->has(1));
  EXPECT_EQ(this->tier_->contains(key_of(1)), Presence::kLookupFailed);
  this->poll();
  EXPECT_TRUE(this->removals_.empty()) << "the part may exist";
  EXPECT_EQ(this->records_on(0), 1u);
}

// ---- resets

TYPED_TEST(SharedStores, a_part_from_before_a_reset_that_missed_its_host_is_never_used) {
  for (const std::uint32_t missed : {1u, 0u}) {
    this->start();
    ASSERT_TRUE(this->write(1).is_ok());
    const std::string before = this->epoch(missed);
    this->stop();
    this->reset_elsewhere();
    this->set_epoch(missed, before);  // as if the reset had not reached this host
    ++this->weights;
    this->start();
    EXPECT_FALSE(this->has(1)) << "host " << missed;
    this->expect_usable();
    this->stop();
  }
}

TYPED_TEST(SharedStores, a_reset_while_the_hosts_open_their_tiers_leaves_them_in_one_epoch) {
  this->start();
  ASSERT_TRUE(this->write(1).is_ok());
  this->stop();
  this->before_open_ = [&](std::uint32_t host, const EpochChoice&) {
    if (host == 0) return;
    this->before_open_ = nullptr;
    this->reset_elsewhere();  // host 0 has opened the epoch before it
  };
  ++this->weights;
  this->start();
  EXPECT_FALSE(this->has(1));
  this->expect_usable();
}

// Another engine begins the epoch that this engine has chosen, fills it and is reset before this engine goes
// on.
TYPED_TEST(ReplacingStores, an_epoch_that_a_reset_has_ended_meanwhile_is_not_begun_again) {
  this->set_epoch(0, kFirst);
  this->set_epoch(1, kSecond);
  std::uint64_t ended = 0;
  this->before_open_ = [&](std::uint32_t host, const EpochChoice& choice) {
    if (host == 0 || !choice.is_new) return;
    this->before_open_ = nullptr;
    ended = choice.id;
    const auto other = this->open_alone(1, choice);
    EXPECT_EQ(other->stats().epoch_id, ended);
    EXPECT_TRUE(other->reset().is_ok());
    other->close();
  };
  this->start();
  ASSERT_NE(ended, 0u);
  EXPECT_NE(this->opened_[0], ended);
  this->expect_usable();
}

TYPED_TEST(SharedStores, an_epoch_that_the_store_has_lost_meanwhile_is_not_begun_again) {
  this->set_epoch(0, kFirst);
  this->set_epoch(1, kSecond);
  std::uint64_t chosen = 0;
  this->before_open_ = [&](std::uint32_t host, const EpochChoice& choice) {
    if (host == 0 || !choice.is_new) return;
    this->before_open_ = nullptr;
    chosen = choice.id;
    this->remove_epoch(1);
  };
  this->start();
  ASSERT_NE(chosen, 0u);
  EXPECT_NE(this->opened_[0], chosen);
  this->expect_usable();
}

TYPED_TEST(SharedStores, a_reset_separates_the_engine_from_the_next_one) {
  this->start();
  ASSERT_TRUE(this->write(1).is_ok());
  ASSERT_TRUE(this->tier_->reset().is_ok());
  ++this->weights;
  EXPECT_FALSE(this->has(1));
  ASSERT_TRUE(this->write(1).is_ok());
  EXPECT_TRUE(this->read(1).is_ok());
  this->restart();
  EXPECT_FALSE(this->has(1)) << "written after the reset";
  this->expect_usable();
}

TYPED_TEST(SharedStores, a_reset_leaves_the_hosts_in_one_epoch_that_later_engines_use_as_it_is) {
  for (const bool is_common : {true, false}) {
    this->has_common_store_ = is_common;
    this->start();
    ASSERT_TRUE(this->write(1).is_ok());
    ASSERT_TRUE(this->tier_->reset().is_ok());
    const std::string left[] = {this->epoch(0), this->epoch(1)};
    EXPECT_EQ(EpochRegistry::id_of(left[0]), EpochRegistry::id_of(left[1]));
    EXPECT_NE(left[0], left[1]);
    ASSERT_TRUE(this->write(2).is_ok());
    this->stop();
    ++this->weights;
    this->is_read_only_ = true;
    this->start();
    EXPECT_FALSE(this->has(1)) << "written before the reset";
    EXPECT_FALSE(this->has(2)) << "written by the engine that was reset";
    this->stop();
    this->is_read_only_ = false;
    this->start();
    EXPECT_FALSE(this->has(1));
    EXPECT_FALSE(this->has(2));
    ASSERT_TRUE(this->write(3).is_ok());
    EXPECT_EQ(this->epoch(0), left[0]);
    EXPECT_EQ(this->epoch(1), left[1]);
    this->stop();
    this->is_read_only_ = true;
    this->start();
    EXPECT_TRUE(this->has(3));
    EXPECT_TRUE(this->read(3).is_ok());
    this->stop();
    this->is_read_only_ = false;
    this->store(1).kill();
    this->store(1).start();
  }
}

TYPED_TEST(SharedStores, two_resets_leave_two_epochs) {
  this->start();
  ASSERT_TRUE(this->tier_->reset().is_ok());
  const std::string first = this->epoch(0);
  ASSERT_TRUE(this->tier_->reset().is_ok());
  EXPECT_NE(EpochRegistry::id_of(this->epoch(0)), EpochRegistry::id_of(first));
  EXPECT_EQ(EpochRegistry::id_of(this->epoch(0)), EpochRegistry::id_of(this->epoch(1)));
}

// Resets of two engines that overlap, so that their order differs from host to host.
TYPED_TEST(SharedStores, resets_of_two_engines_in_another_order_on_each_host_do_not_agree) {
  this->start();
  ASSERT_TRUE(this->write(1).is_ok());
  const auto reset = [&](std::uint32_t host, std::uint64_t id) {
    const auto tier = this->open_alone(host);
    EXPECT_TRUE(tier->reset(id).is_ok());
    tier->close();
  };
  reset(0, 70);
  reset(1, 80);
  reset(1, 70);
  reset(0, 80);
  EXPECT_NE(EpochRegistry::id_of(this->epoch(0)), EpochRegistry::id_of(this->epoch(1)));
  this->stop();
  ++this->weights;
  this->start();
  EXPECT_FALSE(this->has(1));
  this->expect_usable();
}

TYPED_TEST(SharedStores, a_store_that_does_not_respond_during_a_reset_gets_another_epoch_than_the_others) {
  this->has_common_store_ = false;
  this->start();
  ASSERT_TRUE(this->write(1).is_ok());
  const std::string before = this->epoch(1);
  this->store(1).fail_resets(true);
  EXPECT_FALSE(this->tier_->reset().is_ok());
  EXPECT_EQ(this->epoch(1), before);
  this->store(1).fail_resets(false);
  EXPECT_TRUE(this->eventually([&] { return this->tier_->stats().writable; }));
  EXPECT_NE(this->epoch(1), before);
  EXPECT_NE(EpochRegistry::id_of(this->epoch(0)), EpochRegistry::id_of(this->epoch(1)));
  this->stop();
  ++this->weights;
  this->is_read_only_ = true;
  this->start();
  EXPECT_FALSE(this->has(1));
  EXPECT_EQ(this->read(1).kind(), StatusKind::kUnavailable);
  this->stop();
  this->is_read_only_ = false;
  this->start();
  EXPECT_FALSE(this->has(1));
  this->expect_usable();
}

// The reset reached one host. Later an engine that writes replaces the epochs, in one store after the other.
TYPED_TEST(SharedStores, a_read_only_engine_that_starts_after_a_missed_reset_waits_for_the_next_epoch) {
  this->has_common_store_ = false;
  this->start();
  ASSERT_TRUE(this->write(1).is_ok());
  this->stop();
  {
    const auto reset = this->open_alone(0);
    EXPECT_TRUE(reset->reset().is_ok());
    reset->close();
  }
  const std::string left[] = {this->epoch(0), this->epoch(1)};
  ++this->weights;
  this->is_read_only_ = true;
  this->start();
  EXPECT_THAT(this->links_->take_events(),
              ElementsAre(AllOf(HasSubstr("have different epochs"), HasSubstr("write_policy is read_only"))));
  EXPECT_FALSE(this->has(1));
  EXPECT_EQ(this->read(1).kind(), StatusKind::kUnavailable);
  EXPECT_EQ(this->epoch(0), left[0]);
  EXPECT_EQ(this->epoch(1), left[1]);
  const std::uint64_t id = 77;
  const auto reads_again = [&](std::uint32_t host) {  // the store of this host, twice
    const std::size_t before = this->epochs_read(host);
    EXPECT_TRUE(this->eventually([&] { return this->epochs_read(host) >= before + 2; }));
  };
  for (const std::uint32_t host : {1u, 0u}) {
    reads_again(0);
    reads_again(1);
    EXPECT_FALSE(this->tier_->stats().readable) << "host " << host;
    EXPECT_EQ(this->read(1).kind(), StatusKind::kUnavailable);
    this->set_epoch(host, EpochRegistry::name_of_id(id));
  }
  EXPECT_TRUE(this->eventually([&] { return this->tier_->stats().readable; }));
  EXPECT_THAT(this->links_->take_events(), ElementsAre(HasSubstr("is in service: all hosts have the same")));
  EXPECT_FALSE(this->has(1)) << "from before the reset";
  for (const TierPart& part : this->tier_->parts()) {
    EXPECT_EQ(part.stats.epoch_id, id);
    EXPECT_FALSE(part.epoch_differs);
  }
  this->stop();
  this->is_read_only_ = false;
  this->start();
  ASSERT_TRUE(this->write(2).is_ok());
  this->stop();
  this->is_read_only_ = true;
  this->start();
  EXPECT_TRUE(this->has(2));
  EXPECT_TRUE(this->read(2).is_ok());
}

TYPED_TEST(SharedStores, an_engine_keeps_its_epoch_when_another_one_is_reset) {
  this->start();
  ASSERT_TRUE(this->write(1).is_ok());
  EXPECT_FALSE(this->tier_->stats().diverged);
  this->reset_elsewhere();
  EXPECT_TRUE(this->eventually([&] { return this->tier_->stats().diverged; }));
  EXPECT_TRUE(this->read(1).is_ok());
  EXPECT_TRUE(this->write(2).is_ok());
  EXPECT_TRUE(this->read(2).is_ok());
  ++this->weights;
  this->restart();
  EXPECT_FALSE(this->has(1));
  EXPECT_FALSE(this->has(2));
  this->expect_usable();
}

// ---- starts at once, and stores that lose data

TYPED_TEST(ReplacingStores, engines_that_find_the_same_epochs_choose_the_same_id) {
  std::uint64_t ids[2] = {};
  for (std::uint64_t& id : ids) {
    this->set_epoch(0, kFirst);
    this->set_epoch(1, kSecond);
    this->start();
    EXPECT_TRUE(this->hosts_agree());
    id = this->opened_[0];
    this->stop();
  }
  EXPECT_EQ(ids[0], ids[1]);
}

TYPED_TEST(ReplacingStores, an_epoch_with_an_id_that_was_in_use_has_no_earlier_records) {
  for (int engine = 0; engine < 2; ++engine) {
    // The second time, the stores have lost their newest changes, and return to the replaced names.
    this->set_epoch(0, kFirst);
    this->set_epoch(1, kSecond);
    this->weights = static_cast<std::uint32_t>(engine);
    this->start();
    EXPECT_FALSE(this->has(1));
    ASSERT_TRUE(this->write(1).is_ok());
    EXPECT_TRUE(this->read(1).is_ok());
    this->stop();
  }
}

TYPED_TEST(SharedStores, an_epoch_that_another_engine_replaces_between_two_hosts_is_noticed) {
  this->before_open_ = [&](std::uint32_t host, const EpochChoice&) {
    if (host == 0) return;
    this->before_open_ = nullptr;
    this->set_epoch(1, kSecond);
  };
  this->start();
  this->expect_usable();
}

TYPED_TEST(SharedStores, a_store_that_restarts_empty_gets_the_epoch_of_the_running_engine) {
  for (const bool is_common : {true, false}) {
    this->has_common_store_ = is_common;
    this->start();
    ASSERT_TRUE(this->write(1).is_ok());
    const std::string used[] = {this->epoch(0), this->epoch(1)};
    this->store(1).kill();
    EXPECT_FALSE(this->read(1).is_ok());
    this->store(1).start();
    EXPECT_TRUE(this->eventually([&] { return this->epoch(0) == used[0] && this->epoch(1) == used[1]; }));
    EXPECT_TRUE(this->eventually([&] { return this->write(2).is_ok() && this->read(2).is_ok(); }));
    this->restart();
    EXPECT_FALSE(this->has(1));
    EXPECT_TRUE(this->has(2));
    EXPECT_TRUE(this->read(2).is_ok());
    this->stop();
    this->store(0).kill();
    this->store(0).start();
  }
}

TYPED_TEST(SharedStores, a_store_that_lost_everything_makes_all_chunks_misses) {
  this->has_common_store_ = false;
  for (const std::uint32_t lost : {0u, 1u}) {
    this->start();
    ASSERT_TRUE(this->write(1).is_ok());
    this->stop();
    this->store(lost).kill();
    this->store(lost).start();
    this->start();
    EXPECT_FALSE(this->has(1)) << "host " << lost;
    this->expect_usable();
    this->stop();
  }
}

// A store may evict the epoch while no engine reads it, and keep the records.
TYPED_TEST(SharedStores, an_evicted_epoch_ends_the_use_of_its_records) {
  const std::vector<std::vector<std::uint32_t>> cases = {{0}, {1}, {0, 1}};
  for (const std::vector<std::uint32_t>& evicted : cases) {
    this->start();
    ASSERT_TRUE(this->write(1).is_ok());
    this->stop();
    for (const std::uint32_t host : evicted) this->remove_epoch(host);
    ++this->weights;
    this->start();
    EXPECT_GT(this->records_on(0), 0u);
    EXPECT_GT(this->records_on(1), 0u);
    EXPECT_FALSE(this->has(1)) << evicted.size() << " of host " << evicted[0];
    this->expect_usable();
    this->stop();
  }
}

// The reset reached host 0 only, and its store has evicted the epoch of the reset.
TYPED_TEST(SharedStores, an_evicted_epoch_of_a_reset_never_agrees_with_an_epoch_from_before_it) {
  this->start();
  ASSERT_TRUE(this->write(1).is_ok());
  this->stop();
  {
    const auto reset = this->open_alone(0);
    EXPECT_TRUE(reset->reset().is_ok());
    reset->close();
  }
  this->remove_epoch(0);
  ++this->weights;
  this->start();
  EXPECT_FALSE(this->has(1));
  this->expect_usable();
}

TYPED_TEST(ReplacingStores, an_epoch_that_changes_during_its_replacement_stays) {
  this->set_epoch(0, kFirst);
  this->store(0).block_replacement();
  std::unique_ptr<Tier> tier;
  std::thread opener([&] { tier = this->open_alone(0, {8, true, EpochRegistry::id_of(kFirst)}); });
  this->store(0).wait_for_blocked(1);
  this->set_epoch(0, kSecond);
  this->store(0).release();
  opener.join();
  ASSERT_NE(tier, nullptr);
  EXPECT_EQ(tier->stats().epoch_id, EpochRegistry::id_of(kSecond));
  EXPECT_EQ(this->epoch(0), kSecond);
}

// ---- starts that fail

TYPED_TEST(SharedStores, a_store_that_does_not_respond_at_start_is_used_when_it_does) {
  for (const std::uint32_t down : {1u, 0u}) {
    this->has_common_store_ = down == 0;
    this->store(down).kill();
    this->start();
    const std::string reason = TypeParam::kPlace;
    std::vector<std::string> events = this->links_->take_events();
    ASSERT_EQ(events.size(), 1u);
    EXPECT_THAT(events[0],
                AllOf(HasSubstr("is out of service: the store does not respond on the host of rank "),
                      HasSubstr("rank 1" + reason), HasSubstr(TypeParam::kNoConnection)));
    EXPECT_EQ(events[0].find("rank 0" + reason) != std::string::npos, down == 0);
    this->poll();
    EXPECT_FALSE(this->tier_->stats().readable || this->tier_->stats().writable);
    EXPECT_EQ(this->tier_->contains(key_of(1)), Presence::kLookupFailed);
    EXPECT_EQ(this->write(1).kind(), StatusKind::kUnavailable);
    this->store(down).start();
    EXPECT_TRUE(
        this->eventually([&] { return this->tier_->stats().readable && this->tier_->stats().writable; }));
    EXPECT_THAT(this->links_->take_events(), Contains(HasSubstr("is in service")));
    EXPECT_TRUE(this->write(1).is_ok());
    EXPECT_TRUE(this->read(1).is_ok());
    this->restart();
    EXPECT_TRUE(this->has(1));
    EXPECT_TRUE(this->read(1).is_ok());
    this->stop();
  }
}

TYPED_TEST(SharedStores, a_store_of_the_scheduler_that_does_not_respond_is_no_different_epoch) {
  this->has_common_store_ = false;
  this->store(0).kill();
  this->start();
  EXPECT_THAT(this->links_->take_events(),
              ElementsAre(AllOf(HasSubstr("the store does not respond on the host of rank 0 ("),
                                Not(HasSubstr("host of rank 1")))));
  EXPECT_TRUE(this->eventually([&] { return this->tier_->parts()[1].stats.epoch_id != 0; }));
  this->poll();
  EXPECT_THAT(this->links_->take_events(), IsEmpty());
  EXPECT_FALSE(this->tier_->parts()[0].stats.writable);
  EXPECT_TRUE(this->tier_->parts()[1].stats.writable) << "only the first host's store is down";
  this->store(0).start();
  EXPECT_TRUE(this->eventually([&] { return this->tier_->stats().writable; }));
  EXPECT_THAT(this->links_->take_events(), ElementsAre(HasSubstr("is in service: all hosts have")));
  EXPECT_TRUE(this->write(1).is_ok());
}

TYPED_TEST(SharedStores, a_reset_while_a_store_does_not_respond_is_reported_when_the_tier_is_used) {
  this->has_common_store_ = false;
  this->start();
  ASSERT_TRUE(this->write(1).is_ok());
  this->stop();
  this->store(1).kill();
  this->start();
  (void)this->links_->take_events();
  (void)this->tier_->reset();
  this->poll();
  EXPECT_THAT(this->links_->take_events(), IsEmpty());
  this->store(1).start();
  EXPECT_TRUE(this->eventually([&] { return this->tier_->stats().writable; }));
  this->poll();
  EXPECT_THAT(this->links_->take_events(), ElementsAre(HasSubstr("is in service after a reset")));
  EXPECT_FALSE(this->has(1));
  EXPECT_TRUE(this->write(1).is_ok());
}

using RedisSharedStores = SharedStores<RedisStoreAccess>;
TEST_F(RedisSharedStores, a_store_that_refuses_to_store_an_epoch_fails_the_start_with_the_reason) {
  has_common_store_ = false;
  store(1).server.call({"ACL", "SETUSER", "default", "-set"});
  const auto message = [&] { return message_of<ResourceError>([&] { start(); }); };
  const auto names_host = StartsWith("the tiers of the host of rank 1 at 127.0.0.1 cannot be used: ");
  EXPECT_THAT(message(), AllOf(names_host, HasSubstr("the user lacks a permission")));
  stop();
  store(1).server.call({"ACL", "SETUSER", "default", "+set"});
  store(1).server.call({"CONFIG", "SET", "maxmemory-policy", "noeviction"});
  store(1).server.call({"CONFIG", "SET", "maxmemory", "1"});
  EXPECT_THAT(message(), AllOf(names_host, HasSubstr("the server is full (maxmemory)")));
}

TYPED_TEST(SharedStores, hosts_replace_their_epochs_if_a_store_returns_with_another_one) {
  this->has_common_store_ = false;
  this->set_epoch(0, kFirst);
  this->store(1).kill();
  this->start();
  (void)this->links_->take_events();
  this->store(1).start();
  this->set_epoch(1, kSecond);  // a reset that did not reach the other host
  std::vector<std::string> events;
  EXPECT_TRUE(this->eventually([&] {
    for (std::string& event : this->links_->take_events()) events.push_back(std::move(event));
    return events.size() == 3;
  }));
  EXPECT_THAT(events,
              ElementsAre(HasSubstr("stays out of service"), HasSubstr("replace their different epochs"),
                          HasSubstr("is in service after a reset")));
  for (const TierPart& part : this->tier_->parts()) {
    EXPECT_TRUE(part.stats.readable && part.stats.writable);
    EXPECT_FALSE(part.epoch_differs);
  }
  EXPECT_EQ(EpochRegistry::id_of(this->epoch(0)), EpochRegistry::id_of(this->epoch(1)));
  EXPECT_TRUE(this->write(1).is_ok());
  EXPECT_TRUE(this->read(1).is_ok());
  this->restart();
  EXPECT_FALSE(this->has(1)) << "written after a reset";
  this->expect_usable();
}

TYPED_TEST(SharedStores, a_read_only_tier_whose_store_returns_with_another_epoch_waits_for_a_common_one) {
  this->has_common_store_ = false;
  this->is_read_only_ = true;
  this->set_epoch(0, kFirst);
  this->store(1).kill();
  this->start();
  (void)this->links_->take_events();
  this->store(1).start();
  this->set_epoch(1, kSecond);  // a reset that did not reach the other host
  std::vector<std::string> events;
  EXPECT_TRUE(this->eventually([&] {
    for (std::string& event : this->links_->take_events()) events.push_back(std::move(event));
    return !events.empty();
  }));
  EXPECT_THAT(events, ElementsAre(HasSubstr("stays out of service")));
  for (const TierPart& part : this->tier_->parts()) {
    EXPECT_FALSE(part.stats.readable || part.stats.writable) << "the tier uses none of them";
    EXPECT_TRUE(part.epoch_differs);
  }
  const auto has_epoch_of_others = [&](const char* host) {
    Metrics metrics;
    TierFigures().publish("far", this->tier_->parts(), metrics);
    return metrics.value("kv_offload_host_tier_usable", {host, "far", "epoch"}) == 1;
  };
  EXPECT_FALSE(has_epoch_of_others("0") || has_epoch_of_others("1"));
  EXPECT_FALSE(this->tier_->stats().readable || this->tier_->stats().writable);
  EXPECT_EQ(this->write(1).kind(), StatusKind::kUnavailable);
  this->poll();
  EXPECT_THAT(this->links_->take_events(), IsEmpty()) << "it may not write";
  this->set_epoch(0, kSecond);
  EXPECT_TRUE(this->eventually([&] { return this->tier_->stats().readable; }));
  for (const TierPart& part : this->tier_->parts()) EXPECT_FALSE(part.epoch_differs);
}

TYPED_TEST(ReplacingStores, a_store_that_does_not_respond_when_an_epoch_is_replaced_fails_the_start) {
  this->has_common_store_ = false;
  this->set_epoch(0, kFirst);
  this->set_epoch(1, kSecond);
  this->before_open_ = [&](std::uint32_t host, const EpochChoice& choice) {
    if (host == 1 && choice.is_new) this->store(1).kill();
  };
  EXPECT_THAT(message_of<ResourceError>([&] { this->start(); }),
              AllOf(StartsWith("the tiers of the host of rank 1 at 127.0.0.1 cannot be used: "),
                    HasSubstr(fmt::format("{} tier ", TypeParam::kType)),
                    HasSubstr("must write a new one to each store")));
}

TYPED_TEST(ReplacingStores, a_store_that_cannot_replace_an_epoch_safely_is_refused) {
  this->set_epoch(0, kFirst);
  this->set_epoch(1, kSecond);
  this->store(0).refuse_replacements();
  EXPECT_THAT(message_of<ResourceError>([&] { this->start(); }),
              EndsWith(std::string_view(TypeParam::kType) == "redis"
                           ? "its user needs the commands WATCH, MULTI, EXEC and SET"
                           : "safely: give all hosts a new prefix"));
  EXPECT_EQ(this->epoch(0), kFirst);
}

using S3SharedStores = SharedStores<S3StoreAccess>;
TEST_F(S3SharedStores, an_epoch_without_an_etag_is_not_replaced) {
  set_epoch(0, kFirst);
  store(0).server.answer(S3Server::Verb::kEpoch, "HTTP/1.1 200 OK\r\nContent-Length: 32\r\n\r\n" + kFirst, 2);
  EXPECT_THAT(message_of<ResourceError>([&] {
                (void)open_alone(0, {8, true, EpochRegistry::id_of(kFirst)});
              }),
              EndsWith("safely: give all hosts a new prefix"));
  EXPECT_EQ(epoch(0), kFirst);
}

// ---- a store without conditional writes: hosts with different epochs are reset

using MooncakeSharedStores = SharedStores<MooncakeStoreAccess>;
TEST_F(MooncakeSharedStores, a_start_replaces_no_epoch) {
  set_epoch(0, kFirst);
  const auto tier = open_alone(0, {8, true, EpochRegistry::id_of(kFirst)});
  EXPECT_EQ(tier->stats().epoch_id, EpochRegistry::id_of(kFirst));
  EXPECT_EQ(epoch(0), kFirst);
  EXPECT_EQ(store(0).store.puts(store(0).epoch_name()), 0u);
}

TEST_F(MooncakeSharedStores, hosts_with_different_epochs_begin_an_epoch_of_their_own) {
  has_common_store_ = false;
  set_epoch(0, kFirst);
  set_epoch(1, kSecond);
  start();
  EXPECT_THAT(links_->take_events(),
              ElementsAre(HasSubstr("stays out of service: the stores of hosts 0 (rank 0), "
                                    "1 (rank 1) respond, but have different epochs")));
  EXPECT_EQ(epoch(0), kFirst);
  EXPECT_EQ(epoch(1), kSecond);
  EXPECT_TRUE(eventually([&] { return tier_->stats().readable && tier_->stats().writable; }));
  EXPECT_THAT(links_->take_events(), ElementsAre(HasSubstr("replace their different epochs"),
                                                 HasSubstr("is in service after a reset")));
  ASSERT_TRUE(write(1).is_ok());
  const std::uint64_t common = EpochRegistry::id_of(epoch(0));
  for (const std::string& name : {record_on(0), record_on(1)}) {
    EXPECT_EQ(name.find(kFirst), name.npos) << "from before the reset";
    EXPECT_EQ(name.find(kSecond), name.npos);
    EXPECT_EQ(name.find(epoch(0)), name.npos) << "later engines would find it";
    EXPECT_EQ(name.find(epoch(1)), name.npos);
  }
  restart();
  EXPECT_TRUE(hosts_agree());
  EXPECT_EQ(opened_[0], common);
  EXPECT_THAT(links_->take_events(), IsEmpty());
  EXPECT_FALSE(has(1));
  expect_usable();
}

// Another engine is reset after both hosts have read their epochs, and the reset misses host 1.
TEST_F(MooncakeSharedStores, a_reset_during_the_start_is_not_undone) {
  has_common_store_ = false;
  set_epoch(0, kFirst);
  set_epoch(1, kSecond);
  before_open_ = [&](std::uint32_t host, const EpochChoice& choice) {
    if (host == 0 || !choice.is_new) return;
    before_open_ = nullptr;
    const auto other = open_alone(0);
    EXPECT_TRUE(other->reset().is_ok());
    other->close();
  };
  start();
  EXPECT_NE(epoch(0), kFirst);
  EXPECT_FALSE(hosts_agree());
  expect_usable();
}

TEST_F(MooncakeSharedStores, a_store_that_stops_responding_during_the_start_is_used_when_it_does) {
  has_common_store_ = false;
  set_epoch(0, kFirst);
  set_epoch(1, kSecond);
  before_open_ = [&](std::uint32_t host, const EpochChoice& choice) {
    if (host == 1 && choice.is_new) store(1).kill();
  };
  start();
  before_open_ = nullptr;
  EXPECT_THAT(links_->take_events(),
              ElementsAre(HasSubstr("the store does not respond on the host of rank 1")));
  EXPECT_EQ(write(1).kind(), StatusKind::kUnavailable);
  store(1).start();
  expect_usable();
}

// Two engines store a chunk at once. Each finds a part that the other one is still writing, so the chunk will
// be whole, although both writes fail.
TEST_F(MooncakeSharedStores, a_part_that_another_engine_is_writing_keeps_the_other_part) {
  has_common_store_ = false;
  start();
  ASSERT_TRUE(write(1).is_ok());
  std::string writing = record_on(1);
  writing.replace(writing.rfind(':') + 1, std::string::npos, key_of(2).hex());
  store(1).store.begin_and_leave(writing);
  EXPECT_EQ(write(2).kind(), StatusKind::kUnavailable);
  EXPECT_NE(tier_->contains(key_of(2)), Presence::kAbsent) << "a part is being removed";
  EXPECT_EQ(records_on(0), 2u);
}

// After our own reset, another engine has put an epoch back that the reset had ended, and was itself reset.
TEST_F(MooncakeSharedStores, the_epoch_of_a_reset_is_not_published_again) {
  start();
  const std::string before = epoch(0);
  ASSERT_TRUE(tier_->reset().is_ok());
  const std::string of_reset = epoch(0);
  set_epoch(0, before);
  EXPECT_TRUE(eventually([&] { return epoch(0) != before; }));
  EXPECT_NE(EpochRegistry::id_of(epoch(0)), EpochRegistry::id_of(of_reset));
  EXPECT_EQ(epoch(1).substr(0, 16), of_reset.substr(0, 16));
  ++weights;
  restart();
  EXPECT_FALSE(hosts_agree());
  expect_usable();
}

TYPED_TEST(SharedStores, a_read_only_tier_needs_an_epoch_that_all_hosts_have) {
  this->is_read_only_ = true;
  this->start();
  EXPECT_THAT(this->links_->take_events(),
              ElementsAre(HasSubstr("no epoch in the store of the host of rank 0, the host of rank 1, and")));
  EXPECT_EQ(this->epoch(0), "");
  this->set_epoch(0, kFirst);
  this->set_epoch(1, kFirst);
  EXPECT_TRUE(this->eventually([&] { return this->tier_->stats().readable; }));
  this->stop();
  this->remove_epoch(0);
  this->remove_epoch(1);
  this->is_read_only_ = false;
  this->start();
  ASSERT_TRUE(this->write(1).is_ok());
  this->stop();
  this->is_read_only_ = true;
  this->start();
  EXPECT_TRUE(this->has(1));
  EXPECT_TRUE(this->read(1).is_ok());
  this->stop();
  const std::string written = this->epoch(0);
  this->set_epoch(1, kSecond);
  this->start();
  EXPECT_FALSE(this->has(1));
  EXPECT_EQ(this->read(1).kind(), StatusKind::kUnavailable);
  EXPECT_EQ(this->epoch(0), written);
  EXPECT_EQ(this->epoch(1), kSecond);
}

}  // namespace
}  // namespace kv_offload
