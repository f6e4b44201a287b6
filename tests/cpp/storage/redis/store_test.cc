// What can happen to a server, and what the tier makes of it.
#include "storage/redis/store.h"

#include <gtest/gtest.h>

#include <chrono>
#include <fstream>
#include <sstream>
#include <string>

#include "storage/redis/medium.h"
#include "with_threads.h"

namespace kv_offload {
namespace {

using namespace testing;
using std::chrono::seconds;
using Verb = RedisProxy::Verb;

// An op_deadline that a test waits for. It is real time, and bounds what is to succeed as well.
constexpr Nanos kShort{seconds(2)};

class RedisTierTest : public ::testing::Test {
 protected:
  std::unique_ptr<Tier> open() { return make_redis_tier(options()); }
  RedisTierOptions options() {
    RedisTierOptions chosen = medium_.options();
    chosen.name = "redis";
    chosen.clock = &clock_;
    chosen.op_deadline = seconds(60);
    return chosen;
  }
  // As the ops of a pool see it, without threads.
  static TierOp op_of(OpKind kind, std::uint32_t number, const Row& row) {
    TierOp op;
    op.kind = kind;
    op.key = key_of(number);
    op.shards = row.shards();
    return op;
  }
  // Upkeep goes by the tier's clock.
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

TEST_F(RedisTierTest, a_record_lies_there_as_it_would_on_a_disk) {
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

TEST_F(RedisTierTest, where_nobody_else_writes_few_writes_ask_first) {
  TierDriver user(open());
  const auto questions = [&](std::uint32_t first, std::uint32_t writes) {
    const std::size_t before = medium_.proxy.faults.seen(Verb::kLocate);
    for (std::uint32_t i = 0; i < writes; ++i) EXPECT_TRUE(user.write(first + i));
    return medium_.proxy.faults.seen(Verb::kLocate) - before;
  };
  EXPECT_EQ(questions(0, AskFirst::kRun), AskFirst::kRun);
  EXPECT_EQ(questions(1000, 2 * AskFirst::kEvery), 2u);
}

TEST_F(RedisTierTest, large_records_and_many_shards_come_back_whole) {
  TierDriver user(open());
  for (const ShardSizes& sizes : {ShardSizes{8 << 20}, ShardSizes(kMaxShards, 40000)}) {
    const auto number = static_cast<std::uint32_t>(sizes.size());
    ASSERT_TRUE(user.write(number, sizes));
    EXPECT_TRUE(user.read(number, sizes));
  }
}

// Each is a value that was never written under this key; none is read, each is counted once and removed.
TEST_F(RedisTierTest, a_value_that_is_no_record_of_this_key_is_damage) {
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

TEST_F(RedisTierTest, what_pads_a_shard_is_verified_too) {
  TierDriver user(open());
  ASSERT_TRUE(user.write(1, {5000}));
  medium_.server.call(
      {"SETRANGE", medium_.name_of(key_of(1)), std::to_string(kRecordHeaderBytes + 8000), "x"});
  EXPECT_EQ(user.read(1, {5000}).kind(), StatusKind::kCorrupt);
}

// The reader found damage; before it removes it, another has written the record anew.
TEST_F(RedisTierTest, a_record_that_took_the_place_of_a_damaged_one_stays) {
  redis::RedisStore store(options());
  Row row({8192});
  row.fill(1);
  std::uint64_t moved = 0;
  ASSERT_TRUE(store.write(op_of(OpKind::kWrite, 1, row), store.epoch(), &moved));
  const std::string name = medium_.name_of(key_of(1));
  const std::string whole = medium_.server.call({"GET", name}).text;
  medium_.damage(key_of(1));
  medium_.proxy.faults.block(Verb::kOther);  // WATCH: the damaged one was read
  std::thread reader([&] {
    Row into({8192});
    std::uint64_t read = 0;
    EXPECT_EQ(store.read(op_of(OpKind::kRead, 1, into), store.epoch(), &read).kind(), StatusKind::kCorrupt);
  });
  medium_.proxy.faults.wait_for_blocked(1);
  std::string anew = whole;  // written at another time: another header
  RecordHeader header;
  EXPECT_TRUE(decode_header(std::as_bytes(std::span(whole)).first(kRecordHeaderBytes), &header));
  ++header.created_unix_nanos;
  encode_header(header, std::as_writable_bytes(std::span(anew)).first(kRecordHeaderBytes));
  medium_.server.call({"SET", name, anew});
  medium_.proxy.faults.release();
  reader.join();
  EXPECT_EQ(medium_.server.call({"GET", name}).text, anew);
}

TEST_F(RedisTierTest, a_tier_that_only_reads_changes_nothing_there) {
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
  EXPECT_TRUE(later.has(1)) << "it reset nobody else";
}

TEST_F(RedisTierTest, one_that_only_reads_finds_what_comes_after_it) {
  RedisTierOptions chosen = options();
  chosen.read_only = true;
  TierDriver user(make_redis_tier(chosen));
  EXPECT_FALSE(user.has(1));
  TierDriver writer(open());
  ASSERT_TRUE(writer.write(1));
  EXPECT_TRUE(eventually(user, [&] { return user.has(1); }));
  EXPECT_TRUE(user.read(1));
}

TEST_F(RedisTierTest, what_another_has_written_is_not_sent_again) {
  TierDriver first(open()), second(open());
  ASSERT_TRUE(first.write(1));
  const Completion again = second.finish(second.start(OpKind::kWrite, 1, {8192}));
  EXPECT_TRUE(again.status);
  EXPECT_EQ(again.bytes, 0u);
  EXPECT_EQ(medium_.proxy.faults.seen(Verb::kWrite), 1u);
}

TEST_F(RedisTierTest, a_time_to_live_is_given_and_renewed_by_who_writes_again) {
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

// ---- resets, over a server that forgets

TEST_F(RedisTierTest, who_runs_on_after_anothers_reset_is_apart_and_shares_nothing_with_it) {
  TierDriver reset(open()), other(open());
  ASSERT_TRUE(reset.tier().reset());
  reset.weights = 1;
  ASSERT_TRUE(reset.write(1));
  EXPECT_TRUE(eventually(other, [&] { return other.tier().stats().apart; }));
  EXPECT_FALSE(other.has(1));
  ASSERT_TRUE(other.write(2));
  EXPECT_FALSE(reset.has(2));
  EXPECT_FALSE(reset.tier().stats().apart);
  TierDriver later(open());
  EXPECT_FALSE(later.has(1) || later.has(2)) << "older weights, and weights of one process";
}

TEST_F(RedisTierTest, two_that_were_reset_share_nothing) {
  TierDriver one(open()), two(open());
  ASSERT_TRUE(one.tier().reset() && two.tier().reset());
  one.weights = 1;
  two.weights = 2;
  ASSERT_TRUE(one.write(1));
  EXPECT_FALSE(two.has(1));
  ASSERT_TRUE(two.write(1));
  EXPECT_TRUE(one.read(1));
}

// A count would begin anew here, and name the epoch of one that was reset a second time.
TEST_F(RedisTierTest, a_server_that_forgot_which_epochs_there_were_mixes_none) {
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

TEST_F(RedisTierTest, the_epoch_is_put_back_when_the_server_drops_it) {
  TierDriver user(open());
  ASSERT_TRUE(user.write(1));
  const std::string name = "kv_offload:" + std::string(64, '1') + ":epoch";
  medium_.server.call({"DEL", name});
  EXPECT_TRUE(eventually(user, [&] { return medium_.server.call({"EXISTS", name}).integer == 1; }));
  TierDriver later(open());
  EXPECT_TRUE(later.has(1));
}

TEST_F(RedisTierTest, what_is_no_epoch_is_replaced) {
  const std::string name = "kv_offload:" + std::string(64, '1') + ":epoch";
  for (const redis::Connection::Words& junk :
       {redis::Connection::Words{"SET", name, "../x"}, redis::Connection::Words{"RPUSH", name, "x"}}) {
    medium_.server.call({"DEL", name});
    medium_.server.call(junk);
    TierDriver user(open());
    ASSERT_TRUE(user.write(7));
    EXPECT_EQ(medium_.server.call({"GET", name}).text.size(), 32u);
  }
}

// The reset comes between what the server answers to upkeep and what upkeep makes of it.
TEST_F(RedisTierTest, an_epoch_that_a_reset_ended_is_never_put_back) {
  redis::RedisStore store(options());
  const std::string name = "kv_offload:" + std::string(64, '1') + ":epoch";
  const std::string before = medium_.server.call({"GET", name}).text;
  medium_.proxy.faults.block(Verb::kInfo);  // which is asked behind it
  std::thread upkeep([&] { store.maintain(); });
  medium_.proxy.faults.wait_for_blocked(1);
  store.forget();
  EXPECT_TRUE(store.begin_epoch());
  medium_.proxy.faults.release();
  upkeep.join();
  medium_.server.call({"DEL", name});
  store.maintain();
  EXPECT_NE(medium_.server.call({"GET", name}).text, before);
}

// A replica took over that had not heard of the reset; or another put back what it knew, when it was dropped.
TEST_F(RedisTierTest, an_epoch_that_a_reset_ended_and_that_comes_back_is_replaced_again) {
  redis::RedisStore store(options());
  const std::string name = "kv_offload:" + std::string(64, '1') + ":epoch";
  const std::string before = medium_.server.call({"GET", name}).text;
  store.forget();
  ASSERT_TRUE(store.begin_epoch());
  const std::string after = medium_.server.call({"GET", name}).text;
  medium_.server.call({"SET", name, before});
  store.maintain();
  EXPECT_EQ(medium_.server.call({"GET", name}).text, after);
  // That of another's reset stays.
  const std::string others(32, 'a');
  medium_.server.call({"SET", name, others});
  store.maintain();
  store.maintain();
  EXPECT_EQ(medium_.server.call({"GET", name}).text, others);
}

// Its upkeep had taken over what others put there; a reset is of later than all of it.
TEST_F(RedisTierTest, each_epoch_that_was_there_before_a_reset_is_replaced_again) {
  redis::RedisStore store(options());
  const std::string name = "kv_offload:" + std::string(64, '1') + ":epoch";
  const std::string first = medium_.server.call({"GET", name}).text, second(32, 'a');
  medium_.server.call({"SET", name, second});
  store.maintain();
  store.forget();
  ASSERT_TRUE(store.begin_epoch());
  const std::string after = medium_.server.call({"GET", name}).text;
  for (const std::string& before : {first, second, first}) {
    medium_.server.call({"SET", name, before});
    store.maintain();
    EXPECT_EQ(medium_.server.call({"GET", name}).text, after);
  }
}

TEST_F(RedisTierTest, upkeep_says_nothing_to_the_server_once_the_tier_closes) {
  redis::RedisStore store(options());
  const std::size_t asked = medium_.proxy.faults.seen(Verb::kEpoch);
  store.stop();
  store.maintain();
  EXPECT_EQ(medium_.proxy.faults.seen(Verb::kEpoch), asked);
}

// ---- a server that fails

TEST_F(RedisTierTest, a_full_server_refuses_writes_and_nothing_else_happens) {
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
  EXPECT_TRUE(user.tier().stats().writable) << "its own bound is no failure";
  EXPECT_TRUE(user.read(0, {256 << 10}));
  medium_.lose(key_of(0));
  EXPECT_TRUE(user.write(300));
}

TEST_F(RedisTierTest, a_server_that_evicts_stays_below_its_bound_and_what_it_dropped_is_a_miss) {
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

TEST_F(RedisTierTest,
       a_value_that_is_cut_in_the_middle_is_a_failure_and_the_next_read_is_on_another_connection) {
  TierDriver user(open());
  ASSERT_TRUE(user.write(1));
  for (const std::size_t after : {1u, 3u, 7u, 70u, 4100u, 12000u, 12296u}) {
    medium_.proxy.faults.cut(Verb::kRead, after);
    EXPECT_EQ(user.read(1).kind(), StatusKind::kIo) << after;
    medium_.proxy.faults.cut(Verb::kRead, 0);
    EXPECT_TRUE(user.read(1)) << after;
  }
  EXPECT_EQ(medium_.server.keys().size(), 1u) << "no fault of the record";
}

TEST_F(RedisTierTest, a_reply_that_comes_byte_by_byte_ends_with_the_deadline) {
  { ASSERT_TRUE(TierDriver(open()).write(1)); }
  RedisTierOptions chosen = options();
  chosen.op_deadline = kShort;
  TierDriver user(make_redis_tier(chosen));
  ASSERT_TRUE(eventually(user, [&] { return user.tier().stats().writable; }));
  medium_.proxy.faults.trickle(Verb::kRead, true);  // 12 s in all
  EXPECT_EQ(user.read(1).kind(), StatusKind::kTimeout);
  medium_.proxy.faults.trickle(Verb::kRead, false);
  EXPECT_TRUE(user.until([&] { return user.read(1).is_ok(); }));
}

TEST_F(RedisTierTest, a_server_that_is_stopped_costs_each_op_a_deadline_and_then_none) {
  { ASSERT_TRUE(TierDriver(open()).write(1)); }
  RedisTierOptions chosen = options();
  chosen.op_deadline = kShort;
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

TEST_F(RedisTierTest, a_server_that_was_killed_and_is_back_empty_is_used_again) {
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
  // Before another starts: who finds no epoch makes one.
  ASSERT_TRUE(eventually(user, [&] {
    return medium_.server.call({"KEYS", "*:epoch"}).integer == 1;
  })) << "the epoch is put back";
  TierDriver next(open());
  EXPECT_TRUE(eventually(next, [&] { return next.has(1); }));
}

TEST_F(RedisTierTest, one_that_starts_before_its_server_is_empty_until_it_answers) {
  medium_.server.kill();
  TierDriver user(open());
  EXPECT_FALSE(user.has(1));
  EXPECT_EQ(user.write(1).kind(), StatusKind::kUnavailable);
  EXPECT_FALSE(user.tier().stats().writable);
  medium_.server.start();
  EXPECT_TRUE(eventually(user, [&] { return user.tier().stats().writable; }));
  ASSERT_TRUE(user.write(1));
  EXPECT_TRUE(user.read(1));
  EXPECT_TRUE(TierDriver(open()).has(1)) << "it shares what it writes";
}

TEST_F(RedisTierTest, a_connection_that_the_server_closed_while_idle_is_no_failure) {
  RedisTierOptions chosen = options();
  chosen.server = medium_.server.address();
  TierDriver user(make_redis_tier(chosen));
  ASSERT_TRUE(user.write(1));
  EXPECT_GT(medium_.server.call({"CLIENT", "KILL", "TYPE", "normal"}).integer, 0);
  EXPECT_TRUE(user.read(1));
}

TEST_F(RedisTierTest, a_read_only_replica_is_read_and_says_why_it_is_not_written) {
  TierDriver user(open());
  ASSERT_TRUE(user.write(1));
  medium_.server.call({"CONFIG", "SET", "replica-serve-stale-data", "yes"});
  medium_.server.call({"REPLICAOF", "127.0.0.1", "1"});
  EXPECT_TRUE(user.read(1));
  const Status status = user.write(2);
  EXPECT_EQ(status.kind(), StatusKind::kIo);
  EXPECT_NE(status.message().find("read-only replica"), std::string::npos) << status.to_string();
}

// ---- who is let in

std::string text_of(const std::string& path) {
  std::ostringstream text;
  text << std::ifstream(path).rdbuf();
  return text.str();
}

// What opening says when it is refused.
std::string refused(const RedisTierOptions& options) {
  try {
    (void)make_redis_tier(options);
  } catch (const ResourceError& error) {
    return error.what();
  }
  return {};
}

TEST_F(RedisTierTest, a_wrong_password_is_refused_at_start_in_one_sentence_without_it) {
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

TEST_F(RedisTierTest, a_user_without_permissions_is_told_which_are_needed) {
  medium_.server.call({"ACL", "SETUSER", "kv", "on", ">x", "~*", "+ping", "+info"});
  RedisTierOptions chosen = options();
  chosen.server.user = "kv";
  chosen.server.password = "x";
  EXPECT_NE(refused(chosen).find("+exists"), std::string::npos) << refused(chosen);
}

// The list in the sentence is all that is needed, and no more.
TEST_F(RedisTierTest, the_permissions_that_are_named_are_enough) {
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

// Behind a MULTI that is refused, DEL would be run at once, whatever lies there now.
TEST_F(RedisTierTest, without_transactions_damage_is_found_and_stays) {
  medium_.server.call({"ACL", "SETUSER", "kv", "on", ">x", "~*", "+@all", "-multi"});
  RedisTierOptions chosen = options();
  chosen.server.user = "kv";
  chosen.server.password = "x";
  TierDriver user(make_redis_tier(chosen));
  ASSERT_TRUE(user.write(1) && user.write(2));
  const std::string name = medium_.name_of(key_of(1));
  medium_.damage(key_of(1));
  EXPECT_EQ(user.read(1).kind(), StatusKind::kCorrupt);
  EXPECT_EQ(medium_.server.call({"EXISTS", name}).integer, 1);
  EXPECT_TRUE(user.read(2));
  EXPECT_TRUE(user.write(3));
}

TEST_F(RedisTierTest, a_database_that_is_not_there_is_named) {
  RedisTierOptions chosen = options();
  chosen.server.database = 4000;
  EXPECT_NE(refused(chosen).find("no database 4000"), std::string::npos) << refused(chosen);
}

// It announces no address, so that what it says of itself means the socket that it was asked on.
TEST(RedisOneNodeTest, a_cluster_of_one_node_behind_a_socket_is_used_once_it_has_its_slots) {
  const RedisProcess node(
      {"--port", "0", "--cluster-enabled", "yes", "--cluster-port", std::to_string(unused_port())});
  RedisTierOptions options;
  FakeClock clock;
  options.server = node.address();
  options.clock = &clock;
  options.op_deadline = seconds(60);
  TierDriver user(make_redis_tier(options));
  EXPECT_EQ(user.write(1).kind(), StatusKind::kUnavailable);
  node.call({"CLUSTER", "ADDSLOTSRANGE", "0", "16383"});
  EXPECT_TRUE(user.until([&] {
    clock.advance(seconds(1));
    user.poll();
    return user.write(1).is_ok();
  }));
  EXPECT_TRUE(user.read(1));
  // With the permissions that are named, and no more.
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
