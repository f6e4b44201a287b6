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

TEST_P(ModelSeeds, OneGroup) { expect_clean({.seed = GetParam()}, 100000); }

TEST_P(ModelSeeds, LoadOrRecomputeByCost) {
  expect_clean(
      {.seed = GetParam(), .load_policy = LoadPolicy::kAuto}, 100000,
      {"hit", "pending", "miss", "load", "reset", "load, decided", "recompute, decided", "probe, decided"});
}

TEST_P(ModelSeeds, AStepThatEndsBeforeItsStores) {
  expect_clean({.seed = GetParam(), .step_ends_before_stores = true}, 20000);
}

TEST_P(ModelSeeds, AWindowGroupOfTheSameSize) {
  expect_clean({.seed = GetParam(), .rows = 40, .shard_bytes = {200, 200}, .full_attention = {true, false}},
               20000);
}

TEST_P(ModelSeeds, GroupsOfDifferentSizes) {
  expect_clean({.seed = GetParam(), .rows = 96, .shard_bytes = {5000, 200}, .full_attention = {true, false}},
               20000);
}

TEST_P(ModelSeeds, WritesAtEviction) {
  expect_clean({.seed = GetParam(), .tier = {.write_policy = WritePolicy::kOnEvict}}, 20000);
}

TEST_P(ModelSeeds, WritesAtReuse) {
  expect_clean({.seed = GetParam(), .tier = {.write_policy = WritePolicy::kReuse}}, 20000);
}

TEST_P(ModelSeeds, VeryLittleMemory) {
  expect_clean({.seed = GetParam(), .rows = 5}, 20000, {"hit", "pending", "miss", "load", "eviction"});
}

TEST_P(ModelSeeds, EveryEvictionPolicy) {
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

TEST_P(PlantedFaults, TheModelDetectsEachPlantedFault) {
  ModelRun run({.planted = GetParam()});
  run.run(40000);
  EXPECT_THAT(run.violations(), Not(IsEmpty()));
}

INSTANTIATE_TEST_SUITE_P(Model, PlantedFaults,
                         ::testing::Values(Planted::kWrongRow, Planted::kEarlyCompletion,
                                           Planted::kSkippedVerification, Planted::kStaleRow));

}  // namespace
}  // namespace kv_offload
