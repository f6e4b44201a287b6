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

void Breaker::open(Nanos now, Kind because_of) {
  // While it rests, what speaks against records is not outdone by what speaks against names.
  opened_by_ = closed() ? because_of : std::max(opened_by_, because_of);
  cool_down_ = cool_down_.count() == 0 ? kFirstCoolDown : std::min(cool_down_ * 2, kLastCoolDown);
  retry_at_.store((now + cool_down_).count());
  probing_ = false;
  failures_[0] = failures_[1] = 0;
  trips_.fetch_add(1);
  closed_.store(false, std::memory_order_release);
}

void Breaker::succeeded(const Pass& pass, Kind kind) {
  const MutexLock lock(mutex_);
  if (!counts(pass)) return;
  failures(Kind::kQuestion) = 0;
  if (kind == Kind::kRecord) failures(Kind::kRecord) = 0;
  if (closed()) return;
  probing_ = false;
  if (kind < opened_by_) return;  // it leaves the try to a record
  cool_down_ = Nanos{0};
  closed_.store(true, std::memory_order_release);
}

void Breaker::failed(const Pass& pass, Nanos now, Kind kind) {
  const MutexLock lock(mutex_);
  if (!counts(pass)) return;
  if (!closed() || ++failures(kind) >= kFailuresToTrip) open(now, kind);
}

void Breaker::not_tried(const Pass& pass) {
  const MutexLock lock(mutex_);
  if (pass.probe && counts(pass)) probing_ = false;
}

void Breaker::trip(Nanos now) {
  const MutexLock lock(mutex_);
  if (closed() || probing_) open(now, Kind::kRecord);
}

}  // namespace kv_offload
