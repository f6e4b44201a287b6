// reset and close: everything is forgotten at once, but rows that somebody may
// still touch stay out of use until that ended.
#include <algorithm>

#include "cache/cache_impl.h"

namespace kv_offload {

void TieredCache::Impl::forget_memory() {
  std::vector<OpId> in_flight;
  for (const auto& [id, op] : ops) {
    if (!op.stale) in_flight.push_back(id);
  }
  std::sort(in_flight.begin(), in_flight.end());  // as tiers have queued them: each is found at once
  for (const OpId id : in_flight) {
    Op& op = ops.at(id);
    op.stale = true;
    op.waiters.clear();
    chunks.quarantine(op.row);
    tier_slots[op.tier].tier->cancel(id);  // if it has started, its completion ends the hold
  }
  fetches.clear();
  write_order.clear();
  for (const LoadJob& job : load_jobs) {
    if (!job.completed) forgotten_loads.push_back({job.ticket, job.cache_blocks});
    if (tickets.is_reported(job.ticket, TicketKind::kLoad)) continue;
    for (const Slot slot : job.slots) chunks.quarantine(job.ticket, slot);
  }
  load_jobs.clear();
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
  for (TierSlot& slot : tier_slots) {
    // It has forgotten, whatever it says; and it makes up for what it could not do (see Tier::reset).
    const Status status = slot.tier->reset();
    if (!status.is_ok()) {
      metrics.add("kv_offload_failures_total", {slot.name, "reset", to_string(status.kind())});
    }
  }
  poll_tiers();
}

void TieredCache::Impl::close() {
  if (closed) return;
  for (const OpId op : write_order) drop_write(op, "closing");
  for (TierSlot& slot : tier_slots) slot.tier->close();
  poll_tiers();
  forget_memory();
  events.take();
  closed = true;
}

void TieredCache::reset() {
  if (!impl_->closed) impl_->reset();
}

void TieredCache::close() { impl_->close(); }

}  // namespace kv_offload
