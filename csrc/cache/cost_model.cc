#include "cache/cost_model.h"

#include <cmath>

namespace kv_offload {

void CostModel::end_step(Nanos now) {
  const Nanos lasted = now - step_began_;
  if (running_tokens_ >= options_.min_step_tokens && lasted > Nanos(0) && lasted <= options_.max_step) {
    const double rate = static_cast<double>(running_tokens_) / to_seconds(lasted);
    const double keep =
        rate_ > 0 ? std::exp2(-static_cast<double>(running_tokens_) / options_.half_life_tokens) : 0;
    // Rates average by time per token, not by tokens per time.
    rate_ = keep > 0 ? 1 / (keep / rate_ + (1 - keep) / rate) : rate;
  }
  running_tokens_ = step_tokens_;
  step_tokens_ = 0;
  step_began_ = now;
}

CostModel::Choice CostModel::decide(std::size_t index, double load_seconds, std::uint64_t tokens, Nanos now) {
  Tier& tier = tiers_[index];
  const double compute_seconds = prefill_seconds(tokens);
  bool load = true;
  if (load_seconds > 0 && compute_seconds > 0) {
    load = tier.recompute ? load_seconds < compute_seconds * options_.margin
                          : load_seconds * options_.margin < compute_seconds;
    tier.recompute = !load;
    // What is not used is not measured: try now and then.
    if (!load && now - tier.last_load >= options_.probe_interval) load = true;
  } else {
    tier.recompute = false;
  }
  if (load) tier.last_load = now;
  return load ? Choice::kLoad : Choice::kRecompute;
}

}  // namespace kv_offload
