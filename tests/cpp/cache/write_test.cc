// SPDX-License-Identifier: Apache-2.0
// Writes to a tier: which chunks, when, and which writes are dropped under pressure.
#include "cache/cache_fixture.h"

namespace kv_offload {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;
using ::testing::UnorderedElementsAre;

class WriteTest : public OverBoth<CacheTest> {
 protected:
  void make_with(TierSlotOptions policy, std::uint64_t rows = 8) {
    make({.rows = rows, .cache = {.tiers = {policy}}});
  }
  Names queued() {
    Names result;
    for (const TierOp& op : tier().writes()) result.push_back(names({op.key}).front());
    return result;
  }
  bool recorded(const std::string& name) { return tier().holds(key_of(name)); }
  void load_again(const Names& wanted) {
    const RequestHandle request = begin();
    scan(request, wanted);
    load(request, wanted);
    end(request);
  }
};

KV_OFFLOAD_OVER_BOTH(WriteTest);

TEST_P(WriteTest, a_stored_chunk_is_written_through_head_first) {
  store({"a", "b", "c"});
  EXPECT_THAT(queued(), ElementsAre("a", "b", "c"));
  EXPECT_EQ(cache().stats().pinned_chunks, 3u);
  tier().finish();
  step();
  EXPECT_EQ(cache().stats().pinned_chunks, 0u);
  EXPECT_TRUE(recorded("a") && recorded("b") && recorded("c"));
  EXPECT_EQ(world().metrics.value("kv_offload_write_bytes_total", {"fs"}), 3 * 2 * 4096);
}

TEST_P(WriteTest, a_chunk_is_a_hit_whether_or_not_it_is_recorded_yet) {
  store({"a"});
  EXPECT_EQ(peek({"a"}), "H");
}

TEST_P(WriteTest, a_recorded_chunk_is_not_written_again) {
  record({"a"});
  EXPECT_THAT(store({"a"}), ElementsAre("a"));  // host memory had evicted it: stored again
  EXPECT_THAT(queued(), IsEmpty());
  EXPECT_EQ(peek({"a"}), "H");
}

TEST_P(WriteTest, a_failed_write_is_counted_and_loses_nothing_in_memory) {
  tier().fail(StatusKind::kNoSpace);
  store({"a"});
  tier().finish();
  step();
  EXPECT_EQ(world().failures("fs", "write", "no_space"), 1);
  EXPECT_EQ(world().dropped("fs", "no_space"), 2 * 4096);
  EXPECT_EQ(peek({"a"}), "H");
  EXPECT_EQ(cache().stats().pinned_chunks, 0u);
}

TEST_P(WriteTest, under_pressure_the_oldest_queued_writes_are_shed) {
  make_with({}, 2);
  store({"a"});
  store({"b"});
  EXPECT_THAT(store({"c"}), ElementsAre("c"));
  EXPECT_THAT(queued(), ElementsAre("c"));
  EXPECT_EQ(world().dropped("fs", "pressure"), 2 * 2 * 4096);
  EXPECT_EQ(world().dropped("fs", "cancelled"), 0) << "the drop is counted once";
  EXPECT_EQ(peek({"a"}), "M");
  EXPECT_EQ(peek({"b"}), "H");
}

TEST_P(WriteTest, a_running_write_is_never_shed_and_its_row_never_reused) {
  make_with({}, 1);
  store({"a"});
  tier().start(OpKind::kWrite);
  EXPECT_THAT(store({"b"}), IsEmpty());
  tier().finish_started();
  step();
  EXPECT_THAT(store({"b"}), ElementsAre("b"));
  EXPECT_TRUE(recorded("a"));
}

TEST_P(WriteTest, reuse_does_not_write_chunks_used_once) {
  make_with({.write_policy = WritePolicy::kReuse, .reuse_threshold = 2});
  store({"a", "b"});
  EXPECT_THAT(queued(), IsEmpty());
  load_again({"a"});
  EXPECT_THAT(queued(), ElementsAre("a"));
}

TEST_P(WriteTest, reuse_counts_up_to_its_threshold) {
  make_with({.write_policy = WritePolicy::kReuse, .reuse_threshold = 20});
  store({"a"});
  for (int use = 2; use < 20; ++use) load_again({"a"});
  EXPECT_THAT(queued(), IsEmpty());
  load_again({"a"});
  EXPECT_THAT(queued(), ElementsAre("a"));
}

TEST_P(WriteTest, reuse_remembers_evicted_chunks) {
  make_with({.write_policy = WritePolicy::kReuse, .reuse_threshold = 2}, 1);
  store({"a"});
  store({"b"});
  store({"a"});
  EXPECT_THAT(queued(), ElementsAre("a"));
}

TEST_P(WriteTest, on_evict_writes_the_next_victim_and_evicts_another_meanwhile) {
  make_with({.write_policy = WritePolicy::kOnEvict}, 3);
  store({"a"});
  store({"b"});
  EXPECT_THAT(queued(), IsEmpty());
  store({"c"});
  step();  // full: the cold end is written ahead of need
  EXPECT_THAT(queued(), ElementsAre("a", "b", "c"));
  tier().finish();
  step();
  EXPECT_THAT(store({"d"}), ElementsAre("d"));
  EXPECT_TRUE(recorded("a"));
  EXPECT_EQ(peek({"a"}), "P");
  EXPECT_EQ(peek({"b"}), "H");
  EXPECT_EQ(world().dropped("fs", "pressure"), 0);
}

TEST_P(WriteTest, a_failed_write_at_eviction_is_tried_once) {
  make_with({.write_policy = WritePolicy::kOnEvict}, 1);
  tier().fail(StatusKind::kNoSpace);
  store({"a"});
  for (int i = 0; i < 5; ++i) {
    step();
    tier().finish();
  }
  EXPECT_EQ(world().failures("fs", "write", "no_space"), 1);
  EXPECT_THAT(store({"b"}), ElementsAre("b"));
}

TEST_P(WriteTest, writes_at_eviction_keep_the_eviction_order) {
  make_with({.write_policy = WritePolicy::kOnEvict}, 3);
  for (const char* name : {"a", "b", "c"}) store({name});
  step();
  tier().finish();
  step();
  const StoreGrant grant = cache().prepare_store(begin(), keys({"x", "y", "z"}));
  EXPECT_THAT(names(grant.evicted), ElementsAre("a", "b", "c"));
}

// ---- bursts

class BurstTest : public CacheTest, public ::testing::WithParamInterface<const char*> {
 protected:
  static constexpr std::size_t kRows = 2048;
  void make_full() {
    WorldOptions options{.ranks = 1, .rows = kRows};
    options.cache.tiers = {{.write_policy = WritePolicy::kOnEvict}};
    options.cache.eviction_policy = GetParam();
    make(std::move(options));
    while (cache().stats().resident_chunks + kBurst <= kRows) burst();
  }
  // Offers a new prompt in one call and ends the step.
  void burst(std::size_t chunks = kBurst) {
    Names prompt;
    for (std::size_t i = 0; i < chunks; ++i) prompt.push_back(fmt::format("{}.{}", prompts_, i));
    ++prompts_;
    EXPECT_EQ(store(prompt).size(), chunks);
    step();
  }
  double dropped() { return world().dropped("fs", "pressure") / kPageBytes; }  // chunks

  static constexpr std::size_t kBurst = 200;
  int prompts_ = 0;
};

TEST_P(BurstTest, on_evict_nothing_is_lost_while_the_tier_keeps_up) {
  make_full();
  fake().automatic = true;
  for (int i = 0; i < 20; ++i) burst();
  EXPECT_EQ(dropped(), 0);
  EXPECT_GE(fake().records.size(), 19 * kBurst);
}

TEST_P(BurstTest, on_evict_nothing_is_lost_after_a_reset) {
  make_full();
  fake().automatic = true;
  burst();
  cache().reset();
  for (int i = 0; i < 20; ++i) burst();
  EXPECT_EQ(dropped(), 0);
}

// The tier writes nearly all it can. The other chunks are lost; no store waits or is declined.
TEST_P(BurstTest, on_evict_a_tier_that_is_too_slow_writes_as_many_chunks_as_it_can) {
  make_full();
  for (int i = 0; i < 20; ++i) {
    burst();
    tier().finish(kBurst / 2);
  }
  EXPECT_GE(fake().records.size(), 19 * kBurst / 2);
  EXPECT_GT(dropped(), 0);
  EXPECT_LE(fake().queued_writes(), kRows / 8);
}

INSTANTIATE_TEST_SUITE_P(Policies, BurstTest, ::testing::Values("lru", "prefix"),
                         [](const auto& instance) { return std::string(instance.param); });

// ---- events

class WriteEventsTest : public CacheTest {};

TEST_F(WriteEventsTest, no_event_reports_a_record_that_was_evicted_before_its_write_completed) {
  make({.cache = {.keep_events = true}});
  store({"a", "b"});
  cache().take_events();
  tier().finish();
  fake().records.erase(key_of("a"));  // the removal was polled before the completion
  step();
  const auto events = cache().take_events();
  ASSERT_EQ(events.size(), 1u);
  EXPECT_EQ(events[0].owner, "fs");
  EXPECT_THAT(names(events[0].keys), ElementsAre("b"));
}

// ---- reset

TEST_P(WriteTest, a_reset_invalidates_host_memory_and_all_tiers) {
  make({.cache = {.keep_events = true}});
  store({"a", "b"});
  tier().finish();
  step();
  store({"c"});
  cache().take_events();
  cache().reset();
  EXPECT_EQ(peek({"a"}), "M");
  EXPECT_EQ(peek({"c"}), "M");
  const auto stats = cache().stats();
  EXPECT_EQ(stats.resident_chunks + stats.pinned_chunks + stats.quarantined_rows, 0u);
  Names removed;
  for (const CacheEvent& event : cache().take_events()) {
    ASSERT_TRUE(event.removed);
    for (const std::string& name : names(event.keys)) removed.push_back(event.owner + name);
  }
  EXPECT_THAT(removed, UnorderedElementsAre("a", "b", "c", "fsa", "fsb"));
  EXPECT_EQ(store({"1", "2", "3", "4", "5", "6", "7", "8"}).size(), 8u);
}

TEST_P(WriteTest, rows_of_copies_in_flight_are_not_reused_after_a_reset_until_they_ended) {
  make_with({}, 2);
  store({"a"});
  tier().finish();
  step();
  const RequestHandle reader = begin();
  scan(reader, {"a"});
  const Job loading = begin_load(reader, {"a"});
  const Job storing = offer(begin(), {"b"});
  cache().reset();
  EXPECT_EQ(cache().stats().quarantined_rows, 2u);
  EXPECT_THAT(store({"c"}), IsEmpty());
  copy(storing);  // late
  step();
  const Job fresh = offer(begin(), {"c", "d"});
  EXPECT_EQ(fresh.keys.size(), 1u);
  EXPECT_EQ(fresh.transfer.rows, storing.transfer.rows);
  complete(storing);  // a completion from before the reset has no effect
  EXPECT_EQ(peek({"b"}), "M");
  end_load(loading);
  step();
  EXPECT_EQ(cache().stats().quarantined_rows, 0u);
}

TEST_P(WriteTest, rows_of_running_tier_ops_are_not_reused_after_a_reset) {
  make_with({}, 1);
  store({"a"});
  tier().start(OpKind::kWrite);
  cache().reset();
  EXPECT_THAT(store({"b"}), IsEmpty());
  tier().finish_started();
  step();
  EXPECT_THAT(store({"b"}), ElementsAre("b"));
  EXPECT_EQ(peek({"a"}), "M");
}

TEST_P(WriteTest, a_read_that_runs_through_a_reset_is_discarded) {
  make_with({}, 2);
  record({"a"});
  const RequestHandle request = begin();
  scan(request, {"a"});
  step();
  tier().start(OpKind::kRead);
  cache().reset();
  EXPECT_EQ(cache().stats().quarantined_rows, 1u);
  tier().finish_started();
  EXPECT_EQ(scan(request, {"a"}), "M");
  step();
  EXPECT_EQ(cache().stats().quarantined_rows, 0u);
}

TEST_P(WriteTest, a_tier_whose_reset_failed_is_empty_and_usable_again_after_a_retry) {
  record({"a"});
  tier().fail_resets(true);
  cache().reset();
  EXPECT_EQ(world().failures("fs", "reset", "io"), 1);
  for (int i = 0; i < 2; ++i) {
    EXPECT_EQ(peek({"a"}), "M");
    step();
  }
  store({"b"});
  tier().finish();
  step();
  EXPECT_FALSE(recorded("b"));
  EXPECT_EQ(world().dropped("fs", "unavailable"), 2 * 4096);
  tier().fail_resets(false);
  tier().heal();  // without another reset
  step();
  EXPECT_EQ(peek({"a"}), "M");
  store({"c"});
  tier().finish();
  step();
  EXPECT_TRUE(recorded("c"));
  world().restart();
  EXPECT_EQ(peek({"a"}) + peek({"b"}) + peek({"c"}), "MMM")
      << "records made after a reset are visible only to the process that was reset";
}

class TierResetTest : public CacheTest {};

TEST_F(TierResetTest, a_tier_whose_reset_throws_is_not_used_until_a_reset_succeeds) {
  record({"a"});
  fake().reset_throws = true;
  store({"host"});
  cache().reset();
  EXPECT_EQ(peek({"host"}), "M") << "host memory was reset";
  EXPECT_EQ(world().failures("fs", "reset", "exception"), 1);
  EXPECT_EQ(peek({"a"}), "M");
  store({"b"});
  tier().finish();
  step();
  EXPECT_EQ(tier().queued_reads(), 0u);
  EXPECT_FALSE(tier().holds(key_of("b")));
  EXPECT_EQ(world().dropped("fs", "unavailable"), 2 * kPageBytes);
  fake().reset_throws = false;
  pass_time(std::chrono::seconds(1));
  step();
  EXPECT_EQ(peek({"a"}), "M");
  store({"c"});
  tier().finish();
  step();
  EXPECT_TRUE(tier().holds(key_of("c")));
  EXPECT_FALSE(tier().holds(key_of("a")));
}

TEST_P(WriteTest, a_write_started_before_a_reset_leaves_no_record) {
  store({"a", "b"});
  tier().start(OpKind::kWrite);
  cache().reset();
  tier().finish_started();
  tier().finish();
  step();
  EXPECT_FALSE(recorded("a") || recorded("b"));
  EXPECT_EQ(peek({"a"}), "M");
  store({"a"});
  tier().finish();
  step();
  EXPECT_TRUE(recorded("a"));
  world().restart();
  EXPECT_EQ(peek({"a"}) + peek({"b"}), "MM")
      << "records made after a reset are visible only to the process that was reset";
}

// ---- loads

TEST_P(WriteTest, a_chunk_in_two_loads_is_pinned_until_both_end) {
  make_with({}, 1);
  store({"a"});
  tier().finish();
  step();
  const RequestHandle first = begin(), second = begin();
  scan(first, {"a"});
  scan(second, {"a"});
  const Job one = begin_load(first, {"a"}), two = begin_load(second, {"a"});
  end_load(one);
  EXPECT_THAT(store({"b"}), IsEmpty());
  end_load(two);
  EXPECT_THAT(store({"b"}), ElementsAre("b"));
}

TEST_P(WriteTest, a_load_is_over_only_when_all_ranks_reported) {
  make({.rows = 1, .tier = false});
  store({"a"});
  const RequestHandle request = begin();
  scan(request, {"a"});
  const Job job = begin_load(request, {"a"});
  cache().complete_load(job.keys);
  EXPECT_THAT(store({"b"}), IsEmpty());
  world().report(job.transfer.ticket);
  step();
  EXPECT_THAT(store({"b"}), ElementsAre("b"));
}

TEST_P(WriteTest, only_chunks_in_host_memory_can_be_loaded) {
  EXPECT_THROW(cache().prepare_load(begin(), keys({"a"})), InvalidArgument);
}

// ---- close

TEST_P(WriteTest, closing_sheds_queued_writes_and_lets_running_ones_end) {
  store({"a"});
  store({"b"});
  tier().start(OpKind::kWrite);
  cache().close();
  EXPECT_TRUE(tier().is_closed());
  EXPECT_TRUE(recorded("a"));
  EXPECT_EQ(world().dropped("fs", "closing"), 2 * 4096);
  cache().close();
  step();
  cache().reset();
  cache().publish_gauges();
  EXPECT_EQ(peek({"b"}), "M");
  EXPECT_THAT(store({"c"}), IsEmpty());
}

TEST_P(WriteTest, after_a_restart_the_written_chunks_are_hits) {
  store({"a", "b"});
  tier().finish();
  store({"c"});
  world().restart();
  EXPECT_EQ(peek({"a", "b", "c"}), "PPM");
}

}  // namespace
}  // namespace kv_offload
