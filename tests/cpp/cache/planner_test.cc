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
      : planner_({parts_.groups, parts_.chunks, parts_.costs, parts_.ops, parts_.row_supply, parts_.requests,
                  parts_.metrics}) {}
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

TEST_F(PlannerTest, WhatIsRecordedIsReadAndWhatWasHitIsHeld) {
  const Slot hit = parts_.resident("x");
  scan({"x", "a", "b"});
  plan();
  EXPECT_THAT(parts_.tier->read_keys(), ElementsAre(key_of("a"), key_of("b")));
  EXPECT_THAT(parts_.requests.at(request_).held, ElementsAre(hit));
  EXPECT_THAT(parts_.requests.at(request_).awaited, SizeIs(2));
  EXPECT_EQ(decisions("load"), 1);
}

TEST_F(PlannerTest, APlanIsTrimmedToTheRowsThereAre) {
  scan({"a", "b", "c", "d", "e", "f"});
  plan();
  EXPECT_EQ(parts_.tier->queued_reads(), 4u);
  EXPECT_EQ(parts_.requests.at(request_).closed[0], MissReason::kPressure);
}

// It is loaded as the tokens that it has.
TEST_F(PlannerTest, APartOfAChunkIsReadAsOne) {
  parts_.record("part");
  parts_.requests.lookup(request_, key_of("part"), 4);
  plan();
  EXPECT_EQ(parts_.chunks.find(key_of("part"))->depth, 4u);
}

TEST_F(PlannerTest, TwoRequestsShareARead) {
  scan({"a"});
  const RequestHandle other = parts_.requests.begin({});
  parts_.lookup(other, "a");
  plan();
  EXPECT_EQ(parts_.tier->queued_reads(), 1u);
  EXPECT_THAT(parts_.requests.at(other).awaited, SizeIs(1));
}

TEST_F(PlannerTest, AWaitEndsWithItsDeadline) {
  scan({"a"});
  plan();
  parts_.clock.advance(parts_.options.lookup_deadline);
  plan();
  EXPECT_TRUE(parts_.requests.at(request_).expired);
  EXPECT_EQ(parts_.requests.at(request_).expired_for, MissReason::kDeadline);
  EXPECT_EQ(parts_.tier->queued_reads(), 0u);
}

TEST_F(PlannerTest, ALoadBudgetThatIsSpentLeavesTheReadsAsProbes) {
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

TEST_F(PlannerTest, WhoHasEverythingWaitsOnPastItsBudget) {
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

}  // namespace
}  // namespace kv_offload
