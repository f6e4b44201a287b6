// SPDX-License-Identifier: Apache-2.0
// PrefillModel: estimates how long the engine needs to compute tokens. Prefill time is not linear in the
// prompt length, because attention grows with the context:
//
//   seconds of a step = base + per_token * tokens + per_context * sum(tokens * context)
//
// The model is learned online from the steps: from the tokens whose chunks are offered for storing, and from
// the time until the following step. The work of a step shows in one of three intervals between step ends.
// The interval depends on vLLM's version and on async scheduling (which schedules one step ahead): it is the
// one in which large steps take long.
//
// Threads: one.
#pragma once

#include <array>
#include <cstdint>

#include "base/clock.h"

namespace kv_offload {

struct PrefillOptions {
  double half_life_tokens = 65536;  // tokens after which a sample has half its weight
  std::uint64_t min_step_tokens = 16;
  // A longer step means that the engine hung; it is not a slow prefill.
  Nanos max_step{std::chrono::seconds(10)};
};

class PrefillModel {
 public:
  explicit PrefillModel(PrefillOptions options = {}) : options_(options) {}

  // Tokens computed in the step that is being scheduled. `context`: mean number of tokens before each of
  // them.
  void observe(double tokens, double context);
  void end_step(Nanos now);
  // The engine was idle from `since` until now.
  void on_idle(Nanos since, Nanos now);

  bool known() const { return weight_ > 0; }
  // Returns the seconds to compute `tokens` after `context` other tokens; 0 while unknown.
  double seconds(double tokens, double context) const;
  // Returns the rate for a whole prompt of this length; 0 while unknown.
  double tokens_per_second(double prompt_tokens) const;

 private:
  static constexpr std::size_t kLags = 3;
  static constexpr std::size_t kTerms = 3;
  struct Work {
    double tokens = 0, token_context = 0;
  };
  struct Step {
    Work work;           // observed in this step
    double seconds = 0;  // from the end of the previous step to the end of this one
  };
  struct Fit {
    double base = 0, per_token = 0, per_context = 0;
  };
  void close_step(double seconds);
  void learn(const Work& work, double seconds);
  const Fit& fit() const;

  PrefillOptions options_;
  Work work_;  // of the step that is being scheduled
  Nanos last_end_{0};
  std::array<Step, kLags> recent_{};      // newest first
  std::array<double, kLags> together_{};  // sum of tokens * seconds, by lag
  std::size_t lag_ = 0;
  // Moments of (1, tokens, tokens * context) against seconds. Each sample is weighted by 1 / tokens, and
  // older samples fade.
  std::array<std::array<double, kTerms>, kTerms> xx_{};
  std::array<double, kTerms> xy_{};
  double weight_ = 0;
  double step_tokens_ = 0;  // tokens per large step, as in the chunked prefill of a long prompt
  mutable Fit fit_;
  mutable bool dirty_ = true;
};

}  // namespace kv_offload
