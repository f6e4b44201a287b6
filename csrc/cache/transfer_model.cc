// SPDX-License-Identifier: Apache-2.0
#include "cache/transfer_model.h"

#include <algorithm>
#include <bit>

namespace kv_offload {

void TransferModel::observe(double bytes, double seconds) {
  if (bytes <= 0 || seconds <= 0) return;
  const auto units = static_cast<std::uint64_t>(bytes) / 64;
  auto& of_size =
      samples_[std::min<std::size_t>(static_cast<std::size_t>(std::bit_width(units)), kSizes - 1)];
  const auto oldest = std::min_element(of_size.begin(), of_size.end(),
                                       [](const Sample& a, const Sample& b) { return a.number < b.number; });
  *oldest = {bytes, seconds, ++samples_taken_};
  dirty_ = true;
}

void TransferModel::on_overdue(double bytes, double so_far) {
  if (bytes <= 0 || so_far <= seconds(bytes)) return;
  restart();
  observe(bytes, so_far);
}

double TransferModel::seconds(double bytes) const {
  if (!known()) return 0;
  const Fit& line = fit();
  return line.latency + line.per_byte * bytes;
}

double TransferModel::bytes_per_second() const {
  const double per_byte = known() ? fit().per_byte : 0;
  return per_byte > 0 ? 1 / per_byte : 0;
}

// Least squares with weight 1/bytes per sample: one large slow plan counts as much as many small fast reads.
const TransferModel::Fit& TransferModel::fit() const {
  if (!dirty_) return fit_;
  fit_ = {};
  dirty_ = false;
  const std::uint64_t too_old = std::max(first_, samples_taken_ > kOld ? samples_taken_ - kOld : 0);
  double weight = 0, x = 0, y = 0, xx = 0, xy = 0;
  for (const auto& of_size : samples_) {
    for (const auto& [bytes, seconds, number] : of_size) {
      if (number <= too_old) continue;
      const double w = 1 / bytes;
      weight += w;
      x += w * bytes;
      y += w * seconds;
      xx += w * bytes * bytes;
      xy += w * bytes * seconds;
    }
  }
  if (weight <= 0) return fit_;
  const double spread = weight * xx - x * x;
  // Sizes must differ enough to separate latency from rate.
  fit_.is_separable = spread > 0.05 * weight * xx;
  if (fit_.is_separable) {
    fit_.per_byte = (weight * xy - x * y) / spread;
    fit_.latency = (y - fit_.per_byte * x) / weight;
  }
  // No negative terms: attribute all time to the rate, or all of it to the latency.
  if (!fit_.is_separable || fit_.latency < 0) {
    fit_.latency = 0;
    fit_.per_byte = xy / xx;
  } else if (fit_.per_byte < 0) {
    fit_.per_byte = 0;
    fit_.latency = y / weight;
  }
  return fit_;
}

}  // namespace kv_offload
