// SPDX-License-Identifier: Apache-2.0
// CircuitBreaker: circuit breaker for one direction of a tier, for a device that is stuck or keeps failing. A
// trip opens it. After a cool-down it admits one probe op: success closes the breaker, failure keeps it open
// for twice as long. Any thread; no I/O.
//
// There are two kinds of op: those that move a record, and lookups (kLookup), which the device answers from
// names alone. A device that fails lookups does not move records either, but a successful lookup proves
// nothing about records. So lookups have a failure count and a probe of their own. Their success closes the
// breaker only if lookups opened it. If record ops opened it, the result of a lookup's probe changes nothing
// for them.
//
// Every admitted op gets a pass and reports its end with it. A result counts only if the op was admitted
// after the breaker last opened and after the last stuck op was found. While the breaker is open, only the
// probe's result counts.
#pragma once

#include <atomic>
#include <cstdint>
#include <optional>

#include "base/clock.h"
#include "base/thread_annotations.h"

namespace kv_offload {

class CircuitBreaker {
 public:
  static constexpr unsigned kFailuresToTrip = 8;  // in a row, of one kind
  static constexpr Nanos kFirstCoolDown{std::chrono::seconds(1)};
  static constexpr Nanos kLastCoolDown{std::chrono::seconds(60)};

  enum class Kind : std::uint8_t { kLookup, kRecord };  // a later kind outweighs an earlier one
  struct Pass {
    std::uint64_t openings = 0;  // how often the breaker had opened when the pass was given
    bool probe = false;
    Kind kind = Kind::kRecord;
  };

  // Returns a pass if an op may start, else nullopt. The op's end must be reported with one of succeeded(),
  // failed() and withdraw().
  std::optional<Pass> admit(Nanos now, Kind kind = Kind::kRecord) EXCLUDES(mutex_);
  // True if admit() would admit a record op.
  bool offers(Nanos now) const {
    // The record time is never later than that of lookups.
    return closed() || now.count() >= retry_at_[static_cast<std::size_t>(Kind::kRecord)].load();
  }
  bool closed() const { return closed_.load(std::memory_order_acquire); }
  // True if the op's result would still count. False, for example, after another op was found stuck.
  bool is_valid(const Pass& pass) EXCLUDES(mutex_) {
    const MutexLock lock(mutex_);
    return is_valid_locked(pass);
  }
  void succeeded(const Pass& pass) EXCLUDES(mutex_);
  void failed(const Pass& pass, Nanos now) EXCLUDES(mutex_);
  void withdraw(const Pass& pass) EXCLUDES(mutex_);  // cancelled, or expired in the queue
  // Reports that an op is stuck in the device.
  void trip(Nanos now) EXCLUDES(mutex_);
  std::uint64_t trips() const { return trips_.load(); }

 private:
  bool is_valid_locked(const Pass& pass) const REQUIRES(mutex_);
  // Invalidates all earlier passes.
  void open(Nanos now, Kind cause) REQUIRES(mutex_);
  void start_cool_down(Nanos now, Kind cause) REQUIRES(mutex_);
  unsigned& failures(Kind kind) REQUIRES(mutex_) { return failures_[static_cast<std::size_t>(kind)]; }
  bool& probing(Kind kind) REQUIRES(mutex_) { return probing_[static_cast<std::size_t>(kind)]; }

  std::atomic<std::int64_t>& retry_at(Kind kind) { return retry_at_[static_cast<std::size_t>(kind)]; }

  Mutex mutex_;
  bool probing_[2] GUARDED_BY(mutex_) = {};       // by kind: the probe's pass is out
  unsigned failures_[2] GUARDED_BY(mutex_) = {};  // by kind, in a row
  Kind opened_by_ GUARDED_BY(mutex_) = Kind::kRecord;
  Nanos cool_down_ GUARDED_BY(mutex_){0};
  std::atomic<bool> closed_{true};
  std::atomic<std::int64_t> retry_at_[2] = {};  // by kind; the record time is never the later one
  std::atomic<std::uint64_t> openings_{0}, trips_{0};
};

}  // namespace kv_offload
