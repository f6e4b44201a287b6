// SPDX-License-Identifier: Apache-2.0
#include "cache/tier_io.h"

#include "cache/parts.h"
#include "out_of_memory.h"

namespace kv_offload {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;
using ::testing::SizeIs;

class TierIoTest : public ::testing::Test {
 protected:
  struct Told {
    TierIo::Waiter waiter;
    bool arrived;
    std::optional<MissReason> failed;
    ChunkState state;  // the chunk's state during the callback
    bool operator==(const Told&) const = default;
  };
  TierIoTest() {
    parts_.on_read_end = [this](TierIo::Waiter waiter, const TierIo::ReadEnd& end) {
      told_.push_back({waiter, end.arrived, end.failed, parts_.chunks.at(end.slot).state});
    };
  }
  Slot read(const std::string& name, bool probe = false) {
    const TierIo::Read read{parts_.fetching(name), 0};
    ops_.read({&read, 1}, Nanos(0), probe);
    return read.slot;
  }
  void write(Slot slot) { ops_.write(0, {&slot, 1}); }
  double failures(std::string_view op, std::string_view kind) {
    return parts_.metrics.value("kv_offload_failures_total", {"fs", op, kind});
  }

  OpParts parts_;
  TierIo& ops_ = parts_.ops;
  std::vector<Told> told_;
};

TEST_F(TierIoTest, waiters_are_notified_once_the_chunk_is_resident) {
  parts_.record("a");
  const Slot slot = read("a");
  EXPECT_TRUE(ops_.await(slot, 5));
  EXPECT_TRUE(ops_.await(slot, 6));
  EXPECT_FALSE(ops_.await(slot, 5)) << "the waiter is already registered";
  parts_.finish();
  EXPECT_THAT(
      told_, ElementsAre(Told{5, true, {}, ChunkState::kResident}, Told{6, true, {}, ChunkState::kResident}));
  EXPECT_EQ(parts_.chunks.at(slot).origin, ChunkOrigin::kTier);
  EXPECT_FALSE(ops_.await(slot, 7)) << "no read of the chunk is in flight";
}

TEST(TierIoShardsTest, a_record_has_each_shard_of_a_row) {
  PartsOptions options;
  options.rows = 6;
  options.shards_per_area = 3;
  OpParts parts(options);
  (void)parts.resident("before");  // uses the first pages
  const Slot slot = parts.resident("a");
  const RowId row = parts.chunks.at(slot).row;
  for (std::uint32_t i = 0; i < 3; ++i) fill(parts.region->shard(0, row + i, 300), key_of("a"), i);
  parts.ops.write(0, {&slot, 1});
  parts.finish();
  const FakeTier::Record& record = parts.tier->records.at(key_of("a"));
  ASSERT_THAT(record.shards, SizeIs(3));
  for (std::uint32_t i = 0; i < 3; ++i) {
    ASSERT_THAT(record.shards[i], SizeIs(300));
    EXPECT_TRUE(matches(record.shards[i], key_of("a"), i)) << i;
  }
}

TEST(TierIoTenantsTest, unrelated_keys_of_two_tenants_are_looked_up_separately) {
  PartsOptions options;
  options.cache.tenants = {{"other", 0}, {"quiet", 0.75}, {"flood", 0.25}};
  OpParts parts(options);
  parts.tier->knows = false;
  EXPECT_FALSE(parts.ops.is_recorded(key_of("a"), 1, 2));
  EXPECT_FALSE(parts.ops.is_recorded(key_of("b"), 1, 2));
  EXPECT_FALSE(parts.ops.is_recorded(key_of("c"), 1, 1));
  parts.ops.end_step();
  using Asked = std::vector<std::pair<std::vector<ChunkKey>, LookupOptions>>;
  EXPECT_EQ(parts.tier->asked, (Asked{{{key_of("a"), key_of("b")}, {KeyOrder::kNone, 2, 0.25}},
                                      {{key_of("c")}, {KeyOrder::kNone, 1, 0.75}}}));
}

TEST_F(TierIoTest, a_read_that_fails_makes_its_chunk_absent_with_the_reason_and_is_counted_once) {
  parts_.record("a");
  parts_.tier->fail(StatusKind::kIo);
  ops_.await(read("a"), 5);
  parts_.finish();
  EXPECT_THAT(told_, ElementsAre(Told{5, false, MissReason::kIoError, ChunkState::kFetching}));
  EXPECT_FALSE(parts_.has("a"));
  EXPECT_EQ(parts_.free_rows(), 4u);
  EXPECT_EQ(parts_.key_history.eviction_reason(key_of("a")), static_cast<std::uint8_t>(MissReason::kIoError));
  EXPECT_EQ(failures("read", "io"), 1);
}

TEST_F(TierIoTest, ops_that_end_because_a_host_is_lost_have_that_reason_and_are_no_failures) {
  parts_.record("a");
  parts_.tier->host_is_lost = true;
  ops_.await(read("a"), 5);
  write(parts_.resident("b"));
  parts_.finish();
  EXPECT_THAT(told_, ElementsAre(Told{5, false, MissReason::kHostLost, ChunkState::kFetching}));
  EXPECT_EQ(parts_.metrics.value("kv_offload_dropped_bytes_total", {"fs", "host_lost"}), kPageBytes);
  EXPECT_EQ(failures("read", "unavailable"), 0);
  EXPECT_EQ(failures("write", "unavailable"), 0);
}

TEST_F(TierIoTest, a_cancelled_read_is_not_a_failure_of_its_key) {
  parts_.record("a");
  const Slot slot = read("a");
  const OpId op = ops_.await(slot, 5).value();
  ops_.await(slot, 6);
  ops_.stop_awaiting(op, 5);
  EXPECT_EQ(parts_.tier->queued_reads(), 1u) << "another request waits for the read";
  ops_.stop_awaiting(op, 5);
  EXPECT_EQ(parts_.tier->queued_reads(), 1u) << "the request had already left";
  ops_.stop_awaiting(op, 6);
  EXPECT_EQ(parts_.tier->queued_reads(), 0u);
  parts_.finish();
  EXPECT_THAT(told_, IsEmpty());
  EXPECT_FALSE(parts_.has("a"));
  EXPECT_EQ(parts_.key_history.eviction_reason(key_of("a")), std::nullopt);
  EXPECT_EQ(failures("read", "cancelled"), 0);
}

TEST_F(TierIoTest, a_read_is_left_as_a_probe_unless_others_wait_for_it) {
  parts_.record("a");
  const Slot slot = read("a");
  const OpId op = ops_.await(slot, 5).value();
  ops_.await(slot, 6);
  EXPECT_FALSE(ops_.continue_as_probe(slot, Nanos(0)));
  ops_.stop_awaiting(op, 6);
  EXPECT_FALSE(ops_.is_probe(slot));
  EXPECT_TRUE(ops_.continue_as_probe(slot, Nanos(0)));
  EXPECT_TRUE(ops_.is_probe(slot));
  EXPECT_TRUE(ops_.await(slot, 7));
  EXPECT_FALSE(ops_.is_probe(slot)) << "a request waits for the read again";
}

TEST_F(TierIoTest, a_write_has_a_pin_until_it_ended) {
  const Slot slot = parts_.resident("a");
  write(slot);
  write(slot);
  EXPECT_EQ(parts_.tier->queued_writes(), 1u) << "a write is already queued";
  EXPECT_EQ(ops_.writes_in_flight(0), 1u);
  EXPECT_EQ(parts_.chunks.victim(), std::nullopt);
  parts_.finish();
  EXPECT_EQ(ops_.writes_in_flight(0), 0u);
  EXPECT_EQ(parts_.chunks.victim(), slot);
  EXPECT_TRUE(ops_.is_recorded(key_of("a"), 1, 0));
  write(slot);
  EXPECT_EQ(parts_.tier->queued_writes(), 0u) << "the record exists";
}

TEST_F(TierIoTest, a_failed_write_is_counted_once_and_its_chunk_stays) {
  parts_.tier->fail(StatusKind::kNoSpace);
  const Slot slot = parts_.resident("a");
  write(slot);
  parts_.finish();
  EXPECT_EQ(failures("write", "no_space"), 1);
  EXPECT_EQ(parts_.metrics.value("kv_offload_dropped_bytes_total", {"fs", "no_space"}), kPageBytes);
  EXPECT_TRUE(parts_.has("a"));
  EXPECT_TRUE(parts_.chunks.was_write_tried(slot, 0));
}

TEST_F(TierIoTest, shedding_cancels_the_oldest_writes_and_counts_them_once) {
  write(parts_.resident("a"));
  write(parts_.resident("b"));
  parts_.tier->start(OpKind::kWrite);
  EXPECT_TRUE(ops_.shed_writes());
  EXPECT_EQ(parts_.metrics.value("kv_offload_dropped_bytes_total", {"fs", "pressure"}), kPageBytes);
  EXPECT_EQ(parts_.metrics.value("kv_offload_dropped_bytes_total", {"fs", "cancelled"}), 0);
  EXPECT_EQ(parts_.chunks.pinned(), 1u) << "the running write";
  EXPECT_FALSE(ops_.shed_writes()) << "no write is left to cancel";
}

TEST_F(TierIoTest, a_running_op_keeps_its_row_through_a_reset_until_it_ends) {
  parts_.record("a");
  read("a");
  write(parts_.resident("b"));
  parts_.tier->start(OpKind::kRead);
  parts_.tier->start(OpKind::kWrite);
  ops_.forget();
  parts_.chunks.forget();
  EXPECT_EQ(parts_.chunks.quarantined_rows(), 2u);
  EXPECT_EQ(parts_.free_rows(), 2u);
  parts_.tier->finish_started();
  ops_.poll();
  EXPECT_EQ(parts_.free_rows(), 4u);
  EXPECT_FALSE(parts_.has("a"));
}

TEST_F(TierIoTest, a_failed_reset_of_a_tier_is_counted) {
  parts_.tier->fail_resets(true);
  ops_.reset();
  EXPECT_EQ(failures("reset", "io"), 1);
  EXPECT_FALSE(ops_.is_writable(0)) << "as of the previous poll";
}

TEST(TierIoResetTest, the_reset_of_a_tier_that_throws_stops_no_other) {
  PartsOptions options;
  options.tiers = 2;
  OpParts parts(options);
  parts.record("a");
  parts.slower->records = parts.tier->records;
  parts.tier->reset_throws = true;
  const auto failures = [&] {
    return parts.metrics.value("kv_offload_failures_total", {"fs", "reset", "exception"});
  };
  parts.ops.reset();
  EXPECT_TRUE(parts.slower->was_reset());
  EXPECT_EQ(parts.ops.contains(0, key_of("a")), Presence::kAbsent);
  EXPECT_FALSE(parts.ops.is_readable(0) || parts.ops.is_writable(0) || parts.ops.is_shared(0));
  EXPECT_TRUE(parts.ops.is_readable(1) && parts.ops.is_writable(1));
  EXPECT_EQ(failures(), 1);
  parts.ops.poll();
  EXPECT_EQ(failures(), 1) << "the next attempt comes a second later";
  parts.clock.advance(std::chrono::seconds(1));
  parts.ops.poll();
  EXPECT_EQ(failures(), 2);
  parts.tier->reset_throws = false;
  parts.clock.advance(std::chrono::seconds(1));
  parts.ops.poll();
  EXPECT_TRUE(parts.tier->was_reset());
  EXPECT_TRUE(parts.ops.is_readable(0) && parts.ops.is_writable(0));
  EXPECT_EQ(failures(), 2);
}

TEST(TierIoResetTest, a_failure_is_counted_also_if_memory_runs_out) {
  OpParts parts;
  parts.record("a");
  parts.tier->reset_throws = true;
  EXPECT_GT(testing::fail_each_allocation([&] { parts.ops.reset(); },
                                          [&] {
                                            EXPECT_EQ(parts.ops.contains(0, key_of("a")), Presence::kAbsent);
                                            EXPECT_FALSE(parts.ops.is_readable(0));
                                          }),
            0u);
  EXPECT_EQ(parts.metrics.value("kv_offload_failures_total", {"fs", "reset", "exception"}), 1);
}

TEST_F(TierIoTest, polls_once_a_step_unless_already_polled) {
  const Slot slot = parts_.resident("a");
  write(slot);
  ops_.poll_once_per_step();
  parts_.tier->finish();
  ops_.poll_once_per_step();
  EXPECT_EQ(ops_.writes_in_flight(0), 1u);
  ops_.end_step();
  ops_.poll_once_per_step();
  EXPECT_EQ(ops_.writes_in_flight(0), 0u);
}

TEST_F(TierIoTest, records_that_a_tier_removed_are_remembered_with_the_reason) {
  parts_.record("a");
  parts_.record("b");
  parts_.tier->remove(key_of("a"), TierRemoval::Reason::kCorrupt);
  parts_.tier->remove(key_of("b"), TierRemoval::Reason::kEvicted);
  ops_.poll();
  EXPECT_EQ(parts_.key_history.eviction_reason(key_of("a")), static_cast<std::uint8_t>(MissReason::kCorrupt));
  EXPECT_EQ(parts_.key_history.eviction_reason(key_of("b")), static_cast<std::uint8_t>(MissReason::kEvicted));
  const auto events = parts_.events.take();
  ASSERT_THAT(events, SizeIs(1));
  EXPECT_EQ(events[0].owner, "fs");
  EXPECT_THAT(events[0].keys, ElementsAre(key_of("a"), key_of("b")));
}

// One poll reports both the removal and the write, not in the order in which they happened.
TEST_F(TierIoTest, a_record_written_again_is_not_reported_as_removed) {
  parts_.record("a");
  parts_.tier->remove(key_of("a"), TierRemoval::Reason::kEvicted);
  write(parts_.resident("a"));
  parts_.finish();
  std::vector<bool> removed;
  for (const CacheEvent& event : parts_.events.take()) {
    if (event.storage) removed.push_back(event.removed);
  }
  EXPECT_THAT(removed, ElementsAre(false));
  EXPECT_EQ(parts_.key_history.eviction_reason(key_of("a")), std::nullopt);
}

TEST_F(TierIoTest, a_chunk_is_recorded_from_the_end_of_its_write_until_its_removal) {
  const Slot slot = parts_.resident("a");
  const auto recorded = [&] { return parts_.chunks.at(slot).recorded; };
  write(slot);
  EXPECT_FALSE(recorded()) << "not yet";
  parts_.tier->fail(StatusKind::kIo);
  parts_.finish();
  EXPECT_FALSE(recorded());
  parts_.tier->fail(StatusKind::kOk);
  write(slot);
  parts_.finish();
  EXPECT_TRUE(recorded());
  parts_.tier->remove(key_of("a"), TierRemoval::Reason::kEvicted);
  ops_.poll();
  EXPECT_FALSE(recorded());
}

TEST_F(TierIoTest, a_fetched_chunk_and_an_unneeded_write_count_as_recorded) {
  parts_.record("a");
  parts_.record("b");
  const Slot fetched = read("a");
  parts_.finish();
  EXPECT_TRUE(parts_.chunks.at(fetched).recorded);
  const Slot stored = parts_.resident("b");
  EXPECT_FALSE(parts_.chunks.at(stored).recorded);
  write(stored);
  EXPECT_EQ(ops_.writes_in_flight(0), 0u);
  EXPECT_TRUE(parts_.chunks.at(stored).recorded);
}

// A chunk with records on two tiers.
class TierIoTiersTest : public ::testing::Test {
 protected:
  TierIoTiersTest() {
    parts_.ops.write(0, {&slot_, 1});
    parts_.ops.write(1, {&slot_, 1});
    parts_.slower->finish();
    parts_.finish();
  }
  void remove_from(FakeTier& tier) {
    tier.remove(key_of("a"), TierRemoval::Reason::kEvicted);
    parts_.ops.poll();
  }
  bool recorded() { return parts_.chunks.at(slot_).recorded; }

  OpParts parts_{{.tiers = 2}};
  const Slot slot_ = parts_.resident("a");
};

TEST_F(TierIoTiersTest, a_chunk_is_recorded_while_one_of_its_records_exists) {
  remove_from(*parts_.tier);
  EXPECT_TRUE(recorded());
  remove_from(*parts_.slower);
  EXPECT_FALSE(recorded());
}

// Makes the cost model prefer recomputing over reading from this tier, whatever records it has.
void make_too_slow(OpParts& parts, std::size_t tier) {
  Nanos now{std::chrono::seconds(100)};
  parts.costs.prefill.observe(1000, 500);
  for (const int second : {0, 1, 1, 1}) parts.costs.prefill.end_step(now += std::chrono::seconds(second));
  for (int i = 1; i <= 32; ++i) parts.costs.on_read(tier, 10.0 * i, 10.0 * i, now);
  const Stretch stretch{static_cast<std::int32_t>(tier), 100, 1000, 1000};
  ASSERT_EQ(parts.costs.decide({.stretches = {&stretch, 1}}).choice, Decision::Choice::kRecompute);
}

TEST_F(TierIoTest, a_record_on_a_tier_that_is_too_slow_does_not_count) {
  make_too_slow(parts_, 0);
  const Slot slot = parts_.resident("a");
  write(slot);
  parts_.finish();
  EXPECT_FALSE(parts_.chunks.at(slot).recorded);
}

TEST_F(TierIoTiersTest, a_record_on_a_tier_that_is_too_slow_does_not_replace_a_removed_one) {
  make_too_slow(parts_, 1);
  remove_from(*parts_.tier);
  EXPECT_FALSE(recorded());
}

}  // namespace
}  // namespace kv_offload
