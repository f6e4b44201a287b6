// SPDX-License-Identifier: Apache-2.0
// TierFigures: publishes the statistics of one tier as metrics. Running totals are added by their growth
// since the last call, so each value counts once.
//
// Threads: one (the scheduler's).
#pragma once

#include <string_view>
#include <vector>

#include "metrics/metrics.h"
#include "tier/tier.h"

namespace kv_offload {

class TierFigures {
 public:
  void publish(std::string_view tier, const TierStats& stats, Metrics& metrics);
  // The tiers of all hosts (Tier::parts()).
  void publish(std::string_view tier, const std::vector<TierPart>& parts, Metrics& metrics);

 private:
  void publish_codec(std::string_view tier, const TierStats& stats, Metrics& metrics) const;

  TierStats published_;  // running totals already in the metrics
  std::vector<TierPart> published_parts_;
};

}  // namespace kv_offload
