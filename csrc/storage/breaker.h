// Breaker: turns one direction of a tier off for a while when its device is
// stuck or keeps failing. Closed -> (trip) open -> after a cool-down, one probe
// op is let through -> its success closes, its failure opens again for twice as
// long. Any thread; no I/O.
//
// Two kinds of op are told apart: those that move a record, and questions, which are answered from names
// alone. A device that answers no question moves no record either; that it answers one says nothing of
// records. So questions have a run of failures and a probe of their own, and end only a rest that such a run
// began; in one that records began, what becomes of a question's probe changes nothing for records.
//
// Every op that is let through gets a pass and tells its end with it. Only the end
// of an op that was let through since the breaker opened last, or since an op was
// found stuck, says something about the device now, and while the breaker is open
// only that of a probe.
#pragma once

#include <atomic>
#include <cstdint>
#include <optional>

#include "base/clock.h"
#include "base/thread_annotations.h"

namespace kv_offload {

class Breaker {
 public:
  static constexpr unsigned kFailuresToTrip = 8;  // in a row, of one kind
  static constexpr Nanos kFirstCoolDown{std::chrono::seconds(1)};
  static constexpr Nanos kLastCoolDown{std::chrono::seconds(60)};

  enum class Kind : std::uint8_t { kQuestion, kRecord };  // what the later says outweighs the earlier
  struct Pass {
    std::uint64_t rests = 0;  // before it was given
    bool probe = false;
    Kind kind = Kind::kRecord;
  };

  // May an op start? Its end must be told, by one of the three calls below.
  std::optional<Pass> admit(Nanos now, Kind kind = Kind::kRecord) EXCLUDES(mutex_);
  // Would admit() let an op through.
  bool offers(Nanos now) const {
    return closed() || now.count() >= retry_at_[static_cast<std::size_t>(Kind::kRecord)].load();  // the first
  }
  bool closed() const { return closed_.load(std::memory_order_acquire); }
  // Would its end count. No longer, for example, when an op was found stuck meanwhile.
  bool stands(const Pass& pass) EXCLUDES(mutex_) {
    const MutexLock lock(mutex_);
    return counts(pass);
  }
  void succeeded(const Pass& pass) EXCLUDES(mutex_);
  void failed(const Pass& pass, Nanos now) EXCLUDES(mutex_);
  void not_tried(const Pass& pass) EXCLUDES(mutex_);  // cancelled, or expired in the queue
  // An op is stuck in the device.
  void trip(Nanos now) EXCLUDES(mutex_);
  std::uint64_t trips() const { return trips_.load(); }

 private:
  bool counts(const Pass& pass) const REQUIRES(mutex_);
  // Nothing that was let through before counts any more.
  void open(Nanos now, Kind because_of) REQUIRES(mutex_);
  void rest(Nanos now, Kind because_of) REQUIRES(mutex_);
  unsigned& failures(Kind kind) REQUIRES(mutex_) { return failures_[static_cast<std::size_t>(kind)]; }
  bool& probing(Kind kind) REQUIRES(mutex_) { return probing_[static_cast<std::size_t>(kind)]; }

  std::atomic<std::int64_t>& retry_at(Kind kind) { return retry_at_[static_cast<std::size_t>(kind)]; }

  Mutex mutex_;
  // By kind.
  bool probing_[2] GUARDED_BY(mutex_) = {};       // a probe's pass is out
  unsigned failures_[2] GUARDED_BY(mutex_) = {};  // in a row
  Kind opened_by_ GUARDED_BY(mutex_) = Kind::kRecord;
  Nanos cool_down_ GUARDED_BY(mutex_){0};
  std::atomic<bool> closed_{true};
  std::atomic<std::int64_t> retry_at_[2] = {};  // by kind; that of records is never the later one
  std::atomic<std::uint64_t> rests_{0}, trips_{0};
};

}  // namespace kv_offload
