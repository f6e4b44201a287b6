// TransferModel: seconds until a transfer has arrived = latency + bytes / rate,
// where the bytes count all that wait before it. Learnt from the latest samples
// alone, so that nothing of a device's past outlives a window of new evidence.
//
// Threads: one.
#pragma once

#include <array>
#include <cstddef>

namespace kv_offload {

class TransferModel {
 public:
  static constexpr std::size_t kWindow = 32;  // samples

  // `bytes` had arrived `seconds` after they were asked for: all bytes that were
  // ahead and the transfer's own.
  void note(double bytes, double seconds);
  // Nothing of before counts any more.
  void restart() { count_ = next_ = 0; }
  // `bytes` have NOT arrived after `seconds`. Where that is worse than the
  // estimate it replaces what was learnt.
  void note_overdue(double bytes, double seconds);

  bool known() const { return count_ > 0; }
  // Samples of several sizes: the latency is told from the rate.
  bool told_apart() const { return fit().told_apart; }
  // 0 while unknown.
  double seconds(double bytes) const;
  // 0 while unknown; without the latency.
  double bytes_per_second() const;
  double latency() const { return fit().latency; }

 private:
  struct Sample {
    double bytes, seconds;
  };
  struct Fit {
    double latency = 0, per_byte = 0;
    bool told_apart = false;
  };
  const Fit& fit() const;

  std::array<Sample, kWindow> samples_{};
  std::size_t count_ = 0, next_ = 0;
  mutable Fit fit_;
  mutable bool dirty_ = true;
};

}  // namespace kv_offload
