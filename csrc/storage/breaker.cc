#include "storage/breaker.h"

#include <algorithm>

namespace kv_offload {

std::optional<Breaker::Pass> Breaker::admit(Nanos now, Kind kind) {
  if (closed()) return Pass{trips_.load(), false, kind};
  const MutexLock lock(mutex_);
  if (closed()) return Pass{trips_.load(), false, kind};
  if (probing(kind) || now.count() < retry_at_.load()) return std::nullopt;
  probing(kind) = true;
  return Pass{trips_.load(), true, kind};
}

bool Breaker::counts(const Pass& pass) const {
  return pass.trips == trips_.load() && (closed() || pass.probe);
}

void Breaker::open(Nanos now, Kind because_of) {
  // While it rests, what speaks against records is not outdone by what speaks against names.
  opened_by_ = closed() ? because_of : std::max(opened_by_, because_of);
  cool_down_ = cool_down_.count() == 0 ? kFirstCoolDown : std::min(cool_down_ * 2, kLastCoolDown);
  retry_at_.store((now + cool_down_).count());
  probing_[0] = probing_[1] = false;
  failures_[0] = failures_[1] = 0;
  trips_.fetch_add(1);
  closed_.store(false, std::memory_order_release);
}

void Breaker::succeeded(const Pass& pass) {
  const MutexLock lock(mutex_);
  if (!counts(pass)) return;
  failures(Kind::kQuestion) = 0;
  if (pass.kind == Kind::kRecord) failures(Kind::kRecord) = 0;
  if (closed()) return;
  probing(pass.kind) = false;
  if (pass.kind < opened_by_) return;
  probing_[0] = probing_[1] = false;
  cool_down_ = Nanos{0};
  closed_.store(true, std::memory_order_release);
}

void Breaker::failed(const Pass& pass, Nanos now) {
  const MutexLock lock(mutex_);
  if (!counts(pass)) return;
  if (!closed() || ++failures(pass.kind) >= kFailuresToTrip) open(now, pass.kind);
}

void Breaker::not_tried(const Pass& pass) {
  const MutexLock lock(mutex_);
  if (pass.probe && counts(pass)) probing(pass.kind) = false;
}

void Breaker::trip(Nanos now) {
  const MutexLock lock(mutex_);
  if (closed() || probing_[0] || probing_[1]) return open(now, Kind::kRecord);
  opened_by_ = Kind::kRecord;
}

}  // namespace kv_offload
