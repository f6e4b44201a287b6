// SPDX-License-Identifier: Apache-2.0
#include "cache/planner.h"

#include "cache/parts.h"
#include "step_watch.h"

namespace kv_offload {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;
using ::testing::SizeIs;

class PlannerTest : public ::testing::Test {
 protected:
  explicit PlannerTest(const PartsOptions& options = {})
      : parts_(options),
        planner_({parts_.groups, parts_.chunks, parts_.costs, parts_.ops, parts_.row_provider,
                  parts_.requests, parts_.metrics}) {}
  void SetUp() override {
    for (const char* name : {"a", "b", "c", "d", "e", "f"}) parts_.record(name);
    request_ = parts_.requests.begin({});
  }
  void scan(const Names& names) {
    for (const auto& name : names) parts_.lookup(request_, name);
  }
  void plan() {
    parts_.ops.poll();
    planner_.plan_step(parts_.clock.now());
    parts_.requests.end_step();
    parts_.ops.end_step();
  }
  double decisions(std::string_view choice) {
    return parts_.metrics.value("kv_offload_decisions_total", {choice});
  }

  std::string look(RequestHandle request, const Names& names) {
    std::string seen;
    for (const auto& name : names) seen.push_back("MHPR"[static_cast<int>(parts_.lookup(request, name))]);
    return seen;
  }
  // Asks about both in each step. Returns what the second one sees.
  std::string step_both(RequestHandle second, const Names& of_first, const Names& of_second) {
    look(request_, of_first);
    std::string seen = look(second, of_second);
    plan();
    return seen;
  }
  void pin(const Names& names) {
    for (const auto& name : names) parts_.chunks.pin(parts_.resident(name));
  }

  RequestParts parts_;
  Planner planner_;
  RequestHandle request_ = 0;
};

TEST_F(PlannerTest, recorded_chunks_are_read_and_hits_are_pinned) {
  const Slot hit = parts_.resident("x");
  scan({"x", "a", "b"});
  plan();
  EXPECT_THAT(parts_.tier->read_keys(), ElementsAre(key_of("a"), key_of("b")));
  EXPECT_THAT(parts_.requests.at(request_).held, ElementsAre(hit));
  EXPECT_THAT(parts_.requests.at(request_).awaited, SizeIs(2));
  EXPECT_EQ(decisions("load"), 1);
}

TEST_F(PlannerTest, a_plan_is_trimmed_to_the_available_rows) {
  scan({"a", "b", "c", "d", "e", "f"});
  plan();
  EXPECT_EQ(parts_.tier->queued_reads(), 4u);
  EXPECT_EQ(parts_.requests.at(request_).closed[0], MissReason::kPressure);
}

TEST_F(PlannerTest, a_decision_that_is_repeated_after_a_wait_counts_once) {
  scan({"a"});
  plan();
  for (std::uint64_t i = 0; i < RequestTable::kUnaskedSteps; ++i) plan();
  parts_.clock.advance(parts_.options.lookup_timeout);
  plan();
  ASSERT_TRUE(parts_.requests.at(request_).expired);
  parts_.finish();
  scan({"a"});
  plan();
  EXPECT_EQ(parts_.tier->queued_reads(), 1u) << "it waits again";
  EXPECT_EQ(decisions("load"), 1);
  parts_.requests.admit(request_);
  parts_.finish();
  scan({"b"});
  plan();
  EXPECT_EQ(decisions("load"), 2);
}

// ---- rows that other requests hold

TEST_F(PlannerTest, a_request_waits_for_the_rows_of_an_older_one) {
  const RequestHandle other = parts_.requests.begin({});
  EXPECT_EQ(step_both(other, {"a", "b", "c"}, {"d", "e"}), "PP");
  EXPECT_THAT(parts_.tier->read_keys(), ElementsAre(key_of("a"), key_of("b"), key_of("c"), key_of("d")));
  EXPECT_TRUE(parts_.requests.at(other).awaits_rows());
  parts_.finish();
  EXPECT_EQ(step_both(other, {"a", "b", "c"}, {"d", "e"}), "HP");
  EXPECT_EQ(parts_.tier->queued_reads(), 0u);
  parts_.requests.admit(request_);
  EXPECT_EQ(look(other, {"d", "e"}), "HP");
  plan();
  EXPECT_THAT(parts_.tier->read_keys(), ElementsAre(key_of("e")));
  EXPECT_FALSE(parts_.requests.at(other).awaits_rows());
  parts_.finish();
  EXPECT_EQ(look(other, {"d", "e"}), "HH");
  EXPECT_EQ(decisions("load"), 2);
}

TEST_F(PlannerTest, a_request_waits_for_the_rows_of_a_running_load) {
  const Names loaded{"w", "x", "y"};
  for (const auto& name : loaded) parts_.resident(name);
  const std::vector<ChunkKey> keys{key_of("w"), key_of("x"), key_of("y")};
  const auto load = parts_.device_loads.begin(keys, {});
  EXPECT_EQ(look(request_, {"a", "b"}), "PP");
  plan();
  EXPECT_EQ(parts_.tier->queued_reads(), 1u);
  EXPECT_TRUE(parts_.requests.at(request_).awaits_rows());
  parts_.device_loads.complete(keys);  // a rank has not reported yet
  EXPECT_EQ(look(request_, {"a", "b"}), "PP");
  plan();
  EXPECT_TRUE(parts_.requests.at(request_).awaits_rows());
  parts_.report(load.transfer.ticket);
  parts_.device_loads.poll();
  EXPECT_EQ(look(request_, {"a", "b"}), "PP");
  plan();
  EXPECT_EQ(parts_.tier->queued_reads(), 2u);
  EXPECT_FALSE(parts_.requests.at(request_).awaits_rows());
}

// A row of the older one's own prompt, which is not evicted for it, but would be for others.
TEST_F(PlannerTest, a_younger_request_takes_no_row_while_an_older_one_waits_for_rows) {
  const RequestHandle older = parts_.requests.begin({}), younger = parts_.requests.begin({});
  parts_.chunks.access(parts_.resident("x"), parts_.requests.at(older).number, 0);
  EXPECT_EQ(step_both(older, {"a", "b"}, {"c", "d", "e"}), "PPP");
  look(request_, {"a", "b"});
  look(older, {"c", "d", "e"});
  EXPECT_EQ(look(younger, {"f"}), "P");
  plan();
  EXPECT_TRUE(parts_.has("x"));
  EXPECT_TRUE(parts_.requests.at(older).awaits_rows());
  EXPECT_TRUE(parts_.requests.at(younger).awaits_rows());
  parts_.finish();
  parts_.requests.admit(request_);
  look(younger, {"f"});
  look(older, {"c", "d", "e"});
  plan();
  EXPECT_THAT(parts_.tier->read_keys(), ElementsAre(key_of("d"), key_of("e"), key_of("f")));
}

// Each holds half of what both need.
TEST_F(PlannerTest, requests_that_hold_rows_do_not_wait_for_each_other) {
  std::vector<Slot> of_first, of_second;
  for (const char* name : {"w", "x"}) of_first.push_back(parts_.resident(name));
  for (const char* name : {"y", "z"}) of_second.push_back(parts_.resident(name));
  const RequestHandle other = parts_.requests.begin({});
  parts_.requests.hold(request_, of_first);
  parts_.requests.hold(other, of_second);
  EXPECT_EQ(step_both(other, {"w", "x", "a", "b"}, {"y", "z", "c", "d"}), "HHPP");
  EXPECT_TRUE(parts_.requests.at(request_).awaits_rows());
  EXPECT_TRUE(parts_.requests.at(other).awaits_rows());
  EXPECT_EQ(step_both(other, {"w", "x", "a", "b"}, {"y", "z", "c", "d"}), "HHPP");
  EXPECT_EQ(look(request_, {"w", "x", "a", "b"}), "HHMM");
  EXPECT_EQ(parts_.requests.at(request_).closed[0], MissReason::kPressure);
  EXPECT_EQ(look(other, {"y", "z", "c", "d"}), "HHPP");
  parts_.requests.admit(request_);
  plan();
  EXPECT_EQ(parts_.tier->queued_reads(), 2u);
}

TEST_F(PlannerTest, a_request_does_not_wait_for_rows_that_are_pinned_for_ever) {
  pin({"w", "x", "y"});
  const RequestHandle other = parts_.requests.begin({});
  look(other, {"b"});
  EXPECT_EQ(look(request_, {"a", "c"}), "PP");
  plan();
  EXPECT_EQ(parts_.requests.at(request_).closed[0], MissReason::kPressure);
}

// None of them could use a row of another one. Each loads what it has, at the same time.
TEST_F(PlannerTest, requests_for_the_same_prompt_do_not_wait_for_each_other) {
  const RequestHandle other = parts_.requests.begin({});
  const Names prompt{"a", "b", "c", "d", "e"};
  step_both(other, prompt, prompt);
  parts_.finish();
  EXPECT_EQ(look(request_, prompt), "HHHHM");
  EXPECT_EQ(look(other, prompt), "HHHHM");
  const std::vector<ChunkKey> keys{key_of("a"), key_of("b"), key_of("c"), key_of("d")};
  const RequestHandle third = parts_.requests.begin({});
  parts_.device_loads.begin(keys, {});
  EXPECT_EQ(look(third, prompt), "HHHHP");
  plan();
  EXPECT_EQ(parts_.requests.at(third).closed[0], MissReason::kPressure);
}

TEST_F(PlannerTest, a_request_waits_for_rows_no_longer_than_computing_takes) {
  const Nanos budget = std::chrono::milliseconds(100), compute = 4 * budget;
  const RequestHandle other = parts_.requests.begin({});
  pin({"x"});
  step_both(other, {"a", "b"}, {"c", "d"});
  parts_.requests.set_load_budget(other, budget, parts_.clock.now() + budget);
  parts_.requests.report_decision(other, "load", {.compute_seconds = to_seconds(compute)});
  parts_.clock.advance(compute - Nanos(1));
  EXPECT_EQ(step_both(other, {"a", "b"}, {"c", "d"}), "PP");
  EXPECT_FALSE(parts_.requests.at(other).expired) << "the time for its reads has not begun";
  parts_.finish();
  // vLLM does not ask: it has no room.
  parts_.clock.advance(budget);
  plan();
  parts_.clock.advance(budget);
  EXPECT_EQ(step_both(other, {"a", "b"}, {"c", "d"}), "HP");
  EXPECT_TRUE(parts_.requests.at(other).awaits_rows());
  parts_.clock.advance(Nanos(1));
  EXPECT_EQ(step_both(other, {"a", "b"}, {"c", "d"}), "HP");
  EXPECT_EQ(parts_.requests.at(other).closed[0], MissReason::kPressure);
  EXPECT_EQ(look(other, {"c", "d"}), "HM");
}

TEST_F(PlannerTest, the_time_for_the_reads_begins_when_there_are_rows) {
  const Nanos budget = std::chrono::milliseconds(100);
  const RequestHandle other = parts_.requests.begin({});
  step_both(other, {"a", "b", "c", "d"}, {"e"});
  parts_.requests.set_load_budget(other, budget, parts_.clock.now() + budget);
  parts_.clock.advance(budget - Nanos(1));
  parts_.finish();
  parts_.requests.admit(request_);
  EXPECT_EQ(look(other, {"e"}), "P");
  plan();
  EXPECT_EQ(parts_.tier->queued_reads(), 1u);
  EXPECT_EQ(parts_.requests.at(other).load_budget_end, parts_.clock.now() + budget);
}

TEST_F(PlannerTest, a_request_that_waits_for_rows_has_a_deadline) {
  const RequestHandle other = parts_.requests.begin({});
  pin({"x"});
  step_both(other, {"a", "b"}, {"c", "d"});
  parts_.finish();
  parts_.clock.advance(parts_.options.lookup_timeout);
  plan();
  EXPECT_EQ(parts_.requests.at(other).expired_for, MissReason::kPressure);
  EXPECT_EQ(parts_.requests.at(request_).expired_for, MissReason::kDeadline);
  EXPECT_EQ(look(other, {"c", "d"}), "HM");
}

// Its own hits further to the right are not evicted while it may get other rows.
TEST_F(PlannerTest, a_request_that_waits_for_rows_keeps_its_tail) {
  const RequestHandle other = parts_.requests.begin({});
  parts_.resident("f");
  step_both(other, {"a", "b", "c"}, {"d", "f"});
  EXPECT_TRUE(parts_.has("f"));
  EXPECT_TRUE(parts_.requests.at(other).awaits_rows());
  parts_.finish();
  parts_.requests.admit(request_);
  EXPECT_EQ(look(other, {"d", "f"}), "PH");
  plan();
  EXPECT_TRUE(parts_.has("f"));
  EXPECT_THAT(parts_.tier->read_keys(), ElementsAre(key_of("d")));
}

// Teaches that a token is computed in 1 ms and that the tier reads 1 byte per second.
void make_tier_slow(OpParts& parts) {
  Nanos now = parts.clock.now();
  parts.costs.prefill.observe(1000, 500);
  for (const int second : {0, 1, 1, 1}) parts.costs.prefill.end_step(now += std::chrono::seconds(second));
  for (int i = 1; i <= 32; ++i) parts.costs.on_read(0, 10.0 * i, 10.0 * i, now);
}

// What arrived before does not show how fast the tier reads now.
TEST_F(PlannerTest, the_reads_after_a_wait_for_rows_are_judged_by_themselves) {
  const Nanos budget = std::chrono::milliseconds(10);
  const RequestHandle other = parts_.requests.begin({});
  step_both(other, {"a", "b"}, {"c", "d", "e"});
  parts_.finish();
  parts_.requests.set_load_budget(other, budget, parts_.clock.now() + budget);
  parts_.requests.admit(request_);
  EXPECT_EQ(look(other, {"c", "d", "e"}), "HHP");
  plan();
  ASSERT_EQ(parts_.tier->queued_reads(), 1u);
  make_tier_slow(parts_);
  ASSERT_GT(parts_.costs.prefill.seconds(16, 0), to_seconds(budget) / 2) << "the rest, at the earlier rate";
  parts_.clock.advance(budget);
  plan();
  EXPECT_EQ(parts_.requests.at(other).expired_for, MissReason::kRecomputeCheaper);
}

TEST_F(PlannerTest, a_request_decides_again_after_a_wait_for_rows) {
  for (const bool is_slow : {false, true}) {
    const RequestHandle first = parts_.requests.begin({}), other = parts_.requests.begin({});
    look(first, {"a", "b", "c", "d"});
    look(other, {"e"});
    plan();
    ASSERT_TRUE(parts_.requests.at(other).awaits_rows());
    if (is_slow) make_tier_slow(parts_);
    parts_.finish();
    parts_.requests.admit(first);
    look(other, {"e"});
    plan();
    EXPECT_EQ(parts_.requests.at(other).awaited.size(), is_slow ? 0u : 1u);
    EXPECT_EQ(decisions("recompute"), is_slow ? 1 : 0);
    EXPECT_EQ(decisions("load"), is_slow ? 4 : 2);
    parts_.requests.end(other);
    parts_.requests.end(first);
    parts_.finish();
    for (const char* name : {"a", "b", "c", "d", "e"}) {
      if (const ChunkEntry* entry = parts_.chunks.find(key_of(name)))
        parts_.chunks.discard(parts_.chunks.slot_of(entry));
    }
  }
}

TEST_F(PlannerTest, a_cut_is_decided_again_after_a_wait_for_rows) {
  const RequestHandle other = parts_.requests.begin({});
  step_both(other, {"a", "b", "c", "d"}, {"e", "f"});
  parts_.requests.set_load_tokens(other, ChunkParts::kTokens);
  parts_.finish();
  parts_.requests.admit(request_);
  look(other, {"e", "f"});
  plan();
  EXPECT_EQ(parts_.tier->queued_reads(), 2u);
}

TEST_F(PlannerTest, a_request_asks_once_in_a_step_whether_rows_become_free) {
  constexpr std::uint64_t kOthers = 20;
  const Slot filling = parts_.filling("filling", kNoTicket);
  for (const char* name : {"x", "y", "z"}) parts_.resident(name);
  ASSERT_EQ(parts_.chunks.at(filling).state, ChunkState::kFilling);
  for (std::uint64_t i = 0; i < kOthers; ++i) EXPECT_EQ(look(parts_.requests.begin({}), {"filling"}), "P");
  EXPECT_EQ(look(request_, {"a", "b", "c", "x", "y", "z"}), "PPPHHH");
  const std::uint64_t steps = testing::steps_of([&] { planner_.plan_step(parts_.clock.now()); });
  EXPECT_EQ(parts_.tier->queued_reads(), 3u) << "in the rows of its tail";
  EXPECT_GE(steps, kOthers);
  EXPECT_LT(steps, 2 * kOthers);
}

// The oldest ones wait. The rest is computed.
TEST_F(PlannerTest, requests_that_wait_for_rows_do_not_make_a_step_long) {
  constexpr std::size_t kChunks = 16384;
  Names prompt;
  for (std::size_t i = 0; i < kChunks; ++i) prompt.push_back(fmt::format("p{}", i));
  for (const auto& name : prompt) parts_.record(name);
  pin({"x", "y", "z"});
  look(request_, {"a"});
  plan();
  std::vector<RequestHandle> others;
  for (int i = 0; i < 5; ++i) {
    others.push_back(parts_.requests.begin({}));
    look(others.back(), prompt);
  }
  plan();
  for (std::size_t i = 0; i < others.size(); ++i)
    EXPECT_EQ(parts_.requests.at(others[i]).awaits_rows(), i < 4) << i;
  EXPECT_EQ(parts_.requests.at(others[4]).closed[0], MissReason::kPressure);
}

// ---- tenants

class TenantPlannerTest : public PlannerTest {
 protected:
  static constexpr TenantId kQuiet = 1, kFlood = 2;
  TenantPlannerTest() : PlannerTest(with_tenants()) {}
  static PartsOptions with_tenants() {
    PartsOptions options;
    options.cache.tenants = {{"other", 0}, {"quiet", 0.5}, {"flood", 0}};
    return options;
  }
  RequestHandle begin(TenantId tenant) {
    RequestOptions options;
    options.tenant = tenant;
    return parts_.requests.begin(options);
  }
  Slot resident_of(TenantId tenant, const std::string& name) {
    const EntryInfo info{0, 0, 0, 99, 0, 0, tenant};
    const Slot slot = parts_.chunks.insert_filling(key_of(name), 0, parts_.take(0), info, kNoTicket);
    parts_.chunks.finish_store(slot);
    return slot;
  }
};

TEST_F(TenantPlannerTest, a_tenant_below_its_share_does_not_wait_behind_others) {
  const RequestHandle loading = begin(kFlood), flood = begin(kFlood), quiet = begin(kQuiet);
  pin({"x", "y", "z"});
  look(loading, {"a"});
  plan();
  const auto look_both = [&] {
    look(flood, {"b"});
    look(quiet, {"c"});
  };
  look_both();
  plan();
  EXPECT_TRUE(parts_.requests.at(flood).awaits_rows());
  EXPECT_TRUE(parts_.requests.at(quiet).awaits_rows());
  parts_.finish();
  parts_.requests.admit(loading);
  look_both();
  plan();
  EXPECT_THAT(parts_.tier->read_keys(), ElementsAre(key_of("c")));
  EXPECT_EQ(parts_.requests.at(flood).closed[0], MissReason::kPressure) << "it may not take that row";
}

// It may take a row that the older request may not take.
TEST_F(TenantPlannerTest, a_tenant_does_not_wait_behind_another_for_its_own_rows) {
  const RequestHandle loading = begin(kFlood), flood = begin(kFlood), quiet = begin(kQuiet);
  resident_of(kQuiet, "x");
  resident_of(kQuiet, "y");
  look(loading, {"a", "b"});
  plan();
  look(flood, {"c"});
  look(quiet, {"d"});
  plan();
  EXPECT_TRUE(parts_.requests.at(flood).awaits_rows());
  EXPECT_THAT(parts_.tier->read_keys(), ElementsAre(key_of("a"), key_of("b"), key_of("d")));
}

TEST_F(TenantPlannerTest, a_request_does_not_wait_for_rows_that_its_tenant_may_not_take) {
  resident_of(kQuiet, "x");
  const std::vector<Slot> held{resident_of(kQuiet, "y")};
  pin({"u", "v"});
  const RequestHandle flood = begin(kFlood), waiting = begin(kQuiet);
  const std::vector<ChunkKey> keys{key_of("x")};
  parts_.device_loads.begin(keys, {.tenant = kQuiet});
  parts_.requests.hold(waiting, held);
  look(waiting, {"f"});
  look(flood, {"a"});
  plan();
  EXPECT_EQ(parts_.requests.at(flood).closed[0], MissReason::kPressure);
  EXPECT_TRUE(parts_.requests.at(waiting).awaits_rows());
}

// A partial chunk loads only the tokens that it has.
TEST_F(PlannerTest, a_partial_chunk_is_read_with_its_own_depth) {
  parts_.record("part");
  parts_.requests.lookup(request_, key_of("part"), 4);
  plan();
  EXPECT_EQ(parts_.chunks.find(key_of("part"))->depth, 4u);
}

TEST_F(PlannerTest, two_requests_share_a_read) {
  scan({"a"});
  const RequestHandle other = parts_.requests.begin({});
  parts_.lookup(other, "a");
  plan();
  EXPECT_EQ(parts_.tier->queued_reads(), 1u);
  EXPECT_THAT(parts_.requests.at(other).awaited, SizeIs(1));
}

TEST_F(PlannerTest, a_wait_ends_with_its_deadline) {
  scan({"a"});
  plan();
  parts_.clock.advance(parts_.options.lookup_timeout);
  plan();
  EXPECT_TRUE(parts_.requests.at(request_).expired);
  EXPECT_EQ(parts_.requests.at(request_).expired_for, MissReason::kDeadline);
  EXPECT_EQ(parts_.tier->queued_reads(), 0u);
}

TEST_F(PlannerTest, an_exhausted_load_budget_leaves_the_reads_as_probes) {
  scan({"a"});
  plan();
  parts_.requests.set_load_budget(request_, std::chrono::milliseconds(1),
                                  parts_.clock.now() + std::chrono::milliseconds(1));
  parts_.clock.advance(std::chrono::milliseconds(1));
  plan();
  EXPECT_EQ(parts_.requests.at(request_).expired_for, MissReason::kRecomputeCheaper);
  EXPECT_EQ(parts_.tier->queued_reads(), 1u);
  EXPECT_EQ(decisions("give_up"), 1);
}

TEST_F(PlannerTest, a_request_with_all_chunks_ignores_its_budget) {
  scan({"a"});
  plan();
  parts_.requests.set_load_budget(request_, std::chrono::milliseconds(1),
                                  parts_.clock.now() + std::chrono::milliseconds(1));
  parts_.finish();
  parts_.clock.advance(std::chrono::milliseconds(1));
  plan();
  EXPECT_FALSE(parts_.requests.at(request_).expired);
  EXPECT_THAT(parts_.requests.at(request_).awaited, IsEmpty());
}

// During a directory scan, chunks become known in any order. Only a run of present chunks from the left
// counts as hits, so chunks found early must not take rows from chunks before them.
TEST_F(PlannerTest, a_prompt_larger_than_host_memory_hits_one_chunk_per_row) {
  const Names prompt{"a", "b", "c", "d", "e", "f"};
  std::vector<std::size_t> order{0, 1, 2, 3, 4, 5};
  do {
    RequestParts parts;
    Planner planner({parts.groups, parts.chunks, parts.costs, parts.ops, parts.row_provider, parts.requests,
                     parts.metrics});
    for (const auto& name : prompt) {
      parts.record(name);
      parts.tier->forgotten.insert(key_of(name));  // presence unknown
    }
    parts.tier->answers = false;
    const RequestHandle request = parts.requests.begin({});
    std::size_t hits = 0;
    for (std::size_t known = 0; known < 2 * order.size(); ++known) {
      if (known < order.size()) parts.tier->forgotten.erase(key_of(prompt[order[known]]));
      hits = 0;
      for (bool in_front = true; const auto& name : prompt) {
        in_front &= parts.lookup(request, name) == LookupResult::kHit;
        hits += in_front;
      }
      planner.plan_step(parts.clock.now());
      parts.requests.end_step();
      parts.ops.end_step();
      parts.finish();
    }
    EXPECT_EQ(hits, 4u) << ::testing::PrintToString(order);
  } while (std::next_permutation(order.begin(), order.end()));
}

// Hits further to the right are useless without the beginning.
TEST_F(PlannerTest, reads_of_a_prompts_head_evict_its_own_tail) {
  for (const char* name : {"c", "d", "e", "f"}) parts_.resident(name);
  scan({"a", "b", "c", "d", "e", "f"});
  plan();
  EXPECT_THAT(parts_.tier->read_keys(), ElementsAre(key_of("a"), key_of("b")));
  EXPECT_TRUE(parts_.has("c"));
  EXPECT_TRUE(parts_.has("d"));
  EXPECT_FALSE(parts_.has("e"));
  EXPECT_FALSE(parts_.has("f"));
  EXPECT_THAT(parts_.requests.at(request_).held, SizeIs(2));
}

TEST(PlannerWithNeighbours, chunks_that_a_neighbour_reads_are_not_evicted_for_a_prompts_head) {
  RequestParts parts({.share_for = "model"});
  Planner planner({parts.groups, parts.chunks, parts.costs, parts.ops, parts.row_provider, parts.requests,
                   parts.metrics});
  parts.chunks.share_in(*parts.region, "weights", Nanos(0));
  const ReadingEngine neighbour(parts);
  for (const char* name : {"a", "b"}) parts.record(name);
  for (const char* name : {"c", "d", "e", "f"}) parts.resident(name);
  for (const char* name : {"d", "e", "f"}) neighbour.pin(name);
  const RequestHandle request = parts.requests.begin({});
  for (const char* name : {"a", "b", "c", "d", "e", "f"}) parts.lookup(request, name);
  parts.ops.poll();
  planner.plan_step(parts.clock.now());
  EXPECT_THAT(parts.tier->read_keys(), ElementsAre(key_of("a")));
  EXPECT_FALSE(parts.has("c"));
  for (const char* name : {"d", "e", "f"}) EXPECT_TRUE(parts.has(name)) << "evicted, and its row is not free";
}

// A plan evicts a chunk that a later plan of this step hit, and reads another chunk into its slot. The later
// plan sheds writes to find a row, and so processes the completion of that read.
TEST_F(PlannerTest, a_plan_does_not_unpin_another_chunk_in_a_reused_slot) {
  const Slot hit = parts_.resident("x");
  for (const char* name : {"p", "q", "r"}) parts_.chunks.pin(parts_.resident(name));
  const Slot written = parts_.chunks.slot_of(parts_.chunks.find(key_of("p")));
  parts_.ops.write(0, {&written, 1});
  scan({"a"});
  const RequestHandle other = parts_.requests.begin({});
  parts_.lookup(other, "b");
  ASSERT_EQ(parts_.lookup(other, "x"), LookupResult::kHit);
  parts_.requests.set_load_budget(other, Nanos(1), Nanos(1));
  parts_.requests.await_rows(other);
  (void)parts_.requests.take_pending();
  parts_.requests.end_step();
  parts_.clock.advance(Nanos(1));  // it has waited for rows long enough
  scan({"a"});
  parts_.lookup(other, "b");
  ASSERT_EQ(parts_.lookup(other, "x"), LookupResult::kHit);
  parts_.tier->automatic = true;
  planner_.plan_step(parts_.clock.now());
  const ChunkEntry* read = parts_.chunks.find(key_of("a"));
  ASSERT_NE(read, nullptr);
  EXPECT_EQ(parts_.chunks.slot_of(read), hit);
  EXPECT_EQ(read->state, ChunkState::kResident);
  EXPECT_EQ(read->pins, 1u);
  EXPECT_THAT(parts_.requests.at(request_).held, ElementsAre(hit));
  EXPECT_EQ(parts_.requests.at(other).closed[0], MissReason::kPressure);
}

}  // namespace
}  // namespace kv_offload
