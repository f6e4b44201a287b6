// reset and close: everything is forgotten at once, but rows that somebody may
// still touch stay out of use until that ended.
#include <algorithm>

#include "cache/cache_impl.h"

namespace kv_offload {

void TieredCache::Impl::forget_memory() {
  ops.forget();
  load_jobs.forget();
  chunks.forget();
  for (RequestState& request : requests) {
    request.knows_span = false;
    request.held.clear();
    request.awaited.clear();
    request.failed.clear();
    std::fill(request.declined.begin(), request.declined.end(), std::nullopt);
    request.clear_wait();
    request.clear_pass();
  }
  waiting.clear();
  asked.clear();
  memory.clear();
}

void TieredCache::Impl::reset() {
  forget_memory();
  ops.reset();
}

void TieredCache::Impl::close() {
  if (closed) return;
  ops.close();
  forget_memory();
  events.take();
  closed = true;
}

void TieredCache::reset() {
  if (!impl_->closed) impl_->reset();
}

void TieredCache::close() { impl_->close(); }

}  // namespace kv_offload
