// SPDX-License-Identifier: Apache-2.0
// Load-or-recompute decisions and their effect on TTFT, with fast, throttled, failing and recovering
// tiers, in virtual time.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "cache/simulated_engine.h"

namespace kv_offload {
namespace {

constexpr double kFast = 256e6;         // 1,000,000 tokens/s: a hundredth of the compute time
constexpr double kThrottled = 64e3;     // 250 tokens/s: forty times the compute time
constexpr std::uint32_t kChunks = 256;  // 4,096 tokens: about half a second to compute

class DecisionTest : public ::testing::Test {
 protected:
  SimulatedEngine& make(EngineOptions options = {}) {
    engine_ = std::make_unique<SimulatedEngine>(std::move(options));
    return *engine_;
  }
  SimulatedEngine& engine() { return *engine_; }
  // Serves prompts that no tier has, so the cache learns the engine's speed.
  void warm_up() {
    for (const std::uint32_t chunks : {32u, 64u, 256u, 512u}) engine_->serve(engine_->new_prompt(chunks));
  }
  // Returns a prompt whose first chunks are in host memory.
  SimulatedEngine::Prompt with_head_in_memory(std::uint32_t head, std::uint32_t tail) {
    auto prompt = engine_->new_prompt(head);
    engine_->serve(prompt);
    const auto rest = engine_->new_prompt(tail);
    prompt.keys.insert(prompt.keys.end(), rest.keys.begin(), rest.keys.end());
    return prompt;
  }
  // Serves a prompt that only a tier has. Returns TTFT / compute time; 1 = the time without a tier.
  double served(std::uint32_t chunks = kChunks, std::size_t tier = 0) {
    const auto prompt = engine_->new_prompt(chunks);
    engine_->put(prompt, tier);
    last_ = engine_->serve(prompt);
    engine_->pass(1);
    return last_.first_token_seconds / engine_->compute_seconds(prompt);
  }
  double mean_served(int requests) {
    double sum = 0;
    for (int i = 0; i < requests; ++i) sum += served();
    return sum / requests;
  }

  std::unique_ptr<SimulatedEngine> engine_;
  SimulatedEngine::Served last_;
};

TEST_F(DecisionTest, a_fast_tier_is_always_used) {
  make({.tiers = {kFast}});
  warm_up();
  for (int i = 0; i < 50; ++i) {
    EXPECT_LT(served(), 0.2);
    EXPECT_EQ(last_.loaded_tokens, kChunks * SimulatedEngine::kChunk);
  }
  EXPECT_EQ(engine().decisions("recompute"), 0);
}

TEST_F(DecisionTest, a_throttled_tier_costs_at_most_a_tenth) {
  make({.tiers = {kThrottled}});
  warm_up();
  const double first = served();
  EXPECT_LT(first, 2.1)
      << "the first request, which measures the tier, takes less than twice the compute time";
  EXPECT_LT((first + 99 * mean_served(99)) / 100, 1.1);
  EXPECT_GT(engine().decisions("recompute"), 90);
}

TEST_F(DecisionTest, a_window_that_cannot_arrive_in_time_is_not_awaited) {
  constexpr std::uint32_t kLong = 512;
  for (const double speed : {kFast, kThrottled / 16}) {  // 8 chunks: 0.1 ms; 8.2 s, the deadline is 5
    make({.token_seconds = 2e-3, .tiers = {speed}, .window = 8});
    warm_up();
    const auto teaches = engine().new_prompt(2);
    engine().put(teaches, 0);
    engine().put_window(teaches, 0);
    engine().serve(teaches, {.load_policy = LoadPolicy::kAlways});
    const auto prompt = engine().new_prompt(kLong);
    engine().serve(prompt);  // now host memory has all of it except the window
    engine().put_window(prompt, 0);
    const double seconds = engine().serve(prompt).first_token_seconds;
    const double share = seconds / engine().compute_seconds(prompt);
    if (speed == kFast) {
      EXPECT_LT(share, 0.1);
    } else {
      EXPECT_LT(share, 1.05) << "computing takes 16 s; no 5 s wait comes first";
      EXPECT_EQ(engine().decisions("recompute"), 1);
    }
  }
}

TEST_F(DecisionTest, a_tier_that_slows_down_is_abandoned_before_it_doubles_the_ttft) {
  make({.tiers = {kFast}});
  warm_up();
  EXPECT_LT(mean_served(10), 0.2);
  engine().tiers[0]->bytes_per_second = kThrottled;
  EXPECT_LT(served(), 1.6);
  EXPECT_EQ(engine().decisions("give_up"), 1);
  EXPECT_LT(mean_served(20), 1.1);
}

TEST_F(DecisionTest, a_stuck_tier_is_abandoned) {
  make({.tiers = {kFast}});
  warm_up();
  served();
  engine().tiers[0]->stuck = true;
  EXPECT_LT(served(), 1.6);
  EXPECT_LT(mean_served(20), 1.1);
}

TEST_F(DecisionTest, reads_in_flight_after_giving_up_serve_as_the_probe) {
  make({.tiers = {kFast}});
  warm_up();
  served();
  engine().tiers[0]->stuck = true;
  served();
  EXPECT_EQ(engine().decisions("give_up"), 1);
  for (int minute = 0; minute < 3; ++minute) {
    engine().pass(60);
    served();
  }
  EXPECT_EQ(engine().decisions("probe"), 0);
}

TEST_F(DecisionTest, giving_up_keeps_the_reads_that_other_requests_wait_for) {
  make({.tiers = {kFast}});
  warm_up();
  served();
  const auto prompt = engine().new_prompt(kChunks);
  engine().put(prompt, 0);
  engine().tiers[0]->stuck = true;
  TieredCache& cache = *engine().cache;
  const auto begin = [&] {
    const RequestHandle request = cache.begin_request("r", {});
    cache.set_span(request, SimulatedEngine::kChunk, kChunks * SimulatedEngine::kChunk);
    return request;
  };
  // Returns the number of chunks with this lookup result.
  const auto answered = [&](RequestHandle request, LookupResult wanted) {
    std::uint32_t count = 0;
    for (const ChunkKey& key : prompt.keys) count += cache.lookup(request, key) == wanted;
    cache.end_step();
    return count;
  };
  const RequestHandle first = begin();
  EXPECT_EQ(answered(first, LookupResult::kPending), kChunks);
  engine().pass(0.1);  // the request waits for a quarter of the compute time: 0.13 s
  const RequestHandle second = begin();
  EXPECT_EQ(answered(second, LookupResult::kPending), kChunks);
  engine().pass(0.05);
  cache.end_step();
  EXPECT_EQ(answered(first, LookupResult::kMiss), kChunks);
  EXPECT_EQ(engine().decisions("give_up"), 1);
  EXPECT_EQ(answered(second, LookupResult::kPending), kChunks);
  engine().tiers[0]->stuck = false;
  engine().pass(0.05);
  EXPECT_EQ(answered(second, LookupResult::kHit), kChunks);
  cache.end_request(first);
  cache.end_request(second);
}

// Another server writes the records one by one. The first record alone is not worth the tier's latency.
// The wait for the last record must not count as read time of the tier.
TEST_F(DecisionTest, awaited_chunks_are_loaded_in_any_write_order) {
  make({.tiers = {kFast}});
  engine().tiers[0]->latency_seconds = 0.02;
  warm_up();
  for (int i = 0; i < 3; ++i) served();
  TieredCache& cache = *engine().cache;
  for (const int steps : {5, 700}) {  // steps of 1 ms until the other records exist; computing takes 0.5 s
    const auto prompt = engine().new_prompt(kChunks);
    const RequestHandle request = cache.begin_request("r", {.remote_wait = std::chrono::seconds(2)});
    cache.set_span(request, SimulatedEngine::kChunk, kChunks * SimulatedEngine::kChunk);
    std::uint32_t misses = 0;  // vLLM computes a prompt after the first one
    const auto hits = [&] {
      std::uint32_t count = 0;
      for (const ChunkKey& key : prompt.keys) {
        const LookupResult answer = cache.lookup(request, key);
        misses += answer == LookupResult::kMiss;
        if (answer == LookupResult::kMiss) break;
        count += answer == LookupResult::kHit;
      }
      cache.end_step();
      engine().pass(0.001);
      return count;
    };
    engine().put(prompt, 0, 0, 1);
    for (int step = 0; step < steps; ++step) hits();
    engine().put(prompt, 0);
    std::uint32_t most = 0;
    for (int step = 0; step < 200 && most < kChunks; ++step) most = std::max(most, hits());
    EXPECT_EQ(most, kChunks) << steps;
    EXPECT_EQ(misses, 0u) << steps;
    cache.end_request(request);
  }
}

TEST_F(DecisionTest, a_tier_that_recovered_is_used_again_within_a_probe) {
  make({.tiers = {kFast}});
  warm_up();
  served();
  engine().tiers[0]->bytes_per_second = kThrottled;
  mean_served(5);
  engine().tiers[0]->bytes_per_second = kFast;
  engine().pass(60);
  served();  // a probe; no request waits for it
  EXPECT_LT(mean_served(5), 0.2);
}

TEST_F(DecisionTest, latency_is_not_mistaken_for_low_speed) {
  make({.tiers = {kFast}});
  engine().tiers[0]->latency_seconds = 0.02;
  warm_up();
  served(16);  // 25 ms to compute: the load is abandoned, its first reads continue
  EXPECT_EQ(engine().decisions("give_up"), 1);
  EXPECT_LT(served(), 0.2);
  EXPECT_LT(served(32), 0.8);
}

TEST_F(DecisionTest, probes_are_few_reads_and_no_request_waits_for_them) {
  make({.tiers = {kThrottled}});
  warm_up();
  served();
  const std::uint64_t before = engine().tiers[0]->submitted_reads;
  for (int minute = 0; minute < 10; ++minute) {
    engine().pass(58);
    EXPECT_LT(served(), 1.02);
  }
  EXPECT_EQ(engine().decisions("probe"), 10);
  EXPECT_EQ(engine().tiers[0]->submitted_reads - before, 10u * 8);
}

TEST_F(DecisionTest, long_prompts_are_loaded_and_short_ones_computed_if_that_is_cheaper) {
  // Reads 4,500 tokens/s: slower than computing a short prompt, faster than the end of a long one.
  make({.token_seconds = 100e-6,
        .context_seconds = 20e-9,
        .wait_step_share = 0.01,
        .rows = 32768,
        .tiers = {4500 * 256.0}});
  warm_up();
  for (int i = 0; i < 3; ++i) served(64), served(1024);
  const double loads = engine().decisions("load");
  served(64);
  EXPECT_EQ(engine().decisions("load"), loads);
  served(1024);  // 16,384 tokens: 4.3 s to compute, 3.6 s to load
  EXPECT_EQ(engine().decisions("load"), loads + 1);
}

TEST_F(DecisionTest, the_worthwhile_part_is_loaded_and_the_rest_computed) {
  make({.tiers = {kFast, kThrottled}});
  warm_up();
  for (const std::size_t tier : {0u, 1u}) served(kChunks, tier);  // measures both tiers
  const auto prompt = engine().new_prompt(kChunks);
  engine().put(prompt, 0, 0, 200);
  engine().put(prompt, 1, 200);
  const auto result = engine().serve(prompt);
  EXPECT_EQ(result.loaded_tokens, 200 * SimulatedEngine::kChunk);
  EXPECT_EQ(engine().decisions("partial"), 1);
  EXPECT_EQ(engine().last_report.choice, "partial");
  EXPECT_GE(engine().last_report.decided, engine().last_report.first_lookup);
  // The same after chunks that are in host memory.
  const auto longer = with_head_in_memory(50, kChunks);
  engine().put(longer, 0, 50, 250);
  engine().put(longer, 1, 250);
  EXPECT_EQ(engine().serve(longer).loaded_tokens, 250 * SimulatedEngine::kChunk);
  EXPECT_EQ(engine().decisions("partial"), 2);
}

TEST_F(DecisionTest, tokens_after_a_long_prefix_take_longer_to_compute) {
  // Reads 4,500 tokens/s: slower than computing at the start of a prompt, faster than after 12,288 tokens.
  make({.token_seconds = 100e-6,
        .context_seconds = 20e-9,
        .wait_step_share = 0.01,
        .rows = 32768,
        .tiers = {4500 * 256.0}});
  warm_up();
  for (int i = 0; i < 3; ++i) served(64), served(1024);
  served(64);
  EXPECT_EQ(last_.loaded_tokens, 0u);
  const auto prompt = with_head_in_memory(768, 64);
  engine().put(prompt, 0, 768);
  EXPECT_EQ(engine().serve(prompt).loaded_tokens, (768 + 64) * SimulatedEngine::kChunk);
}

TEST_F(DecisionTest, a_slow_chunk_is_loaded_if_many_chunks_follow_it) {
  make({.tiers = {kThrottled}});
  warm_up();
  served();
  const auto prompt = engine().new_prompt(kChunks);
  engine().serve(prompt);  // now in host memory; the twin differs in its first chunk:
  const auto twin = [&] {
    auto mixed = engine().new_prompt(1);
    engine().put(mixed, 0);
    mixed.keys.insert(mixed.keys.end(), prompt.keys.begin() + 1, prompt.keys.end());
    return mixed;
  }();
  engine().pass(1);
  EXPECT_EQ(engine().serve(twin).loaded_tokens, kChunks * SimulatedEngine::kChunk);
}

TEST_F(DecisionTest, a_copy_that_is_needed_anyway_adds_only_the_cost_of_its_bytes) {
  make({.copy_bytes_per_second = kFast, .copy_latency_seconds = 0.05, .tiers = {kFast}});
  warm_up();
  for (const std::uint32_t chunks : {64u, 512u, 256u}) served(chunks);  // measures the latency
  served(16);                                                           // 25 ms to compute
  EXPECT_EQ(last_.loaded_tokens, 0u);
  const auto prompt = with_head_in_memory(kChunks, 16);
  engine().put(prompt, 0, kChunks);
  EXPECT_EQ(engine().serve(prompt).loaded_tokens, (kChunks + 16) * SimulatedEngine::kChunk);
}

TEST_F(DecisionTest, a_request_is_decided_once) {
  make({.tiers = {kFast}});
  const auto prompt = engine().new_prompt(kChunks);
  engine().put(prompt, 0);
  TieredCache& cache = *engine().cache;
  const RequestHandle request = cache.begin_request("r", {});
  Nanos decided{0};
  for (const std::uint32_t asked : {kChunks / 2, kChunks}) {  // the second pass looks up more chunks
    for (std::uint32_t i = 0; i < asked; ++i) (void)cache.lookup(request, prompt.keys[i]);
    engine().clock.advance(Nanos(1));
    cache.end_step();
    if (decided == Nanos(0)) decided = cache.report(request).decided;
  }
  EXPECT_EQ(cache.report(request).decided, decided);
  EXPECT_EQ(engine().tiers[0]->submitted_reads, kChunks);
  EXPECT_EQ(engine().decisions("load"), 1);
  cache.end_request(request);
}

TEST_F(DecisionTest, chunks_that_cannot_arrive_before_the_deadline_are_not_awaited) {
  // Loading all takes 8 s and computing 16 s, but the deadline is 5 s.
  make({.token_seconds = 1e-3, .context_seconds = 0, .rows = 32768, .tiers = {2000 * 256.0}});
  warm_up();
  served(64);
  const double part = served(1024);
  EXPECT_EQ(engine().last_report.choice, "partial");
  EXPECT_NEAR(last_.loaded_tokens, 8000, 400);  // the planner uses 4 s of the deadline
  EXPECT_LT(part, 0.8);
  EXPECT_EQ(engine().counter("kv_offload_miss_tokens_total", {"deadline"}), 0);
}

TEST_F(DecisionTest, host_memory_is_not_copied_where_computing_is_much_faster) {
  make({.copy_bytes_per_second = 256 * 1000.0, .tiers = {}});  // 1,000 tokens/s
  warm_up();
  const auto ask = [&](std::uint32_t chunks) {
    const auto prompt = engine().new_prompt(chunks);
    engine().serve(prompt);
    return engine().serve(prompt).loaded_tokens;
  };
  EXPECT_GT(ask(64), 0u);  // measures the copy speed
  EXPECT_GT(ask(128), 0u);
  EXPECT_EQ(ask(128), 0u);
  EXPECT_GT(engine().counter("kv_offload_miss_tokens_total", {"recompute_cheaper"}), 0);
}

TEST_F(DecisionTest, the_load_policy_of_a_request_overrides_the_cost_model) {
  make({.tiers = {kThrottled}});
  warm_up();
  served();
  const auto prompt = engine().new_prompt(16);
  engine().put(prompt, 0);
  EXPECT_EQ(engine().serve(prompt, {.load_policy = LoadPolicy::kAlways}).loaded_tokens, 256u);
  make({.tiers = {kFast}});
  const auto other = engine().new_prompt(16);
  engine().put(other, 0);
  EXPECT_EQ(engine().serve(other, {.load_policy = LoadPolicy::kNever}).loaded_tokens, 0u);
}

TEST_F(DecisionTest, saved_seconds_match_the_gain_of_the_requests) {
  make({.tiers = {kFast}});
  warm_up();
  double gained = 0;
  for (int i = 0; i < 20; ++i) {
    const auto prompt = engine().new_prompt(kChunks);
    engine().put(prompt, 0);
    gained += engine().compute_seconds(prompt) - engine().serve(prompt).first_token_seconds;
  }
  EXPECT_NEAR(engine().counter("kv_offload_saved_seconds_total"), gained, 0.05 * gained);
  EXPECT_EQ(engine().counter("kv_offload_lost_seconds_total"), 0);
  EXPECT_EQ(engine().counter("kv_offload_load_seconds"), 20);
}

TEST_F(DecisionTest, a_loss_is_counted_as_lost_seconds) {
  make({.tiers = {2500 * 256.0}, .cache = {.load_policy = LoadPolicy::kAlways}});
  warm_up();
  EXPECT_GT(served(), 2);
  EXPECT_EQ(engine().counter("kv_offload_saved_seconds_total"), 0);
  EXPECT_NEAR(engine().counter("kv_offload_lost_seconds_total"), 1.1, 0.2);
}

class StepOrderTest : public DecisionTest, public ::testing::WithParamInterface<StepOrder> {};

TEST_P(StepOrderTest, the_engines_speed_is_learnt_in_every_step_order) {
  make({.order = GetParam(), .tiers = {}});
  for (const std::uint32_t chunks : {32u, 256u, 64u, 512u, 128u, 96u, 512u}) {
    engine().serve(engine().new_prompt(chunks));
    engine().pass(2);
  }
  engine().serve(engine().new_prompt(1));
  engine().cache->publish_gauges();
  const auto prompt = engine().new_prompt(512);
  const double speed = 8192 / engine().compute_seconds(prompt);
  EXPECT_NEAR(engine().counter("kv_offload_prefill_tokens_per_second", {"8192"}), speed, 0.1 * speed);
}

INSTANTIATE_TEST_SUITE_P(All, StepOrderTest,
                         ::testing::Values(StepOrder::kStoresFirst, StepOrder::kStepEndFirst,
                                           StepOrder::kOneAhead));

}  // namespace
}  // namespace kv_offload
