// SPDX-License-Identifier: Apache-2.0
#include "cache/cost_model.h"

#include <algorithm>
#include <utility>

namespace kv_offload {

void CostModel::on_read(std::size_t index, double bytes_ahead, double seconds, Nanos now) {
  Tier& tier = tiers_[index];
  // Samples from before the tier fell out of use are outdated.
  if (std::exchange(tier.probing, false)) tier.reads.restart();
  tier.reads.observe(bytes_ahead, seconds);
  tier.last_read = now;
}

void CostModel::on_overdue_read(std::size_t index, double bytes_ahead, double seconds_so_far, Nanos now) {
  tiers_[index].reads.on_overdue(bytes_ahead, seconds_so_far);
  tiers_[index].last_read = now;
}

double CostModel::bytes_ahead(std::size_t index, double bytes, const Reader& by) const {
  const Tier& tier = tiers_[index];
  const double own = tier.waiting_of[by.tenant] + bytes;
  const double others = tier.waiting_bytes - tier.waiting_of[by.tenant];
  return own + std::min(others, own * (1 - by.weight) / by.weight);
}

double CostModel::read_seconds(std::size_t index, double bytes, double hint, const Reader& by) const {
  const Tier& tier = tiers_[index];
  return tier.reads.known() ? tier.reads.seconds(bytes_ahead(index, bytes, by)) : hint;
}

double CostModel::hint(const DecisionInput& input, std::size_t tier) const {
  return input.hints.empty() ? 0 : input.hints[tier];
}

void CostModel::extend(Cut* cut, const Stretch& stretch, double chunks) {
  const double share = stretch.chunks > 0 ? chunks / stretch.chunks : 0;
  const double bytes = share * static_cast<double>(stretch.bytes);
  cut->chunks += static_cast<std::uint32_t>(chunks);
  cut->tokens += share * static_cast<double>(stretch.tokens);
  cut->copy_bytes += bytes;
  if (stretch.tier >= 0) cut->tier_bytes[static_cast<std::size_t>(stretch.tier)] += bytes;
}

// Tiers read concurrently; the copy to the device follows.
void CostModel::judge(Cut* cut, const DecisionInput& input) const {
  double longest = 0, longest_with_margin = 0;
  for (std::size_t t = 0; t < tiers_.size(); ++t) {
    if (cut->tier_bytes[t] <= 0) continue;
    const double seconds =
        read_seconds(t, cut->tier_bytes[t], hint(input, t) * cut->tier_bytes[t] / all_[t], input.by);
    longest = std::max(longest, seconds);
    const double factor = tiers_[t].recompute ? 1 / options_.margin : options_.margin;
    longest_with_margin = std::max(longest_with_margin, factor * seconds);
  }
  const double rate = copy_model_.bytes_per_second();
  const double copy =
      (rate > 0 ? cut->copy_bytes / rate : 0) + (input.loads_anyway ? 0 : copy_model_.latency());
  cut->load_seconds = longest + copy;
  cut->compute_seconds = prefill.seconds(cut->tokens, input.context);
  cut->gain = cut->compute_seconds - longest_with_margin - copy;
}

bool CostModel::in_time(const Cut& cut, const DecisionInput& input) {
  return input.deadline_seconds <= 0 || cut.load_seconds <= input.deadline_seconds;
}

// Within a stretch the gain is convex: a tier's latency is paid once, and deeper chunks take longer to
// compute. So only the end of a stretch, or the last chunk that arrives in time, can be best.
CostModel::Cut CostModel::best_cut(const DecisionInput& input, Cut* whole) const {
  Cut best, at;
  bool all_in_time = true;
  for (const Stretch& stretch : input.stretches) {
    const Cut before = at;
    extend(&at, stretch, stretch.chunks);
    judge(&at, input);
    // After the deadline only the total for `whole` is accumulated.
    if (!all_in_time) continue;
    if (in_time(at, input)) {
      if (at.gain > best.gain) best = at;
      continue;
    }
    all_in_time = false;
    // Binary search for the last chunk of this stretch that arrives in time.
    for (std::uint32_t fit = 0, too_many = stretch.chunks; too_many - fit > 1;) {
      const std::uint32_t middle = fit + (too_many - fit) / 2;
      Cut part = before;
      extend(&part, stretch, middle);
      judge(&part, input);
      (in_time(part, input) ? fit : too_many) = middle;
      if (in_time(part, input) && part.gain > best.gain) best = part;
    }
  }
  *whole = at;
  // A window is all or nothing.
  if (input.divisible) return best;
  return in_time(at, input) && at.gain > 0 ? at : Cut{};
}

Decision CostModel::decide(const DecisionInput& input) {
  using Choice = Decision::Choice;
  all_.fill(0);
  for (const Stretch& stretch : input.stretches) {
    if (stretch.tier >= 0) all_[static_cast<std::size_t>(stretch.tier)] += static_cast<double>(stretch.bytes);
  }
  Cut whole;
  const Cut best = best_cut(input, &whole);
  // A tier or prefill of unknown speed: load, because loading is how the speed is learned.
  bool known = prefill.known();
  for (std::size_t t = 0; t < tiers_.size(); ++t) {
    if (all_[t] > 0) known &= read_seconds(t, all_[t], hint(input, t), input.by) > 0;
  }
  if (!known) return {Choice::kLoad, whole.chunks, 0, whole.compute_seconds};
  // Remember the choice per tier: tiers within the best cut are loaded from, the others recomputed.
  for (std::size_t t = 0; t < tiers_.size(); ++t) {
    if (all_[t] > 0) tiers_[t].recompute = true;
  }
  std::uint32_t at = 0;
  for (const Stretch& stretch : input.stretches) {
    if (stretch.tier >= 0 && at < best.chunks)
      tiers_[static_cast<std::size_t>(stretch.tier)].recompute = false;
    at += stretch.chunks;
  }
  if (best.chunks == 0) return {Choice::kRecompute, 0, whole.load_seconds, whole.compute_seconds};
  const Choice choice = best.chunks == whole.chunks ? Choice::kLoad : Choice::kPartial;
  return {choice, best.chunks, best.load_seconds, best.compute_seconds};
}

bool CostModel::should_probe(std::size_t index, Nanos now) {
  Tier& tier = tiers_[index];
  const bool still_read = tier.probing && tier.waiting_bytes > 0;
  if (!tier.recompute || still_read || now - tier.last_read < options_.probe_interval) return false;
  begin_probe(index, now);
  return true;
}

void CostModel::begin_probe(std::size_t index, Nanos now) {
  tiers_[index].probing = true;
  tiers_[index].last_read = now;
}

bool CostModel::host_pays(double bytes_per_token, Nanos now) {
  if (!prefill.known() || !copy_model_.is_separable() || copy_model_.bytes_per_second() <= 0) return true;
  const double copy = bytes_per_token / copy_model_.bytes_per_second();
  // For the first tokens of a prompt; later tokens take longer.
  const bool pays = copy < options_.host_slowdown_limit * prefill.seconds(1, 0);
  if (!pays && now - last_host_load_ < options_.probe_interval) return false;
  last_host_load_ = now;
  return true;
}

}  // namespace kv_offload
