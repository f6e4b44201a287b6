// SPDX-License-Identifier: Apache-2.0
#include "cache/cost_model.h"

#include <gtest/gtest.h>

namespace kv_offload {
namespace {

using std::chrono::seconds;
using Choice = Decision::Choice;

// The engine computes 1,000 tokens/s. Tiers are described by the tokens they read per second.
// A chunk has ten tokens and ten bytes.
class CostModelTest : public ::testing::Test {
 protected:
  CostModel model_{2};
  Nanos now_{seconds(100)};

  void compute(double tokens, double took) {
    model_.prefill.observe(tokens, tokens / 2);
    model_.prefill.end_step(now_);
    now_ += Nanos(static_cast<std::int64_t>(took * 1e9));
    for (int i = 0; i < 3; ++i) model_.prefill.end_step(now_);
  }
  void read(std::size_t tier, double tokens_per_second) {
    for (int i = 1; i <= 32; ++i) model_.on_read(tier, 10.0 * i, 10.0 * i / tokens_per_second, now_);
  }
  static Stretch on(std::int32_t tier, std::uint32_t chunks) {
    return {tier, chunks, 10 * chunks, 10 * chunks};
  }
  // `input`: all fields except the stretches.
  Decision decide(std::vector<Stretch> stretches, CostModel::DecisionInput input = {}) {
    input.stretches = stretches;
    return model_.decide(input);
  }
};

TEST_F(CostModelTest, unmeasured_tiers_are_loaded_from) {
  EXPECT_EQ(decide({on(0, 100)}).choice, Choice::kLoad);
  compute(1000, 1);
  EXPECT_EQ(decide({on(0, 100)}).choice, Choice::kLoad);
  EXPECT_NEAR(decide({on(0, 100)}).compute_seconds, 1, 0.01);
}

TEST_F(CostModelTest, the_faster_of_load_and_recompute_is_chosen) {
  compute(1000, 1);
  read(0, 5000);
  const Decision load = decide({on(0, 100)});
  EXPECT_EQ(load.choice, Choice::kLoad);
  EXPECT_NEAR(load.load_seconds, 0.2, 0.01);
  EXPECT_NEAR(load.compute_seconds, 1, 0.01);
  read(0, 200);
  EXPECT_EQ(decide({on(0, 100)}).choice, Choice::kRecompute);
}

TEST_F(CostModelTest, a_tiers_estimate_is_used_until_the_first_measurement) {
  compute(1000, 1);
  const std::vector<double> hints{40, 0};
  EXPECT_EQ(decide({on(0, 100)}, {.hints = hints}).choice, Choice::kRecompute);
  read(0, 5000);
  EXPECT_EQ(decide({on(0, 100)}, {.hints = hints}).choice, Choice::kLoad);
}

TEST_F(CostModelTest, a_tiers_estimate_is_scaled_by_the_bytes_of_a_part) {
  compute(1000, 1);
  const std::vector<double> hints{5, 0};
  EXPECT_NEAR(decide({on(0, 1000)}, {.hints = hints, .deadline_seconds = 2}).chunks, 400, 1);
}

TEST_F(CostModelTest, tiers_read_concurrently) {
  compute(1000, 1);
  read(0, 1500);
  read(1, 1500);
  EXPECT_NEAR(decide({on(0, 50), on(1, 50)}).load_seconds, 0.333, 0.01);
}

TEST_F(CostModelTest, the_queue_of_a_tier_counts_as_wait_time) {
  compute(1000, 1);
  read(0, 5000);
  model_.add_waiting(0, 20000);
  EXPECT_EQ(decide({on(0, 100)}).choice, Choice::kRecompute);
  model_.remove_waiting(0, 20000);
  EXPECT_EQ(decide({on(0, 100)}).choice, Choice::kLoad);
}

TEST_F(CostModelTest, the_copy_to_the_device_counts) {
  compute(1000, 1);
  read(0, 5000);
  for (int i = 1; i <= 8; ++i) model_.on_copy(100.0 * i, 0.1 * i);  // 1,000 tokens/s
  EXPECT_EQ(decide({on(0, 100)}).choice, Choice::kRecompute);
}

TEST_F(CostModelTest, a_copy_that_is_needed_anyway_costs_only_its_bytes) {
  compute(1000, 1);
  read(0, 5000);
  for (int i = 1; i <= 8; ++i) model_.on_copy(100.0 * i, 0.5 + 1e-4 * i);
  EXPECT_EQ(decide({on(0, 40)}).choice, Choice::kRecompute);  // 0.4 s against 0.08 and 0.5
  EXPECT_EQ(decide({on(0, 40)}, {.loads_anyway = true}).choice, Choice::kLoad);
}

TEST_F(CostModelTest, a_choice_is_kept_while_the_costs_are_close) {
  compute(1000, 1);
  read(0, 970);
  EXPECT_EQ(decide({on(0, 100)}).choice, Choice::kLoad);  // the current choice
  read(0, 800);
  EXPECT_EQ(decide({on(0, 100)}).choice, Choice::kRecompute);
  read(0, 1030);
  EXPECT_EQ(decide({on(0, 100)}).choice, Choice::kRecompute);
  read(0, 1200);
  EXPECT_EQ(decide({on(0, 100)}).choice, Choice::kLoad);
  read(0, 970);
  EXPECT_EQ(decide({on(0, 100)}).choice, Choice::kLoad);
}

TEST_F(CostModelTest, chunks_on_the_fast_tier_are_loaded_without_the_rest) {
  compute(1000, 1);
  read(0, 10000);
  read(1, 100);
  const Decision decision = decide({on(0, 60), on(1, 40)});
  EXPECT_EQ(decision.choice, Choice::kPartial);
  EXPECT_EQ(decision.chunks, 60u);
  EXPECT_NEAR(decision.compute_seconds, 0.6, 0.01);
}

TEST_F(CostModelTest, a_slow_chunk_is_read_for_the_chunks_after_it) {
  compute(1000, 1);
  read(1, 100);
  const Decision decision = decide({on(1, 1), on(Stretch::kHostMemory, 99)});
  EXPECT_EQ(decision.choice, Choice::kLoad);
  EXPECT_EQ(decision.chunks, 100u);
}

TEST_F(CostModelTest, only_chunks_that_arrive_in_time_are_planned) {
  compute(1000, 1);
  read(0, 2000);
  const Decision decision = decide({on(0, 1000)}, {.deadline_seconds = 2});  // all of it: 5 s
  EXPECT_EQ(decision.choice, Choice::kPartial);
  EXPECT_NEAR(decision.chunks, 400, 1);
  EXPECT_LE(decision.load_seconds, 2);
}

TEST_F(CostModelTest, an_indivisible_load_is_loaded_whole_or_not_at_all) {
  compute(1000, 1);
  read(0, 2000);
  EXPECT_EQ(decide({on(0, 1000)}, {.divisible = false, .deadline_seconds = 2}).choice, Choice::kRecompute);
  EXPECT_EQ(decide({on(0, 1000)}, {.divisible = false, .deadline_seconds = 6}).choice, Choice::kLoad);
  read(1, 300);
  EXPECT_EQ(decide({on(0, 100), on(1, 100)}).chunks, 100u) << "control: the slow end is not loaded";
  const Decision slow_end = decide({on(0, 100), on(1, 100)}, {.divisible = false});
  EXPECT_EQ(slow_end.choice, Choice::kRecompute);
  EXPECT_EQ(decide({on(0, 100), on(1, 30)}).chunks, 100u) << "control: loading without the end is faster";
  const Decision short_end = decide({on(0, 100), on(1, 30)}, {.divisible = false});
  EXPECT_EQ(short_end.choice, Choice::kLoad);
  EXPECT_EQ(short_end.chunks, 130u);
}

TEST_F(CostModelTest, an_unused_tier_is_probed_periodically) {
  compute(1000, 1);
  read(0, 100);
  EXPECT_FALSE(model_.should_probe(0, now_ + seconds(60))) << "it is in use";
  decide({on(0, 100)});
  EXPECT_FALSE(model_.should_probe(0, now_ + seconds(29)));
  EXPECT_TRUE(model_.should_probe(0, now_ + seconds(31)));
  EXPECT_FALSE(model_.should_probe(0, now_ + seconds(32)));
  EXPECT_TRUE(model_.should_probe(0, now_ + seconds(62)));
}

TEST_F(CostModelTest, an_overdue_read_replaces_a_probe) {
  compute(1000, 1);
  read(0, 100);
  decide({on(0, 100)});
  model_.on_overdue_read(0, 10, 100, now_ + seconds(20));
  EXPECT_FALSE(model_.should_probe(0, now_ + seconds(49)));
  EXPECT_TRUE(model_.should_probe(0, now_ + seconds(51)));
}

TEST_F(CostModelTest, only_one_probe_is_in_flight) {
  compute(1000, 1);
  read(0, 100);
  decide({on(0, 100)});
  EXPECT_TRUE(model_.should_probe(0, now_ + seconds(31)));
  model_.add_waiting(0, 80);
  EXPECT_FALSE(model_.should_probe(0, now_ + seconds(300)));
}

TEST_F(CostModelTest, a_probe_measures_the_tier_again) {
  compute(1000, 1);
  read(0, 100);
  decide({on(0, 100)});
  EXPECT_TRUE(model_.should_probe(0, now_ + seconds(31)));
  for (int i = 1; i <= 8; ++i) model_.on_read(0, 10.0 * i, 10.0 * i / 5000, now_);
  EXPECT_EQ(decide({on(0, 100)}).choice, Choice::kLoad);
}

TEST_F(CostModelTest, host_memory_is_used_unless_copying_is_much_slower) {
  EXPECT_TRUE(model_.host_pays(1, now_));
  compute(1000, 1);
  model_.on_copy(1000, 10);
  EXPECT_TRUE(model_.host_pays(1, now_)) << "one size is not enough: the time may be all latency";
  for (int i = 1; i <= 8; ++i) model_.on_copy(100.0 * i, 0.15 * i);
  EXPECT_TRUE(model_.host_pays(1, now_)) << "copying takes 1.5 times as long as computing";
  for (int i = 1; i <= 32; ++i) model_.on_copy(100.0 * i, 1.0 * i);
  EXPECT_FALSE(model_.host_pays(1, now_));
  EXPECT_TRUE(model_.host_pays(1, now_ + seconds(31))) << "retried after the back-off";
  EXPECT_FALSE(model_.host_pays(1, now_ + seconds(32)));
}

TEST(CostModelTenants, pending_bytes_of_others_count_only_while_they_are_read_too) {
  CostModel model(1);
  model.add_waiting(0, 1e9, 2);
  model.add_waiting(0, 100, 1);
  EXPECT_DOUBLE_EQ(model.bytes_ahead(0, 0, {1, 0.25}), 400) << "a quarter of the bandwidth";
  EXPECT_DOUBLE_EQ(model.bytes_ahead(0, 100, {1, 0.25}), 800);
  EXPECT_DOUBLE_EQ(model.bytes_ahead(0, 0, {2, 0.75}), 1e9 + 100);
  EXPECT_DOUBLE_EQ(model.bytes_ahead(0, 50, {0, 1}), 50);
  model.remove_waiting(0, 1e9, 2);
  EXPECT_DOUBLE_EQ(model.bytes_ahead(0, 100, {1, 0.25}), 200);
}

TEST(CostModelTenants, a_long_queue_of_another_tenant_changes_no_decision) {
  CostModel model(1);
  const Nanos now = std::chrono::seconds(100);
  for (const double bytes : {1e6, 2e6, 4e6, 8e6}) model.on_read(0, bytes, 1e-3 + bytes / 1e9, now);
  const double alone = model.read_seconds(0, 1e6, 0, {1, 0.5});
  model.add_waiting(0, 1e12, 2);
  EXPECT_NEAR(model.read_seconds(0, 1e6, 0, {1, 0.5}), alone + 1e-3, 1e-4);
  EXPECT_GT(model.read_seconds(0, 1e6, 0, {2, 0.5}), 100);
}

}  // namespace
}  // namespace kv_offload
