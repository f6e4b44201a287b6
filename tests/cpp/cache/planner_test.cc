// SPDX-License-Identifier: Apache-2.0
#include "cache/planner.h"

#include "cache/parts.h"

namespace kv_offload {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;
using ::testing::SizeIs;

class PlannerTest : public ::testing::Test {
 protected:
  PlannerTest()
      : planner_({parts_.groups, parts_.chunks, parts_.costs, parts_.ops, parts_.row_provider,
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
