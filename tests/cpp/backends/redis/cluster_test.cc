// SPDX-License-Identifier: Apache-2.0
// A real cluster: placement of records, a slot that moves, a node that dies and is replaced.
#include "backends/redis/cluster.h"

#include <gtest/gtest.h>

#include <array>
#include <chrono>
#include <map>
#include <set>
#include <string>

#include "backends/redis/cluster_servers.h"
#include "backends/redis/probe.h"
#include "backends/redis/records.h"
#include "backends/redis/tier.h"
#include "tier/tier_driver.h"

namespace kv_offload {
namespace {

using namespace testing;
using std::chrono::seconds;
using Servers = RedisClusterServers;

// One cluster for all tests. Each test finds it complete, except after the last test, which kills a node.
class RedisClusterTest : public ::testing::Test {
 protected:
  static void SetUpTestSuite() { servers_ = std::make_unique<Servers>(); }
  static void TearDownTestSuite() { servers_.reset(); }

  void SetUp() override {
    ASSERT_TRUE(servers_->is_ready());
    namespace_id_.fill(++namespaces_);
  }

  RedisTierOptions options(std::size_t seed = 0) const {
    RedisTierOptions options;
    options.name = "redis";
    options.server = servers_->address(seed);
    options.namespace_id = namespace_id_;
    options.clock = &clock_;
    options.op_timeout = seconds(60);
    return options;
  }
  std::string prefix() const { return "kv_offload:" + hex_of(namespace_id_) + ":"; }
  // Returns the epoch that new processes use.
  std::string epoch() const {
    for (std::size_t i = 0; i < Servers::kMasters; ++i) {
      const redis::Reply reply = servers_->node(i).call({"GET", prefix() + "epoch"});
      if (reply.kind == redis::Reply::Kind::kString) return reply.text;
    }
    ADD_FAILURE() << "no node has the epoch";
    return {};
  }
  std::string name_of(std::uint32_t number) const { return prefix() + epoch() + ":" + key_of(number).hex(); }
  // Returns the first number, starting at `from`, whose record belongs to this master.
  std::uint32_t number_on(std::size_t master, std::uint32_t from = 1) const {
    const std::string start = prefix() + epoch() + ":";
    for (std::uint32_t number = from;; ++number) {
      const std::uint32_t slot = redis::slot_of(start + key_of(number).hex());
      if (slot >= Servers::kFirst[master] && slot < Servers::kFirst[master + 1]) return number;
    }
  }
  template <typename Condition>
  bool eventually(TierDriver& user, Condition condition) {
    return user.until([&] {
      clock_.advance(seconds(1));
      user.poll();
      return condition();
    });
  }

  void move_a_slot(bool may_evict);

  static std::unique_ptr<Servers> servers_;
  static std::uint8_t namespaces_;
  FakeClock clock_;
  NamespaceId namespace_id_{};
};
std::unique_ptr<Servers> RedisClusterTest::servers_;
std::uint8_t RedisClusterTest::namespaces_ = 0;

TEST_F(RedisClusterTest, records_are_spread_over_all_nodes_and_found_from_any_node) {
  TierDriver user(make_redis_tier(options(0)));
  std::set<std::size_t> holders;
  for (std::uint32_t number = 1; number <= 40; ++number) {
    ASSERT_TRUE(user.write(number, {5000, 0, 4096}));
    holders.insert(servers_->holder_of(name_of(number)));
  }
  EXPECT_EQ(holders, (std::set<std::size_t>{0, 1, 2}));
  TierDriver later(make_redis_tier(options(Servers::kReplica)));
  std::vector<ChunkKey> keys;
  for (std::uint32_t number = 1; number <= 41; ++number) keys.push_back(key_of(number));
  later.tier().prefetch_presence(keys, KeyOrder::kPrefix);
  for (std::uint32_t number = 1; number <= 40; ++number) {
    EXPECT_TRUE(later.has(number)) << number;
    EXPECT_TRUE(later.read(number, {5000, 0, 4096})) << number;
  }
  EXPECT_FALSE(later.has(41));
  EXPECT_EQ(later.read(41).kind(), StatusKind::kNotFound);
}

TEST_F(RedisClusterTest, one_reset_covers_all_nodes) {
  TierDriver user(make_redis_tier(options()));
  for (std::uint32_t number = 1; number <= 12; ++number) ASSERT_TRUE(user.write(number));
  ASSERT_TRUE(user.tier().reset());
  for (std::uint32_t number = 1; number <= 12; ++number) EXPECT_FALSE(user.has(number));
  user.weights = 1;
  for (std::uint32_t number = 1; number <= 12; ++number) ASSERT_TRUE(user.write(number));
  for (std::uint32_t number = 1; number <= 12; ++number) EXPECT_TRUE(user.read(number));
  TierDriver later(make_redis_tier(options(2)));
  for (std::uint32_t number = 1; number <= 12; ++number) EXPECT_FALSE(later.has(number));
}

TEST_F(RedisClusterTest, damage_is_removed_on_the_node_that_stores_it) {
  TierDriver user(make_redis_tier(options()));
  for (std::size_t master = 0; master < Servers::kMasters; ++master) {
    const std::uint32_t number = number_on(master);
    ASSERT_TRUE(user.write(number));
    const std::string name = name_of(number);
    ASSERT_EQ(servers_->holder_of(name), master);
    servers_->node(master).call({"SETRANGE", name, "5000", "x"});
    EXPECT_EQ(user.read(number).kind(), StatusKind::kCorrupt);
    EXPECT_EQ(servers_->holder_of(name), Servers::kNodes);
    ASSERT_TRUE(user.write(number));
    EXPECT_TRUE(user.read(number));
  }
}

TEST_F(RedisClusterTest, the_memory_of_all_masters_is_summed_and_each_is_named) {
  TierDriver user(make_redis_tier(options()));
  EXPECT_TRUE(eventually(user, [&] { return user.tier().stats().capacity_bytes == 3 * (64ull << 20); }));
  EXPECT_GT(user.tier().stats().bytes, 3u << 20) << "an empty server uses more than 1 MiB";
  const redis::Probe found =
      redis::probe({servers_->address(Servers::kReplica)}, "kv_offload", 1 << 20, 6, seconds(60));
  EXPECT_TRUE(found.cluster);
  ASSERT_EQ(found.nodes.size(), 3u);
  for (std::size_t i = 0; i < 3; ++i) {
    EXPECT_EQ(found.nodes[i].address, redis::address_of(servers_->address(i)));
    EXPECT_EQ(found.nodes[i].eviction_policy, "allkeys-lru");
    EXPECT_EQ(found.nodes[i].max_bytes, 64u << 20);
  }
  EXPECT_EQ(found.write_refused, "");
  EXPECT_GT(found.read_bytes_per_second, 0);
  EXPECT_GT(found.bytes_per_record, 1u << 20);
  EXPECT_LT(found.bytes_per_record, 2u << 20);
  // A user without that permission is served anyway, and leaves no keys; all keys are on one node.
  for (std::size_t i = 0; i < Servers::kMasters; ++i) {
    servers_->node(i).call({"ACL", "SETUSER", "plain", "on", ">x", "~*", "+@all", "-memory"});
  }
  redis::Server plain = servers_->address(0);
  plain.user = "plain";
  plain.password = "x";
  const redis::Probe without = redis::probe({plain}, "{tag}", 1 << 20, 6, seconds(60));
  EXPECT_EQ(without.bytes_per_record, 0u);
  EXPECT_GT(without.read_bytes_per_second, 0);
  for (std::size_t i = 0; i < Servers::kMasters; ++i) {
    for (const std::string& key : servers_->node(i).keys()) EXPECT_EQ(key.find("probe"), key.npos) << key;
  }
}

TEST_F(RedisClusterTest, the_commands_see_the_records_of_all_nodes) {
  TierDriver user(make_redis_tier(options()));
  std::array<std::string, Servers::kMasters> names;
  for (std::size_t master = 0; master < Servers::kMasters; ++master) {
    const std::uint32_t number = number_on(master);
    ASSERT_TRUE(user.write(number));
    names[master] = name_of(number);
  }
  // The replica has only a part of the keys, and names the masters.
  const auto records = open_redis_records(
      {.server = servers_->address(Servers::kReplica), .deadline = seconds(60), .page = 4});
  const auto listed = [&] {
    std::map<std::string, RemoteRecord> found;
    std::string next;
    int pages = 0;
    do {
      RemotePage page;
      EXPECT_TRUE(records->list(hex_of(namespace_id_), next, true, &page));
      for (const RemoteRecord& record : page.records) {
        if (record.is_record()) found.emplace(record.name, record);
      }
      next = page.next;
    } while (!next.empty() && ++pages < 1000);
    return found;
  };
  const auto found = listed();
  ASSERT_EQ(found.size(), names.size());
  for (const std::string& name : names) {
    EXPECT_GT(found.at(name).bytes, kRecordHeaderBytes);
    bool removed = false;
    EXPECT_TRUE(records->verify(found.at(name), true, &removed));
    EXPECT_FALSE(removed);
  }
  servers_->node(1).call({"SETRANGE", names[1], "5000", "x"});
  bool removed = false;
  EXPECT_EQ(records->verify(found.at(names[1]), true, &removed).kind(), StatusKind::kCorrupt);
  EXPECT_TRUE(removed);
  EXPECT_EQ(servers_->holder_of(names[1]), Servers::kNodes);
  std::vector<RemoteRecord> all;
  for (const auto& [name, record] : found) all.push_back(record);
  RemoteRemoved gone;
  EXPECT_TRUE(records->remove(all, &gone));
  EXPECT_EQ(gone.records, 2u) << "one was removed before";
  EXPECT_TRUE(listed().empty());
  // A slot moves between two pages.
  const std::uint16_t slot = redis::slot_of(names[0]);
  servers_->begin_move(slot, 0, 1);
  servers_->end_move(slot, 0, 1);
  RemotePage last;
  std::string next;
  Status status;
  do {
    status = records->list(hex_of(namespace_id_), next, false, &last);
    next = last.next;
  } while (status && !next.empty());
  EXPECT_NE(status.message().find("moved to other nodes"), std::string::npos) << status.to_string();
  servers_->begin_move(slot, 1, 0);
  servers_->end_move(slot, 1, 0);
  RemotePage page;
  for (const char* strange : {"3@", "x", "1", "@", "-1@0"})
    EXPECT_THROW((void)records->list("", strange, false, &page), InvalidArgument) << strange;
}

TEST_F(RedisClusterTest, a_copy_reads_the_records_and_the_epoch_of_all_nodes) {
  TierDriver user(make_redis_tier(options()));
  const auto records =
      open_redis_records({.server = servers_->address(Servers::kReplica), .deadline = seconds(60)});
  records->use_record_sizes();
  std::string name;
  ASSERT_TRUE(records->read_startup_epoch(hex_of(namespace_id_), &name));
  EXPECT_EQ(name, epoch());
  std::size_t masters = 0;
  for (std::size_t master = 0; master < Servers::kMasters; ++master)
    ASSERT_TRUE(user.write(number_on(master)));
  std::string next;
  do {
    RemotePage page;
    ASSERT_TRUE(records->list(hex_of(namespace_id_), next, true, &page));
    for (const RemoteRecord& record : page.records) {
      if (!record.is_record()) continue;
      EXPECT_EQ(record.bytes, kRecordHeaderBytes + 8192);
      WholeRecord copy;
      EXPECT_TRUE(records->read(record, &copy));
      EXPECT_EQ(copy.bytes().size(), record.bytes);
      ++masters;
    }
    next = page.next;
  } while (!next.empty());
  EXPECT_EQ(masters, Servers::kMasters);
}

// A slot of the first master moves to the second while it is in use.
void RedisClusterTest::move_a_slot(bool may_evict) {
  RedisTierOptions chosen = options();
  chosen.may_evict = may_evict;
  TierDriver user(make_redis_tier(chosen));
  const std::uint32_t staying = number_on(0);
  ASSERT_TRUE(user.write(staying));
  // Uses a slot without any record, including those of other tests: a slot with other records could not be
  // moved.
  std::uint32_t coming = number_on(0, staying + 1);
  const auto slot_of_it = [&] { return redis::slot_of(name_of(coming)); };
  const auto keys_there = [&] {
    return servers_->node(0).call({"CLUSTER", "COUNTKEYSINSLOT", std::to_string(slot_of_it())}).integer;
  };
  while (keys_there() > 0) coming = number_on(0, coming + 1);
  const std::uint16_t slot = slot_of_it();
  servers_->begin_move(slot, 0, 1);
  EXPECT_EQ(user.read(coming).kind(), StatusKind::kNotFound) << "neither node has it";
  ASSERT_TRUE(user.write(coming));
  EXPECT_EQ(servers_->holder_of(name_of(coming)), 1u) << "ASK: on the node that imports the slot";
  EXPECT_TRUE(user.read(coming));
  EXPECT_TRUE(TierDriver(make_redis_tier(options())).has(coming));
  servers_->end_move(slot, 0, 1);
  EXPECT_TRUE(user.read(coming)) << "MOVED";
  EXPECT_TRUE(user.read(staying));
  EXPECT_EQ(user.tier().stats().breaker_trips, 0u);
}

TEST_F(RedisClusterTest, a_slot_that_moves_takes_its_records_along) { move_a_slot(true); }

// Each write first queries the memory of the node.
TEST_F(RedisClusterTest, a_slot_that_moves_takes_writes_that_must_not_evict) { move_a_slot(false); }

// Runs last, because it leaves a cluster of two masters and a former replica.
TEST_F(RedisClusterTest, z_keys_of_a_failed_node_are_missing_until_its_replica_takes_over) {
  constexpr std::size_t kDying = 2;
  RedisTierOptions chosen = options();
  TierDriver user(make_redis_tier(chosen));
  std::array<std::uint32_t, Servers::kMasters> numbers{};
  for (std::size_t master = 0; master < Servers::kMasters; ++master) {
    numbers[master] = number_on(master);
    ASSERT_TRUE(user.write(numbers[master]));
  }
  const std::string kept = name_of(numbers[kDying]);
  const std::uint32_t another = number_on(kDying, 1000);  // now, because the node may have the epoch
  const ChunkKey missing = key_of(number_on(0, 2000)), unknown = key_of(number_on(kDying, 2000));
  ASSERT_TRUE(holds_soon([&] {  // a replica answers for its own keys only
    const auto keys = servers_->node(Servers::kReplica).keys();
    return std::find(keys.begin(), keys.end(), kept) != keys.end();
  }));
  servers_->kill(kDying);
  EXPECT_EQ(user.read(numbers[kDying]).kind(), StatusKind::kIo);
  for (int i = 0; i < 30; ++i) {
    EXPECT_EQ(user.read(numbers[kDying]).kind(), StatusKind::kUnavailable);
    EXPECT_TRUE(user.read(numbers[0]));
  }
  EXPECT_TRUE(user.tier().stats().readable && user.tier().stats().writable);
  EXPECT_EQ(user.tier().stats().breaker_trips, 0u) << "one failed node of three must not switch the tier off";
  user.tier().prefetch_presence({missing, unknown}, KeyOrder::kNone);
  EXPECT_TRUE(user.until([&] {
    return user.tier().contains(missing) == Presence::kAbsent &&
           user.tier().contains(unknown) != Presence::kLookupPending;
  }));
  EXPECT_EQ(user.tier().contains(unknown), Presence::kLookupFailed) << "its node may have the record";
  try {
    (void)open_redis_records({.server = servers_->address(0), .deadline = seconds(60)});
    ADD_FAILURE() << "the keys of the node that is down would be left out";
  } catch (const ResourceError& error) {
    EXPECT_NE(std::string(error.what()).find(redis::address_of(servers_->address(kDying))), std::string::npos)
        << error.what();
  }
  const redis::Probe probed = redis::probe({servers_->address(0)}, "kv_offload", 1 << 20, 6, seconds(60));
  EXPECT_GT(probed.write_bytes_per_second, 0) << "of the nodes that answer";
  EXPECT_GT(probed.read_bytes_per_second, 0);
  servers_->promote_replica();
  EXPECT_TRUE(eventually(user, [&] { return user.read(numbers[kDying]).is_ok(); }));
  ASSERT_TRUE(user.write(another));
  for (const std::uint32_t number : numbers) EXPECT_TRUE(user.read(number));
  TierDriver later(make_redis_tier(options(Servers::kReplica)));
  EXPECT_TRUE(later.has(numbers[kDying]));
}

}  // namespace
}  // namespace kv_offload
