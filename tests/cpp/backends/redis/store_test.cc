// SPDX-License-Identifier: Apache-2.0
// Server faults, and the reaction of the redis tier.
#include "backends/redis/store.h"

#include <gtest/gtest.h>

#include <chrono>
#include <fstream>
#include <sstream>
#include <string>

#include "backends/redis/medium.h"
#include "backends/redis/records.h"

namespace kv_offload {
namespace {

using namespace testing;
using std::chrono::seconds;
using Verb = RedisProxy::Verb;

// An op_timeout that a test waits for. It is real time, and also bounds ops that must succeed.
constexpr Nanos kShort{seconds(2)};

class RedisTierTest : public ::testing::Test {
 protected:
  std::unique_ptr<Tier> open() { return make_redis_tier(options()); }
  RedisTierOptions options() {
    RedisTierOptions chosen = medium_.options();
    chosen.name = "redis";
    chosen.clock = &clock_;
    chosen.op_timeout = seconds(60);
    return chosen;
  }
  // Builds an op as a pool does, without threads.
  static TierOp op_of(OpKind kind, std::uint32_t number, const Row& row) {
    TierOp op;
    op.kind = kind;
    op.key = key_of(number);
    op.shards = row.shards();
    return op;
  }
  static Status write_to(redis::RedisStore& store, std::uint32_t number) {
    Row row({8192});
    row.fill(number);
    std::uint64_t moved = 0;
    return store.write(op_of(OpKind::kWrite, number, row), store.epoch(), &moved);
  }
  static Status read_from(redis::RedisStore& store, std::uint32_t number) {
    Row into({8192});
    std::uint64_t moved = 0;
    const Status status = store.read(op_of(OpKind::kRead, number, into), store.epoch(), &moved);
    EXPECT_TRUE(!status || into.holds(number));
    return status;
  }
  // Upkeep follows the tier's clock.
  template <typename Condition>
  bool eventually(TierDriver& user, Condition condition) {
    return user.until([&] {
      clock_.advance(seconds(1));
      user.poll();
      return condition();
    });
  }
  Status restored_read(TierDriver& user, std::uint32_t number) {
    clock_.advance(seconds(120));
    return user.read(number);
  }

  FakeClock clock_;
  RedisMedium medium_;
};

// ---- values

TEST_F(RedisTierTest, a_record_is_stored_in_the_disk_format) {
  TierDriver user(open());
  ASSERT_TRUE(user.write(1, {5000, 0, 4096}));
  const std::string name = medium_.name_of(key_of(1));
  EXPECT_TRUE(name.starts_with("kv_offload:" + std::string(64, '1') + ":")) << name;
  const std::string value = medium_.server.call({"GET", name}).text;
  ASSERT_EQ(value.size(), kRecordHeaderBytes + 8192 + 4096);
  RecordHeader header;
  ASSERT_TRUE(decode_header(std::as_bytes(std::span(value)).first(kRecordHeaderBytes), &header));
  EXPECT_EQ(header.key, key_of(1));
  EXPECT_EQ(header.shard_bytes, (std::vector<std::uint64_t>{5000, 0, 4096}));
  EXPECT_EQ(value.find_first_not_of('\0', kRecordHeaderBytes + 5000), kRecordHeaderBytes + 8192);
}

TEST_F(RedisTierTest, a_single_writer_seldom_checks_for_existing_records) {
  TierDriver user(open());
  const auto questions = [&](std::uint32_t first, std::uint32_t writes) {
    const std::size_t before = medium_.proxy.faults.seen(Verb::kLocate);
    for (std::uint32_t i = 0; i < writes; ++i) EXPECT_TRUE(user.write(first + i));
    return medium_.proxy.faults.seen(Verb::kLocate) - before;
  };
  EXPECT_EQ(questions(0, ExistenceCheckPolicy::kMissesToSkip), ExistenceCheckPolicy::kMissesToSkip);
  EXPECT_EQ(questions(1000, 2 * ExistenceCheckPolicy::kCheckInterval), 2u);
}

TEST_F(RedisTierTest, large_records_and_many_shards_are_read_back) {
  TierDriver user(open());
  for (const ShardSizes& sizes : {ShardSizes{8 << 20}, ShardSizes(kMaxShards, 40000)}) {
    const auto number = static_cast<std::uint32_t>(sizes.size());
    ASSERT_TRUE(user.write(number, sizes));
    EXPECT_TRUE(user.read(number, sizes));
  }
}

// Each value was never written under this key. None is read; each is counted once and removed.
TEST_F(RedisTierTest, a_value_that_is_not_a_record_of_this_key_is_damage) {
  TierDriver user(open());
  ASSERT_TRUE(user.write(1) && user.write(2));
  const std::string name = medium_.name_of(key_of(1)), other = medium_.name_of(key_of(2));
  const std::string whole = medium_.server.call({"GET", name}).text;
  const std::string foreign = medium_.server.call({"GET", other}).text;
  std::string payload = whole, version = whole;
  payload[6000] ^= 1;
  version[8] ^= 1;
  for (const std::string& value : {payload, version, foreign, whole.substr(0, whole.size() - 1), whole + "x",
                                   whole.substr(0, 100), std::string(), std::string(100000, 'x')}) {
    medium_.server.call({"SET", name, value});
    EXPECT_EQ(user.read(1).kind(), StatusKind::kCorrupt) << value.size();
    EXPECT_EQ(medium_.server.call({"EXISTS", name}).integer, 0) << value.size();
  }
  medium_.server.call({"DEL", name});
  medium_.server.call({"RPUSH", name, "x"});
  EXPECT_EQ(user.read(1).kind(), StatusKind::kCorrupt) << "a list";
  EXPECT_EQ(medium_.server.call({"EXISTS", name}).integer, 0);
  EXPECT_TRUE(user.read(2));
  ASSERT_TRUE(user.write(1));
  EXPECT_TRUE(user.read(1));
}

TEST_F(RedisTierTest, the_padding_of_a_shard_is_verified_too) {
  TierDriver user(open());
  ASSERT_TRUE(user.write(1, {5000}));
  medium_.server.call(
      {"SETRANGE", medium_.name_of(key_of(1)), std::to_string(kRecordHeaderBytes + 8000), "x"});
  EXPECT_EQ(user.read(1, {5000}).kind(), StatusKind::kCorrupt);
}

// The reader found damage. Before it removes the record, another server writes the record again.
TEST_F(RedisTierTest, a_record_that_replaced_a_damaged_one_stays) {
  redis::RedisStore store(options());
  Row row({8192});
  row.fill(1);
  std::uint64_t moved = 0;
  ASSERT_TRUE(store.write(op_of(OpKind::kWrite, 1, row), store.epoch(), &moved));
  const std::string name = medium_.name_of(key_of(1));
  const std::string whole = medium_.server.call({"GET", name}).text;
  medium_.damage(key_of(1));
  medium_.proxy.faults.block(Verb::kOther);  // WATCH: the damaged record was read
  std::thread reader([&] {
    Row into({8192});
    std::uint64_t read = 0;
    EXPECT_EQ(store.read(op_of(OpKind::kRead, 1, into), store.epoch(), &read).kind(), StatusKind::kCorrupt);
  });
  medium_.proxy.faults.wait_for_blocked(1);
  std::string anew = whole;  // written at another time, so with another header
  RecordHeader header;
  EXPECT_TRUE(decode_header(std::as_bytes(std::span(whole)).first(kRecordHeaderBytes), &header));
  ++header.created_unix_nanos;
  encode_header(header, std::as_writable_bytes(std::span(anew)).first(kRecordHeaderBytes));
  medium_.server.call({"SET", name, anew});
  medium_.proxy.faults.release();
  reader.join();
  EXPECT_EQ(medium_.server.call({"GET", name}).text, anew);
  ASSERT_TRUE(write_to(store, 1));
  EXPECT_EQ(medium_.server.call({"GET", name}).text, anew) << "a valid record must not be written again";
}

TEST_F(RedisTierTest, a_read_only_tier_changes_nothing) {
  { ASSERT_TRUE(TierDriver(open()).write(1)); }
  RedisTierOptions chosen = options();
  chosen.read_only = true;
  TierDriver user(make_redis_tier(chosen));
  EXPECT_TRUE(user.has(1));
  EXPECT_TRUE(user.read(1));
  medium_.damage(key_of(1));
  EXPECT_EQ(user.read(1).kind(), StatusKind::kCorrupt);
  EXPECT_EQ(medium_.server.keys().size(), 1u);
  EXPECT_FALSE(user.tier().reset());
  EXPECT_FALSE(user.has(1));
  TierDriver later(open());
  EXPECT_TRUE(later.has(1)) << "others were not reset";
}

TEST_F(RedisTierTest, a_read_only_tier_finds_records_written_later) {
  RedisTierOptions chosen = options();
  chosen.read_only = true;
  TierDriver user(make_redis_tier(chosen));
  EXPECT_FALSE(user.has(1));
  TierDriver writer(open());
  ASSERT_TRUE(writer.write(1));
  EXPECT_TRUE(eventually(user, [&] { return user.has(1); }));
  EXPECT_TRUE(user.read(1));
}

TEST_F(RedisTierTest, a_record_written_by_another_is_not_sent_again) {
  TierDriver first(open()), second(open());
  ASSERT_TRUE(first.write(1));
  const Completion again = second.finish(second.start(OpKind::kWrite, 1, {8192}));
  EXPECT_TRUE(again.status);
  EXPECT_EQ(again.bytes, 0u);
  EXPECT_EQ(medium_.proxy.faults.seen(Verb::kWrite), 1u);
}

TEST_F(RedisTierTest, a_ttl_is_set_and_a_repeated_write_renews_it) {
  RedisTierOptions chosen = options();
  chosen.ttl_seconds = 1000;
  TierDriver first(make_redis_tier(chosen));
  ASSERT_TRUE(first.write(1));
  const std::string name = medium_.name_of(key_of(1));
  EXPECT_GT(medium_.server.call({"TTL", name}).integer, 900);
  medium_.server.call({"EXPIRE", name, "5"});
  TierDriver second(make_redis_tier(chosen));
  ASSERT_TRUE(second.write(1));
  EXPECT_GT(medium_.server.call({"TTL", name}).integer, 900);
  medium_.server.call({"PEXPIRE", name, "0"});
  EXPECT_EQ(first.read(1).kind(), StatusKind::kNotFound);
  EXPECT_EQ(first.removed(TierRemoval::Reason::kVanished), 1u);
}

// ---- resets, with a server that loses keys

TEST_F(RedisTierTest, a_reset_engine_shares_no_records_with_another) {
  TierDriver reset(open()), other(open());
  ASSERT_TRUE(reset.tier().reset());
  reset.weights = 1;
  ASSERT_TRUE(reset.write(1));
  EXPECT_TRUE(eventually(other, [&] { return other.tier().stats().diverged; }));
  EXPECT_FALSE(other.has(1));
  ASSERT_TRUE(other.write(2));
  EXPECT_FALSE(reset.has(2));
  EXPECT_FALSE(reset.tier().stats().diverged);
  TierDriver later(open());
  EXPECT_FALSE(later.has(1) || later.has(2)) << "older weights, and weights of one process";
}

TEST_F(RedisTierTest, two_reset_engines_share_nothing) {
  TierDriver one(open()), two(open());
  ASSERT_TRUE(one.tier().reset() && two.tier().reset());
  one.weights = 1;
  two.weights = 2;
  ASSERT_TRUE(one.write(1));
  EXPECT_FALSE(two.has(1));
  ASSERT_TRUE(two.write(1));
  EXPECT_TRUE(one.read(1));
}

// A counter would restart here, and name the epoch of an engine that is reset a second time.
TEST_F(RedisTierTest, a_server_that_lost_its_epochs_mixes_no_records) {
  TierDriver one(open());
  ASSERT_TRUE(one.tier().reset());
  one.weights = 1;
  ASSERT_TRUE(one.write(1));
  medium_.server.call({"DEL", "kv_offload:" + std::string(64, '1') + ":epoch"});
  TierDriver two(open());
  EXPECT_FALSE(two.has(1));
  ASSERT_TRUE(two.tier().reset());
  two.weights = 2;
  EXPECT_FALSE(two.has(1));
  ASSERT_TRUE(two.write(1));
  EXPECT_TRUE(one.read(1));
  EXPECT_TRUE(two.read(1));
}

TEST_F(RedisTierTest, the_epoch_is_written_back_when_the_server_drops_it) {
  TierDriver user(open());
  ASSERT_TRUE(user.write(1));
  const std::string name = "kv_offload:" + std::string(64, '1') + ":epoch";
  medium_.server.call({"DEL", name});
  EXPECT_TRUE(eventually(user, [&] { return medium_.server.call({"EXISTS", name}).integer == 1; }));
  TierDriver later(open());
  EXPECT_TRUE(later.has(1));
}

TEST_F(RedisTierTest, an_invalid_epoch_value_is_replaced) {
  const std::string name = "kv_offload:" + std::string(64, '1') + ":epoch";
  for (const redis::Connection::Command& junk :
       {redis::Connection::Command{"SET", name, "../x"}, redis::Connection::Command{"RPUSH", name, "x"}}) {
    medium_.server.call({"DEL", name});
    medium_.server.call(junk);
    TierDriver user(open());
    ASSERT_TRUE(user.write(7));
    EXPECT_EQ(medium_.server.call({"GET", name}).text.size(), 32u);
  }
}

// The reset happens after the server's answer to upkeep, and before upkeep uses the answer.
TEST_F(RedisTierTest, an_epoch_that_a_reset_ended_is_never_written_back) {
  redis::RedisStore store(options());
  const std::string name = "kv_offload:" + std::string(64, '1') + ":epoch";
  const std::string before = medium_.server.call({"GET", name}).text;
  medium_.proxy.faults.block(Verb::kInfo);  // upkeep sends this after it
  std::thread upkeep([&] { store.maintain(); });
  medium_.proxy.faults.wait_for_blocked(1);
  store.forget(0);
  EXPECT_TRUE(store.begin_epoch());
  medium_.proxy.faults.release();
  upkeep.join();
  medium_.server.call({"DEL", name});
  store.maintain();
  EXPECT_NE(medium_.server.call({"GET", name}).text, before);
}

// As above, of this engine or of another one. Servers that start later would find records from before it.
TEST_F(RedisTierTest, an_invalid_epoch_value_that_a_reset_has_replaced_is_not_replaced) {
  const std::string name = "kv_offload:" + std::string(64, '1') + ":epoch";
  for (const bool is_own : {true, false}) {
    redis::RedisStore store(options());
    const std::string others(32, 'a');
    medium_.server.call({"SET", name, "../x"});
    medium_.proxy.faults.block(Verb::kInfo);
    std::thread upkeep([&] { store.maintain(); });
    medium_.proxy.faults.wait_for_blocked(1);
    if (is_own) {
      store.forget(0);
      EXPECT_TRUE(store.begin_epoch());
    } else {
      medium_.server.call({"SET", name, others});
    }
    const std::string after = medium_.server.call({"GET", name}).text;
    medium_.proxy.faults.release();
    upkeep.join();
    EXPECT_EQ(medium_.server.call({"GET", name}).text, after);
  }
}

// A replica that missed the reset took over, or another engine wrote its old epoch back after the server
// dropped the new one.
TEST_F(RedisTierTest, an_ended_epoch_that_returns_is_replaced_again) {
  redis::RedisStore store(options());
  const std::string name = "kv_offload:" + std::string(64, '1') + ":epoch";
  const std::string before = medium_.server.call({"GET", name}).text;
  store.forget(0);
  ASSERT_TRUE(store.begin_epoch());
  const std::string after = medium_.server.call({"GET", name}).text;
  EXPECT_NE(after, before) << "the server has the new epoch before any upkeep";
  medium_.server.call({"SET", name, before});
  store.maintain();
  EXPECT_EQ(medium_.server.call({"GET", name}).text, after);
  // An epoch of another engine's reset stays.
  const std::string others(32, 'a');
  medium_.server.call({"SET", name, others});
  store.maintain();
  store.maintain();
  EXPECT_EQ(medium_.server.call({"GET", name}).text, others);
}

// Upkeep had adopted epochs that others wrote; the reset is newer than all of them.
TEST_F(RedisTierTest, each_epoch_from_before_a_reset_is_replaced_again) {
  redis::RedisStore store(options());
  const std::string name = "kv_offload:" + std::string(64, '1') + ":epoch";
  const std::string first = medium_.server.call({"GET", name}).text, second(32, 'a');
  medium_.server.call({"SET", name, second});
  store.maintain();
  store.forget(0);
  ASSERT_TRUE(store.begin_epoch());
  const std::string after = medium_.server.call({"GET", name}).text;
  for (const std::string& before : {first, second, first}) {
    medium_.server.call({"SET", name, before});
    store.maintain();
    EXPECT_EQ(medium_.server.call({"GET", name}).text, after);
  }
}

TEST_F(RedisTierTest, upkeep_sends_nothing_once_the_tier_closes) {
  redis::RedisStore store(options());
  const std::size_t asked = medium_.proxy.faults.seen(Verb::kEpoch);
  store.stop();
  store.maintain();
  EXPECT_EQ(medium_.proxy.faults.seen(Verb::kEpoch), asked);
}

// ---- a server that fails

TEST_F(RedisTierTest, a_full_server_refuses_writes_only) {
  medium_.server.call({"CONFIG", "SET", "maxmemory", "3mb"});
  medium_.server.call({"CONFIG", "SET", "maxmemory-policy", "noeviction"});
  TierDriver user(open());
  std::uint32_t written = 0;
  Status status;
  while (written < 100 && (status = user.write(written, {256 << 10}))) ++written;
  EXPECT_EQ(status.kind(), StatusKind::kNoSpace) << status.to_string();
  EXPECT_GT(written, 2u);
  for (std::uint32_t i = 200; i < 220; ++i)
    EXPECT_EQ(user.write(i, {256 << 10}).kind(), StatusKind::kNoSpace);
  EXPECT_TRUE(user.tier().stats().writable) << "its own bound is not a failure";
  EXPECT_TRUE(user.read(0, {256 << 10}));
  medium_.lose(key_of(0));
  EXPECT_TRUE(user.write(300));
}

TEST_F(RedisTierTest, a_write_that_must_not_evict_is_refused_while_there_is_still_room) {
  medium_.server.call({"CONFIG", "SET", "maxmemory", "6mb"});
  medium_.server.call({"CONFIG", "SET", "maxmemory-policy", "allkeys-lru"});
  RedisTierOptions chosen = options();
  chosen.may_evict = false;
  redis::RedisStore store(chosen);
  std::uint32_t written = 0;
  Status status;
  Row row({256 << 10});
  std::uint64_t moved = 0;
  while (written < 100 && (status = store.write(op_of(OpKind::kWrite, written, row), store.epoch(), &moved)))
    ++written;
  EXPECT_EQ(status.kind(), StatusKind::kNoSpace) << status.to_string();
  EXPECT_NE(status.message().find("of maxmemory 6.0 MiB in use"), std::string::npos) << status.message();
  EXPECT_GT(written, 5u);
  EXPECT_EQ(medium_.server.keys().size(), written) << "nothing was evicted";
  medium_.server.call({"CONFIG", "SET", "maxmemory", "0"});
  EXPECT_TRUE(store.write(op_of(OpKind::kWrite, written, row), store.epoch(), &moved));
  store.close();
}

TEST_F(RedisTierTest, a_whole_record_replaces_a_value_without_a_look) {
  TierDriver user(open());
  ASSERT_TRUE(user.write(1));
  const auto records = open_redis_records({.server = medium_.server.address()});
  RemoteRecord record;
  record.name = medium_.name_of(key_of(1));
  record.namespace_id = std::string(64, '1');
  record.key = key_of(1).hex();
  WholeRecord copy;
  ASSERT_TRUE(records->read(record, &copy));
  medium_.damage(key_of(1));
  redis::RedisStore store(options());
  TierOp op;
  op.key = key_of(1);
  op.shards = {copy.bytes()};
  op.is_whole_record = true;
  std::uint64_t moved = 0;
  ASSERT_TRUE(store.write(op, store.epoch(), &moved));
  EXPECT_EQ(moved, 8192u);
  EXPECT_TRUE(user.read(1));
  store.close();
}

TEST_F(RedisTierTest, evicted_records_of_a_bounded_server_are_misses) {
  medium_.server.call({"CONFIG", "SET", "maxmemory", "4mb"});
  medium_.server.call({"CONFIG", "SET", "maxmemory-policy", "allkeys-lru"});
  TierDriver user(open());
  for (std::uint32_t i = 0; i < 40; ++i) ASSERT_TRUE(user.write(i, {256 << 10}));
  std::uint32_t kept = 0;
  for (std::uint32_t i = 0; i < 40; ++i) {
    const Status status = user.read(i, {256 << 10});
    EXPECT_TRUE(status || status.kind() == StatusKind::kNotFound) << status.to_string();
    kept += status.is_ok();
  }
  EXPECT_GT(kept, 0u);
  EXPECT_LT(kept, 16u);
  EXPECT_EQ(user.removed(TierRemoval::Reason::kVanished), 40 - kept);
  EXPECT_TRUE(user.tier().stats().readable);
}

TEST_F(RedisTierTest, a_truncated_value_is_a_failure_and_the_next_read_uses_another_connection) {
  TierDriver user(open());
  ASSERT_TRUE(user.write(1));
  for (const std::size_t after : {1u, 3u, 7u, 70u, 4100u, 12000u, 12296u}) {
    medium_.proxy.faults.cut(Verb::kRead, after);
    EXPECT_EQ(user.read(1).kind(), StatusKind::kIo) << after;
    medium_.proxy.faults.cut(Verb::kRead, 0);
    EXPECT_TRUE(user.read(1)) << after;
  }
  EXPECT_EQ(medium_.server.keys().size(), 1u) << "the record is intact";
}

TEST_F(RedisTierTest, a_reply_that_arrives_byte_by_byte_ends_with_the_deadline) {
  { ASSERT_TRUE(TierDriver(open()).write(1)); }
  RedisTierOptions chosen = options();
  chosen.op_timeout = kShort;
  TierDriver user(make_redis_tier(chosen));
  ASSERT_TRUE(eventually(user, [&] { return user.tier().stats().writable; }));
  medium_.proxy.faults.trickle(Verb::kRead, true);  // 12 s in total
  EXPECT_EQ(user.read(1).kind(), StatusKind::kTimeout);
  medium_.proxy.faults.trickle(Verb::kRead, false);
  EXPECT_TRUE(user.until([&] { return user.read(1).is_ok(); }));
}

TEST_F(RedisTierTest, a_stopped_server_costs_each_op_in_flight_a_deadline_and_later_ops_none) {
  { ASSERT_TRUE(TierDriver(open()).write(1)); }
  RedisTierOptions chosen = options();
  chosen.op_timeout = kShort;
  chosen.n_read_threads = 12;  // all reads wait at the same time
  TierDriver user(make_redis_tier(chosen));
  ASSERT_TRUE(eventually(user, [&] { return user.tier().stats().writable; }));
  ASSERT_TRUE(user.until([&] { return user.read(1).is_ok(); }));
  medium_.server.stop_process();
  std::vector<OpId> reads;
  for (unsigned i = 0; i < 12; ++i) reads.push_back(user.start(OpKind::kRead, 1, {8192}));
  for (const OpId id : reads) EXPECT_FALSE(user.finish(id).status);
  EXPECT_FALSE(user.tier().stats().readable);
  EXPECT_EQ(user.read(1).kind(), StatusKind::kUnavailable) << "at once";
  medium_.server.continue_process();
  EXPECT_TRUE(user.until([&] { return restored_read(user, 1).is_ok(); }));
}

TEST_F(RedisTierTest, a_server_that_was_killed_and_returns_empty_is_used_again) {
  TierDriver user(open());
  ASSERT_TRUE(user.write(1));
  medium_.server.kill();
  EXPECT_EQ(user.read(1).kind(), StatusKind::kIo);
  EXPECT_EQ(user.write(2).kind(), StatusKind::kIo);
  medium_.server.start();
  EXPECT_EQ(user.read(1).kind(), StatusKind::kNotFound);
  EXPECT_EQ(user.removed(TierRemoval::Reason::kVanished), 1u);
  ASSERT_TRUE(user.write(1));
  EXPECT_TRUE(user.read(1));
  // This must happen before another engine starts: an engine that finds no epoch creates one.
  ASSERT_TRUE(eventually(user, [&] {
    return medium_.server.call({"KEYS", "*:epoch"}).integer == 1;
  })) << "the epoch was not written back";
  TierDriver next(open());
  EXPECT_TRUE(eventually(next, [&] { return next.has(1); }));
}

TEST_F(RedisTierTest, a_tier_that_starts_before_its_server_is_empty_until_the_server_answers) {
  medium_.server.kill();
  TierDriver user(open());
  EXPECT_FALSE(user.has(1));
  EXPECT_EQ(user.write(1).kind(), StatusKind::kUnavailable);
  EXPECT_FALSE(user.tier().stats().writable);
  medium_.server.start();
  EXPECT_TRUE(eventually(user, [&] { return user.tier().stats().writable; }));
  ASSERT_TRUE(user.write(1));
  EXPECT_TRUE(user.read(1));
  EXPECT_TRUE(TierDriver(open()).has(1)) << "it shares its records";
}

TEST_F(RedisTierTest, an_idle_connection_that_the_server_closed_is_not_a_failure) {
  RedisTierOptions chosen = options();
  chosen.server = medium_.server.address();
  TierDriver user(make_redis_tier(chosen));
  ASSERT_TRUE(user.write(1));
  EXPECT_GT(medium_.server.call({"CLIENT", "KILL", "TYPE", "normal"}).integer, 0);
  EXPECT_TRUE(user.read(1));
}

TEST_F(RedisTierTest, a_read_only_replica_serves_reads_and_names_the_cause_for_writes) {
  TierDriver user(open());
  ASSERT_TRUE(user.write(1));
  medium_.server.call({"CONFIG", "SET", "replica-serve-stale-data", "yes"});
  medium_.server.call({"REPLICAOF", "127.0.0.1", "1"});
  EXPECT_TRUE(user.read(1));
  const Status status = user.write(2);
  EXPECT_EQ(status.kind(), StatusKind::kIo);
  EXPECT_NE(status.message().find("read-only replica"), std::string::npos) << status.to_string();
}

// ---- authentication

std::string text_of(const std::string& path) {
  std::ostringstream text;
  text << std::ifstream(path).rdbuf();
  return text.str();
}

// Returns the error of a refused open.
std::string refused(const RedisTierOptions& options) {
  try {
    (void)make_redis_tier(options);
  } catch (const ResourceError& error) {
    return error.what();
  }
  return {};
}

TEST_F(RedisTierTest, a_wrong_password_is_refused_at_start_and_not_printed) {
  medium_.server.call({"ACL", "SETUSER", "kv", "on", ">right-secret", "~*", "+@all"});
  medium_.server.call({"ACL", "SETUSER", "default", "off"});
  RedisTierOptions chosen = options();
  chosen.server.user = "kv";
  chosen.server.password = "wrong-secret";
  const std::string sentence = refused(chosen);
  EXPECT_NE(sentence.find("refuses the user name or the password"), std::string::npos) << sentence;
  EXPECT_EQ(sentence.find("secret"), std::string::npos) << sentence;
  chosen.server.password.clear();
  EXPECT_NE(refused(chosen).find("password_env"), std::string::npos);
  chosen.server.password = "right-secret";
  TierDriver user(make_redis_tier(chosen));
  ASSERT_TRUE(user.write(1));
  EXPECT_TRUE(user.read(1));
  EXPECT_EQ(text_of(medium_.server.directory() + "/log").find("secret"), std::string::npos);
}

TEST_F(RedisTierTest, a_user_without_permissions_gets_a_list_of_the_needed_ones) {
  medium_.server.call({"ACL", "SETUSER", "kv", "on", ">x", "~*", "+ping", "+info"});
  RedisTierOptions chosen = options();
  chosen.server.user = "kv";
  chosen.server.password = "x";
  EXPECT_NE(refused(chosen).find("+exists"), std::string::npos) << refused(chosen);
}

// The list in the message contains exactly the needed permissions.
TEST_F(RedisTierTest, the_listed_permissions_are_sufficient) {
  medium_.server.call({"ACL",       "SETUSER", "kv",     "on",       ">x",      "~kv_offload:*", "+ping",
                       "+select",   "+info",   "+get",   "+set",     "+exists", "+expire",       "+del",
                       "+getrange", "+strlen", "+watch", "+unwatch", "+multi",  "+exec"});
  RedisTierOptions chosen = options();
  chosen.server.user = "kv";
  chosen.server.password = "x";
  chosen.server.database = 3;
  chosen.ttl_seconds = 100;
  TierDriver user(make_redis_tier(chosen));
  ASSERT_TRUE(user.write(1));
  EXPECT_TRUE(user.read(1));
  ASSERT_TRUE(user.tier().reset());
  ASSERT_TRUE(user.write(2));
  EXPECT_TRUE(user.has(2));
  EXPECT_FALSE(user.has(3));
}

// After a refused MULTI, DEL would run at once, whatever the record is by then.
TEST_F(RedisTierTest, without_transactions_a_damaged_record_stays_and_the_next_write_replaces_it) {
  for (const char* const refused : {"-multi", "-watch", "-exec", "-del"}) {
    medium_.server.call({"ACL", "SETUSER", "kv", "reset", "on", ">x", "~*", "+@all", refused});
    RedisTierOptions chosen = options();
    chosen.server.user = "kv";
    chosen.server.password = "x";
    redis::RedisStore store(chosen);
    const auto write = [&] { return write_to(store, 1); };
    const auto read = [&] { return read_from(store, 1); };
    ASSERT_TRUE(write());
    const std::string name = medium_.name_of(key_of(1));
    medium_.damage(key_of(1));
    EXPECT_EQ(read().kind(), StatusKind::kCorrupt) << refused;
    EXPECT_EQ(medium_.server.call({"EXISTS", name}).integer, 1) << refused;
    ASSERT_TRUE(write());
    EXPECT_TRUE(read()) << refused;
    const std::size_t before = medium_.proxy.faults.seen(Verb::kWrite);
    ASSERT_TRUE(write());
    EXPECT_EQ(medium_.proxy.faults.seen(Verb::kWrite), before) << "only once";
    store.close();
  }
}

TEST_F(RedisTierTest, a_missing_database_is_named_in_the_error) {
  RedisTierOptions chosen = options();
  chosen.server.database = 4000;
  EXPECT_NE(refused(chosen).find("no database 4000"), std::string::npos) << refused(chosen);
}

// It announces no address, so its own address in the map means the socket that was used.
TEST(RedisOneNodeTest, a_one_node_cluster_behind_a_socket_is_used_once_it_has_its_slots) {
  const RedisProcess node(
      {"--port", "0", "--cluster-enabled", "yes", "--cluster-port", std::to_string(unused_port())});
  RedisTierOptions options;
  FakeClock clock;
  options.server = node.address();
  options.clock = &clock;
  options.op_timeout = seconds(60);
  TierDriver user(make_redis_tier(options));
  EXPECT_EQ(user.write(1).kind(), StatusKind::kUnavailable);
  node.call({"CLUSTER", "ADDSLOTSRANGE", "0", "16383"});
  EXPECT_TRUE(user.until([&] {
    clock.advance(seconds(1));
    user.poll();
    return user.write(1).is_ok();
  }));
  EXPECT_TRUE(user.read(1));
  // With exactly the listed permissions.
  node.call({"ACL",       "SETUSER", "kv",     "on",       ">x",      "~kv_offload:*", "+ping",
             "+select",   "+info",   "+get",   "+set",     "+exists", "+expire",       "+del",
             "+getrange", "+strlen", "+watch", "+unwatch", "+multi",  "+exec",         "+cluster|slots",
             "+asking"});
  options.server.user = "kv";
  options.server.password = "x";
  TierDriver permitted(make_redis_tier(options));
  ASSERT_TRUE(permitted.write(2));
  EXPECT_TRUE(permitted.read(1));
  options.server.database = 3;
  EXPECT_NE(refused(options).find("only has database 0"), std::string::npos) << refused(options);
}

}  // namespace
}  // namespace kv_offload
