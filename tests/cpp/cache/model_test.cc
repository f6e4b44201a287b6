// SPDX-License-Identifier: Apache-2.0
// Compares the cache with a simple reference model in at least 10^5 random calls. Also checks that
// the model detects every injected fault.
#include "cache/model_run.h"
#include "test_iterations.h"

namespace kv_offload {
namespace {

using ::testing::IsEmpty;
using ::testing::Not;

void expect_clean(const ModelOptions& options, std::uint64_t calls,
                  const std::vector<std::string>& must_happen = {"hit", "pending", "miss", "load", "eviction",
                                                                 "reset", "preemption", "late report"}) {
  ModelRun run(options);
  run.run(calls);
  run.quiesce();
  EXPECT_THAT(run.violations(), IsEmpty()) << "seed " << options.seed;
  for (const std::string& what : must_happen) EXPECT_GT(run.happened[what], 2u) << what;
}

class ModelSeeds : public ::testing::TestWithParam<std::uint64_t> {};

TEST_P(ModelSeeds, one_group) { expect_clean({.seed = GetParam()}, 100000); }

TEST_P(ModelSeeds, load_or_recompute_by_cost) {
  expect_clean(
      {.seed = GetParam(), .load_policy = LoadPolicy::kAuto}, 100000,
      {"hit", "pending", "miss", "load", "reset", "load, decided", "recompute, decided", "probe, decided"});
}

TEST_P(ModelSeeds, a_step_that_ends_before_its_stores) {
  expect_clean({.seed = GetParam(), .step_ends_before_stores = true}, 20000);
}

TEST_P(ModelSeeds, a_window_group_of_the_same_size) {
  expect_clean({.seed = GetParam(), .rows = 40, .shard_bytes = {200, 200}, .full_attention = {true, false}},
               20000);
}

TEST_P(ModelSeeds, groups_of_different_sizes) {
  expect_clean({.seed = GetParam(), .rows = 96, .shard_bytes = {5000, 200}, .full_attention = {true, false}},
               30000);
}

TEST_P(ModelSeeds, writes_at_eviction) {
  expect_clean({.seed = GetParam(), .tier = {.write_policy = WritePolicy::kOnEvict}}, 20000);
}

TEST_P(ModelSeeds, writes_at_reuse) {
  expect_clean({.seed = GetParam(), .tier = {.write_policy = WritePolicy::kReuse}}, 20000);
}

TEST_P(ModelSeeds, very_little_memory) {
  expect_clean({.seed = GetParam(), .rows = 5}, 20000, {"hit", "pending", "miss", "load", "eviction"});
}

TEST_P(ModelSeeds, every_eviction_policy) {
  for (const std::string& policy : eviction_policy_names()) {
    SCOPED_TRACE(policy);
    expect_clean({.seed = GetParam(), .eviction_policy = policy}, 20000);
    expect_clean(
        {.seed = GetParam(), .tier = {.write_policy = WritePolicy::kOnEvict}, .eviction_policy = policy},
        20000);
  }
}

INSTANTIATE_TEST_SUITE_P(Model, ModelSeeds, ::testing::Range<std::uint64_t>(1, testing::kSanitized ? 2 : 4));

class PlantedFaults : public ::testing::TestWithParam<Planted> {};

TEST_P(PlantedFaults, the_model_detects_each_planted_fault) {
  ModelRun run({.planted = GetParam()});
  run.run(40000);
  EXPECT_THAT(run.violations(), Not(IsEmpty()));
}

INSTANTIATE_TEST_SUITE_P(Model, PlantedFaults,
                         ::testing::Values(Planted::kWrongRow, Planted::kEarlyCompletion,
                                           Planted::kSkippedVerification, Planted::kStaleRow));

}  // namespace
}  // namespace kv_offload
