#include "storage/breaker.h"

#include <algorithm>

namespace kv_offload {

bool Breaker::admit(Nanos now) {
  if (closed()) return true;
  const MutexLock lock(mutex_);
  if (closed()) return true;
  if (probing_ || now.count() < retry_at_.load()) return false;
  probing_ = true;
  return true;
}

void Breaker::open(Nanos now) {
  cool_down_ = cool_down_.count() == 0 ? kFirstCoolDown : std::min(cool_down_ * 2, kLastCoolDown);
  retry_at_.store((now + cool_down_).count());
  probing_ = false;
  failures_ = 0;
  trips_.fetch_add(1);
  closed_.store(false, std::memory_order_release);
}

void Breaker::succeeded() {
  const MutexLock lock(mutex_);
  failures_ = 0;
  // While open without a probe, an old op's late success proves nothing.
  if (closed() || !probing_) return;
  probing_ = false;
  cool_down_ = Nanos{0};
  closed_.store(true, std::memory_order_release);
}

bool Breaker::failed(Nanos now) {
  const MutexLock lock(mutex_);
  if (closed() ? ++failures_ < kFailuresToTrip : !probing_) return false;
  open(now);
  return true;
}

void Breaker::not_tried() {
  const MutexLock lock(mutex_);
  probing_ = false;
}

void Breaker::trip(Nanos now) {
  const MutexLock lock(mutex_);
  if (closed() || probing_) open(now);
}

}  // namespace kv_offload
