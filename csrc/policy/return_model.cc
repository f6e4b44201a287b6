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
  std::array<float, kBuckets> hazard{};
  for (unsigned b = 0; b < kBuckets; ++b) {
    float exposed = 0, returns = 0;
    for (unsigned c = 0; c < kClasses; ++c) {
      exposed += exposed_[c][b];
      returns += returns_[c][b];
    }
    const float prior = (returns + (b == 0 ? kFirstPriorReturns : kPriorReturns)) / (exposed + 1);
    hazard[b] = std::min(
        1.0f, (returns_[of_class][b] + kPriorEntries * prior) / (exposed_[of_class][b] + kPriorEntries));
  }
  for (unsigned from = 0; from < kBuckets; ++from) {
    float best = 0, here = 1, gained = 0, kept = 0;
    for (unsigned b = from; b < kBuckets; ++b) {
      const auto width = static_cast<float>(edge(b + 1) - edge(b));
      kept += here * (b == from ? width / 2 : width) * (1 - hazard[b] / 2);
      gained += here * hazard[b];
      here *= 1 - hazard[b];
      best = std::max(best, gained / kept);
    }
    worth_[of_class][from] = best;
  }
}

}  // namespace kv_offload
