// SPDX-License-Identifier: Apache-2.0
// Records that the server, or another of its clients, removes are reported without a read.
#include <gtest/gtest.h>

#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "backends/redis/cluster_servers.h"
#include "backends/redis/medium.h"
#include "backends/redis/removal_notices.h"
#include "backends/redis/removal_watch.h"
#include "backends/redis/store.h"

namespace kv_offload {
namespace {

using namespace testing;
using redis::RemovalNotices;
using redis::RemovalWatch;

class RedisRemovals : public ::testing::Test {
 protected:
  RedisTierOptions options() {
    RedisTierOptions chosen;
    chosen.name = "redis";
    chosen.server = server_.address();
    chosen.namespace_id.fill(0x11);
    chosen.op_timeout = std::chrono::seconds(60);
    chosen.watch_removals = true;
    return chosen;
  }
  std::string name_of(std::uint32_t number) const {
    for (const std::string& name : server_.keys()) {
      if (name.ends_with(":" + key_of(number).hex())) return name;
    }
    return {};
  }
  // Writes a record as an I/O thread does.
  void write(redis::RedisStore& store, PresenceCache& known, std::uint32_t number) {
    store_record(store, number);
    known.written(key_of(number), known.epoch_number());
  }
  static void store_record(redis::RedisStore& store, std::uint32_t number) {
    Row row({8192});
    row.fill(number);
    TierOp op;
    op.kind = OpKind::kWrite;
    op.key = key_of(number);
    op.shards = row.shards();
    std::uint64_t moved = 0;
    ASSERT_TRUE(store.write(op, store.epoch(), &moved));
  }
  // Watches until so many removals were reported, in total.
  bool reports(redis::RedisStore& store, PresenceCache& known, std::size_t count) {
    return holds_soon([&] {
      store.watch(&known);
      known.take_removals(&removals_);
      return removals_.size() >= count;
    });
  }

  RedisProcess server_;
  SteadyClock clock_;
  PresenceCache known_{clock_, std::chrono::seconds(1), 100'000};
  std::vector<TierRemoval> removals_;
};

TEST_F(RedisRemovals, a_record_that_another_client_removes_is_reported_once_and_without_a_read) {
  TierDriver user(make_redis_tier(options()));
  ASSERT_TRUE(user.write(1) && user.write(2));
  ASSERT_EQ(server_.call({"DEL", name_of(1)}).integer, 1);
  EXPECT_TRUE(user.until([&] { return user.tier().has_removals(); })) << "an idle engine is not woken";
  EXPECT_EQ(user.removed(TierRemoval::Reason::kVanished), 1u);
  EXPECT_EQ(user.removals[0].key, key_of(1));
  EXPECT_FALSE(user.tier().has_removals());
  EXPECT_EQ(user.tier().contains(key_of(2)), Presence::kPresent);
  EXPECT_EQ(user.tier().stats().removals_problem, "");
}

TEST_F(RedisRemovals, a_tier_that_does_not_watch_reports_nothing_and_opens_no_connection) {
  RedisTierOptions chosen = options();
  chosen.watch_removals = false;
  TierDriver user(make_redis_tier(chosen));
  ASSERT_TRUE(user.write(1));
  EXPECT_EQ(server_.call({"CLIENT", "LIST", "TYPE", "pubsub"}).text, "");
}

TEST_F(RedisRemovals, evicted_and_expired_records_are_reported) {
  redis::RedisStore store(options());
  for (std::uint32_t number = 1; number <= 3; ++number) write(store, known_, number);
  store.watch(&known_);
  ASSERT_EQ(server_.call({"PEXPIRE", name_of(2), "1"}).integer, 1);
  EXPECT_TRUE(reports(store, known_, 1));
  EXPECT_EQ(removals_.front().key, key_of(2));
  server_.call({"CONFIG", "SET", "maxmemory-policy", "allkeys-lru"});
  server_.call({"CONFIG", "SET", "maxmemory", "1"});
  EXPECT_TRUE(reports(store, known_, 3));
  EXPECT_EQ(known_.contains(key_of(1)), Presence::kAbsent);
}

TEST_F(RedisRemovals, all_records_are_reported_after_flushall_in_several_runs) {
  redis::RedisStore store(options());
  write(store, known_, 1);
  store.watch(&known_);
  constexpr std::uint32_t kMany = 3 * RemovalWatch::kKeysPerRun;
  for (std::uint32_t number = 1; number <= kMany; ++number) known_.written(key_of(number), 0);
  EXPECT_FALSE(known_.has_removals());
  server_.call({"FLUSHALL"});
  EXPECT_TRUE(reports(store, known_, kMany));
  EXPECT_EQ(removals_.size(), kMany);
}

TEST_F(RedisRemovals, a_record_that_is_written_again_is_not_reported) {
  redis::RedisStore store(options());
  write(store, known_, 1);
  write(store, known_, 2);
  store.watch(&known_);
  const std::string name = name_of(1), value = server_.call({"GET", name}).text;
  server_.call({"DEL", name});
  server_.call({"SET", name, value});
  server_.call({"DEL", name_of(2)});
  EXPECT_TRUE(reports(store, known_, 1));
  ASSERT_EQ(removals_.size(), 1u);
  EXPECT_EQ(removals_[0].key, key_of(2));
}

// The server evicts a record before the thread that wrote it has reported it as written.
TEST_F(RedisRemovals, a_record_that_is_removed_before_its_write_is_known_is_reported) {
  redis::RedisStore store(options());
  store_record(store, 1);
  write(store, known_, 2);
  store.watch(&known_);
  server_.call({"DEL", name_of(1)});
  server_.call({"DEL", name_of(2)});  // sent after the notice of the first one
  EXPECT_TRUE(reports(store, known_, 1));
  known_.written(key_of(1), known_.epoch_number());
  EXPECT_TRUE(reports(store, known_, 2));
  EXPECT_EQ(removals_[1].key, key_of(1));
}

TEST_F(RedisRemovals, removals_during_a_lost_connection_are_reported) {
  redis::RedisStore store(options());
  for (const char* type : {"pubsub", "normal"}) {
    removals_.clear();
    write(store, known_, 1);
    store.watch(&known_);
    server_.call({"CLIENT", "KILL", "TYPE", type, "SKIPME", "yes"});
    server_.call({"DEL", name_of(1)});
    EXPECT_TRUE(reports(store, known_, 1)) << type;
  }
}

TEST_F(RedisRemovals, a_server_that_restarts_empty_has_removed_all_records) {
  redis::RedisStore store(options());
  for (std::uint32_t number = 1; number <= 3; ++number) write(store, known_, number);
  store.watch(&known_);
  server_.kill();
  store.watch(&known_);
  known_.take_removals(&removals_);
  EXPECT_TRUE(removals_.empty()) << "a server that does not respond has lost nothing yet";
  server_.start();
  EXPECT_TRUE(reports(store, known_, 3));
}

TEST_F(RedisRemovals, a_notice_that_is_none_closes_the_connection_and_all_records_are_checked) {
  redis::RedisStore store(options());
  write(store, known_, 1);
  store.watch(&known_);
  const std::string name = name_of(1);
  const auto subscriber = [&] {  // "id=7"
    const std::string list = server_.call({"CLIENT", "LIST", "TYPE", "pubsub"}).text;
    return list.substr(0, list.find(' '));
  };
  for (const char* text : {"garbage", ""}) {
    const std::string before = subscriber();
    ASSERT_EQ(server_.call({"PUBLISH", "__redis__:invalidate", text}).integer, 1) << "nobody is subscribed";
    EXPECT_TRUE(holds_soon([&] {
      store.watch(&known_);
      const std::string now = subscriber();
      return !now.empty() && now != before;
    }));
  }
  server_.call({"DEL", name});
  EXPECT_TRUE(reports(store, known_, 1));
}

TEST_F(RedisRemovals, removals_of_an_epoch_that_was_reset_are_not_reported) {
  redis::RedisStore store(options());
  write(store, known_, 1);
  write(store, known_, 2);
  store.watch(&known_);
  const std::string name = name_of(1);
  store.forget(0);
  ASSERT_TRUE(store.begin_epoch());
  known_.reset();
  known_.take_removals(&removals_);
  removals_.clear();
  write(store, known_, 1);
  write(store, known_, 3);
  server_.call({"DEL", name});
  server_.call({"DEL", name_of(3)});
  EXPECT_TRUE(reports(store, known_, 1));
  ASSERT_EQ(removals_.size(), 1u);
  EXPECT_EQ(removals_[0].key, key_of(3));
}

TEST_F(RedisRemovals, a_refused_command_is_named_and_other_operations_go_on) {
  const auto user_of = [&](const std::string& name, const std::vector<std::string>& rules) {
    std::vector<std::string_view> command{"ACL", "SETUSER", name, "on", ">secret", "~*", "+@all"};
    command.insert(command.end(), rules.begin(), rules.end());
    EXPECT_EQ(server_.call(command).text, "OK");
    RedisTierOptions chosen = options();
    chosen.server.user = name;
    chosen.server.password = "secret";
    return std::make_unique<redis::RedisStore>(chosen);
  };
  const auto problem_of = [&](redis::RedisStore& store) {
    store.watch(&known_);
    TierStats stats;
    store.figures(&stats);
    return stats.removals_problem;
  };
  auto without_channel = user_of("one", {"resetchannels"});
  EXPECT_NE(problem_of(*without_channel).find("the server refused SUBSCRIBE"), std::string::npos);
  auto without_tracking = user_of("two", {"allchannels", "-client|tracking"});
  const std::string problem = problem_of(*without_tracking);
  EXPECT_NE(problem.find("the server refused CLIENT TRACKING"), std::string::npos) << problem;
  EXPECT_NE(problem.find("+client|tracking"), std::string::npos) << problem;
  write(*without_tracking, known_, 1);
  auto allowed = user_of("three", {"resetchannels", "&__redis__:invalidate"});
  EXPECT_EQ(problem_of(*allowed), "");
}

// A connection that a firewall has forgotten delivers nothing, and no error.
TEST_F(RedisRemovals, a_node_that_does_not_answer_checks_is_connected_again) {
  redis::Cluster cluster({server_.address()});
  bool refused = false;
  ASSERT_TRUE(cluster.learn(std::chrono::steady_clock::now() + std::chrono::seconds(60), &refused));
  RemovalNotices notices(cluster, "p:", std::chrono::milliseconds(1));
  EXPECT_TRUE(notices.take().all);
  EXPECT_TRUE(holds_soon([&] { return !notices.take().all; })) << "a server that answers is checked only";
  server_.stop_process();
  EXPECT_TRUE(holds_soon([&] {
    (void)notices.take();
    return !notices.problem().empty();
  }));
  server_.continue_process();
  EXPECT_TRUE(holds_soon([&] { return notices.take().all; }));
  server_.call({"SET", "p:1", "x"});
  server_.call({"SET", "q:1", "x"});
  std::vector<std::string> keys;
  EXPECT_TRUE(holds_soon([&] {
    for (std::string& key : notices.take().keys) keys.push_back(std::move(key));
    return !keys.empty();
  }));
  EXPECT_EQ(keys, std::vector<std::string>{"p:1"});
}

TEST(RedisClusterRemovals, removals_on_every_master_are_reported_also_of_a_slot_that_moved) {
  RedisClusterServers servers;
  ASSERT_TRUE(servers.is_ready());
  RedisTierOptions chosen;
  chosen.name = "redis";
  chosen.server = servers.address(0);
  chosen.namespace_id.fill(0x11);
  chosen.op_timeout = std::chrono::seconds(60);
  chosen.watch_removals = true;
  TierDriver user(make_redis_tier(chosen));
  constexpr std::uint32_t kRecords = 24;
  for (std::uint32_t number = 0; number < kRecords; ++number) ASSERT_TRUE(user.write(number));
  std::size_t removed = 0;
  for (std::size_t node = 0; node < RedisClusterServers::kMasters; ++node) {
    const std::vector<std::string> names = servers.node(node).keys();
    ASSERT_FALSE(names.empty()) << node;
    servers.node(node).call({"DEL", names[0]});
    ++removed;
    EXPECT_TRUE(user.until([&] { return user.removed(TierRemoval::Reason::kVanished) == removed; })) << node;
  }
  const std::string name = servers.node(0).keys().at(0);
  const std::uint16_t slot = redis::slot_of(name);
  servers.begin_move(slot, 0, 1);
  const std::string port = std::to_string(servers.address(1).port);
  ASSERT_EQ(servers.node(0).call({"MIGRATE", "127.0.0.1", port, name, "0", "60000"}).text, "OK");
  servers.end_move(slot, 0, 1);
  ASSERT_EQ(servers.holder_of(name), 1u);
  servers.node(1).call({"DEL", name});
  ++removed;
  EXPECT_TRUE(user.until([&] { return user.removed(TierRemoval::Reason::kVanished) == removed; }));
}

}  // namespace
}  // namespace kv_offload
