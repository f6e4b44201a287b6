// SPDX-License-Identifier: Apache-2.0
#include "cache/prefill_model.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <limits>
#include <vector>

namespace kv_offload {
namespace {

constexpr double kFade = 0.98;         // decay of the lag evidence per computing step
constexpr double kLagMargin = 1.25;    // another lag must be better by this factor
constexpr double kIndependent = 1e-3;  // below this, terms are treated as collinear

using Matrix = std::array<std::array<double, 3>, 3>;
using Vector = std::array<double, 3>;

// Solves for the terms listed in `chosen`; other terms are 0. False if the terms are collinear or a
// coefficient is negative.
bool solve(const Matrix& xx, const Vector& xy, const std::vector<std::size_t>& chosen, Vector* solution) {
  const std::size_t n = chosen.size();
  double rows[3][4];
  for (std::size_t i = 0; i < n; ++i) {
    const double scale_i = std::sqrt(xx[chosen[i]][chosen[i]]);
    if (scale_i <= 0) return false;
    for (std::size_t j = 0; j < n; ++j) {
      rows[i][j] = xx[chosen[i]][chosen[j]] / scale_i / std::sqrt(xx[chosen[j]][chosen[j]]);
    }
    rows[i][n] = xy[chosen[i]] / scale_i;
  }
  for (std::size_t i = 0; i < n; ++i) {  // on correlations: a pivot is the unexplained part
    if (rows[i][i] < kIndependent) return false;
    for (std::size_t k = i + 1; k < n; ++k) {
      const double factor = rows[k][i] / rows[i][i];
      for (std::size_t j = i; j <= n; ++j) rows[k][j] -= factor * rows[i][j];
    }
  }
  *solution = {};
  for (std::size_t i = n; i-- > 0;) {
    double value = rows[i][n];
    for (std::size_t j = i + 1; j < n; ++j) {
      value -= rows[i][j] * (*solution)[chosen[j]] * std::sqrt(xx[chosen[j]][chosen[j]]);
    }
    (*solution)[chosen[i]] = value / rows[i][i] / std::sqrt(xx[chosen[i]][chosen[i]]);
  }
  return std::all_of(solution->begin(), solution->end(), [](double value) { return value >= 0; });
}

// Returns the squared error minus that of the zero prediction.
double error_of(const Matrix& xx, const Vector& xy, const Vector& at) {
  double error = 0;
  for (std::size_t i = 0; i < 3; ++i) {
    error -= 2 * at[i] * xy[i];
    for (std::size_t j = 0; j < 3; ++j) error += at[i] * xx[i][j] * at[j];
  }
  return error;
}

}  // namespace

void PrefillModel::observe(double tokens, double context) {
  work_.tokens += tokens;
  work_.token_context += tokens * context;
}

void PrefillModel::end_step(Nanos now) {
  const Nanos lasted = now - last_end_;
  close_step(lasted <= options_.max_step ? to_seconds(lasted) : 0);
  last_end_ = now;
}

void PrefillModel::on_idle(Nanos since, Nanos now) {
  end_step(std::max(since, last_end_));
  for (std::size_t i = 1; i < kLags; ++i) close_step(0);
  last_end_ = now;
}

void PrefillModel::close_step(double seconds) {
  std::move_backward(recent_.begin(), recent_.end() - 1, recent_.end());
  recent_[0] = {work_, seconds};
  work_ = {};
  const double fade = recent_[0].work.tokens > 0 ? kFade : 1;
  for (std::size_t lag = 0; lag < kLags; ++lag) {
    together_[lag] = together_[lag] * fade + recent_[lag].work.tokens * seconds;
  }
  const auto best =
      static_cast<std::size_t>(std::max_element(together_.begin(), together_.end()) - together_.begin());
  if (together_[best] > kLagMargin * together_[lag_]) {
    lag_ = best;
    weight_ = 0;  // learned data belongs to other intervals
    xx_ = {};
    xy_ = {};
    dirty_ = true;
  }
  // The oldest step: all intervals in which its work may show are known now.
  const Step& oldest = recent_[kLags - 1];
  learn(oldest.work, recent_[kLags - 1 - lag_].seconds);
}

void PrefillModel::learn(const Work& work, double seconds) {
  if (work.tokens < static_cast<double>(options_.min_step_tokens) || seconds <= 0) return;
  const double keep = std::exp2(-work.tokens / options_.half_life_tokens);
  const Vector x{1, work.tokens, work.token_context};
  const double w = 1 / work.tokens;
  for (std::size_t i = 0; i < kTerms; ++i) {
    for (std::size_t j = 0; j < kTerms; ++j) xx_[i][j] = xx_[i][j] * keep + w * x[i] * x[j];
    xy_[i] = xy_[i] * keep + w * x[i] * seconds;
  }
  weight_ = weight_ * keep + w;
  step_tokens_ = std::max(step_tokens_ * keep, work.tokens);
  dirty_ = true;
}

const PrefillModel::Fit& PrefillModel::fit() const {
  if (!dirty_) return fit_;
  dirty_ = false;
  static const std::vector<std::size_t> kChoices[] = {{1}, {1, 2}, {1, 0}, {1, 2, 0}};
  double least = std::numeric_limits<double>::infinity();
  for (const auto& chosen : kChoices) {
    Vector at{};
    if (!solve(xx_, xy_, chosen, &at)) continue;
    const double error = error_of(xx_, xy_, at);
    if (error >= least) continue;
    least = error;
    fit_ = {at[0], at[1], at[2]};
  }
  return fit_;
}

double PrefillModel::seconds(double tokens, double context) const {
  if (!known()) return 0;
  const Fit& line = fit();
  const double base = step_tokens_ > 0 ? line.base / step_tokens_ : 0;
  return tokens * (base + line.per_token + line.per_context * (context + tokens / 2));
}

double PrefillModel::tokens_per_second(double prompt_tokens) const {
  const double needed = seconds(prompt_tokens, 0);
  return needed > 0 ? prompt_tokens / needed : 0;
}

}  // namespace kv_offload
