// SPDX-License-Identifier: Apache-2.0
#include "tier/circuit_breaker.h"

#include <algorithm>

namespace kv_offload {

std::optional<CircuitBreaker::Pass> CircuitBreaker::admit(Nanos now, Kind kind) {
  if (closed()) return Pass{openings_.load(), false, kind};
  const MutexLock lock(mutex_);
  if (closed()) return Pass{openings_.load(), false, kind};
  if (probing(kind) || now.count() < retry_at(kind).load()) return std::nullopt;
  probing(kind) = true;
  return Pass{openings_.load(), true, kind};
}

bool CircuitBreaker::is_valid_locked(const Pass& pass) const {
  return pass.openings == openings_.load() && (closed() || pass.probe);
}

void CircuitBreaker::open(Nanos now, Kind cause) {
  openings_.fetch_add(1);
  probing_[0] = probing_[1] = false;
  failures_[0] = failures_[1] = 0;
  start_cool_down(now, cause);
  closed_.store(false, std::memory_order_release);
}

void CircuitBreaker::start_cool_down(Nanos now, Kind cause) {
  opened_by_ = cause;
  cool_down_ = cool_down_.count() == 0 ? kFirstCoolDown : std::min(cool_down_ * 2, kLastCoolDown);
  for (auto& retry_at : retry_at_) retry_at.store((now + cool_down_).count());
  trips_.fetch_add(1);
}

void CircuitBreaker::succeeded(const Pass& pass) {
  const MutexLock lock(mutex_);
  if (!is_valid_locked(pass)) return;
  failures(Kind::kLookup) = 0;
  if (pass.kind == Kind::kRecord) failures(Kind::kRecord) = 0;
  if (closed()) return;
  probing(pass.kind) = false;
  if (pass.kind < opened_by_) return;
  probing_[0] = probing_[1] = false;
  cool_down_ = Nanos{0};
  closed_.store(true, std::memory_order_release);
}

void CircuitBreaker::failed(const Pass& pass, Nanos now) {
  const MutexLock lock(mutex_);
  if (!is_valid_locked(pass)) return;
  if (closed()) {
    if (++failures(pass.kind) >= kFailuresToTrip) open(now, pass.kind);
    return;
  }
  probing(pass.kind) = false;
  if (pass.kind < opened_by_) {  // a lookup's probe does not extend the cool-down of records
    retry_at(pass.kind).store((now + cool_down_).count());
  } else {
    start_cool_down(now, pass.kind);
  }
}

void CircuitBreaker::withdraw(const Pass& pass) {
  const MutexLock lock(mutex_);
  if (pass.probe && is_valid_locked(pass)) probing(pass.kind) = false;
}

void CircuitBreaker::trip(Nanos now) {
  const MutexLock lock(mutex_);
  if (closed() || probing_[0] || probing_[1]) return open(now, Kind::kRecord);
  opened_by_ = Kind::kRecord;
}

}  // namespace kv_offload
