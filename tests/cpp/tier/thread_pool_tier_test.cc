// SPDX-License-Identifier: Apache-2.0
// ThreadPoolTier over a store without a catalog: batched presence lookups, upkeep, failures.
#include "tier/thread_pool_tier.h"

#include <gtest/gtest.h>

#include <atomic>
#include <cerrno>
#include <functional>
#include <list>
#include <new>
#include <thread>

#include "out_of_memory.h"
#include "step_watch.h"
#include "tier/circuit_breaker.h"
#include "tier/io_pool.h"
#include "tier/loopback_server.h"
#include "tier/memory_store.h"
#include "tier/presence_lookup.h"
#include "tier/tier_driver.h"
#include "tier/tier_runtime.h"

namespace kv_offload {
namespace {

using namespace testing;
using std::chrono::seconds;
using Verb = MemoryServer::Verb;

class ThreadPoolTierTest : public ::testing::Test {
 protected:
  ThreadPoolTierOptions options() {
    ThreadPoolTierOptions options;
    options.name = "memory";
    options.clock = &clock_;
    return options;
  }
  std::unique_ptr<Tier> open(const ThreadPoolTierOptions& options, std::size_t keys_per_locate = 64) {
    return make_thread_pool_tier(std::make_unique<MemoryStore>(server_, NamespaceId{}, keys_per_locate),
                                 options);
  }
  std::unique_ptr<Tier> open() { return open(options()); }
  // The caller runs the pool's ops one by one.
  std::unique_ptr<Tier> open_by_hand(IoPool** pool, std::size_t keys_per_locate = 64) {
    ThreadPoolTierOptions by_hand = options();
    by_hand.manual_pool = pool;
    return open(by_hand, keys_per_locate);
  }
  static std::vector<ChunkKey> keys(std::uint32_t count) {
    std::vector<ChunkKey> keys;
    for (std::uint32_t i = 0; i < count; ++i) keys.push_back(key_of(i));
    return keys;
  }
  static void run_reads(IoPool* pool) {
    while (const auto next = pool->begin_next(Lane::kRead)) next();
  }
  void start_read(Tier& tier, OpId id, Nanos deadline = Nanos{0}) {
    start(tier, OpKind::kRead, id, deadline);
  }
  void start(Tier& tier, OpKind kind, OpId id, Nanos deadline = Nanos{0}) {
    std::vector<TierOp> ops(1);
    ops[0].id = id;
    ops[0].kind = kind;
    ops[0].key = key_of(1);
    ops[0].shards = {row_.span()};
    ops[0].deadline = deadline;
    tier.submit(std::move(ops));
  }
  // Runs all queued reads and returns how the started read ended.
  static StatusKind end_read(Tier& tier, IoPool* pool) {
    run_reads(pool);
    std::vector<Completion> done;
    std::vector<TierRemoval> removals;
    tier.poll(&done, &removals);
    EXPECT_EQ(done.size(), 1u);
    return done.empty() ? StatusKind::kDevice : done.front().status.kind();
  }

  FakeClock clock_;
  AlignedBuffer row_{4096};
  const std::shared_ptr<MemoryServer> server_ = std::make_shared<MemoryServer>();
};

TEST_F(ThreadPoolTierTest, the_keys_of_a_prompt_are_looked_up_in_one_batch_and_in_order) {
  { ASSERT_TRUE(TierDriver(open()).write(3)); }
  IoPool* pool = nullptr;
  const std::unique_ptr<Tier> tier = open_by_hand(&pool);
  tier->prefetch_presence(keys(10), KeyOrder::kNone);
  tier->prefetch_presence(keys(10), KeyOrder::kNone);  // again, while the lookup is pending
  run_reads(pool);
  ASSERT_EQ(server_->asked().size(), 1u);
  EXPECT_EQ(server_->asked()[0], keys(10));
  EXPECT_EQ(tier->contains(key_of(3)), Presence::kPresent);
  EXPECT_EQ(tier->contains(key_of(4)), Presence::kAbsent);
  clock_.advance(options().absent_for);
  EXPECT_EQ(tier->contains(key_of(3)), Presence::kPresent);
  EXPECT_EQ(tier->contains(key_of(4)), Presence::kStaleMiss) << "another server may have written it";
  tier->prefetch_presence(keys(10), KeyOrder::kNone);
  run_reads(pool);
  ASSERT_EQ(server_->asked().size(), 2u);
  EXPECT_EQ(server_->asked()[1].size(), 9u) << "all keys but the present one";
}

TEST_F(ThreadPoolTierTest, more_keys_than_one_batch_are_looked_up_concurrently) {
  IoPool* pool = nullptr;
  const std::unique_ptr<Tier> tier = open_by_hand(&pool, 4);
  tier->prefetch_presence(keys(10), KeyOrder::kNone);
  run_reads(pool);
  std::vector<std::size_t> sizes;
  for (const auto& asked : server_->asked()) sizes.push_back(asked.size());
  EXPECT_EQ(sizes, (std::vector<std::size_t>{4, 4, 2}));
  EXPECT_EQ(tier->contains(key_of(9)), Presence::kAbsent);
}

// As in each step in which the request waits.
TEST_F(ThreadPoolTierTest, a_prompt_that_is_submitted_again_is_not_queued_twice) {
  IoPool* pool = nullptr;
  const std::unique_ptr<Tier> tier = open_by_hand(&pool, 4);
  for (int step = 0; step < 3; ++step) tier->prefetch_presence(keys(10), KeyOrder::kPrefix);
  EXPECT_EQ(pool->depth(Lane::kRead).queued, 1u);
  tier->prefetch_presence(keys(12), KeyOrder::kPrefix);
  EXPECT_EQ(pool->depth(Lane::kRead).queued, 2u) << "a different prompt";
  run_reads(pool);
  std::size_t asked = 0;
  for (const auto& question : server_->asked()) asked += question.size();
  EXPECT_EQ(asked, 12u) << "only the keys that the first prompt does not cover";
  clock_.advance(options().absent_for);
  tier->prefetch_presence(keys(10), KeyOrder::kPrefix);
  EXPECT_EQ(pool->depth(Lane::kRead).queued, 1u) << "the first lookup has ended";
  run_reads(pool);
}

// A new lookup waits for its own answer: earlier knowledge is not reused, however late a thread runs it.
TEST_F(ThreadPoolTierTest, an_absent_key_becomes_unknown_once_its_absence_is_to_be_forgotten) {
  IoPool* pool = nullptr;
  const std::unique_ptr<Tier> tier = open_by_hand(&pool);
  tier->prefetch_presence(keys(2), KeyOrder::kPrefix);
  run_reads(pool);
  tier->forget_miss(key_of(0));
  EXPECT_EQ(tier->contains(key_of(0)), Presence::kAbsent) << "its absence has not expired";
  clock_.advance(options().absent_for);
  tier->forget_miss(key_of(0));
  EXPECT_EQ(tier->contains(key_of(0)), Presence::kUnknown);
  EXPECT_EQ(tier->contains(key_of(1)), Presence::kStaleMiss);
  tier->prefetch_presence(keys(1), KeyOrder::kPrefix);
  EXPECT_EQ(tier->contains(key_of(0)), Presence::kUnknown);
  run_reads(pool);
  EXPECT_EQ(tier->contains(key_of(0)), Presence::kAbsent);
}

TEST_F(ThreadPoolTierTest, a_prompt_is_queued_again_when_its_first_answers_expired_and_its_last_are_pending) {
  IoPool* pool = nullptr;
  const std::unique_ptr<Tier> tier = open_by_hand(&pool, 4);
  tier->prefetch_presence(keys(8), KeyOrder::kPrefix);
  pool->begin_next(Lane::kRead)();
  EXPECT_EQ(tier->contains(key_of(3)), Presence::kAbsent);
  EXPECT_EQ(tier->contains(key_of(4)), Presence::kLookupPending);
  clock_.advance(options().absent_for);
  tier->prefetch_presence(keys(8), KeyOrder::kPrefix);
  run_reads(pool);
  EXPECT_EQ(tier->contains(key_of(3)), Presence::kAbsent) << "looked up twice";
  EXPECT_EQ(server_->asked().size(), 3u);
}

// Mirrors the previous test: the first answer is pending, and later ones have expired.
TEST_F(ThreadPoolTierTest, a_prompt_is_queued_again_when_its_last_answers_expired_and_its_first_are_pending) {
  IoPool* pool = nullptr;
  const std::unique_ptr<Tier> tier = open_by_hand(&pool, 4);
  // Another prompt looks up the first keys, in a batch that no thread has started.
  std::vector<ChunkKey> another;
  for (std::uint32_t i = 100; i < 104; ++i) another.push_back(key_of(i));
  for (std::uint32_t i = 0; i < 4; ++i) another.push_back(key_of(i));
  tier->prefetch_presence(another, KeyOrder::kNone);
  pool->begin_next(Lane::kRead)();
  const auto first = pool->begin_next(Lane::kRead);  // 0..3, slow
  ASSERT_TRUE(first);
  tier->prefetch_presence(keys(12), KeyOrder::kPrefix);
  pool->begin_next(Lane::kRead)();                    // 4..7
  const auto second = pool->begin_next(Lane::kRead);  // 8..11, slow
  ASSERT_TRUE(second);
  EXPECT_EQ(tier->contains(key_of(4)), Presence::kAbsent);
  EXPECT_EQ(tier->contains(key_of(0)), Presence::kLookupPending);
  clock_.advance(options().absent_for);
  tier->prefetch_presence(keys(12), KeyOrder::kPrefix);
  run_reads(pool);
  EXPECT_EQ(tier->contains(key_of(4)), Presence::kAbsent) << "it was looked up again";
  first();
  second();
}

TEST_F(ThreadPoolTierTest, two_prompts_with_equal_first_and_last_keys_are_both_looked_up) {
  IoPool* pool = nullptr;
  const std::unique_ptr<Tier> tier = open_by_hand(&pool);
  tier->prefetch_presence({key_of(1), key_of(2), key_of(3)}, KeyOrder::kNone);
  tier->prefetch_presence({key_of(1), key_of(4), key_of(3)}, KeyOrder::kNone);
  run_reads(pool);
  EXPECT_EQ(tier->contains(key_of(4)), Presence::kAbsent);
}

// A waiting request submits its keys in each step, except those with a pending lookup.
TEST_F(ThreadPoolTierTest, pending_lookups_are_distinguished_from_unknown_keys) {
  IoPool* pool = nullptr;
  const std::unique_ptr<Tier> tier = open_by_hand(&pool, 4);
  tier->prefetch_presence(keys(12), KeyOrder::kPrefix);
  EXPECT_EQ(tier->contains(key_of(3)), Presence::kUnknown) << "no thread has started it";
  pool->begin_next(Lane::kRead)();
  EXPECT_EQ(tier->contains(key_of(3)), Presence::kAbsent);
  for (const std::uint32_t number : {4u, 11u})
    EXPECT_EQ(tier->contains(key_of(number)), Presence::kLookupPending);
  EXPECT_EQ(tier->contains(key_of(12)), Presence::kUnknown);
  run_reads(pool);
  EXPECT_EQ(tier->contains(key_of(11)), Presence::kAbsent);
}

// A thread may look up the first of the prompt's keys for another prompt before it starts this one.
TEST_F(ThreadPoolTierTest, the_tail_of_a_queued_prompt_is_not_queued_again) {
  IoPool* pool = nullptr;
  const std::unique_ptr<Tier> tier = open_by_hand(&pool, 4);
  tier->prefetch_presence(keys(12), KeyOrder::kPrefix);
  const auto all = keys(12);
  tier->prefetch_presence({all.begin() + 4, all.end()}, KeyOrder::kPrefix);
  EXPECT_EQ(pool->depth(Lane::kRead).queued, 1u);
  tier->prefetch_presence({all.begin(), all.begin() + 4}, KeyOrder::kPrefix);
  EXPECT_EQ(pool->depth(Lane::kRead).queued, 2u)
      << "it has another last key: searching for it would take too long";
}

// Enough prompts that ended ones are swept while others are live.
TEST_F(ThreadPoolTierTest, each_of_many_prompts_is_queued_once_while_others_have_ended) {
  IoPool* pool = nullptr;
  const std::unique_ptr<Tier> tier = open_by_hand(&pool);
  for (std::uint32_t round = 0; round < 10; ++round) {
    for (int step = 0; step < 2; ++step) {
      for (std::uint32_t i = 0; i < 50; ++i)
        tier->prefetch_presence({key_of(100 * round + i)}, KeyOrder::kPrefix);
      EXPECT_EQ(pool->depth(Lane::kRead).queued, 50u);
    }
    run_reads(pool);
  }
  EXPECT_EQ(server_->asked().size(), 500u);
}

// In a stuck device the lookup would hold a thread.
TEST_F(ThreadPoolTierTest, a_lookup_admitted_before_the_device_got_stuck_is_not_sent) {
  IoPool* pool = nullptr;
  const std::unique_ptr<Tier> tier = open_by_hand(&pool, 1);
  tier->prefetch_presence(keys(3), KeyOrder::kNone);
  pool->begin_next(Lane::kRead)();
  const auto stuck = pool->begin_next(Lane::kRead), later = pool->begin_next(Lane::kRead);
  ASSERT_TRUE(stuck && later);
  clock_.advance(options().op_timeout + seconds(1));
  std::vector<Completion> done;
  std::vector<TierRemoval> removals;
  tier->poll(&done, &removals);
  EXPECT_FALSE(tier->stats().readable);
  const std::size_t asked = server_->asked().size();
  later();
  EXPECT_EQ(server_->asked().size(), asked);
  stuck();
}

TEST_F(ThreadPoolTierTest, a_record_written_by_another_is_found_by_a_later_lookup) {
  TierDriver a(open()), b(open());
  EXPECT_FALSE(b.has(1));
  ASSERT_TRUE(a.write(1));
  EXPECT_FALSE(b.has(1)) << "until its absence expires";
  clock_.advance(options().absent_for);
  EXPECT_TRUE(b.has(1));
  EXPECT_TRUE(b.read(1));
}

TEST_F(ThreadPoolTierTest, an_answer_that_arrives_after_a_reset_does_not_count) {
  { ASSERT_TRUE(TierDriver(open()).write(1)); }
  TierDriver user(open());
  server_->block(Verb::kLocate);
  user.tier().prefetch_presence({key_of(1)}, KeyOrder::kNone);
  server_->wait_for_blocked();
  ASSERT_TRUE(user.tier().reset());
  server_->release();
  EXPECT_FALSE(user.has(1));
}

TEST_F(ThreadPoolTierTest, failing_lookups_switch_the_tier_off_for_a_time) {
  for (const StatusKind kind : {StatusKind::kIo, StatusKind::kTimeout}) {
    { ASSERT_TRUE(TierDriver(open()).write(1)); }
    TierDriver user(open());
    server_->fail(Verb::kLocate, kind);
    for (std::uint32_t i = 0; i < CircuitBreaker::kFailuresToTrip; ++i) EXPECT_FALSE(user.has(100 + i));
    EXPECT_FALSE(user.tier().stats().readable) << "after as many failures as for reads";
    EXPECT_EQ(user.tier().contains(key_of(1)), Presence::kLookupFailed);
    server_->fail(Verb::kLocate, StatusKind::kOk);
    clock_.advance(seconds(2));
    EXPECT_TRUE(user.has(1));
    // The answer is known a moment before the lookup returns its probe slot.
    EXPECT_TRUE(user.until([&] { return user.read(1).is_ok(); }));
    EXPECT_TRUE(user.tier().stats().readable);
    EXPECT_EQ(user.tier().stats().breaker_trips, 1u);
  }
}

TEST_F(ThreadPoolTierTest, occasional_lookup_failures_do_not_switch_reads_off) {
  TierDriver user(open());
  for (std::uint32_t i = 0; i < 2 * CircuitBreaker::kFailuresToTrip; ++i) {
    server_->fail(Verb::kLocate, i % 2 == 0 ? StatusKind::kIo : StatusKind::kOk);
    EXPECT_FALSE(user.has(100 + i));
  }
  EXPECT_EQ(user.tier().stats().breaker_trips, 0u);
}

TEST_F(ThreadPoolTierTest, files_removed_by_other_programs_do_not_switch_writes_off) {
  for (const int error_number : {ENOENT, EIO}) {
    TierDriver user(open());
    server_->fail(Verb::kWrite, StatusKind::kIo, error_number);
    for (std::uint32_t i = 0; i < 2 * CircuitBreaker::kFailuresToTrip; ++i) EXPECT_FALSE(user.write(i));
    EXPECT_EQ(user.tier().stats().writable, error_number == ENOENT);
    server_->fail(Verb::kWrite, StatusKind::kOk);
  }
}

TEST_F(ThreadPoolTierTest, lookups_enable_a_server_again_before_there_is_anything_to_read) {
  IoPool* pool = nullptr;
  const std::unique_ptr<Tier> tier = open_by_hand(&pool, 1);
  const auto ask = [&](std::vector<ChunkKey> keys) {
    tier->prefetch_presence(std::move(keys), KeyOrder::kNone);
    run_reads(pool);
  };
  server_->fail(Verb::kLocate, StatusKind::kIo);
  for (std::uint32_t i = 0; i < CircuitBreaker::kFailuresToTrip; ++i) ask({key_of(100 + i)});
  EXPECT_FALSE(tier->stats().readable);
  server_->fail(Verb::kLocate, StatusKind::kOk);
  clock_.advance(seconds(2));
  ask({key_of(200)});
  const std::size_t asked = server_->asked().size();
  ask({key_of(300), key_of(301), key_of(302)});  // a tier that is off would admit only one
  EXPECT_EQ(server_->asked().size(), asked + 3);
}

// One lookup is in flight, and another follows it.
TEST_F(ThreadPoolTierTest, a_record_gets_its_own_probe_alongside_lookups) {
  IoPool* pool = nullptr;
  const std::unique_ptr<Tier> tier = open_by_hand(&pool, 1);
  server_->fail(Verb::kRead, StatusKind::kIo);
  const auto read = [&](OpId id) {
    start_read(*tier, id);
    return end_read(*tier, pool);
  };
  for (OpId id = 1; id <= CircuitBreaker::kFailuresToTrip; ++id) EXPECT_EQ(read(id), StatusKind::kIo);
  EXPECT_EQ(read(20), StatusKind::kUnavailable);
  clock_.advance(seconds(2));
  server_->block(Verb::kLocate);
  tier->prefetch_presence({key_of(2)}, KeyOrder::kNone);
  std::thread asking(pool->begin_next(Lane::kRead));
  server_->wait_for_blocked();
  EXPECT_EQ(read(21), StatusKind::kIo) << "it is tried";
  server_->release();
  asking.join();
}

// Reads work again and lookups do not: the separate probe of records must count.
TEST_F(ThreadPoolTierTest, a_successful_read_ends_the_cool_down_although_a_concurrent_lookup_fails) {
  { ASSERT_TRUE(TierDriver(open()).write(1, {4096})); }
  IoPool* pool = nullptr;
  const std::unique_ptr<Tier> tier = open_by_hand(&pool, 1);
  server_->fail(Verb::kRead, StatusKind::kIo);
  for (OpId id = 1; id <= CircuitBreaker::kFailuresToTrip; ++id) {
    start_read(*tier, id);
    EXPECT_EQ(end_read(*tier, pool), StatusKind::kIo);
  }
  server_->fail(Verb::kRead, StatusKind::kOk);
  server_->fail(Verb::kLocate, StatusKind::kIo);
  clock_.advance(seconds(2));
  start_read(*tier, 20);
  tier->prefetch_presence({key_of(2)}, KeyOrder::kNone);  // urgent: it runs first, and fails
  EXPECT_EQ(end_read(*tier, pool), StatusKind::kOk) << "the record was read";
  start_read(*tier, 21);
  EXPECT_EQ(end_read(*tier, pool), StatusKind::kOk) << "reads are on";
}

TEST_F(ThreadPoolTierTest, a_failed_lookup_from_before_a_reset_does_not_affect_later_ones) {
  IoPool* pool = nullptr;
  const std::unique_ptr<Tier> tier = open_by_hand(&pool, 1);
  const auto begin_to_ask = [&] {
    tier->prefetch_presence({key_of(1), key_of(2)}, KeyOrder::kNone);
    pool->begin_next(Lane::kRead)();  // looks up the first key and passes the other to another thread
    EXPECT_EQ(tier->contains(key_of(2)), Presence::kLookupPending);
    return pool->begin_next(Lane::kRead);
  };
  const auto older = begin_to_ask();
  ASSERT_TRUE(tier->reset());
  const auto newer = begin_to_ask();
  ASSERT_TRUE(newer) << "a lookup from before the reset was reused";
  server_->fail(Verb::kLocate, StatusKind::kIo);
  older();
  EXPECT_EQ(tier->contains(key_of(2)), Presence::kLookupPending) << "its lookup is pending";
  server_->fail(Verb::kLocate, StatusKind::kOk);
  newer();
  EXPECT_EQ(tier->contains(key_of(2)), Presence::kAbsent);
}

TEST_F(ThreadPoolTierTest, a_prompt_queued_before_a_reset_and_started_after_it_looks_up_nothing) {
  IoPool* pool = nullptr;
  const std::unique_ptr<Tier> tier = open_by_hand(&pool);
  tier->prefetch_presence({key_of(1)}, KeyOrder::kNone);
  ASSERT_TRUE(tier->reset());
  tier->prefetch_presence({key_of(1)}, KeyOrder::kNone);
  pool->begin_next(Lane::kRead)();
  EXPECT_TRUE(server_->asked().empty());
  const auto newer = pool->begin_next(Lane::kRead);
  ASSERT_TRUE(newer) << "it was mistaken for the lookup before the reset";
  newer();
  EXPECT_EQ(tier->contains(key_of(1)), Presence::kAbsent);
}

TEST_F(ThreadPoolTierTest, after_a_reset_a_tier_has_its_own_writes_and_nothing_of_others) {
  TierDriver user(open());
  EXPECT_TRUE(user.tier().stats().is_shared);
  ASSERT_TRUE(user.tier().reset());
  EXPECT_FALSE(user.tier().stats().is_shared);
  EXPECT_TRUE(user.tier().stats().readable);
}

TEST_F(ThreadPoolTierTest, successful_lookups_do_not_make_up_for_failed_reads) {
  TierDriver user(open());
  ASSERT_TRUE(user.write(1));
  server_->fail(Verb::kRead, StatusKind::kIo);
  for (std::uint32_t i = 0; i < CircuitBreaker::kFailuresToTrip; ++i) {
    EXPECT_FALSE(user.has(100 + i));
    EXPECT_EQ(user.read(1).kind(), StatusKind::kIo);
  }
  EXPECT_EQ(user.tier().stats().breaker_trips, 1u);
  clock_.advance(seconds(2));
  EXPECT_FALSE(user.has(200));
  // The answer is known a moment before the lookup returns its probe slot.
  EXPECT_TRUE(user.until([&] { return user.read(1).kind() == StatusKind::kIo; }))
      << "it is admitted: the lookup left the probe slot to it";
  EXPECT_EQ(user.tier().stats().breaker_trips, 2u);
}

TEST_F(ThreadPoolTierTest, a_stuck_lookup_switches_the_tier_off) {
  TierDriver user(open());
  server_->block(Verb::kLocate);
  user.tier().prefetch_presence({key_of(1)}, KeyOrder::kNone);
  server_->wait_for_blocked();
  EXPECT_EQ(user.tier().contains(key_of(1)), Presence::kLookupPending);
  clock_.advance(options().op_timeout + seconds(1));
  user.poll();
  EXPECT_FALSE(user.tier().stats().readable);
  EXPECT_EQ(user.tier().contains(key_of(1)), Presence::kLookupFailed);
  server_->release();
}

TEST_F(ThreadPoolTierTest, a_stuck_write_switches_reads_off_unless_a_read_succeeded_since) {
  ASSERT_TRUE(TierDriver(open()).write(2));
  {
    IoPool* pool = nullptr;
    const std::unique_ptr<Tier> before = open_by_hand(&pool);
    start(*before, OpKind::kWrite, 1);
    pool->begin_next(Lane::kWrite)();
  }
  enum class Answer { kSince, kNone, kBefore };
  for (const Answer answer : {Answer::kSince, Answer::kNone, Answer::kBefore}) {
    const bool since = answer == Answer::kSince;
    IoPool* pool = nullptr;
    const std::unique_ptr<Tier> tier = open_by_hand(&pool);
    if (answer == Answer::kBefore) start_read(*tier, 2);
    start(*tier, OpKind::kWrite, 1);
    const auto stuck = pool->begin_next(Lane::kWrite);
    run_reads(pool);  // no thread polls, as in an idle engine
    clock_.advance(options().op_timeout - seconds(1));
    if (since) {
      start_read(*tier, 2);
      EXPECT_EQ(end_read(*tier, pool), StatusKind::kOk);
    }
    tier->prefetch_presence({key_of(2)}, KeyOrder::kNone);
    start_read(*tier, 3);
    clock_.advance(seconds(2));
    std::vector<Completion> done;
    std::vector<TierRemoval> removals;
    tier->poll(&done, &removals);
    EXPECT_EQ(done.empty(), since) << "the queued read";
    EXPECT_EQ(tier->stats().readable, since);
    EXPECT_FALSE(tier->stats().writable);
    EXPECT_EQ(tier->contains(key_of(2)) == Presence::kLookupFailed, !since);
    run_reads(pool);
    EXPECT_EQ(tier->contains(key_of(2)) == Presence::kPresent, since);
    stuck();
  }
}

// A stuck lookup's thread may never return, and its late answer is no newer than that of the next lookup.
TEST_F(ThreadPoolTierTest, the_keys_of_a_stuck_lookup_are_looked_up_again_once_the_tier_is_on) {
  { ASSERT_TRUE(TierDriver(open()).write(1)); }
  IoPool* pool = nullptr;
  const std::unique_ptr<Tier> tier = open_by_hand(&pool, 1);
  tier->prefetch_presence(keys(2), KeyOrder::kNone);
  pool->begin_next(Lane::kRead)();
  const auto stuck = pool->begin_next(Lane::kRead);  // looks up key 1
  ASSERT_TRUE(stuck);
  clock_.advance(options().op_timeout + seconds(1));
  std::vector<Completion> done;
  std::vector<TierRemoval> removals;
  tier->poll(&done, &removals);
  EXPECT_EQ(tier->contains(key_of(1)), Presence::kLookupFailed);
  clock_.advance(seconds(2));
  EXPECT_EQ(tier->contains(key_of(1)), Presence::kUnknown);
  tier->forget_miss(key_of(1));
  tier->prefetch_presence({key_of(1)}, KeyOrder::kNone);
  const auto newer = pool->begin_next(Lane::kRead);
  ASSERT_TRUE(newer) << "it was mistaken for the stuck one";
  newer();
  EXPECT_EQ(tier->contains(key_of(1)), Presence::kPresent);
  EXPECT_TRUE(tier->stats().readable);
  stuck();
  EXPECT_EQ(tier->contains(key_of(1)), Presence::kPresent);
}

TEST_F(ThreadPoolTierTest, the_end_of_a_stuck_lookup_is_not_that_of_a_newer_one) {
  { ASSERT_TRUE(TierDriver(open()).write(1, {4096})); }
  IoPool* pool = nullptr;
  const std::unique_ptr<Tier> tier = open_by_hand(&pool, 1);
  const auto ask = [&] {
    tier->prefetch_presence({key_of(2), key_of(3)}, KeyOrder::kNone);
    pool->begin_next(Lane::kRead)();
    return pool->begin_next(Lane::kRead);  // looks up key 3
  };
  const auto stuck = ask();
  clock_.advance(options().op_timeout + seconds(1));
  std::vector<Completion> done;
  std::vector<TierRemoval> removals;
  tier->poll(&done, &removals);
  clock_.advance(seconds(2));
  start_read(*tier, 1);
  EXPECT_EQ(end_read(*tier, pool), StatusKind::kOk) << "the tier is on again";
  const auto newer = ask();
  ASSERT_TRUE(stuck && newer);
  stuck();
  EXPECT_EQ(tier->contains(key_of(3)), Presence::kLookupPending) << "the newer lookup is pending";
  newer();
  EXPECT_EQ(tier->contains(key_of(3)), Presence::kAbsent);
}

TEST_F(ThreadPoolTierTest, a_batch_that_was_not_admitted_is_looked_up_again_alongside_a_slow_one) {
  IoPool* pool = nullptr;
  const std::unique_ptr<Tier> tier = open_by_hand(&pool, 1);
  server_->fail(Verb::kLocate, StatusKind::kIo);
  for (std::uint32_t i = 0; i < CircuitBreaker::kFailuresToTrip; ++i) {
    tier->prefetch_presence({key_of(100 + i)}, KeyOrder::kNone);
    run_reads(pool);
  }
  EXPECT_FALSE(tier->stats().readable);
  server_->fail(Verb::kLocate, StatusKind::kOk);
  clock_.advance(seconds(2));
  server_->block(Verb::kLocate);
  tier->prefetch_presence({key_of(1), key_of(2)}, KeyOrder::kNone);
  std::thread asking(pool->begin_next(Lane::kRead));  // 1 is the slow probe; 2 is abandoned
  server_->wait_for_blocked();
  EXPECT_EQ(tier->contains(key_of(2)), Presence::kLookupFailed);
  clock_.advance(options().absent_for);
  EXPECT_EQ(tier->contains(key_of(2)), Presence::kUnknown);
  tier->forget_miss(key_of(2));
  tier->prefetch_presence({key_of(2)}, KeyOrder::kNone);
  EXPECT_EQ(pool->depth(Lane::kRead).queued, 1u) << "no lookup is pending for it";
  if (const auto next = pool->begin_next(Lane::kRead)) next();
  EXPECT_EQ(tier->contains(key_of(2)), Presence::kLookupFailed)
      << "it stays unknown while the other lookup is slow";
  server_->release();
  asking.join();
}

TEST_F(ThreadPoolTierTest, prompts_with_equal_first_keys_are_each_queued_once_until_started) {
  IoPool* pool = nullptr;
  const std::unique_ptr<Tier> tier = open_by_hand(&pool, 4);
  std::vector<std::vector<ChunkKey>> prompts(3);
  for (std::uint32_t prompt = 0; prompt < prompts.size(); ++prompt) {
    for (std::uint32_t i = 0; i < 8; ++i) prompts[prompt].push_back(key_of(i < 3 ? i : 100 * prompt + i));
  }
  for (int step = 0; step < 3; ++step) {
    for (const auto& prompt : prompts) tier->prefetch_presence(prompt, KeyOrder::kPrefix);
    EXPECT_EQ(pool->depth(Lane::kRead).queued, prompts.size()) << "none has started";
  }
  run_reads(pool);
  for (const auto& prompt : prompts) {
    for (const ChunkKey& key : prompt) EXPECT_EQ(tier->contains(key), Presence::kAbsent);
  }
}

TEST_F(ThreadPoolTierTest, no_lookup_stays_pending_forever_when_memory_runs_out) {
  bool failed = true;
  for (unsigned after = 0; failed; ++after) {
    IoPool* pool = nullptr;
    const std::unique_ptr<Tier> tier = open_by_hand(&pool, 1);
    tier->prefetch_presence(keys(7), KeyOrder::kNone);
    const auto begin = pool->begin_next(Lane::kRead);
    {
      const FailingAllocation one(after);
      begin();
      failed = one.came();
    }
    run_reads(pool);
    clock_.advance(seconds(2));
    for (const ChunkKey& key : keys(7)) {
      tier->forget_miss(key);
      tier->prefetch_presence({key}, KeyOrder::kNone);
      run_reads(pool);
      EXPECT_EQ(tier->contains(key), Presence::kAbsent) << after;
    }
    EXPECT_EQ(tier->stats().breaker_trips, 0u) << after;
  }
}

TEST_F(ThreadPoolTierTest, an_op_ends_once_when_memory_runs_out) {
  { ASSERT_TRUE(TierDriver(open()).write(1)); }
  const std::function<void(Tier&)> befores[] = {
      [](Tier&) {}, [](Tier& tier) { (void)tier.reset(); },
      [&](Tier&) { clock_.advance(seconds(2)); },  // too late to start
  };
  unsigned failures = 0;
  for (const auto& before : befores) {
    bool failed = true;
    for (unsigned after = 0; failed; ++after, failures += failed) {
      IoPool* pool = nullptr;
      const std::unique_ptr<Tier> tier = open_by_hand(&pool);
      start_read(*tier, 1, clock_.now() + seconds(1));
      before(*tier);
      {
        const auto begin = pool->begin_next(Lane::kRead);
        const FailingAllocation one(after);
        begin();
        failed = one.came();
      }
      (void)end_read(*tier, pool);
    }
  }
  EXPECT_GT(failures, 3u);
}

TEST_F(ThreadPoolTierTest, a_probe_whose_submission_runs_out_of_memory_is_not_lost) {
  unsigned failures = 0;
  for (bool failed = true; failed;) {
    IoPool* pool = nullptr;
    const std::unique_ptr<Tier> tier = open_by_hand(&pool);
    server_->fail(MemoryServer::Verb::kRead, StatusKind::kIo);
    for (OpId id = 1; id <= CircuitBreaker::kFailuresToTrip; ++id) {
      start_read(*tier, id);
      EXPECT_EQ(end_read(*tier, pool), StatusKind::kIo);
    }
    start_read(*tier, 100);
    EXPECT_EQ(end_read(*tier, pool), StatusKind::kUnavailable) << "it is cooling down";
    server_->fail(MemoryServer::Verb::kRead, StatusKind::kOk);
    clock_.advance(seconds(2));
    bool submitted = true;
    {
      const FailingAllocation one(failures);
      try {
        start_read(*tier, 101);
      } catch (const std::bad_alloc&) {
        submitted = false;
      }
      failed = one.came();
    }
    failures += failed;
    if (!submitted) start_read(*tier, 102);
    EXPECT_EQ(end_read(*tier, pool), StatusKind::kNotFound) << failures << ": the device works again";
    EXPECT_EQ(tier->estimate_read_seconds(0), 0) << "no bytes wait";
  }
  EXPECT_GT(failures, 4u);
}

// I/O threads that end an op wait while a poll holds the lock.
TEST(TierRuntimeTest, a_poll_takes_completions_in_one_short_lock_hold) {
  constexpr OpId kOps = 10'000;
  const auto server = std::make_shared<MemoryServer>();
  ThreadPoolTierOptions options;
  options.name = "memory";
  TierRuntime shared(std::make_unique<MemoryStore>(server, NamespaceId{}, 64), options);
  const auto complete = [&](OpId id) {
    std::list<Completion> ended(1);
    ended.front().id = id;
    shared.complete(std::move(ended));
  };
  for (OpId id = 1; id <= kOps; ++id) complete(id);
  std::vector<Completion> taken;
  {
    const FailingAllocation one(0);
    EXPECT_THROW(shared.take_completions(&taken), std::bad_alloc);
  }
  EXPECT_TRUE(taken.empty());
  complete(kOps + 1);
  const StepWatch watch;
  const std::uint64_t steps = steps_of([&] { shared.take_completions(&taken); });
  ASSERT_EQ(taken.size(), kOps + 1);
  for (OpId id = 1; id <= kOps + 1; ++id) EXPECT_EQ(taken[id - 1].id, id);
  EXPECT_GE(steps, kOps);
  EXPECT_EQ(watch.most(), 0u) << "without the lock";
}

// ---- tiers that other servers fill

TEST_F(ThreadPoolTierTest, a_tier_that_cannot_be_reset_offers_nothing_after_a_reset) {
  { ASSERT_TRUE(TierDriver(open()).write(1)); }
  TierDriver reader(
      make_thread_pool_tier(std::make_unique<MemoryStore>(server_, NamespaceId{}, 64, true), options()));
  EXPECT_TRUE(reader.has(1));
  EXPECT_TRUE(reader.read(1));
  EXPECT_EQ(reader.tier().reset().kind(), StatusKind::kUnavailable);
  const int maintained = server_->maintained();
  clock_.advance(seconds(1));
  ASSERT_TRUE(reader.until([&] {
    reader.poll();
    return server_->maintained() > maintained;
  }));
  EXPECT_EQ(reader.tier().contains(key_of(1)), Presence::kAbsent);
  EXPECT_FALSE(reader.has(1));
  EXPECT_EQ(reader.read(1).kind(), StatusKind::kNotFound);
  EXPECT_FALSE(reader.tier().stats().writable);
  EXPECT_FALSE(reader.tier().stats().readable) << "no request should wait for its records";
  EXPECT_EQ(server_->epoch(), 1u) << "the others are unaffected";
  TierDriver later(open());
  EXPECT_TRUE(later.has(1));
}

// ---- upkeep

class Counted final : public RecordStore {
 public:
  struct Calls {
    std::atomic<int> started{0}, maintained{0}, begun{0}, stopped{0}, closed{0};
    std::atomic<int> maintained_after_stop{0}, maintained_before_start{0};
  };
  explicit Counted(Calls& calls) : calls_(calls), epoch_(std::make_shared<Epoch>()) {}
  Status write(const TierOp&, const EpochPtr&, std::uint64_t*) override { return Status::ok(); }
  Status read(const TierOp&, const EpochPtr&, std::uint64_t*) override { return Status::ok(); }
  Status locate(std::span<const ChunkKey>, KeyOrder, const EpochPtr&, std::vector<bool>*) override {
    return Status::ok();
  }
  std::size_t keys_per_locate(KeyOrder) const override { return 1; }
  void start() override { ++calls_.started; }
  void maintain() override {
    calls_.maintained_before_start += calls_.started == 0;
    calls_.maintained_after_stop += calls_.stopped > 0;
    ++calls_.maintained;
  }
  Status begin_epoch() override { return Status::ok(); }
  EpochPtr epoch() const override { return epoch_; }
  void forget(std::uint64_t) override {}
  void stop() override { ++calls_.stopped; }
  void close() override { ++calls_.closed; }
  void figures(TierStats*) const override {}

 private:
  Calls& calls_;
  const EpochPtr epoch_;
};

TEST_F(ThreadPoolTierTest, upkeep_does_not_begin_the_epoch_that_a_reset_begins) {
  const auto tier = open();
  server_->block(Verb::kEpoch);
  Status ended;
  std::thread resetting([&] { ended = tier->reset(); });
  server_->wait_for_blocked();
  const int maintained = server_->maintained();
  EXPECT_TRUE(holds_soon([&] {
    clock_.advance(seconds(1));
    return server_->maintained() > maintained;
  })) << "upkeep waits for the epoch too";
  server_->release();
  resetting.join();
  EXPECT_TRUE(ended.is_ok());
  EXPECT_TRUE(tier->stats().writable);
}

TEST_F(ThreadPoolTierTest, a_reset_can_begin_without_waiting_for_the_storage) {
  ThreadPoolTierOptions patient = options();
  patient.op_timeout = std::chrono::hours(1);
  TierDriver user(open(patient));
  ASSERT_TRUE(user.write(1));
  server_->block(Verb::kEpoch);
  user.tier().begin_reset(77);
  server_->wait_for_blocked();
  EXPECT_FALSE(user.has(1));
  EXPECT_FALSE(user.tier().stats().writable);
  server_->release();
  EXPECT_TRUE(user.until([&] {
    user.poll();
    return user.tier().stats().writable;
  }));
  EXPECT_FALSE(user.has(1));
  EXPECT_TRUE(user.write(1));
}

// A second name, with another ID than the other hosts have, could replace the first one in the store.
TEST_F(ThreadPoolTierTest, upkeep_does_not_begin_the_epoch_that_a_reset_begins_without_waiting) {
  const auto tier = open();
  server_->block(Verb::kEpoch);
  tier->begin_reset(77);
  server_->wait_for_blocked();
  const int maintained = server_->maintained();
  EXPECT_TRUE(holds_soon([&] {
    clock_.advance(seconds(1));
    return server_->maintained() > maintained || server_->blocked_threads() > 1;
  }));
  EXPECT_EQ(server_->blocked_threads(), 1) << "upkeep begins an epoch too";
  const std::uint64_t before = server_->epoch();
  server_->release();
  EXPECT_TRUE(holds_soon([&] { return tier->stats().writable; }));
  EXPECT_EQ(server_->epoch(), before + 1);
}

TEST_F(ThreadPoolTierTest, upkeep_begins_the_epoch_that_a_reset_could_not_begin) {
  TierDriver user(open());
  server_->fail(Verb::kEpoch, StatusKind::kIo);
  EXPECT_FALSE(user.tier().reset().is_ok());
  server_->fail(Verb::kEpoch, StatusKind::kOk);
  EXPECT_TRUE(user.until([&] {
    clock_.advance(seconds(1));
    user.poll();
    return user.tier().stats().writable;
  }));
}

TEST_F(ThreadPoolTierTest, upkeep_runs_without_polls_and_once_more_before_the_store_closes) {
  Counted::Calls calls;
  TierDriver user(make_thread_pool_tier(std::make_unique<Counted>(calls), options()));
  for (int i = 1; i <= 2; ++i) {
    clock_.advance(seconds(1));
    ASSERT_TRUE(user.until([&] { return calls.maintained >= i; })) << "driven by the tier's own timer";
  }
  EXPECT_EQ(calls.started, 1);
  EXPECT_EQ(calls.maintained_before_start, 0);
  user.tier().close();
  EXPECT_EQ(calls.stopped, 1);
  EXPECT_EQ(calls.maintained_after_stop, 1);
  EXPECT_EQ(calls.closed, 1);
  user.tier().close();
  EXPECT_EQ(calls.closed, 1);
}

TEST_F(ThreadPoolTierTest, a_neighbour_that_keeps_a_lock_does_not_count_as_a_device_failure) {
  TierDriver user(open());
  server_->fail(Verb::kWrite, StatusKind::kTimeout, EBUSY);
  for (std::uint32_t i = 0; i < 2 * CircuitBreaker::kFailuresToTrip; ++i)
    EXPECT_EQ(user.write(i).kind(), StatusKind::kTimeout) << "the write still reports a failure";
  EXPECT_EQ(user.tier().stats().breaker_trips, 0u);
  EXPECT_TRUE(user.tier().stats().writable);
  server_->fail(Verb::kWrite, StatusKind::kTimeout);  // the control
  for (std::uint32_t i = 0; i < CircuitBreaker::kFailuresToTrip; ++i) (void)user.write(i);
  EXPECT_EQ(user.tier().stats().breaker_trips, 1u);
}

TEST_F(ThreadPoolTierTest, a_store_that_throws_fails_its_op_and_ends_no_thread) {
  TierDriver user(open());
  ASSERT_TRUE(user.write(1));
  for (const Verb verb : {Verb::kRead, Verb::kWrite, Verb::kLocate, Verb::kEpoch}) server_->throw_in(verb);
  EXPECT_EQ(user.read(1).kind(), StatusKind::kIo);
  EXPECT_EQ(user.write(2).kind(), StatusKind::kIo);
  EXPECT_FALSE(user.has(3));
  EXPECT_EQ(user.tier().reset().kind(), StatusKind::kIo);
  for (const Verb verb : {Verb::kRead, Verb::kWrite, Verb::kLocate, Verb::kEpoch})
    server_->throw_in(verb, false);
  EXPECT_TRUE(user.tier().reset());
  EXPECT_TRUE(user.write(1));
  EXPECT_TRUE(user.read(1));
}

TEST_F(ThreadPoolTierTest, upkeep_continues_after_the_store_threw_in_it) {
  TierDriver user(open());
  server_->throw_in(Verb::kMaintain);
  const int thrown = server_->thrown();
  EXPECT_TRUE(user.until([&] {
    clock_.advance(seconds(1));
    user.poll();
    return server_->thrown() > thrown;
  }));
  server_->throw_in(Verb::kMaintain, false);
  const int before = server_->maintained();
  EXPECT_TRUE(user.until([&] {
    clock_.advance(seconds(1));
    user.poll();
    return server_->maintained() > before;
  }));
}

// A prompt of a million tokens has tens of thousands of chunks. Nothing after the first missing one is
// useful.
TEST_F(ThreadPoolTierTest, only_the_first_keys_of_a_long_new_prompt_are_looked_up) {
  IoPool* pool = nullptr;
  const std::unique_ptr<Tier> tier = open_by_hand(&pool);
  const auto asked = [&] {
    std::size_t count = 0;
    for (const auto& one : server_->asked()) count += one.size();
    return count;
  };
  tier->prefetch_presence(keys(65'536), KeyOrder::kPrefix);
  run_reads(pool);
  EXPECT_EQ(asked(), PresenceLookup::kFirstWindow);
  EXPECT_EQ(tier->contains(key_of(0)), Presence::kAbsent);
  EXPECT_EQ(tier->contains(key_of(65'535)), Presence::kUnknown) << "nothing looks there";
  tier->prefetch_presence(keys(3000), KeyOrder::kNone);
  run_reads(pool);
  EXPECT_EQ(asked(), 3000u) << "without an order, each key may be present";
}

TEST_F(ThreadPoolTierTest, a_long_stored_prompt_is_found_completely_and_submitted_once) {
  constexpr std::uint32_t kThere = 2000, kAll = 5000;
  {
    TierDriver user(open());
    for (std::uint32_t i = 0; i < kThere; ++i) ASSERT_TRUE(user.write(i));
  }
  IoPool* pool = nullptr;
  const std::unique_ptr<Tier> tier = open_by_hand(&pool);
  tier->prefetch_presence(keys(kAll), KeyOrder::kPrefix);
  const auto first = pool->begin_next(Lane::kRead);
  first();
  // The next step submits the keys without a pending lookup again.
  std::vector<ChunkKey> rest = keys(kAll);
  rest.erase(rest.begin(), rest.begin() + PresenceLookup::kFirstWindow);
  const auto queued = pool->depth(Lane::kRead).queued;
  tier->prefetch_presence(rest, KeyOrder::kPrefix);
  EXPECT_EQ(pool->depth(Lane::kRead).queued, queued) << "a queued batch covers them";
  run_reads(pool);
  for (std::uint32_t i = 0; i < kThere; ++i) ASSERT_EQ(tier->contains(key_of(i)), Presence::kPresent) << i;
  std::size_t asked = 0;
  for (const auto& one : server_->asked()) asked += one.size();
  EXPECT_LE(asked, 2 * std::size_t{kThere} + PresenceLookup::kFirstWindow);
  tier->prefetch_presence(rest, KeyOrder::kPrefix);
  EXPECT_EQ(pool->depth(Lane::kRead).queued, 1u) << "the previous lookup has ended";
  run_reads(pool);
}

TEST_F(ThreadPoolTierTest, a_lookup_that_ends_at_a_gap_leaves_the_later_keys_to_be_asked_for) {
  {
    TierDriver user(open());
    for (const std::uint32_t number : {0u, 5u}) ASSERT_TRUE(user.write(number));
  }
  server_->ends_at_gaps = true;
  IoPool* pool = nullptr;
  const std::unique_ptr<Tier> tier = open_by_hand(&pool, PresenceLookup::kFirstWindow);
  tier->prefetch_presence(keys(2000), KeyOrder::kPrefix);
  run_reads(pool);
  EXPECT_EQ(server_->asked().size(), 1u) << "the second window is behind the gap";
  EXPECT_EQ(tier->contains(key_of(0)), Presence::kPresent);
  EXPECT_EQ(tier->contains(key_of(1)), Presence::kAbsent);
  for (const std::uint32_t number : {2u, 5u, 255u})
    EXPECT_EQ(tier->contains(key_of(number)), Presence::kSkipped) << number;
  tier->prefetch_presence({key_of(5), key_of(6)}, KeyOrder::kPrefix);
  run_reads(pool);
  EXPECT_EQ(tier->contains(key_of(5)), Presence::kPresent);
  EXPECT_EQ(tier->contains(key_of(6)), Presence::kAbsent);
  EXPECT_EQ(tier->contains(key_of(7)), Presence::kSkipped);
}

TEST_F(ThreadPoolTierTest, nothing_after_a_failed_window_is_looked_up) {
  { ASSERT_TRUE(TierDriver(open()).write(1)); }
  IoPool* pool = nullptr;
  const std::unique_ptr<Tier> tier = open_by_hand(&pool, PresenceLookup::kFirstWindow);
  server_->fail(Verb::kLocate, StatusKind::kIo);
  tier->prefetch_presence(keys(2000), KeyOrder::kPrefix);
  run_reads(pool);
  EXPECT_EQ(tier->contains(key_of(0)), Presence::kLookupFailed);
  EXPECT_NE(tier->contains(key_of(1999)), Presence::kLookupPending);
  EXPECT_EQ(pool->depth(Lane::kRead).queued, 0u);
}

// A store with one record and a catalog. An op may end while the tier takes the removals.
class OneRecord final : public RecordStore, public Catalog {
 public:
  Presence contains(const ChunkKey&) const override { return Presence::kPresent; }
  void begin_lookup(std::span<const ChunkKey>, EpochNumber, std::vector<ChunkKey>*) override {}
  void forget_miss(const ChunkKey&) override {}
  void cancel_lookup(std::span<const ChunkKey>, EpochNumber) override {}
  void touch(const ChunkKey&) override {}
  void take_removals(std::vector<TierRemoval>* removals) override {
    removals->insert(removals->end(), removals_.begin(), removals_.end());
    removals_.clear();
    if (on_taken) on_taken();
  }
  Status write(const TierOp&, const EpochPtr&, std::uint64_t*) override { return Status::ok(); }
  Status read(const TierOp&, const EpochPtr&, std::uint64_t*) override { return Status::ok(); }
  Status remove(const ChunkKey& key, const EpochPtr&) override {
    removals_.push_back({key, TierRemoval::Reason::kEvicted});
    return Status::ok();
  }
  Status locate(std::span<const ChunkKey>, KeyOrder, const EpochPtr&, std::vector<bool>*) override {
    return Status::ok();
  }
  std::size_t keys_per_locate(KeyOrder) const override { return 1; }
  void maintain() override {}
  Status begin_epoch() override { return Status::ok(); }
  EpochPtr epoch() const override { return epoch_; }
  void forget(std::uint64_t) override {}
  void close() override {}
  void figures(TierStats*) const override {}
  Catalog* catalog() override { return this; }

  std::function<void()> on_taken;

 private:
  const EpochPtr epoch_ = std::make_shared<Epoch>();
  std::vector<TierRemoval> removals_;
};

// Otherwise AllHostsTier would attribute the removal to a record that was written since.
TEST_F(ThreadPoolTierTest, a_removal_is_reported_no_later_than_the_end_of_its_op) {
  auto store = std::make_unique<OneRecord>();
  OneRecord& record = *store;
  IoPool* pool = nullptr;
  ThreadPoolTierOptions by_hand = options();
  by_hand.manual_pool = &pool;
  const std::unique_ptr<Tier> tier = make_thread_pool_tier(std::move(store), by_hand);
  start(*tier, OpKind::kRemove, 1);
  record.on_taken = [&] {
    if (const auto next = pool->begin_next(Lane::kWrite)) next();
  };
  std::vector<Completion> done;
  std::vector<TierRemoval> removals;
  for (int polls = 0; polls < 2 && done.empty(); ++polls) tier->poll(&done, &removals);
  EXPECT_EQ(done.size(), 1u);
  EXPECT_EQ(removals.size(), 1u);
}

TEST_F(ThreadPoolTierTest, completions_are_not_lost_if_memory_runs_out_for_the_removals) {
  auto store = std::make_unique<OneRecord>();
  OneRecord& record = *store;
  IoPool* pool = nullptr;
  ThreadPoolTierOptions by_hand = options();
  by_hand.manual_pool = &pool;
  const std::unique_ptr<Tier> tier = make_thread_pool_tier(std::move(store), by_hand);
  start(*tier, OpKind::kRemove, 1);
  pool->begin_next(Lane::kWrite)();
  record.on_taken = [] { throw std::bad_alloc(); };
  std::vector<Completion> done;
  std::vector<TierRemoval> removals;
  EXPECT_NO_THROW(tier->poll(&done, &removals));
  EXPECT_EQ(done.size(), 1u);
}

// The bytes of an op, divided by the weight of its tenant, decide when the tenant's next op starts.
class TenantOps : public ThreadPoolTierTest {
 protected:
  void read(Tier& tier, OpId id, TenantId tenant, double weight, std::size_t bytes) {
    std::vector<TierOp> ops(1);
    ops[0].id = id;
    ops[0].key = key_of(1);
    ops[0].shards = {large_.span().first(bytes)};
    ops[0].entry_info.tenant = tenant;
    ops[0].weight = weight;
    tier.submit(std::move(ops));
  }
  // Runs this many reads and returns the number of those with an id below 1000.
  std::ptrdiff_t run(Tier& tier, IoPool* pool, int count) {
    for (int i = 0; i < count; ++i) pool->begin_next(Lane::kRead)();
    std::vector<Completion> done;
    std::vector<TierRemoval> removals;
    tier.poll(&done, &removals);
    return std::count_if(done.begin(), done.end(), [](const Completion& end) { return end.id < 1000; });
  }
  // The keys of a prompt.
  static std::vector<ChunkKey> prompt(std::uint32_t first, std::uint32_t count) {
    std::vector<ChunkKey> keys;
    for (std::uint32_t i = 0; i < count; ++i) keys.push_back(key_of(first + i));
    return keys;
  }
  static LookupOptions lookup_for(TenantId tenant, double weight = 0.5) {
    return {KeyOrder::kNone, tenant, weight};
  }
  // Returns how many of the store calls so far were for some key of the prompt.
  std::ptrdiff_t calls_for(const std::vector<ChunkKey>& prompt) const {
    const auto asked = server_->asked();
    return std::count_if(asked.begin(), asked.end(), [&](const std::vector<ChunkKey>& keys) {
      return std::find(prompt.begin(), prompt.end(), keys.front()) != prompt.end();
    });
  }
  AlignedBuffer large_{16384};
};

TEST_F(TenantOps, reads_of_tenants_start_in_proportion_to_their_weights) {
  IoPool* pool = nullptr;
  const std::unique_ptr<Tier> tier = open_by_hand(&pool);
  for (OpId id = 0; id < 40; ++id) read(*tier, 1000 + id, 2, 0.25, 4096);
  for (OpId id = 0; id < 40; ++id) read(*tier, id, 1, 0.75, 4096);
  EXPECT_NEAR(static_cast<double>(run(*tier, pool, 40)), 30, 1);
}

TEST_F(TenantOps, large_reads_of_a_tenant_start_less_often) {
  IoPool* pool = nullptr;
  const std::unique_ptr<Tier> tier = open_by_hand(&pool);
  for (OpId id = 0; id < 40; ++id) read(*tier, 1000 + id, 2, 0.5, 3 * 4096);
  for (OpId id = 0; id < 40; ++id) read(*tier, id, 1, 0.5, 4096);
  EXPECT_NEAR(static_cast<double>(run(*tier, pool, 40)), 30, 1);
}

// As in a bucket in which tenants have keys of their own: one call takes one key, and 30 ms.
TEST_F(TenantOps, a_long_queue_of_lookups_does_not_delay_those_of_another_tenant_until_they_are_given_up) {
  constexpr Nanos kCall = std::chrono::milliseconds(30), kLookupTimeout = seconds(5);
  constexpr std::int64_t kKeys = 4;
  IoPool* pool = nullptr;
  const std::unique_ptr<Tier> tier = open_by_hand(&pool, 1);
  for (std::uint32_t i = 0; i < 10; ++i) tier->prefetch_presence(prompt(1000 + 100 * i, 30), lookup_for(2));
  for (int i = 0; i < 10; ++i) pool->begin_next(Lane::kRead)();
  ASSERT_GT(pool->depth(Lane::kRead).queued * kCall, kLookupTimeout);
  tier->prefetch_presence(keys(kKeys), lookup_for(1));
  const Nanos asked = clock_.now();
  while (calls_for(keys(kKeys)) < kKeys && clock_.now() - asked < kLookupTimeout) {
    pool->begin_next(Lane::kRead)();
    clock_.advance(kCall);
  }
  EXPECT_EQ(tier->contains(key_of(kKeys - 1)), Presence::kAbsent) << "it was not looked up";
  EXPECT_LE(clock_.now() - asked, 2 * kKeys * kCall) << "one call of the other tenant for each of its own";
}

TEST_F(TenantOps, lookups_of_tenants_start_in_proportion_to_their_weights) {
  IoPool* pool = nullptr;
  const std::unique_ptr<Tier> tier = open_by_hand(&pool, 1);
  const auto first = prompt(0, 200), second = prompt(1000, 200);
  tier->prefetch_presence(second, lookup_for(2, 0.25));
  tier->prefetch_presence(first, lookup_for(1, 0.75));
  for (int i = 0; i < 100; ++i) pool->begin_next(Lane::kRead)();
  EXPECT_NEAR(static_cast<double>(calls_for(first)), 75, 1);
  EXPECT_EQ(calls_for(first) + calls_for(second), 100);
}

TEST_F(TenantOps, a_tenant_that_had_no_lookups_for_a_while_gains_nothing_by_it) {
  IoPool* pool = nullptr;
  const std::unique_ptr<Tier> tier = open_by_hand(&pool, 1);
  tier->prefetch_presence(keys(1), lookup_for(1));
  tier->prefetch_presence(prompt(1000, 200), lookup_for(2));
  for (int i = 0; i < 100; ++i) pool->begin_next(Lane::kRead)();
  const auto later = prompt(100, 100);
  tier->prefetch_presence(later, lookup_for(1));
  for (int i = 0; i < 40; ++i) pool->begin_next(Lane::kRead)();
  EXPECT_NEAR(static_cast<double>(calls_for(later)), 20, 1);
}

TEST_F(TenantOps, lookups_of_one_tenant_keep_their_order_whatever_its_weight) {
  for (const LookupOptions& lookup : {LookupOptions(KeyOrder::kNone), lookup_for(3, 0.01)}) {
    IoPool* pool = nullptr;
    const std::unique_ptr<Tier> tier = open_by_hand(&pool, 1);
    const std::size_t before = server_->asked().size();
    tier->prefetch_presence(prompt(0, 3), lookup);
    tier->prefetch_presence(prompt(10, 3), lookup);
    run_reads(pool);
    std::vector<ChunkKey> order;
    for (std::size_t i = before; i < server_->asked().size(); ++i)
      order.push_back(server_->asked()[i].front());
    std::vector<ChunkKey> expected;
    for (const std::uint32_t number : {0, 10, 1, 2, 11, 12}) expected.push_back(key_of(number));
    EXPECT_EQ(order, expected);
  }
}

TEST_F(TenantOps, a_prompt_that_another_tenant_has_queued_is_looked_up_in_the_turn_of_the_first_due) {
  IoPool* pool = nullptr;
  const std::unique_ptr<Tier> tier = open_by_hand(&pool, 4);
  for (std::uint32_t i = 0; i < 50; ++i) tier->prefetch_presence(prompt(1000 + 10 * i, 4), lookup_for(2));
  tier->prefetch_presence(keys(4), lookup_for(2));
  const auto queued = pool->depth(Lane::kRead).queued;
  for (int step = 0; step < 3; ++step) tier->prefetch_presence(keys(4), lookup_for(1));
  EXPECT_EQ(pool->depth(Lane::kRead).queued, queued + 1) << "once for each tenant";
  for (int i = 0; i < 2; ++i) pool->begin_next(Lane::kRead)();
  EXPECT_EQ(tier->contains(key_of(3)), Presence::kAbsent);
  run_reads(pool);
  EXPECT_EQ(calls_for(keys(4)), 1) << "by one tenant";
}

TEST_F(TenantOps, a_long_queue_of_lookups_does_not_delay_the_reads_of_another_tenant) {
  IoPool* pool = nullptr;
  const std::unique_ptr<Tier> tier = open_by_hand(&pool, 1);
  tier->prefetch_presence(prompt(1000, 200), lookup_for(2));
  for (int i = 0; i < 10; ++i) pool->begin_next(Lane::kRead)();
  for (OpId id = 0; id < 3; ++id) read(*tier, id, 1, 0.5, 4096);
  EXPECT_EQ(run(*tier, pool, 4), 3) << "one lookup in between, at most";
}

TEST_F(TenantOps, a_new_prompt_of_two_tenants_is_looked_up_once) {
  constexpr std::uint32_t kFirst = PresenceLookup::kFirstWindow;
  IoPool* pool = nullptr;
  const std::unique_ptr<Tier> tier = open_by_hand(&pool);
  for (const TenantId tenant : {1, 2})
    tier->prefetch_presence(prompt(0, 4 * kFirst), {KeyOrder::kPrefix, tenant, 0.5});
  pool->begin_next(Lane::kRead)();  // looks up a part of the first keys, and queues the other parts
  ASSERT_EQ(tier->contains(key_of(kFirst - 1)), Presence::kLookupPending);
  pool->begin_next(Lane::kRead)();  // of the other tenant
  const auto queued = pool->depth(Lane::kRead).queued;
  // As in the next step, and as a request that begins now.
  tier->prefetch_presence(prompt(kFirst, 3 * kFirst), {KeyOrder::kPrefix, 2, 0.5});
  EXPECT_EQ(pool->depth(Lane::kRead).queued, queued);
  run_reads(pool);
  std::size_t asked = 0;
  for (const auto& one : server_->asked()) asked += one.size();
  EXPECT_EQ(asked, kFirst) << "later keys were looked up before these";
  EXPECT_EQ(tier->contains(key_of(0)), Presence::kAbsent);
}

TEST_F(TenantOps, a_new_prompt_is_looked_up_once_if_the_tenant_that_asked_later_has_the_first_turn) {
  constexpr std::uint32_t kFirst = PresenceLookup::kFirstWindow;
  IoPool* pool = nullptr;
  const std::unique_ptr<Tier> tier = open_by_hand(&pool);
  for (const TenantId tenant : {2, 1})  // the first turn is that of tenant 1
    tier->prefetch_presence(prompt(0, 4 * kFirst), {KeyOrder::kPrefix, tenant, 0.5});
  run_reads(pool);
  std::size_t asked = 0;
  for (const auto& one : server_->asked()) asked += one.size();
  EXPECT_EQ(asked, kFirst);
}

TEST_F(TenantOps, the_rest_of_a_prompt_is_looked_up_in_the_turn_of_the_first_due) {
  constexpr std::uint32_t kFirst = PresenceLookup::kFirstWindow;
  {
    TierDriver user(open());
    for (std::uint32_t i = 0; i < kFirst; ++i) ASSERT_TRUE(user.write(i));
  }
  IoPool* pool = nullptr;
  const std::unique_ptr<Tier> tier = open_by_hand(&pool, kFirst);
  tier->prefetch_presence(prompt(0, 2 * kFirst), {KeyOrder::kPrefix, 2, 0.5});
  for (std::uint32_t i = 0; i < 50; ++i) tier->prefetch_presence(prompt(10'000 + 10 * i, 4), lookup_for(2));
  pool->begin_next(Lane::kRead)();
  ASSERT_EQ(tier->contains(key_of(kFirst - 1)), Presence::kPresent);
  tier->prefetch_presence(prompt(kFirst, kFirst), {KeyOrder::kPrefix, 1, 0.5});
  for (int i = 0; i < 2; ++i) pool->begin_next(Lane::kRead)();
  EXPECT_EQ(tier->contains(key_of(kFirst)), Presence::kAbsent) << "it waited for the other tenant's queue";
  run_reads(pool);
  EXPECT_EQ(calls_for(prompt(kFirst, kFirst)), 1);
}

TEST_F(ThreadPoolTierTest, a_prompt_ends_at_known_missing_keys) {
  constexpr std::uint32_t kFirst = PresenceLookup::kFirstWindow;
  IoPool* pool = nullptr;
  const std::unique_ptr<Tier> tier = open_by_hand(&pool, kFirst);
  tier->prefetch_presence(keys(kFirst), KeyOrder::kPrefix);
  tier->prefetch_presence(keys(2 * kFirst), KeyOrder::kPrefix);
  run_reads(pool);
  EXPECT_EQ(server_->asked().size(), 1u) << "keys after missing ones are not needed";
}

TEST_F(TenantOps, lookups_of_all_tenants_are_given_up_when_the_device_is_stuck) {
  IoPool* pool = nullptr;
  const std::unique_ptr<Tier> tier = open_by_hand(&pool, 1);
  tier->prefetch_presence(prompt(1000, 50), lookup_for(2));
  tier->prefetch_presence(keys(3), lookup_for(1));
  for (int i = 0; i < 2; ++i) pool->begin_next(Lane::kRead)();
  const auto stuck = pool->begin_next(Lane::kRead);
  ASSERT_TRUE(stuck);
  clock_.advance(options().op_timeout + seconds(1));
  std::vector<Completion> done;
  std::vector<TierRemoval> removals;
  tier->poll(&done, &removals);
  EXPECT_EQ(pool->depth(Lane::kRead).queued, 0u);
  clock_.advance(seconds(2));
  for (const std::uint32_t number : {1u, 2u, 1001u, 1049u})
    EXPECT_EQ(tier->contains(key_of(number)), Presence::kUnknown) << number;
  for (const auto& [number, tenant] : {std::pair(1u, TenantId{1}), std::pair(1049u, TenantId{2})}) {
    tier->prefetch_presence({key_of(number)}, lookup_for(tenant));
    run_reads(pool);
    EXPECT_EQ(tier->contains(key_of(number)), Presence::kAbsent) << number;
  }
  stuck();
}

}  // namespace
}  // namespace kv_offload
