// SPDX-License-Identifier: Apache-2.0
#include "policy/reuse_predictor.h"

#include <algorithm>

namespace kv_offload {
namespace {

// A class's factors weigh as much as this many observed entries.
constexpr float kPriorEntries = 20;
// A factor of 1 weighs as much as this many reuses of a request class or a kind.
constexpr float kPriorOfFactor = 20;
// Share of all entries assumed to be reused in each bucket, until there is data. (The first bucket covers all
// octaves below the second.)
constexpr float kPriorReturns = 0.01f;
constexpr float kFirstPriorReturns = 0.025f;

// Ages that rate() computes together.
constexpr unsigned kLanes = 8;
static_assert(ReusePredictor::kBuckets % kLanes == 0);

constexpr auto kWidths = [] {
  std::array<float, ReusePredictor::kBuckets> widths{};
  for (unsigned b = 0; b < widths.size(); ++b) {
    widths[b] = static_cast<float>(ReusePredictor::edge(b + 1) - ReusePredictor::edge(b));
  }
  return widths;
}();

}  // namespace

ReusePredictor::ReusePredictor() {
  compare();
  for (unsigned c = 0; c < kClasses; ++c) rate(c);
}

void ReusePredictor::learn(float keep) {
  const unsigned c = next_class_;
  next_class_ = (c + 1) % kClasses;
  if (c == 0) compare();
  rate(c);
  for (unsigned b = 0; b < kBuckets; ++b) {
    exposed_[c][b] *= keep;
    returns_[c][b] *= keep;
  }
}

// Compares the reuses of each class with those expected if it behaved like all entries.
void ReusePredictor::compare() {
  std::array<float, kBuckets> exposed{}, returns{};
  for (unsigned c = 0; c < kClasses; ++c) {
    for (unsigned b = 0; b < kBuckets; ++b) {
      exposed[b] += exposed_[c][b];
      returns[b] += returns_[c][b];
    }
  }
  for (unsigned b = 0; b < kBuckets; ++b) {
    pooled_[b] = (returns[b] + (b == 0 ? kFirstPriorReturns : kPriorReturns)) / (exposed[b] + 1);
  }
  std::array<float, kKinds> seen_of_kind, expected_of_kind;
  seen_of_kind.fill(kPriorOfFactor);
  expected_of_kind.fill(kPriorOfFactor);
  for (unsigned request = 0; request < kRequestClasses; ++request) {
    std::array<float, kKinds> seen{}, expected{};
    float all_seen = kPriorOfFactor, all_expected = kPriorOfFactor;
    for (unsigned kind = 0; kind < kKinds; ++kind) {
      const unsigned c = request * kKinds + kind;
      for (unsigned b = 0; b < kBuckets; ++b) {
        seen[kind] += returns_[c][b];
        expected[kind] += exposed_[c][b] * pooled_[b];
      }
      all_seen += seen[kind];
      all_expected += expected[kind];
    }
    const float of_request = all_seen / all_expected;
    for (unsigned kind = 0; kind < kKinds; ++kind) {
      factor_[request * kKinds + kind] = of_request;
      seen_of_kind[kind] += seen[kind];
      expected_of_kind[kind] += expected[kind] * of_request;
    }
  }
  for (unsigned c = 0; c < kClasses; ++c)
    factor_[c] *= seen_of_kind[c % kKinds] / expected_of_kind[c % kKinds];
}

void ReusePredictor::rate(unsigned of_class) {
  std::array<float, kBuckets> hazard;
  for (unsigned b = 0; b < kBuckets; ++b) {
    const float prior = std::min(1.0f, factor_[of_class] * pooled_[b]);
    hazard[b] = std::min(
        1.0f, (returns_[of_class][b] + kPriorEntries * prior) / (exposed_[of_class][b] + kPriorEntries));
  }
  // Runs for every age `from` at once, so that the inner loop vectorises. `present`: the remaining share of
  // an entry kept since `from` (0 before it). `gained`: its reuses. `kept`: the cost of keeping it. The
  // largest gained / kept is found with products: a division would cost as much as all the rest.
  std::array<float, kBuckets> present{}, gained{}, kept{}, best_gained{}, best_kept;
  best_kept.fill(1);
  for (unsigned b = 0; b < kBuckets; ++b) {
    const float left = 1 - hazard[b], cost = kWidths[b] * (1 - hazard[b] / 2);
    present[b] = 1;
    kept[b] = -cost / 2;                                     // an entry is in the middle of its own bucket
    for (unsigned lanes = 0; lanes <= b; lanes += kLanes) {  // later ages are not present yet
      for (unsigned from = lanes; from < lanes + kLanes; ++from) {
        kept[from] += present[from] * cost;
        gained[from] += present[from] * hazard[b];
        present[from] *= left;
        const bool better = gained[from] * best_kept[from] > best_gained[from] * kept[from];
        best_gained[from] = better ? gained[from] : best_gained[from];
        best_kept[from] = better ? kept[from] : best_kept[from];
      }
    }
  }
  for (unsigned from = 0; from < kBuckets; ++from)
    worth_[of_class][from] = best_gained[from] / best_kept[from];
}

}  // namespace kv_offload
