// PrefillModel: how long the engine needs to compute tokens. Prefill is not
// linear in a prompt's length, because attention grows with what lies before:
//
//   seconds of a step = base + per_token * tokens + per_context * sum(tokens * context)
//
// learnt online from the steps themselves: the tokens whose chunks are offered
// for storing, and the time until the step after. In which interval between two
// ends of steps the work of a step shows depends on vLLM's version and on async
// scheduling (which schedules one step ahead): it is the one, of three, in which
// large steps take long.
//
// Threads: one.
#pragma once

#include <array>
#include <cstdint>

#include "base/clock.h"

namespace kv_offload {

struct PrefillOptions {
  double half_life_tokens = 65536;  // weight of the past
  std::uint64_t min_step_tokens = 16;
  // A step that lasted longer was an engine that hung, not a slow prefill.
  Nanos max_step{std::chrono::seconds(10)};
};

class PrefillModel {
 public:
  explicit PrefillModel(PrefillOptions options = {}) : options_(options) {}

  // Tokens computed in the step that is being scheduled; `context`: how many
  // tokens lie before each of them, in the mean.
  void note(double tokens, double context);
  void end_step(Nanos now);
  // The engine had nothing to do from `since` until now.
  void note_idle(Nanos since, Nanos now);

  bool known() const { return weight_ > 0; }
  // Seconds to compute `tokens` behind `context` others; 0 while unknown.
  double seconds(double tokens, double context) const;
  // Of a whole prompt of this length; 0 while unknown.
  double tokens_per_second(double prompt_tokens) const;

 private:
  static constexpr std::size_t kLags = 3;
  static constexpr std::size_t kTerms = 3;
  struct Work {
    double tokens = 0, token_context = 0;
  };
  struct Step {
    Work work;           // noted in it
    double seconds = 0;  // from the end of the one before to its own
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
  std::array<Step, kLags> recent_{};      // the newest first
  std::array<double, kLags> together_{};  // sum of tokens * seconds, by lag
  std::size_t lag_ = 0;
  // Moments of (1, tokens, tokens * context) against seconds, each sample weighted
  // by 1 / tokens; the past fades.
  std::array<std::array<double, kTerms>, kTerms> xx_{};
  std::array<double, kTerms> xy_{};
  double weight_ = 0;
  double step_tokens_ = 0;  // of large steps: what a long prompt is cut into
  mutable Fit fit_;
  mutable bool dirty_ = true;
};

}  // namespace kv_offload
