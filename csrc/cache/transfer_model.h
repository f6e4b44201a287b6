// SPDX-License-Identifier: Apache-2.0
// TransferModel: seconds until a transfer has arrived = latency + bytes / rate, where the bytes include
// everything that waits before it. Uses only the latest samples of each size: small and large samples
// separate latency from rate, and new samples of a size replace the device's older behaviour.
//
// Threads: one.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace kv_offload {

class TransferModel {
 public:
  static constexpr std::size_t kSamplesPerSize = 4;  // samples kept per power of two of bytes
  static constexpr std::uint64_t kOld = 8192;        // a sample is ignored after this many newer ones

  // `bytes` arrived `seconds` after they were requested. They include the bytes ahead and the transfer's own.
  void observe(double bytes, double seconds);
  // Ignores all earlier samples.
  void restart() {
    first_ = samples_taken_;
    dirty_ = true;
  }
  // `bytes` have NOT arrived after `seconds`. If that is worse than the estimate, it replaces what was
  // learned.
  void on_overdue(double bytes, double seconds);

  bool known() const { return samples_taken_ > first_; }
  // True if samples of several sizes separate the latency from the rate.
  bool is_separable() const { return fit().is_separable; }
  // 0 while unknown.
  double seconds(double bytes) const;
  // Excludes the latency. 0 while unknown.
  double bytes_per_second() const;
  double latency() const { return fit().latency; }

 private:
  static constexpr std::size_t kSizes = 28;  // below 64 bytes, below 128, ... 4 GiB and more
  struct Sample {
    double bytes = 0, seconds = 0;
    std::uint64_t number = 0;  // from 1
  };
  struct Fit {
    double latency = 0, per_byte = 0;
    bool is_separable = false;
  };
  const Fit& fit() const;

  std::array<std::array<Sample, kSamplesPerSize>, kSizes> samples_{};
  std::uint64_t samples_taken_ = 0, first_ = 0;  // samples after first_ count
  mutable Fit fit_;
  mutable bool dirty_ = true;
};

}  // namespace kv_offload
