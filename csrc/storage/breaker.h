// Breaker: turns one direction of a tier off for a while when its device is
// stuck or keeps failing. Closed -> (trip) open -> after a cool-down, one probe
// op is let through -> its success closes, its failure opens again for twice as
// long. Any thread; no I/O.
#pragma once

#include <atomic>
#include <cstdint>

#include "base/clock.h"
#include "base/thread_annotations.h"

namespace kv_offload {

class Breaker {
 public:
  static constexpr unsigned kFailuresToTrip = 8;  // in a row
  static constexpr Nanos kFirstCoolDown{std::chrono::seconds(1)};
  static constexpr Nanos kLastCoolDown{std::chrono::seconds(60)};

  // May an op start? Taking the probe's place counts as an answer: the op's end
  // must be told by one of the calls below.
  bool admit(Nanos now) EXCLUDES(mutex_);
  // Would admit() say yes.
  bool offers(Nanos now) const {
    return closed_.load(std::memory_order_acquire) || now.count() >= retry_at_.load();
  }
  bool closed() const { return closed_.load(std::memory_order_acquire); }
  // An op ended. True when this tripped the breaker.
  void succeeded() EXCLUDES(mutex_);
  bool failed(Nanos now) EXCLUDES(mutex_);
  void not_tried() EXCLUDES(mutex_);  // cancelled, or expired in the queue
  void trip(Nanos now) EXCLUDES(mutex_);
  std::uint64_t trips() const { return trips_.load(); }

 private:
  void open(Nanos now) REQUIRES(mutex_);

  Mutex mutex_;
  bool probing_ GUARDED_BY(mutex_) = false;
  unsigned failures_ GUARDED_BY(mutex_) = 0;
  Nanos cool_down_ GUARDED_BY(mutex_){0};
  std::atomic<bool> closed_{true};
  std::atomic<std::int64_t> retry_at_{0};
  std::atomic<std::uint64_t> trips_{0};
};

}  // namespace kv_offload
