// TransferModel: seconds until a transfer has arrived = latency + bytes / rate,
// where the bytes count all that wait before it. Learnt from the latest samples
// of each size alone: small and large ones are what latency and rate are told
// apart by, and nothing of a device's past outlives new evidence of its size.
//
// Threads: one.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace kv_offload {

class TransferModel {
 public:
  static constexpr std::size_t kOfSize = 4;    // samples of each power of two of bytes
  static constexpr std::uint64_t kOld = 8192;  // so many samples later one counts no more

  // `bytes` had arrived `seconds` after they were asked for: all bytes that were
  // ahead and the transfer's own.
  void note(double bytes, double seconds);
  // Nothing of before counts any more.
  void restart() {
    first_ = noted_;
    dirty_ = true;
  }
  // `bytes` have NOT arrived after `seconds`. Where that is worse than the
  // estimate it replaces what was learnt.
  void note_overdue(double bytes, double seconds);

  bool known() const { return noted_ > first_; }
  // Samples of several sizes: the latency is told from the rate.
  bool told_apart() const { return fit().told_apart; }
  // 0 while unknown.
  double seconds(double bytes) const;
  // 0 while unknown; without the latency.
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
    bool told_apart = false;
  };
  const Fit& fit() const;

  std::array<std::array<Sample, kOfSize>, kSizes> samples_{};
  std::uint64_t noted_ = 0, first_ = 0;  // those after first_ count
  mutable Fit fit_;
  mutable bool dirty_ = true;
};

}  // namespace kv_offload
