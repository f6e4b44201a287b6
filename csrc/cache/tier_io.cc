// SPDX-License-Identifier: Apache-2.0
#include "cache/tier_io.h"

#include <algorithm>
#include <new>
#include <utility>

#include "base/status.h"
#include "memory/row_shards.h"

namespace kv_offload {
namespace {

constexpr int kShedAtOnce = 16;
constexpr int kPassedOver = 64;  // queued writes that stay
constexpr Nanos kResetAgain = std::chrono::seconds(1);

MissReason miss_reason_of(const Status& status) {
  if (is_host_lost(status)) return MissReason::kHostLost;
  switch (status.kind()) {
    case StatusKind::kCorrupt:
      return MissReason::kCorrupt;
    case StatusKind::kNotFound:
      return MissReason::kEvicted;
    case StatusKind::kTimeout:
    case StatusKind::kExpired:
      return MissReason::kDeadline;
    default:
      return MissReason::kIoError;
  }
}

}  // namespace

TierIo::TierIo(const Context& context, std::shared_ptr<const HostRegion> region,
               std::vector<std::unique_ptr<Tier>> tiers, OnReadEnd on_read_end, OnFetched on_fetched)
    : groups_(context.groups),
      chunks_(context.chunks),
      key_history_(context.key_history),
      costs_(context.costs),
      events_(context.events),
      metrics_(context.metrics),
      clock_(context.clock),
      region_(std::move(region)),
      tiers_(std::move(tiers)),
      on_read_end_(std::move(on_read_end)),
      on_fetched_(std::move(on_fetched)) {
  if (tiers_.size() > CostModel::kMaxTiers) {  // limited by the bits of ChunkEntry::writes
    throw_invalid("{} tiers were given; at most {} are possible", tiers_.size(), CostModel::kMaxTiers);
  }
  for (const auto& tier : tiers_) slots_.emplace_back().name = std::string(tier->name());
}

void TierIo::publish() {
  for (std::size_t tier = 0; tier < tiers_.size(); ++tier) {
    TierSlot& slot = slots_[tier];
    const TierStats stats = tiers_[tier]->stats();
    slot.figures.publish(slot.name, stats, metrics_);
    slot.figures.publish(slot.name, tiers_[tier]->parts(), metrics_);
    for (std::size_t i = 0; i < stats.tenant_bytes.size(); ++i) {
      const auto tenant = static_cast<TenantId>(i);
      const double share = chunks_.tenants()->fraction(tenant) * static_cast<double>(stats.capacity_bytes);
      const std::string& name = chunks_.tenant_name(tenant);
      metrics_.set("kv_offload_tenant_tier_bytes", {name, slot.name},
                   static_cast<double>(stats.tenant_bytes[i]));
      metrics_.set("kv_offload_tenant_tier_share_bytes", {name, slot.name}, share);
    }
  }
}

bool TierIo::is_recorded(const ChunkKey& key, std::uint32_t tiers, TenantId tenant) {
  for (std::size_t tier = 0; tier < tiers_.size(); ++tier) {
    if ((tiers >> tier & 1) == 0) continue;
    const Presence presence = contains(tier, key);
    if (presence == Presence::kPresent) return true;
    if (must_ask(presence)) queue_lookup(tier, key, presence, tenant, {});
  }
  return false;
}

void TierIo::queue_lookup(std::size_t tier, const ChunkKey& key, Presence presence, TenantId tenant,
                          Run run) {
  if (presence != Presence::kUnknown) slots_[tier].old_results.push_back(key);
  std::vector<QueuedLookup>& unknown = slots_[tier].unknown;
  if (unknown.empty() || unknown.back().tenant != tenant || unknown.back().run != run)
    unknown.push_back({tenant, run, {}});
  unknown.back().keys.push_back(key);
}

void TierIo::touch(const ChunkKey& key) {
  for (const auto& tier : tiers_) tier->touch(key);
}

std::vector<Shard> TierIo::shards_of(RowId row, std::uint32_t group) const {
  const GroupGeometry& geometry = groups_[group].geometry;
  return shards_of_row(*region_, row, geometry.shard_bytes, geometry.shards_per_area);
}

TierOp TierIo::make_op(OpKind kind, std::uint8_t tier, Slot slot) {
  const ChunkEntry& entry = chunks_.at(slot);
  TierOp order;
  order.id = last_op_ + 1;
  order.kind = kind;
  order.key = entry.key;
  order.group = entry.group;
  order.entry_info = chunks_.entry_info(slot);
  order.entry_info.returns_at = 0;  // hints are about host memory
  order.shards = shards_of(entry.row, entry.group);
  order.row = entry.row;
  order.memory = region_;
  order.weight = chunks_.reader(entry.tenant).weight;
  if (kind == OpKind::kWrite && entry.tenant != 0) order.tenant = chunks_.tenant_name(entry.tenant);
  if (kind == OpKind::kRead) {
    reads_.emplace(slot, order.id);
  } else {
    queued_writes_.insert(order.id);
  }
  try {
    Op& op = ops_[order.id];  // the last call that may throw
    op.kind = kind;
    op.tier = tier;
    op.slot = slot;
    op.row = entry.row;
    op.group = entry.group;
    op.tenant = entry.tenant;
  } catch (...) {
    kind == OpKind::kRead ? reads_.erase(slot) : queued_writes_.erase(order.id);
    throw;
  }
  ++last_op_;
  if (kind == OpKind::kRead) {
    costs_.add_waiting(tier, static_cast<double>(groups_[entry.group].bytes), entry.tenant);
  } else {
    chunks_.begin_write(slot, tier);
    ++slots_[tier].writes;
    ++slots_[tier].writes_of[entry.tenant];
  }
  return order;
}

void TierIo::withdraw(OpId first, std::size_t tier) {
  for (auto at = ops_.lower_bound(first); at != ops_.end();) {
    const auto& [id, op] = *at;
    if (op.tier < tier) {
      ++at;
      continue;
    }
    if (op.kind == OpKind::kRead) {
      reads_.erase(op.slot);
      costs_.remove_waiting(op.tier, static_cast<double>(groups_[op.group].bytes), op.tenant);
    } else {
      queued_writes_.erase(id);
      --slots_[op.tier].writes;
      --slots_[op.tier].writes_of[op.tenant];
      chunks_.end_write(op.slot, op.tier, false);
    }
    at = ops_.erase(at);
  }
}

// ---- reads

TierIo::Op* TierIo::read_of(Slot slot) {
  const auto read = reads_.find(slot);
  return read == reads_.end() ? nullptr : &ops_.at(read->second);
}

void TierIo::read(std::span<const Read> reads, Nanos deadline, bool probe) {
  const Nanos now = clock_.now();
  const OpId first = last_op_ + 1;
  std::vector<std::vector<TierOp>> batches(tiers_.size());
  std::size_t tier = 0;  // those before it have accepted their ops
  try {
    for (const Read& read : reads) {
      TierOp order = make_op(OpKind::kRead, read.tier, read.slot);
      order.deadline = deadline;
      Op& op = ops_.at(order.id);
      op.probe = probe;
      op.submitted = now;
      op.bytes_ahead = costs_.bytes_ahead(read.tier, 0, chunks_.reader(op.tenant));
      batches[read.tier].push_back(std::move(order));
    }
    for (; tier < tiers_.size(); ++tier) {
      if (!batches[tier].empty()) tiers_[tier]->submit(std::move(batches[tier]));
    }
  } catch (...) {
    withdraw(first, tier);
    throw;
  }
}

std::optional<OpId> TierIo::await(Slot slot, Waiter waiter) {
  const auto read = reads_.find(slot);
  if (read == reads_.end() || !ops_.at(read->second).waiters.insert(waiter).second) return std::nullopt;
  return read->second;
}

std::size_t TierIo::waiters(Slot slot) const {
  const auto read = reads_.find(slot);
  return read == reads_.end() ? 0 : ops_.at(read->second).waiters.size();
}

void TierIo::stop_awaiting(OpId read, Waiter waiter) {
  const auto found = ops_.find(read);
  if (found == ops_.end() || found->second.waiters.erase(waiter) == 0) return;
  Op& op = found->second;
  // No request needs it any more. Its completion releases the row.
  if (op.waiters.empty()) cancel(read, op);
}

void TierIo::cancel(OpId id, const Op& op) noexcept {
  try {
    (void)tiers_[op.tier]->cancel(id);
  } catch (const std::bad_alloc&) {  // it is still queued
  }
}

bool TierIo::continue_as_probe(Slot slot, Nanos now) {
  Op* op = read_of(slot);
  if (op == nullptr || op->waiters.size() > 1) return false;
  op->probe = true;
  op->waiters.clear();
  costs_.begin_probe(op->tier, now);
  return true;
}

bool TierIo::is_probe(Slot slot) const {
  const auto read = reads_.find(slot);
  if (read == reads_.end()) return false;
  const Op& op = ops_.at(read->second);
  return op.probe && op.waiters.empty();
}

void TierIo::on_overdue(Slot slot, Nanos now) {
  const Op* op = read_of(slot);
  if (op == nullptr) return;
  costs_.on_overdue_read(op->tier, op->bytes_ahead, to_seconds(now - op->submitted), now);
}

// When the op ended on the device, which is before poll() learns of it.
static Nanos end_of(Nanos submitted, const Completion& completion) {
  const std::chrono::duration<double> seconds(completion.queued_seconds + completion.seconds);
  return submitted + std::chrono::duration_cast<Nanos>(seconds);
}

void TierIo::learn_from_read(const Op& op, const Completion& completion) {
  costs_.remove_waiting(op.tier, static_cast<double>(groups_[op.group].bytes), op.tenant);
  if (!completion.status.is_ok()) return;
  const double seconds = completion.queued_seconds + completion.seconds;
  costs_.on_read(op.tier, op.bytes_ahead, seconds, end_of(op.submitted, completion));
}

void TierIo::count_read(const Op& op, const Completion& completion) {
  const std::string& name = slots_[op.tier].name;
  const StatusKind kind = completion.status.kind();
  if (completion.status.is_ok()) {
    metrics_.add("kv_offload_read_bytes_total", {name}, static_cast<double>(completion.bytes));
    count_of_tenant("kv_offload_tenant_read_bytes_total", op, completion);
    metrics_.observe("kv_offload_read_seconds", {name}, completion.queued_seconds + completion.seconds);
  } else if (is_failure(kind)) {
    metrics_.add("kv_offload_failures_total", {name, "read", to_string(kind)});
  }
}

void TierIo::count_of_tenant(std::string_view metric, const Op& op, const Completion& completion) {
  if (chunks_.tenants() == nullptr) return;
  metrics_.add(metric, {chunks_.tenant_name(op.tenant), slots_[op.tier].name},
               static_cast<double>(completion.bytes));
}

bool TierIo::make_resident(const Op& op) {
  try {
    chunks_.finish_fetch(op.slot, op.tier);
    return true;
  } catch (const std::bad_alloc&) {
    return false;
  }
}

void TierIo::finish_read(Op& op, const Completion& completion) {
  learn_from_read(op, completion);
  if (op.stale) {
    chunks_.release(op.row);
    return count_read(op, completion);
  }
  reads_.erase(op.slot);
  const StatusKind kind = completion.status.kind();
  const bool arrived = completion.status.is_ok() && make_resident(op);
  ReadEnd end{completion.id,  op.slot,
              completion.key, arrived,
              op.tier,        arrived ? completion.bytes : 0,
              op.submitted,   end_of(op.submitted, completion),
              std::nullopt};
  // An expired read was submitted for a request whose wait is over; another request may still wait.
  const bool tried = kind != StatusKind::kCancelled && kind != StatusKind::kExpired;
  if (!arrived && tried) end.failed = miss_reason_of(completion.status);
  for (const Waiter waiter : op.waiters) on_read_end_(waiter, end);
  if (!arrived) {
    if (end.failed) key_history_.record_removal(completion.key, static_cast<std::uint8_t>(*end.failed));
    chunks_.discard(op.slot);
  }
  // The chunk has its new state: the calls from here on may run out of memory.
  count_read(op, completion);
  if (!arrived) return;
  // Subscribers learn of records of earlier processes and of other servers this way.
  publish_recorded(op.tier, completion.key);
  mark_recorded(op.tier, op.slot);
  on_fetched_(op.slot, op.tier);
}

// ---- writes

void TierIo::write(std::uint8_t tier, std::span<const Slot> slots, bool may_decline) {
  if (slots_[tier].needs_reset) return drop_writes(tier, slots);
  const OpId first = last_op_ + 1;
  std::vector<TierOp> batch;
  try {
    for (const Slot slot : slots) {
      if (chunks_.is_written_to(slot, tier)) continue;
      if (is_recorded(tier, chunks_.at(slot).key)) {
        mark_recorded(tier, slot);
        continue;
      }
      batch.push_back(make_op(OpKind::kWrite, tier, slot));
      batch.back().may_decline = may_decline;
    }
    if (!batch.empty()) tiers_[tier]->submit(std::move(batch));
  } catch (...) {
    withdraw(first, tier);
    throw;
  }
}

// Servers that start later would find these records together with older ones from before the reset.
void TierIo::drop_writes(std::size_t tier, std::span<const Slot> slots) {
  for (const Slot slot : slots) {
    metrics_.add("kv_offload_dropped_bytes_total", {slots_[tier].name, to_string(StatusKind::kUnavailable)},
                 static_cast<double>(groups_[chunks_.at(slot).group].bytes));
  }
}

void TierIo::finish_write(Op& op, const Completion& completion) {
  TierSlot& slot = slots_[op.tier];
  --slot.writes;
  --slot.writes_of[op.tenant];
  queued_writes_.erase(completion.id);
  const StatusKind kind = completion.status.kind();
  if (op.stale) {
    chunks_.release(op.row);
  } else {
    chunks_.end_write(op.slot, op.tier, kind != StatusKind::kCancelled);
  }
  // The op has ended: the calls from here on may run out of memory.
  if (completion.status.is_ok()) {
    metrics_.add("kv_offload_write_bytes_total", {slot.name}, static_cast<double>(completion.bytes));
    count_of_tenant("kv_offload_tenant_write_bytes_total", op, completion);
    metrics_.observe("kv_offload_write_seconds", {slot.name}, completion.queued_seconds + completion.seconds);
  } else if (!op.dropped && !(op.stale && kind == StatusKind::kCancelled)) {
    if (is_failure(kind)) metrics_.add("kv_offload_failures_total", {slot.name, "write", to_string(kind)});
    const std::string_view reason =
        is_host_lost(completion.status) ? to_string(MissReason::kHostLost) : to_string(kind);
    metrics_.add("kv_offload_dropped_bytes_total", {slot.name, reason},
                 static_cast<double>(groups_[op.group].bytes));
  }
  if (op.stale || !completion.status.is_ok()) return;
  publish_recorded(op.tier, completion.key);
  mark_recorded(op.tier, op.slot);
}

// The record may have been evicted since, and its removal polled before the completion of this op.
void TierIo::publish_recorded(std::size_t tier, const ChunkKey& key) {
  if (is_recorded(tier, key)) events_.tier_has(key, slots_[tier].name);
}

bool TierIo::drop_write(OpId id, std::string_view reason) {
  const auto found = ops_.find(id);
  if (found == ops_.end() || found->second.kind != OpKind::kWrite) return false;
  Op& op = found->second;
  if (!tiers_[op.tier]->cancel(id)) return false;
  op.dropped = true;
  metrics_.add("kv_offload_dropped_bytes_total", {slots_[op.tier].name, reason},
               static_cast<double>(groups_[op.group].bytes));
  return true;
}

bool TierIo::shed_writes(const Requester& by) {
  int shed = 0;
  const auto shed_some = [&](bool of_others) {
    int passed = 0;
    for (auto at = queued_writes_.begin(); shed < kShedAtOnce && at != queued_writes_.end();) {
      const OpId op = *at;
      // A write that stays keeps its place in the queue, and the search for others is bounded.
      if (chunks_.tenants() != nullptr) {
        const Slot slot = ops_.at(op).slot;
        const bool is_own = chunks_.at(slot).tenant == by.tenant;
        if (is_own == of_others || !chunks_.may_take(by, slot)) {
          if (++passed == kPassedOver) break;
          ++at;
          continue;
        }
      }
      at = queued_writes_.erase(at);
      if (drop_write(op, "pressure")) ++shed;
    }
  };
  // A tenant takes from the others before it drops writes of its own chunks.
  if (chunks_.tenants() != nullptr) shed_some(true);
  if (shed == 0) shed_some(false);
  if (shed == 0) return false;
  // The pins end when the tier reports the cancelled writes.
  const std::size_t pinned = chunks_.pinned();
  poll();
  return chunks_.pinned() < pinned;
}

// ---- completions

void TierIo::poll() {
  polled_ = true;
  for (std::size_t tier = 0; tier < tiers_.size(); ++tier) {
    removals_.clear();
    tiers_[tier]->poll(&completions_, &removals_);
    finish_completions();
    for (const TierRemoval& removal : removals_) {
      // It may have been written again since and reported as present just now.
      if (!is_recorded(tier, removal.key)) handle_removal(slots_[tier], removal);
    }
    TierSlot& slot = slots_[tier];
    if (slot.needs_reset && clock_.now() >= slot.next_reset) reset(tier);
    const TierAvailability now = tiers_[tier]->availability();
    slot.readable = now.readable && !slot.needs_reset;
    slot.writable = now.writable && !slot.needs_reset;
    slot.is_shared = now.is_shared && !slot.needs_reset;
    if (slot.failed_reset.empty()) continue;
    metrics_.add("kv_offload_failures_total", {slot.name, "reset", slot.failed_reset});
    slot.failed_reset = {};
  }
}

void TierIo::finish_completions() {
  while (next_completion_ < completions_.size()) {
    const Completion completion = std::move(completions_[next_completion_++]);
    const auto found = ops_.find(completion.id);
    if (found == ops_.end()) continue;
    Op op = std::move(found->second);
    ops_.erase(found);
    if (op.kind == OpKind::kRead) {
      finish_read(op, completion);
    } else {
      finish_write(op, completion);
    }
  }
  completions_.clear();
  next_completion_ = 0;
}

void TierIo::poll_once_per_step() {
  if (!polled_) poll();
}

void TierIo::end_step() {
  polled_ = false;
  for (std::size_t tier = 0; tier < tiers_.size(); ++tier) {
    // Only at the end of the step: later lookups in this step that already have the answer do not wait for a
    // new one.
    for (const ChunkKey& key : std::exchange(slots_[tier].old_results, {})) tiers_[tier]->forget_miss(key);
    for (QueuedLookup& queued : std::exchange(slots_[tier].unknown, {})) {
      const KeyOrder order = queued.run != Run{} ? KeyOrder::kPrefix : KeyOrder::kNone;
      const Reader reader = chunks_.reader(queued.tenant);
      tiers_[tier]->prefetch_presence(std::move(queued.keys), {order, reader.tenant, reader.weight});
    }
  }
}

void TierIo::mark_recorded(std::size_t tier, Slot slot) {
  if (!costs_.prefers_recompute(tier)) chunks_.set_recorded(slot, true);
}

void TierIo::mark_recorded(std::size_t tier, std::span<const Slot> slots) {
  for (const Slot slot : slots) {
    if (is_recorded(tier, chunks_.at(slot).key)) mark_recorded(tier, slot);
  }
}

void TierIo::handle_removal(const TierSlot& from, const TierRemoval& removal) {
  events_.tier_lost(removal.key, from.name);
  if (const ChunkEntry* entry = chunks_.find_resident(removal.key)) {
    bool elsewhere = false;
    for (std::size_t tier = 0; tier < tiers_.size(); ++tier) {
      elsewhere |=
          &slots_[tier] != &from && !costs_.prefers_recompute(tier) && is_recorded(tier, removal.key);
    }
    if (!elsewhere) chunks_.set_recorded(chunks_.slot_of(entry), false);
  }
  switch (removal.reason) {
    case TierRemoval::Reason::kCorrupt:
      key_history_.record_removal(removal.key, static_cast<std::uint8_t>(MissReason::kCorrupt));
      break;
    case TierRemoval::Reason::kEvicted:
    case TierRemoval::Reason::kVanished:
      key_history_.record_removal(removal.key, static_cast<std::uint8_t>(MissReason::kEvicted));
      break;
    case TierRemoval::Reason::kReset:
      break;
  }
}

// ---- shutdown and reset

void TierIo::forget() noexcept {
  for (auto& [id, op] : ops_) {  // rows are released in the order in which they were taken
    if (op.stale) continue;
    (void)chunks_.quarantine(op.slot);
    op.stale = true;
    op.waiters.clear();
  }
  reads_.clear();
  queued_writes_.clear();
  // If an op has started, its completion ends the hold.
  for (const auto& [id, op] : ops_) cancel(id, op);
}

void TierIo::reset() {
  for (std::size_t tier = 0; tier < tiers_.size(); ++tier) reset(tier);
  poll();
}

void TierIo::reset(std::size_t tier) noexcept {
  TierSlot& slot = slots_[tier];
  try {
    const Status status = tiers_[tier]->reset();
    // The tier has forgotten its records regardless of the status, and retries failed work later (see
    // Tier::reset).
    slot.needs_reset = false;
    if (!status.is_ok()) slot.failed_reset = to_string(status.kind());
  } catch (...) {
    slot.needs_reset = true;
    slot.readable = slot.writable = slot.is_shared = false;
    slot.next_reset = clock_.now() + kResetAgain;
    slot.failed_reset = "exception";
  }
}

void TierIo::close() {
  for (const OpId op : queued_writes_) drop_write(op, "closing");
  for (const auto& tier : tiers_) tier->close();
  poll();
}

}  // namespace kv_offload
