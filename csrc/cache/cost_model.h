// CostModel: is it faster to load these tokens from a tier or to compute them
// again. Pure arithmetic on what it is told; no clock, no tier of its own.
//
// The prefill rate is learnt from steps: tokens that were new in a step over
// the time until the next one, as a moving average weighted by tokens. Where
// either side is unknown it loads: that is how it learns.
//
// Threads: one.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "base/clock.h"

namespace kv_offload {

struct CostModelOptions {
  double margin = 0.9;  // a choice is left only when the other side's time is below this share of its own
  // A tier that was judged too slow is tried again after this long, by one plan.
  Nanos probe_interval{std::chrono::seconds(30)};
  double half_life_tokens = 16384;  // weight of the past in the prefill rate
  std::uint64_t min_step_tokens = 16;
  // A step that lasted longer was an idle engine, not a slow prefill.
  Nanos max_step{std::chrono::seconds(10)};
};

class CostModel {
 public:
  explicit CostModel(std::size_t tiers, CostModelOptions options = {}) : options_(options), tiers_(tiers) {}

  // Tokens computed in the step that is being scheduled.
  void note_prefill(std::uint64_t tokens) { step_tokens_ += tokens; }
  void end_step(Nanos now);
  // 0 while unknown.
  double prefill_tokens_per_second() const { return rate_; }
  // 0 while unknown.
  double prefill_seconds(std::uint64_t tokens) const {
    return rate_ > 0 ? static_cast<double>(tokens) / rate_ : 0;
  }

  enum class Choice : std::uint8_t { kLoad, kRecompute };
  // load_seconds: estimated until all of it arrived, 0 = unknown.
  Choice decide(std::size_t tier, double load_seconds, std::uint64_t tokens, Nanos now);

 private:
  struct Tier {
    bool recompute = false;  // the last choice: changing it takes the margin
    Nanos last_load{0};
  };
  CostModelOptions options_;
  std::vector<Tier> tiers_;
  double rate_ = 0;
  std::uint64_t step_tokens_ = 0;
  std::uint64_t running_tokens_ = 0;  // of the step that runs since step_began_
  Nanos step_began_{0};
};

}  // namespace kv_offload
