#include "policy/return_model.h"

#include <algorithm>

namespace kv_offload {
namespace {

// What all classes show stands for this many entries of each, until it has more of its own.
constexpr float kPriorEntries = 20;
// And this share of them comes back in each bucket, until anything is known. (The
// first bucket has all octaves below the second.)
constexpr float kPriorReturns = 0.01f;
constexpr float kFirstPriorReturns = 0.025f;

constexpr auto kWidths = [] {
  std::array<float, ReturnModel::kBuckets> widths{};
  for (unsigned b = 0; b < widths.size(); ++b) {
    widths[b] = static_cast<float>(ReturnModel::edge(b + 1) - ReturnModel::edge(b));
  }
  return widths;
}();

}  // namespace

ReturnModel::ReturnModel() {
  for (unsigned c = 0; c < kClasses; ++c) rate(c);
}

void ReturnModel::learn(float keep) {
  const unsigned c = next_class_;
  next_class_ = (c + 1) % kClasses;
  rate(c);
  for (unsigned b = 0; b < kBuckets; ++b) {
    exposed_[c][b] *= keep;
    returns_[c][b] *= keep;
  }
}

void ReturnModel::rate(unsigned of_class) {
  std::array<float, kBuckets> exposed{}, returns{}, hazard;
  for (unsigned c = 0; c < kClasses; ++c) {
    for (unsigned b = 0; b < kBuckets; ++b) {
      exposed[b] += exposed_[c][b];
      returns[b] += returns_[c][b];
    }
  }
  for (unsigned b = 0; b < kBuckets; ++b) {
    const float prior = (returns[b] + (b == 0 ? kFirstPriorReturns : kPriorReturns)) / (exposed[b] + 1);
    hazard[b] = std::min(
        1.0f, (returns_[of_class][b] + kPriorEntries * prior) / (exposed_[of_class][b] + kPriorEntries));
  }
  // For every age `from` at once, so that the inner loop is one of vectors: what is left
  // of an entry kept since then (none before it), its returns and what keeping it took.
  // The largest gained / kept is found by products: a division costs as much as all the rest.
  std::array<float, kBuckets> here{}, gained{}, kept{}, best_gained{}, best_kept;
  best_kept.fill(1);
  for (unsigned b = 0; b < kBuckets; ++b) {
    const float left = 1 - hazard[b], cost = kWidths[b] * (1 - hazard[b] / 2);
    here[b] = 1;
    kept[b] = -cost / 2;  // it is in the middle of its own bucket
    for (unsigned from = 0; from < kBuckets; ++from) {
      kept[from] += here[from] * cost;
      gained[from] += here[from] * hazard[b];
      here[from] *= left;
      const bool better = gained[from] * best_kept[from] > best_gained[from] * kept[from];
      best_gained[from] = better ? gained[from] : best_gained[from];
      best_kept[from] = better ? kept[from] : best_kept[from];
    }
  }
  for (unsigned from = 0; from < kBuckets; ++from)
    worth_[of_class][from] = best_gained[from] / best_kept[from];
}

}  // namespace kv_offload
