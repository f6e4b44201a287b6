// SPDX-License-Identifier: Apache-2.0
// HintTrust: whether one client's hints about returns say anything. Compares pairs of sessions that came
// back: the one that was expected to stay away longer should have done so. Hints that are random agree in
// half of the pairs, swapped ones in fewer. Only the order matters, so hints that are all too early or all
// too late are still trusted.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>

namespace kv_offload {

class HintTrust {
 public:
  // A session came back after `actual` seconds and was expected after `expected` (infinity: never).
  void observe(double expected, double actual) {
    for (std::size_t i = 0; i < std::min(count_, kCompared); ++i) {
      const Return& other = recent_[i];
      if (is_similar(expected, other.expected) || is_similar(actual, other.actual)) continue;
      const bool agrees = (expected < other.expected) == (actual < other.actual);
      pairs_ = pairs_ * kKeep + 1;
      disagreeing_ = disagreeing_ * kKeep + !agrees;
    }
    recent_[count_++ % kCompared] = {expected, actual};
  }
  bool is_trusted() const { return pairs_ < kMinPairs || disagreeing_ < kMaxDisagreeing * pairs_; }

 private:
  static constexpr std::size_t kCompared = 8;  // each return with those before it
  static constexpr double kKeep = 0.998;       // weight of a pair after each later one
  static constexpr double kMinPairs = 64;      // before, the hints are trusted
  static constexpr double kMaxDisagreeing = 0.42;
  struct Return {
    double expected = 0, actual = 0;
  };
  static bool is_similar(double one, double other) {
    return one == other || std::abs(one - other) <= 0.1 * std::min(one, other);
  }

  std::array<Return, kCompared> recent_{};
  std::size_t count_ = 0;
  double pairs_ = 0, disagreeing_ = 0;
};

}  // namespace kv_offload
