// SPDX-License-Identifier: Apache-2.0
// How good is the choice between loading and computing, and what does it cost?
//
// A real TieredCache, an engine and tiers in virtual time (tests/cpp/cache/
// simulated_engine.h). For each speed of a tier, relative to computing, the same
// requests are served three times: by the plugin's choice, always loading, never
// loading. The optimum is the faster of the latter two for each request; regret is the
// additional time of the choice. It includes learning: each speed is a new start.
// One JSON object per line.
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <numeric>
#include <random>
#include <vector>

#include "cache/cost_model.h"
#include "cache/simulated_engine.h"

namespace kv_offload {
namespace {

constexpr std::uint32_t kLengths[] = {32, 128, 512, 2048};  // chunks of 16 tokens
constexpr int kRounds = 12;
constexpr double kTokensPerSecond = 10'000;  // of computing, at the start of a prompt
constexpr double kBytesPerToken = 256;

EngineOptions engine_options(LoadPolicy policy, std::vector<double> speeds) {
  EngineOptions options;
  options.token_seconds = 1 / kTokensPerSecond;
  options.wait_step_share = 0.003;
  options.rows = 32768;
  options.tiers = std::move(speeds);
  for (double& speed : options.tiers) speed *= kTokensPerSecond * kBytesPerToken;
  options.cache.load_policy = policy;
  return options;
}

// Runs one engine. `place` puts a prompt on the tiers. Returns the time until each first token.
template <typename Place>
std::vector<double> live(LoadPolicy policy, const std::vector<double>& speeds, Place place) {
  SimulatedEngine engine(engine_options(policy, speeds));
  for (const std::uint32_t chunks : {32u, 256u, 64u, 512u}) engine.serve(engine.new_prompt(chunks));
  std::vector<double> seconds;
  for (int round = 0; round < kRounds; ++round) {
    for (const std::uint32_t chunks : kLengths) {
      const auto prompt = engine.new_prompt(chunks);
      place(engine, prompt);
      seconds.push_back(engine.serve(prompt).first_token_seconds);
      engine.pass(0.5);
    }
  }
  return seconds;
}

template <typename Place>
void compare(const char* what, const std::vector<double>& speeds, Place place) {
  const auto ours = live(LoadPolicy::kAuto, speeds, place);
  const auto load = live(LoadPolicy::kAlways, speeds, place);
  const auto compute = live(LoadPolicy::kNever, speeds, place);
  const std::size_t lengths = std::size(kLengths);
  for (std::size_t l = 0; l < lengths; ++l) {
    double sums[4] = {};
    for (std::size_t i = l; i < ours.size(); i += lengths) {
      sums[0] += ours[i];
      sums[1] += load[i];
      sums[2] += compute[i];
      sums[3] += std::min(load[i], compute[i]);
    }
    fmt::print(
        "{{\"what\": \"{}\", \"tier_speed\": {}, \"prompt_tokens\": {}, \"ours_s\": {:.5f}, \"load_s\": "
        "{:.5f}, "
        "\"compute_s\": {:.5f}, \"oracle_s\": {:.5f}, \"regret\": {:.5f}}}\n",
        what, speeds.front(), kLengths[l] * SimulatedEngine::kChunk, sums[0] / kRounds, sums[1] / kRounds,
        sums[2] / kRounds, sums[3] / kRounds, sums[0] / sums[3] - 1);
  }
  std::fflush(stdout);
}

void decision_quality() {
  for (const double speed : {0.02, 0.1, 0.3, 0.5, 0.7, 0.85, 1.0, 1.2, 1.5, 2.0, 4.0, 10.0, 50.0}) {
    compare("one tier", {speed}, [](SimulatedEngine& engine, const auto& prompt) { engine.put(prompt, 0); });
  }
  for (const double speed : {0.1, 0.5, 0.7, 1.0, 1.5, 2.0, 10.0}) {
    compare("one tier, reads differ by half", {speed}, [](SimulatedEngine& engine, const auto& prompt) {
      engine.tiers[0]->noise = 0.5;
      engine.put(prompt, 0);
    });
  }
  for (const double speed : {0.1, 0.5, 1.0, 2.0, 10.0}) {
    compare("one tier, 20 ms of latency", {speed}, [](SimulatedEngine& engine, const auto& prompt) {
      engine.tiers[0]->latency_seconds = 0.02;
      engine.put(prompt, 0);
    });
  }
  for (const double speed : {0.1, 0.5, 1.0, 2.0, 10.0}) {
    compare("half of it on a tier of speed 50", {speed, 50}, [](SimulatedEngine& engine, const auto& prompt) {
      engine.put(prompt, 1, 0, prompt.keys.size() / 2);
      engine.put(prompt, 0, prompt.keys.size() / 2);
    });
  }
}

double real_seconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

template <typename Work>
double median_ns(Work work) {
  std::vector<double> taken;
  for (int i = 0; i < 301; ++i) {
    const double at = real_seconds();
    work();
    taken.push_back(real_seconds() - at);
  }
  std::sort(taken.begin(), taken.end());
  return taken[taken.size() / 2] * 1e9;
}

void print_cost(const char* what, std::size_t chunks, double ns) {
  fmt::print("{{\"cost\": \"{}\", \"chunks\": {}, \"median_ns\": {:.0f}}}\n", what, chunks, ns);
  std::fflush(stdout);
}

// Compares the end of a step in which a request looked up this number of recorded chunks and must compute
// them with the end of a step in which it looked up as many chunks that are being read: the same scan without
// a decision.
void step_cost(std::uint32_t chunks) {
  SimulatedEngine engine(engine_options(LoadPolicy::kAuto, {0.02}));
  for (const std::uint32_t warm : {32u, 256u, 64u}) engine.serve(engine.new_prompt(warm));
  const auto slow = engine.new_prompt(256);
  engine.put(slow, 0);
  engine.serve(slow);
  const auto prompt = engine.new_prompt(chunks);
  engine.put(prompt, 0);
  const auto end_of_step = [&](LoadPolicy policy) {
    std::vector<double> taken;
    for (int i = 0; i < 301; ++i) {
      const RequestHandle request = engine.cache->begin_request("r", {.load_policy = policy});
      engine.cache->set_span(request, 16, chunks * 16);
      for (int step = 0; step < 2; ++step) {
        for (const ChunkKey& key : prompt.keys) {
          if (engine.cache->lookup(request, key) == LookupResult::kMiss) break;
        }
        if (policy == LoadPolicy::kAlways && step == 0) {
          engine.cache->end_step();
          continue;
        }
        const double at = real_seconds();
        engine.cache->end_step();
        taken.push_back(real_seconds() - at);
        break;
      }
      engine.cache->end_request(request);
      engine.cache->end_step();
    }
    std::sort(taken.begin(), taken.end());
    return taken[taken.size() / 2] * 1e9;
  };
  print_cost("a step's end with a request that is told to compute", chunks, end_of_step(LoadPolicy::kAuto));
  engine.tiers[0]->stuck = true;
  print_cost("a step's end with a request that waits", chunks, end_of_step(LoadPolicy::kAlways));
}

// Real time on the scheduler's thread.
void decision_cost() {
  CostModel model(2);
  Nanos now{std::chrono::seconds(1)};
  for (const double tokens : {500.0, 2000.0, 1000.0}) {
    model.prefill.observe(tokens, tokens / 2);
    for (int i = 0; i < 3; ++i)
      model.prefill.end_step(now += std::chrono::milliseconds(static_cast<int>(tokens / 10)));
  }
  for (std::size_t tier = 0; tier < 2; ++tier) {
    for (int i = 1; i <= 32; ++i) model.on_read(tier, 4096.0 * i, 1e-3 * i, now);
  }
  for (const std::size_t count : {1, 2, 100}) {
    std::vector<Stretch> stretches;
    for (std::size_t i = 0; i < count; ++i) {
      stretches.push_back({static_cast<std::int32_t>(i % 2), 20, 320, 20 * 4096});
    }
    CostModel::DecisionInput input;
    input.stretches = stretches;
    input.deadline_seconds = 4;
    print_cost("the decision alone", 20 * count, median_ns([&] { model.decide(input); }));
  }
  print_cost("a step's end, learning", 0, median_ns([&] {
               model.prefill.observe(2000, 1000);
               model.prefill.end_step(now += std::chrono::milliseconds(200));
               model.prefill.seconds(1000, 0);
             }));
  for (const std::uint32_t chunks : {32u, 2048u}) step_cost(chunks);
}

}  // namespace
}  // namespace kv_offload

int main() {
  kv_offload::decision_quality();
  kv_offload::decision_cost();
  return 0;
}
