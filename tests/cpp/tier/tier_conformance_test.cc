// SPDX-License-Identifier: Apache-2.0
// Checks the promises of tier.h for every tier kind. A kind that is added here must keep all of them.
#include "tier/tier_conformance.h"

#include <gtest/gtest.h>

#include <functional>
#include <random>

#include "tier/circuit_breaker.h"
#include "tier/encoded_medium.h"
#include "tier/encrypted_medium.h"
#include "tier/io_pool.h"
#include "tier/loopback_server.h"

namespace kv_offload {
namespace {

using namespace testing;
using std::chrono::seconds;

struct TestedTier {
  std::string name;
  std::function<std::unique_ptr<Medium>()> make;
};

class TierConformance : public ::testing::TestWithParam<TestedTier> {
 protected:
  ThreadPoolTierOptions options() {
    ThreadPoolTierOptions options;
    options.name = "tier";
    options.clock = &clock_;
    return options;
  }
  ThreadPoolTierOptions by_hand(IoPool** pool) {
    ThreadPoolTierOptions chosen = options();
    chosen.manual_pool = pool;
    return chosen;
  }
  std::unique_ptr<Tier> open() { return medium_->open(options()); }
  // Checks with a tier that is opened later on the same medium.
  bool finds_later(std::uint32_t number) {
    TierDriver later(open());
    return later.has(number);
  }
  static OpId write(TierDriver& user, std::uint32_t number) {
    return user.start(OpKind::kWrite, number, {8192});
  }
  static OpId read(TierDriver& user, std::uint32_t number) {
    return user.start(OpKind::kRead, number, {8192});
  }
  static void run_all(IoPool* pool) {
    for (const Lane lane : {Lane::kRead, Lane::kWrite}) {
      while (const auto next = pool->begin_next(lane)) next();
    }
  }

  FakeClock clock_;
  std::unique_ptr<Medium> medium_ = GetParam().make();
};

// ---- bytes

TEST_P(TierConformance, reads_return_the_written_bytes) {
  TierDriver user(open());
  for (const ShardSizes& sizes : {ShardSizes{8192}, ShardSizes{300}, ShardSizes{5000, 0, 4096, 1}}) {
    const auto number = static_cast<std::uint32_t>(sizes.front());
    ASSERT_TRUE(user.write(number, sizes));
    EXPECT_TRUE(user.read(number, sizes));
  }
  TierDriver later(open());
  EXPECT_TRUE(later.has(300));
  EXPECT_TRUE(later.read(300, {300}));
}

TEST_P(TierConformance, codec_work_is_counted_for_ops_that_succeed) {
  ThreadPoolTierOptions encoded = options();
  encoded.form.compression = always_encoded();
  TierDriver user(medium_->open(encoded));
  user.wait_for_scan();
  constexpr std::uint64_t kRaw = 16 * kPageBytes;
  ASSERT_TRUE(user.write(1, {kRaw}));
  ASSERT_TRUE(user.write(1, {kRaw})) << "it is already stored";
  TierStats stats = user.tier().stats();
  EXPECT_EQ(stats.encoded_raw_bytes, kRaw);
  EXPECT_GT(stats.encode_seconds, 0);
  EXPECT_EQ(stats.decode_seconds, 0);
  ASSERT_TRUE(user.read(1, {kRaw}));
  stats = user.tier().stats();
  EXPECT_GT(stats.decode_seconds, 0);
  EXPECT_EQ(stats.encoded_raw_bytes, kRaw);
}

TEST_P(TierConformance, record_bytes_are_counted_as_stored) {
  ThreadPoolTierOptions encoded = options();
  encoded.form.compression = always_encoded();
  constexpr std::uint64_t kPayload = 16 * kPageBytes, kRaw = kPayload + kRecordHeaderBytes;
  std::uint64_t written[2], read[2];
  std::uint32_t number = 1;
  for (ThreadPoolTierOptions chosen : {options(), encoded}) {
    TierDriver user(medium_->open(chosen));
    user.wait_for_scan();
    const OpId op = user.start(OpKind::kWrite, number, {kPayload});
    EXPECT_EQ(user.finish(op).bytes, kPayload);
    ASSERT_TRUE(user.read(number, {kPayload}));
    ASSERT_TRUE(user.read(number, {kPayload}));
    const TierStats stats = user.tier().stats();
    written[number - 1] = stats.written_record_bytes;
    read[number - 1] = stats.read_record_bytes;
    ++number;
  }
  // A medium of this suite may encode by itself; the second tier always encodes.
  EXPECT_LE(written[0], kRaw);
  EXPECT_LT(written[1], kRaw);
  EXPECT_EQ(read[0], 2 * written[0]);
  EXPECT_EQ(read[1], 2 * written[1]);
}

TEST_P(TierConformance, an_op_without_shards_or_with_too_many_is_a_caller_error) {
  TierDriver user(open());
  EXPECT_THROW(user.start(OpKind::kWrite, 1, {}), InvalidArgument);
  EXPECT_THROW(user.start(OpKind::kWrite, 1, ShardSizes(kMaxShards + 1, 1)), InvalidArgument);
}

TEST_P(TierConformance, a_stored_record_is_not_written_again) {
  TierDriver user(open());
  ASSERT_TRUE(user.write(1));
  const Completion again = user.finish(write(user, 1));
  EXPECT_TRUE(again.status);
  EXPECT_EQ(again.bytes, 0u);
}

// ---- order, cancel, deadlines

TEST_P(TierConformance, ops_of_a_kind_run_in_order) {
  IoPool* pool = nullptr;
  TierDriver user(medium_->open(by_hand(&pool)));
  for (const OpKind kind : {OpKind::kWrite, OpKind::kRead}) {
    std::vector<OpId> ids;
    for (std::uint32_t i = 0; i < 4; ++i) ids.push_back(user.start(kind, i, {8192}));
    for (std::size_t i = 0; i < ids.size(); ++i) {
      pool->begin_next(kind == OpKind::kRead ? Lane::kRead : Lane::kWrite)();
      EXPECT_TRUE(user.ended(ids[i]));
      if (i + 1 < ids.size()) {
        EXPECT_FALSE(user.ended(ids[i + 1]));
      }
    }
  }
}

TEST_P(TierConformance, an_op_cancelled_in_time_leaves_nothing_and_ends_once) {
  IoPool* pool = nullptr;
  TierDriver user(medium_->open(by_hand(&pool)));
  const OpId first = write(user, 1), second = write(user, 2);
  const auto begun = pool->begin_next(Lane::kWrite);
  EXPECT_FALSE(user.tier().cancel(first)) << "it runs";
  EXPECT_TRUE(user.tier().cancel(second));
  EXPECT_FALSE(user.tier().cancel(second));
  begun();
  run_all(pool);
  EXPECT_TRUE(user.finish(first).status);
  EXPECT_EQ(user.finish(second).status.kind(), StatusKind::kCancelled);
  EXPECT_FALSE(user.tier().cancel(first)) << "it has ended";
  EXPECT_EQ(user.tier().contains(key_of(1)), Presence::kPresent);
  EXPECT_FALSE(finds_later(2));
}

TEST_P(TierConformance, an_op_not_started_by_its_deadline_never_starts) {
  IoPool* pool = nullptr;
  TierDriver user(medium_->open(by_hand(&pool)));
  const Nanos deadline = clock_.now() + seconds(1);
  const OpId late = user.start(OpKind::kWrite, 1, {8192}, deadline);
  const OpId early = user.start(OpKind::kWrite, 2, {8192}, deadline);
  const OpId taken_late = user.start(OpKind::kWrite, 3, {8192}, clock_.now() + seconds(3));
  ASSERT_TRUE(user.tier().cancel(early));
  clock_.advance(seconds(1));
  EXPECT_EQ(user.finish(late).status.kind(), StatusKind::kExpired) << "although no thread became free";
  clock_.advance(seconds(2));
  run_all(pool);
  EXPECT_EQ(user.finish(taken_late).status.kind(), StatusKind::kExpired);
  EXPECT_FALSE(finds_later(1) || finds_later(3));
  EXPECT_TRUE(user.tier().stats().writable) << "not a device failure";
}

TEST_P(TierConformance, each_op_ends_once_under_random_operations) {
  TierDriver user(open());
  std::mt19937 random(7);
  std::vector<OpId> ids;
  for (int round = 0; round < 200; ++round) {
    const auto kind = random() % 2 == 0 ? OpKind::kRead : OpKind::kWrite;
    const Nanos deadline = random() % 4 == 0 ? clock_.now() + Nanos(1) : Nanos(0);
    ids.push_back(user.start(kind, random() % 20, {4096}, deadline));
    if (random() % 3 == 0) (void)user.tier().cancel(ids[random() % ids.size()]);
    if (random() % 50 == 0) medium_->fail_transfers(random() % 2 == 0);
    if (random() % 50 == 0) (void)user.tier().reset();
    if (random() % 10 == 0) clock_.advance(std::chrono::milliseconds(100));
    if (random() % 4 == 0) user.poll();
  }
  for (const OpId id : ids) (void)user.finish(id);  // the driver detects ops that end twice
  user.tier().close();
  user.poll();
}

// ---- reset

TEST_P(TierConformance, no_record_from_before_a_reset_is_found_after_it) {
  TierDriver user(open());
  ASSERT_TRUE(user.write(1));
  ASSERT_TRUE(user.tier().reset());
  EXPECT_NE(user.tier().contains(key_of(1)), Presence::kPresent) << "from the call on";
  EXPECT_FALSE(user.has(1));
  EXPECT_EQ(user.read(1).kind(), StatusKind::kNotFound);
  EXPECT_EQ(user.removed(TierRemoval::Reason::kReset), 1u);
  EXPECT_FALSE(finds_later(1));
  user.weights = 1;
  ASSERT_TRUE(user.write(1));
  EXPECT_TRUE(user.read(1));
  EXPECT_FALSE(finds_later(1)) << "a later process has its own weights";
}

TEST_P(TierConformance, an_op_from_before_a_reset_neither_reads_nor_leaves_records_of_the_new_epoch) {
  IoPool* pool = nullptr;
  TierDriver user(medium_->open(by_hand(&pool)));
  const OpId taken_up = write(user, 1);
  const auto begun = pool->begin_next(Lane::kWrite);
  const OpId queued = write(user, 2);
  ASSERT_TRUE(user.tier().reset());
  begun();
  run_all(pool);
  EXPECT_EQ(user.finish(taken_up).status.kind(), StatusKind::kCancelled);
  EXPECT_EQ(user.finish(queued).status.kind(), StatusKind::kCancelled);
  EXPECT_NE(user.tier().contains(key_of(1)), Presence::kPresent);
  const OpId newer = write(user, 3);
  run_all(pool);
  EXPECT_TRUE(user.finish(newer).status);
  const OpId older_read = read(user, 3);
  ASSERT_TRUE(user.tier().reset());
  run_all(pool);
  EXPECT_EQ(user.finish(older_read).status.kind(), StatusKind::kCancelled);
  EXPECT_FALSE(finds_later(1) || finds_later(2) || finds_later(3));
}

TEST_P(TierConformance, an_op_inside_the_device_during_a_reset_ends_cancelled) {
  TierDriver user(open());
  ASSERT_TRUE(user.write(1));
  for (const OpKind kind : {OpKind::kRead, OpKind::kWrite}) {
    medium_->block(kind);
    const OpId id = user.start(kind, kind == OpKind::kRead ? 1 : 2, {8192});
    medium_->wait_for_blocked();
    ASSERT_TRUE(user.tier().reset());
    medium_->release();
    EXPECT_EQ(user.finish(id).status.kind(), StatusKind::kCancelled);
    EXPECT_FALSE(user.has(2));
  }
  EXPECT_FALSE(finds_later(2));
}

TEST_P(TierConformance, a_failed_reset_has_forgotten_all_records_and_is_retried) {
  TierDriver user(open());
  ASSERT_TRUE(user.write(1));
  medium_->fail_resets(true);
  EXPECT_FALSE(user.tier().reset());
  EXPECT_NE(user.tier().contains(key_of(1)), Presence::kPresent);
  EXPECT_FALSE(user.has(1));
  EXPECT_FALSE(user.tier().stats().writable);
  EXPECT_EQ(user.write(2).kind(), StatusKind::kUnavailable);
  medium_->fail_resets(false);
  EXPECT_TRUE(user.until([&] {
    clock_.advance(seconds(1));
    user.poll();
    return user.tier().stats().writable;
  }));
  EXPECT_FALSE(user.has(1));
  ASSERT_TRUE(user.write(2));
  EXPECT_TRUE(user.read(2));
}

// ---- presence

TEST_P(TierConformance, a_record_is_present_once_its_write_completion_was_polled) {
  TierDriver user(open());
  EXPECT_FALSE(user.has(1));
  ASSERT_TRUE(user.write(1));
  EXPECT_EQ(user.tier().contains(key_of(1)), Presence::kPresent);
  EXPECT_TRUE(finds_later(1));
  EXPECT_FALSE(finds_later(2));
}

TEST_P(TierConformance, checking_presence_starts_no_op) {
  { ASSERT_TRUE(TierDriver(open()).write(1)); }
  IoPool* pool = nullptr;
  TierDriver user(medium_->open(by_hand(&pool)));
  user.wait_for_scan();
  for (int i = 0; i < 3; ++i) (void)user.tier().contains(key_of(1));
  EXPECT_FALSE(pool->begin_next(Lane::kRead));
  user.tier().prefetch_presence({key_of(1), key_of(2)}, KeyOrder::kNone);
  run_all(pool);
  EXPECT_EQ(user.tier().contains(key_of(1)), Presence::kPresent);
  EXPECT_EQ(user.tier().contains(key_of(2)), Presence::kAbsent);
}

TEST_P(TierConformance, a_vanished_record_is_a_miss_and_reported_once) {
  TierDriver user(open());
  ASSERT_TRUE(user.write(1));
  medium_->lose(key_of(1));
  EXPECT_EQ(user.read(1).kind(), StatusKind::kNotFound);
  EXPECT_EQ(user.tier().contains(key_of(1)), Presence::kAbsent);
  EXPECT_EQ(user.read(1).kind(), StatusKind::kNotFound);
  EXPECT_EQ(user.removed(TierRemoval::Reason::kVanished), 1u);
  EXPECT_TRUE(user.tier().stats().readable) << "not a device failure";
  ASSERT_TRUE(user.write(1));
  EXPECT_TRUE(user.read(1));
}

TEST_P(TierConformance, a_damaged_record_is_detected_removed_and_written_again) {
  TierDriver user(open());
  ASSERT_TRUE(user.write(1));
  medium_->damage(key_of(1));
  EXPECT_EQ(user.read(1).kind(), StatusKind::kCorrupt);
  EXPECT_EQ(user.tier().contains(key_of(1)), Presence::kAbsent);
  EXPECT_EQ(user.removed(TierRemoval::Reason::kCorrupt), 1u);
  EXPECT_FALSE(finds_later(1));
  const Completion anew = user.finish(write(user, 1));
  ASSERT_TRUE(anew.status);
  EXPECT_EQ(anew.bytes, 8192u);
  EXPECT_TRUE(user.read(1));
}

// ---- a device that fails, hangs or is abandoned

TEST_P(TierConformance, a_device_that_keeps_failing_is_switched_off_for_a_while) {
  TierDriver user(open());
  ASSERT_TRUE(user.write(1));
  medium_->fail_transfers(true);
  for (unsigned i = 0; i < CircuitBreaker::kFailuresToTrip; ++i)
    EXPECT_EQ(user.write(10 + i).kind(), StatusKind::kIo);
  EXPECT_EQ(user.write(30).kind(), StatusKind::kUnavailable);
  EXPECT_FALSE(user.tier().stats().writable);
  EXPECT_TRUE(user.tier().stats().readable) << "reads have their own breaker";
  for (unsigned i = 0; i < CircuitBreaker::kFailuresToTrip; ++i) {
    EXPECT_FALSE(user.read(1));
  }
  EXPECT_FALSE(user.tier().stats().readable);
  EXPECT_NE(user.tier().contains(key_of(40)), Presence::kUnknown) << "no lookup would be answered";
  EXPECT_EQ(user.tier().stats().breaker_trips, 2u);
  medium_->fail_transfers(false);
  clock_.advance(seconds(120));
  ASSERT_TRUE(user.write(30));
  EXPECT_TRUE(user.read(30));
  EXPECT_TRUE(user.tier().stats().readable && user.tier().stats().writable);
}

TEST_P(TierConformance, an_op_that_hangs_switches_the_tier_off_and_blocks_no_caller) {
  ThreadPoolTierOptions chosen = options();
  chosen.n_read_threads = chosen.n_write_threads = 1;  // both take reads
  TierDriver user(medium_->open(chosen));
  ASSERT_TRUE(user.write(1));
  // A directory knows all of its keys.
  const bool knows_all = user.tier().contains(key_of(50)) == Presence::kAbsent;
  const Presence expected = knows_all ? Presence::kAbsent : Presence::kLookupFailed;
  medium_->block(OpKind::kRead);
  const OpId stuck = read(user, 1), as_well = read(user, 1), behind = read(user, 1);
  medium_->wait_for_blocked(2);
  clock_.advance(chosen.op_timeout + seconds(1));
  user.poll();
  EXPECT_FALSE(user.tier().stats().readable || user.tier().stats().writable);
  EXPECT_EQ(user.tier().stats().read_timeouts, 2u);
  EXPECT_EQ(user.finish(behind).status.kind(), StatusKind::kUnavailable);
  EXPECT_EQ(user.write(2).kind(), StatusKind::kUnavailable);
  EXPECT_EQ(user.tier().contains(key_of(1)), Presence::kPresent) << "known, but not readable";
  EXPECT_EQ(user.tier().contains(key_of(50)), expected);
  EXPECT_FALSE(user.ended(stuck)) << "the device may still write into its row";
  clock_.advance(seconds(30));  // a probe would be due, but no thread could run it
  user.poll();
  EXPECT_FALSE(user.tier().stats().readable || user.tier().stats().writable);
  EXPECT_EQ(user.tier().contains(key_of(60)), expected);
  EXPECT_EQ(user.finish(read(user, 1)).status.kind(), StatusKind::kUnavailable);
  EXPECT_EQ(user.write(2).kind(), StatusKind::kUnavailable);
  medium_->release();
  EXPECT_TRUE(user.finish(stuck).status);
  EXPECT_TRUE(user.finish(as_well).status);
  clock_.advance(seconds(1));
  EXPECT_TRUE(user.read(1));
  ASSERT_TRUE(user.write(2));
}

TEST_P(TierConformance, after_close_nothing_is_accepted_and_queued_ops_have_ended) {
  IoPool* pool = nullptr;
  TierDriver user(medium_->open(by_hand(&pool)));
  const OpId queued = write(user, 1);
  user.tier().close();
  EXPECT_EQ(user.finish(queued).status.kind(), StatusKind::kCancelled);
  EXPECT_EQ(user.write(2).kind(), StatusKind::kUnavailable);
  EXPECT_NE(user.tier().contains(key_of(3)), Presence::kUnknown);
  user.tier().prefetch_presence({key_of(3)}, KeyOrder::kNone);
  EXPECT_FALSE(user.tier().reset());
  user.tier().close();
  EXPECT_FALSE(finds_later(1));
}

TEST_P(TierConformance, close_during_a_hanging_op_returns_and_frees_no_memory_in_use) {
  ThreadPoolTierOptions chosen = options();
  chosen.close_wait = std::chrono::milliseconds(10);
  { ASSERT_TRUE(TierDriver(open()).write(1)); }
  std::unique_ptr<Tier> tier = medium_->open(chosen);
  std::vector<Completion> completions;
  std::vector<TierRemoval> removals;
  while (tier->contains(key_of(1)) != Presence::kPresent) {
    tier->prefetch_presence({key_of(1)}, KeyOrder::kNone);
    std::this_thread::yield();
  }
  medium_->block(OpKind::kRead);
  auto row = std::make_shared<Row>(ShardSizes{8192});
  const std::weak_ptr<Row> seen = row;
  std::vector<TierOp> ops(1);
  ops[0].id = 1;
  ops[0].key = key_of(1);
  ops[0].shards = row->shards();
  ops[0].memory = std::move(row);
  tier->submit(std::exchange(ops, {}));
  medium_->wait_for_blocked();
  tier->close();
  tier->poll(&completions, &removals);
  EXPECT_TRUE(completions.empty()) << "the device may still write into the row";
  tier.reset();
  EXPECT_FALSE(seen.expired());
  medium_->release();
  medium_->wait_for_let_go();
  EXPECT_TRUE(holds_soon([&] { return seen.expired(); }));  // the thread drops the op after its connection
}

template <typename OneMedium>
TestedTier kind(std::string name) {
  return {std::move(name), [] { return std::make_unique<OneMedium>(); }};
}
template <typename OneMedium>
TestedTier encrypted(std::string name) {
  return {std::move(name), [] { return std::make_unique<EncryptedMedium>(std::make_unique<OneMedium>()); }};
}

template <typename OneMedium>
TestedTier encoded(std::string name) {
  return {std::move(name), [] { return std::make_unique<EncodedMedium>(std::make_unique<OneMedium>()); }};
}

INSTANTIATE_TEST_SUITE_P(EncodedKinds, TierConformance,
                         ::testing::Values(encoded<FsMedium>("fs"), encoded<MemoryMedium>("memory"),
                                           encoded<MooncakeMedium>("mooncake"), encoded<RedisMedium>("redis")
#ifdef KV_OFFLOAD_S3
                                                                                    ,
                                           encoded<S3Medium>("s3")
#endif
                                               ),
                         [](const auto& info) { return info.param.name; });
INSTANTIATE_TEST_SUITE_P(Kinds, TierConformance,
                         ::testing::Values(kind<FsMedium>("fs"), kind<MemoryMedium>("memory"),
                                           kind<MooncakeMedium>("mooncake"), kind<RedisMedium>("redis")
#ifdef KV_OFFLOAD_S3
                                                                                 ,
                                           kind<S3Medium>("s3")
#endif
                                               ),
                         [](const auto& info) { return info.param.name; });

#ifdef KV_OFFLOAD_ENCRYPTION
INSTANTIATE_TEST_SUITE_P(EncryptedKinds, TierConformance,
                         ::testing::Values(encrypted<FsMedium>("fs"), encrypted<MemoryMedium>("memory"),
                                           encrypted<MooncakeMedium>("mooncake"),
                                           encrypted<RedisMedium>("redis")
#ifdef KV_OFFLOAD_S3
                                               ,
                                           encrypted<S3Medium>("s3")
#endif
                                               ),
                         [](const auto& info) { return info.param.name; });
#endif

}  // namespace
}  // namespace kv_offload
