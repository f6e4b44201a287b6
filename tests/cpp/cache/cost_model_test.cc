#include "cache/cost_model.h"

#include <gtest/gtest.h>

namespace kv_offload {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
constexpr auto kLoad = CostModel::Choice::kLoad;
constexpr auto kRecompute = CostModel::Choice::kRecompute;

class CostModelTest : public testing::Test {
 protected:
  CostModel model_{1};
  Nanos now_{seconds(100)};

  void prefill(std::uint64_t tokens, Nanos took) {
    model_.note_prefill(tokens);
    model_.end_step(now_);
    now_ += took;
    model_.end_step(now_);
  }
  CostModel::Choice decide(double load_seconds, std::uint64_t tokens) {
    return model_.decide(0, load_seconds, tokens, now_);
  }
};

TEST_F(CostModelTest, WhatIsUnknownIsLoaded) {
  EXPECT_EQ(decide(0, 1000), kLoad);
  EXPECT_EQ(decide(100, 1000), kLoad);
  prefill(1000, seconds(1));
  EXPECT_EQ(decide(0, 1000), kLoad);
}

TEST_F(CostModelTest, TheRateIsTokensOverTheTimeUntilTheNextStep) {
  prefill(2000, milliseconds(500));
  EXPECT_DOUBLE_EQ(model_.prefill_tokens_per_second(), 4000);
  EXPECT_DOUBLE_EQ(model_.prefill_seconds(1000), 0.25);
}

TEST_F(CostModelTest, TheRateFollowsSlowly) {
  prefill(2000, milliseconds(500));
  prefill(2000, seconds(1));
  EXPECT_GT(model_.prefill_tokens_per_second(), 3000);
  EXPECT_LT(model_.prefill_tokens_per_second(), 4000);
  for (int i = 0; i < 100; ++i) prefill(2000, seconds(1));
  EXPECT_NEAR(model_.prefill_tokens_per_second(), 2000, 20);
}

TEST_F(CostModelTest, IdleTimeAndTinyStepsTeachNothing) {
  prefill(2000, seconds(60));
  prefill(4, milliseconds(1));
  EXPECT_EQ(model_.prefill_tokens_per_second(), 0);
}

TEST_F(CostModelTest, TheFasterSideWins) {
  prefill(1000, seconds(1));
  EXPECT_EQ(decide(0.5, 1000), kLoad);
  EXPECT_EQ(decide(40, 1000), kRecompute);
}

TEST_F(CostModelTest, AChoiceIsKeptWhileTheSidesAreClose) {
  prefill(1000, seconds(1));
  EXPECT_EQ(decide(1.05, 1000), kLoad);  // loading so far
  EXPECT_EQ(decide(2, 1000), kRecompute);
  EXPECT_EQ(decide(0.95, 1000), kRecompute);
  EXPECT_EQ(decide(0.8, 1000), kLoad);
  EXPECT_EQ(decide(1.05, 1000), kLoad);
}

TEST_F(CostModelTest, ASlowTierIsTriedAgainNowAndThen) {
  prefill(1000, seconds(1));
  EXPECT_EQ(decide(0.5, 1000), kLoad);
  EXPECT_EQ(decide(9, 1000), kRecompute);
  now_ += seconds(31);
  EXPECT_EQ(decide(9, 1000), kLoad);
  EXPECT_EQ(decide(9, 1000), kRecompute);
}

}  // namespace
}  // namespace kv_offload
