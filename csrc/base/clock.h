// SPDX-License-Identifier: Apache-2.0
// Time as a parameter: every deadline and every measured duration uses a Clock, so that tests control time.
#pragma once

#include <chrono>
#include <cstdint>

#include <atomic>

namespace kv_offload {

using Nanos = std::chrono::nanoseconds;

class Clock {
 public:
  virtual ~Clock() = default;
  // Monotonic, with an arbitrary zero. Any thread.
  virtual Nanos now() const = 0;
};

// CLOCK_MONOTONIC.
class SteadyClock final : public Clock {
 public:
  Nanos now() const override { return std::chrono::steady_clock::now().time_since_epoch(); }
};

// For tests: moves only in advance(). Any thread.
class FakeClock final : public Clock {
 public:
  Nanos now() const override { return Nanos(now_.load()); }
  void advance(Nanos by) { now_.fetch_add(by.count()); }

 private:
  std::atomic<std::int64_t> now_{1'000'000'000};
};

inline double to_seconds(Nanos n) { return std::chrono::duration<double>(n).count(); }

}  // namespace kv_offload
