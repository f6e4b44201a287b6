#include "storage/breaker.h"

#include <algorithm>

namespace kv_offload {

std::optional<Breaker::Pass> Breaker::admit(Nanos now) {
  if (closed()) return Pass{trips_.load(), false};
  const MutexLock lock(mutex_);
  if (closed()) return Pass{trips_.load(), false};
  if (probing_ || now.count() < retry_at_.load()) return std::nullopt;
  probing_ = true;
  return Pass{trips_.load(), true};
}

bool Breaker::counts(const Pass& pass) const {
  return pass.trips == trips_.load() && (closed() || pass.probe);
}

void Breaker::open(Nanos now) {
  cool_down_ = cool_down_.count() == 0 ? kFirstCoolDown : std::min(cool_down_ * 2, kLastCoolDown);
  retry_at_.store((now + cool_down_).count());
  probing_ = false;
  failures_ = 0;
  trips_.fetch_add(1);
  closed_.store(false, std::memory_order_release);
}

void Breaker::succeeded(const Pass& pass) {
  const MutexLock lock(mutex_);
  if (!counts(pass)) return;
  failures_ = 0;
  if (closed()) return;
  probing_ = false;
  cool_down_ = Nanos{0};
  closed_.store(true, std::memory_order_release);
}

void Breaker::failed(const Pass& pass, Nanos now) {
  const MutexLock lock(mutex_);
  if (!counts(pass)) return;
  if (!closed() || ++failures_ >= kFailuresToTrip) open(now);
}

void Breaker::not_tried(const Pass& pass) {
  const MutexLock lock(mutex_);
  if (pass.probe && counts(pass)) probing_ = false;
}

void Breaker::trip(Nanos now) {
  const MutexLock lock(mutex_);
  if (closed() || probing_) open(now);
}

}  // namespace kv_offload
