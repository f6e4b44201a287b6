// SPDX-License-Identifier: Apache-2.0
// Records that the server, or another of its clients, removes are reported without a read.
#include <gtest/gtest.h>
#include <poll.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "backends/redis/cluster_servers.h"
#include "backends/redis/medium.h"
#include "backends/redis/removal_notices.h"
#include "backends/redis/removal_watch.h"
#include "backends/redis/store.h"
#include "out_of_memory.h"

namespace kv_offload {
namespace {

using namespace testing;
using redis::RemovalNotices;
using redis::RemovalWatch;

// An op_timeout that a test waits for. It also bounds operations that must succeed.
constexpr std::chrono::seconds kSoonKnown{2};

class RedisRemovals : public ::testing::Test {
 public:
  // Writes a record as an I/O thread does.
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

 protected:
  // op_timeout: also the time after which earlier results are known.
  RedisTierOptions options(std::chrono::seconds op_timeout = std::chrono::seconds(60)) {
    RedisTierOptions chosen;
    chosen.name = "redis";
    chosen.server = server_.address();
    chosen.namespace_id.fill(0x11);
    chosen.op_timeout = op_timeout;
    chosen.watch_removals = true;
    return chosen;
  }
  std::string name_of(std::uint32_t number) const {
    for (const std::string& name : server_.keys()) {
      if (name.ends_with(":" + key_of(number).hex())) return name;
    }
    return {};
  }
  // Returns how often the server was asked for this command.
  int calls_of(const std::string& command) const {
    const std::string figures = server_.call({"INFO", "commandstats"}).text;
    const std::string name = "cmdstat_" + command + ":calls=";
    const std::size_t at = figures.find(name);
    return at == std::string::npos ? 0 : std::stoi(figures.substr(at + name.size()));
  }
  void write(redis::RedisStore& store, PresenceCache& known, std::uint32_t number) {
    store_record(store, number);
    known.written(key_of(number), known.epoch_number());
  }
  // Calls it again and again for this long, and once after it.
  static void repeat_for(std::chrono::milliseconds time, const std::function<void()>& call) {
    const auto end = std::chrono::steady_clock::now() + time;
    EXPECT_TRUE(holds_soon([&] {
      const bool is_over = std::chrono::steady_clock::now() >= end;
      call();
      return is_over;
    }));
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
  redis::RedisStore store(options(kSoonKnown));
  store_record(store, 1);
  write(store, known_, 2);
  store.watch(&known_);
  // All records are checked once more when the results from before this run are known. That must be over.
  repeat_for(kSoonKnown + std::chrono::milliseconds(100), [&] { store.watch(&known_); });
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

// FLUSHALL, or a lost connection, after the server sent the result of a write or a lookup.
TEST_F(RedisRemovals, records_that_become_known_after_flushall_are_reported) {
  redis::RedisStore store(options(kSoonKnown));
  store_record(store, 1);
  store_record(store, 2);
  write(store, known_, 3);
  store.watch(&known_);
  const ChunkKey found = key_of(2);
  std::vector<ChunkKey> asked;
  known_.begin_lookup(std::span(&found, 1), known_.epoch_number(), &asked);
  std::vector<bool> present(1);
  ASSERT_TRUE(store.locate(asked, KeyOrder::kNone, store.epoch(), &present));
  ASSERT_TRUE(present.at(0));
  server_.call({"FLUSHALL"});
  EXPECT_TRUE(reports(store, known_, 1));
  known_.written(key_of(1), known_.epoch_number());
  known_.answered(found, true, known_.epoch_number());
  EXPECT_TRUE(reports(store, known_, 3));
}

TEST_F(RedisRemovals, failed_allocations_lose_no_removal) {
  bool failed = true;
  for (unsigned after = 0; failed && after < 1000; ++after) {
    redis::RedisStore store(options());
    write(store, known_, after);
    for (int i = 0; i < 3; ++i) store.watch(&known_);
    ASSERT_EQ(server_.call({"DEL", name_of(after)}).integer, 1);
    try {
      const FailingAllocation one(after);
      store.watch(&known_);
      failed = one.came();
    } catch (const std::bad_alloc&) {
    }
    EXPECT_TRUE(holds_soon([&] {
      store.watch(&known_);
      return known_.contains(key_of(after)) != Presence::kPresent;
    })) << "after "
        << after << " allocations";
  }
  EXPECT_FALSE(failed);
}

TEST_F(RedisRemovals, a_connection_that_is_lost_again_and_again_is_not_opened_each_time_and_all_are_checked) {
  redis::RedisStore store(options());
  write(store, known_, 1);
  store.watch(&known_);
  constexpr std::uint32_t kMany = 3 * RemovalWatch::kKeysPerRun;
  for (std::uint32_t number = 2; number <= kMany; ++number) known_.written(key_of(number), 0);
  const int before = calls_of("subscribe");
  for (int i = 0; i < 20; ++i) {
    server_.call({"CLIENT", "KILL", "TYPE", "pubsub"});
    store.watch(&known_);
    known_.take_removals(&removals_);
  }
  EXPECT_LE(calls_of("subscribe") - before, 4);
  EXPECT_TRUE(reports(store, known_, kMany - 1));
}

TEST_F(RedisRemovals, missed_changes_do_not_restart_the_check_of_all_records) {
  std::string prefix;
  {
    redis::RedisStore earlier(options());
    store_record(earlier, 1);
    const std::string name = name_of(1);
    prefix = name.substr(0, name.rfind(':') + 1);
  }
  constexpr std::uint32_t kMany = 3 * RemovalWatch::kKeysPerRun, kGone = 64;
  std::vector<std::string> words{"MSET"};
  for (std::uint32_t number = 1; number <= kMany; ++number) {
    known_.written(key_of(number), 0);
    if (number % (kMany / kGone) == 0) continue;  // gone, and no notice names it
    words.push_back(prefix + key_of(number).hex());
    words.emplace_back("x");
  }
  ASSERT_EQ(server_.call(std::vector<std::string_view>(words.begin(), words.end())).text, "OK");
  redis::RedisStore store(options());
  for (int i = 0; i < 12; ++i) {
    // The notice of a flush names no key, and no database either.
    server_.call({"EVAL", "redis.call('SELECT', 1) return redis.call('FLUSHDB')", "0"});
    store.watch(&known_);
    known_.take_removals(&removals_);
  }
  EXPECT_EQ(removals_.size(), kGone);
}

TEST_F(RedisRemovals, a_notice_with_more_names_than_are_accepted_loses_nothing) {
  redis::RedisStore store(options());
  write(store, known_, 1);
  store.watch(&known_);
  const std::string name = name_of(1), prefix = name.substr(0, name.rfind(':') + 1);
  server_.call({"EVAL",
                "redis.call('DEL', KEYS[1]) for i=1,20000 do redis.call('SET', KEYS[2]..i, 'x') end return 1",
                "2", name, prefix});
  EXPECT_TRUE(reports(store, known_, 1));
}

// Upkeep of the tier runs on the same thread.
TEST_F(RedisRemovals, a_server_that_does_not_respond_is_seldom_waited_for) {
  redis::RedisStore store(options());
  write(store, known_, 1);
  store.watch(&known_);
  server_.call({"CLIENT", "KILL", "TYPE", "pubsub"});
  server_.stop_process();
  const auto begun = std::chrono::steady_clock::now();
  int waits = 0;
  for (int i = 0; i < 200; ++i) {
    const auto before = std::chrono::steady_clock::now();
    store.watch(&known_);
    waits += std::chrono::steady_clock::now() - before >= RemovalNotices::kWaitAtMost ? 1 : 0;
  }
  const auto took = std::chrono::steady_clock::now() - begun;
  server_.continue_process();
  EXPECT_GE(waits, 1) << "it was not asked";
  EXPECT_LE(waits, 2);
  EXPECT_LT(took, std::chrono::seconds(60));
}

TEST_F(RedisRemovals, a_malformed_notice_closes_the_connection_and_all_records_are_checked) {
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
    ASSERT_EQ(server_.call({"PUBLISH", "__redis__:invalidate", text}).integer, 1)
        << "no client is subscribed";
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

TEST_F(RedisRemovals, a_refused_command_is_named_and_other_operations_continue) {
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
  const std::atomic<bool> stopped{false};
  RemovalNotices notices(cluster, "p:", std::chrono::seconds(1));
  EXPECT_TRUE(notices.take(stopped).all);
  repeat_for(std::chrono::milliseconds(2500), [&] {  // two checks
    EXPECT_FALSE(notices.take(stopped).all) << "a server that answers is checked only";
  });
  EXPECT_NE(server_.call({"CLIENT", "LIST", "TYPE", "pubsub"}).text.find(" cmd=ping "), std::string::npos);
  server_.stop_process();
  repeat_for(std::chrono::milliseconds(1500),
             [&] { (void)notices.take(stopped); });  // one check, which fails
  server_.continue_process();
  EXPECT_TRUE(holds_soon([&] { return notices.take(stopped).all; }));
  server_.call({"SET", "p:1", "x"});
  server_.call({"SET", "q:1", "x"});
  std::vector<std::string> keys;
  EXPECT_TRUE(holds_soon([&] {
    for (std::string& key : notices.take(stopped).keys) keys.push_back(std::move(key));
    return !keys.empty();
  }));
  EXPECT_EQ(keys, std::vector<std::string>{"p:1"});
}

TEST_F(RedisRemovals, a_lost_tracker_is_noticed_before_the_next_check) {
  redis::Cluster cluster({server_.address()});
  bool refused = false;
  ASSERT_TRUE(cluster.learn(std::chrono::steady_clock::now() + std::chrono::seconds(60), &refused));
  const std::atomic<bool> stopped{false};
  RemovalNotices notices(cluster, "p:", std::chrono::hours(1));
  EXPECT_TRUE(notices.take(stopped).all);
  EXPECT_FALSE(notices.take(stopped).all);
  server_.call({"CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes"});
  EXPECT_TRUE(holds_soon([&] { return notices.take(stopped).all; }));
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

TEST(RedisClusterRemovals, a_slow_node_stays_in_service) {
  RedisClusterServers servers;
  ASSERT_TRUE(servers.is_ready());
  RedisTierOptions chosen;
  chosen.name = "redis";
  chosen.server = servers.address(0);
  chosen.namespace_id.fill(0x11);
  chosen.op_timeout = std::chrono::seconds(60);
  redis::RedisStore store(chosen);
  const SteadyClock clock;
  PresenceCache known(clock, std::chrono::seconds(1), 100'000);
  std::vector<ChunkKey> keys;
  for (std::uint32_t number = 0; number < 24; ++number) {
    RedisRemovals::store_record(store, number);
    known.written(key_of(number), known.epoch_number());
    keys.push_back(key_of(number));
  }
  for (int i = 0; i < 3; ++i) store.watch(&known);
  servers.node(0).call({"DEL", servers.node(0).keys().at(0)});
  servers.node(0).stop_process();
  std::thread watching([&] { store.watch(&known); });
  poll(nullptr, 0, 1500);  // longer than a watch may wait for notices
  servers.node(0).continue_process();
  watching.join();
  std::vector<bool> present(keys.size());
  ASSERT_TRUE(store.locate(keys, KeyOrder::kNone, store.epoch(), &present));
  EXPECT_EQ(std::count(present.begin(), present.end(), true), 23) << "the other records of the node";
}

}  // namespace
}  // namespace kv_offload
