// SPDX-License-Identifier: Apache-2.0
#include "cache/tier_io.h"

#include <algorithm>
#include <utility>

#include "base/status.h"

namespace kv_offload {
namespace {

constexpr int kShedAtOnce = 16;

MissReason miss_reason_of(StatusKind kind) {
  switch (kind) {
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

// Not failures: cancelled before it was tried (counted where it is cancelled); expired before it was tried
// (counted as a miss); refused by a disabled tier (counted as the failure that disabled it); declined as not
// worth its place; not found.
bool is_failure(StatusKind kind) {
  switch (kind) {
    case StatusKind::kOk:
    case StatusKind::kNotFound:
    case StatusKind::kExpired:
    case StatusKind::kCancelled:
    case StatusKind::kUnavailable:
    case StatusKind::kDeclined:
      return false;
    default:
      return true;
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

bool TierIo::is_recorded(const ChunkKey& key, std::uint32_t tiers) {
  for (std::size_t tier = 0; tier < tiers_.size(); ++tier) {
    if ((tiers >> tier & 1) == 0) continue;
    const Presence presence = contains(tier, key);
    if (presence == Presence::kPresent) return true;
    if (presence == Presence::kUnknown || presence == Presence::kStaleMiss)
      queue_lookup(tier, key, presence, {});
  }
  return false;
}

void TierIo::queue_lookup(std::size_t tier, const ChunkKey& key, Presence presence, Run run) {
  if (presence == Presence::kStaleMiss) slots_[tier].stale_misses.push_back(key);
  std::vector<QueuedLookup>& unknown = slots_[tier].unknown;
  if (unknown.empty() || unknown.back().run != run) unknown.push_back({run, {}});
  unknown.back().keys.push_back(key);
}

void TierIo::touch(const ChunkKey& key) {
  for (const auto& tier : tiers_) tier->touch(key);
}

std::vector<Shard> TierIo::shards_of(RowId row, std::uint32_t group) const {
  std::vector<Shard> shards;
  const GroupGeometry& geometry = groups_[group].geometry;
  for (std::uint32_t area = 0; area < region_->num_areas(); ++area) {
    const std::uint64_t bytes = geometry.shard_bytes[area];
    if (bytes == 0) continue;
    const auto pages = static_cast<RowId>(round_up(bytes, kPageBytes) / kPageBytes);
    for (std::uint32_t i = 0; i < geometry.shards_per_area; ++i)
      shards.push_back(region_->shard(area, row + i * pages, bytes));
  }
  return shards;
}

TierOp TierIo::make_op(OpKind kind, std::uint8_t tier, Slot slot) {
  const ChunkEntry& entry = chunks_.at(slot);
  const OpId id = ++last_op_;
  Op& op = ops_[id];
  op.kind = kind;
  op.tier = tier;
  op.slot = slot;
  op.row = entry.row;
  op.group = entry.group;
  if (kind == OpKind::kRead) reads_[slot] = id;
  TierOp order;
  order.id = id;
  order.kind = kind;
  order.key = entry.key;
  order.group = entry.group;
  order.entry_info = chunks_.entry_info(slot);
  order.shards = shards_of(entry.row, entry.group);
  order.memory = region_;
  return order;
}

// ---- reads

TierIo::Op* TierIo::read_of(Slot slot) {
  const auto read = reads_.find(slot);
  return read == reads_.end() ? nullptr : &ops_.at(read->second);
}

void TierIo::read(std::span<const Read> reads, Nanos deadline, bool probe) {
  const Nanos now = clock_.now();
  std::vector<std::vector<TierOp>> batches(tiers_.size());
  for (const auto& [slot, tier] : reads) {
    TierOp order = make_op(OpKind::kRead, tier, slot);
    order.deadline = deadline;
    Op& op = ops_.at(order.id);
    op.probe = probe;
    op.submitted = now;
    costs_.add_waiting(tier, static_cast<double>(groups_[op.group].bytes));
    op.bytes_ahead = costs_.waiting_bytes(tier);
    batches[tier].push_back(std::move(order));
  }
  for (std::size_t tier = 0; tier < tiers_.size(); ++tier) {
    if (!batches[tier].empty()) tiers_[tier]->submit(std::move(batches[tier]));
  }
}

std::optional<OpId> TierIo::await(Slot slot, Waiter waiter) {
  const auto read = reads_.find(slot);
  if (read == reads_.end() || !ops_.at(read->second).waiters.insert(waiter).second) return std::nullopt;
  return read->second;
}

void TierIo::stop_awaiting(OpId read, Waiter waiter) {
  const auto found = ops_.find(read);
  if (found == ops_.end() || found->second.waiters.erase(waiter) == 0) return;
  Op& op = found->second;
  // No request needs it any more. Its completion releases the row.
  if (op.waiters.empty()) tiers_[op.tier]->cancel(read);
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

void TierIo::learn_from_read(const Op& op, const Completion& completion) {
  costs_.remove_waiting(op.tier, static_cast<double>(groups_[op.group].bytes));
  if (!completion.status.is_ok()) return;
  const double seconds = completion.queued_seconds + completion.seconds;
  const auto took = std::chrono::duration_cast<Nanos>(std::chrono::duration<double>(seconds));
  costs_.on_read(op.tier, op.bytes_ahead, seconds, op.submitted + took);
}

void TierIo::finish_read(Op& op, const Completion& completion) {
  const std::string& name = slots_[op.tier].name;
  const StatusKind kind = completion.status.kind();
  const bool arrived = completion.status.is_ok();
  learn_from_read(op, completion);
  if (arrived) {
    metrics_.add("kv_offload_read_bytes_total", {name}, static_cast<double>(completion.bytes));
    metrics_.observe("kv_offload_read_seconds", {name}, completion.queued_seconds + completion.seconds);
  } else if (is_failure(kind)) {
    metrics_.add("kv_offload_failures_total", {name, "read", to_string(kind)});
  }
  if (op.stale) return chunks_.release(op.row);
  reads_.erase(op.slot);
  ReadEnd end{completion.id, op.slot, completion.key, arrived, std::nullopt};
  // An expired read was submitted for a request whose wait is over; another request may still wait.
  const bool tried = kind != StatusKind::kCancelled && kind != StatusKind::kExpired;
  if (!arrived && tried) end.failed = miss_reason_of(kind);
  for (const Waiter waiter : op.waiters) on_read_end_(waiter, end);
  if (arrived) {
    chunks_.finish_fetch(op.slot, op.tier);
    mark_recorded(op.tier, op.slot);
    on_fetched_(op.slot, op.tier);
    return;
  }
  if (end.failed) key_history_.record_removal(completion.key, static_cast<std::uint8_t>(*end.failed));
  chunks_.discard(op.slot);
}

// ---- writes

void TierIo::write(std::uint8_t tier, std::span<const Slot> slots, bool may_decline) {
  std::vector<TierOp> batch;
  for (const Slot slot : slots) {
    if (chunks_.is_written_to(slot, tier)) continue;
    if (is_recorded(tier, chunks_.at(slot).key)) {
      mark_recorded(tier, slot);
      continue;
    }
    chunks_.begin_write(slot, tier);
    ++slots_[tier].writes;
    batch.push_back(make_op(OpKind::kWrite, tier, slot));
    batch.back().may_decline = may_decline;
    queued_writes_.insert(batch.back().id);
  }
  if (!batch.empty()) tiers_[tier]->submit(std::move(batch));
}

void TierIo::finish_write(Op& op, const Completion& completion) {
  TierSlot& slot = slots_[op.tier];
  --slot.writes;
  queued_writes_.erase(completion.id);
  const StatusKind kind = completion.status.kind();
  if (completion.status.is_ok()) {
    metrics_.add("kv_offload_write_bytes_total", {slot.name}, static_cast<double>(completion.bytes));
    metrics_.observe("kv_offload_write_seconds", {slot.name}, completion.queued_seconds + completion.seconds);
  } else if (!op.dropped && !(op.stale && kind == StatusKind::kCancelled)) {
    if (is_failure(kind)) metrics_.add("kv_offload_failures_total", {slot.name, "write", to_string(kind)});
    metrics_.add("kv_offload_dropped_bytes_total", {slot.name, to_string(kind)},
                 static_cast<double>(groups_[op.group].bytes));
  }
  if (op.stale) return chunks_.release(op.row);
  if (completion.status.is_ok()) {
    events_.tier_has(completion.key, slot.name);
    mark_recorded(op.tier, op.slot);
  }
  chunks_.end_write(op.slot, op.tier, kind != StatusKind::kCancelled);
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

bool TierIo::shed_writes() {
  int shed = 0;
  while (shed < kShedAtOnce && !queued_writes_.empty()) {
    const OpId op = *queued_writes_.begin();
    queued_writes_.erase(queued_writes_.begin());
    if (drop_write(op, "pressure")) ++shed;
  }
  if (shed == 0) return false;
  const std::size_t pinned = chunks_.pinned();
  poll();
  return chunks_.pinned() < pinned;
}

// ---- completions

void TierIo::poll() {
  polled_ = true;
  for (std::size_t tier = 0; tier < tiers_.size(); ++tier) {
    completions_.clear();
    removals_.clear();
    tiers_[tier]->poll(&completions_, &removals_);
    for (const Completion& completion : completions_) {
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
    for (const TierRemoval& removal : removals_) {
      // It may have been written again since and reported as present just now.
      if (!is_recorded(tier, removal.key)) handle_removal(slots_[tier], removal);
    }
    const TierStats stats = tiers_[tier]->stats();
    slots_[tier].readable = stats.readable;
    slots_[tier].writable = stats.writable;
    slots_[tier].is_shared = stats.is_shared;
  }
}

void TierIo::poll_once_per_step() {
  if (!polled_) poll();
}

void TierIo::end_step() {
  polled_ = false;
  for (std::size_t tier = 0; tier < tiers_.size(); ++tier) {
    // Only at the end of the step: later lookups in this step that already have the answer do not wait for a
    // new one.
    for (const ChunkKey& key : std::exchange(slots_[tier].stale_misses, {})) tiers_[tier]->forget_miss(key);
    for (QueuedLookup& queued : std::exchange(slots_[tier].unknown, {})) {
      const bool prefix = queued.run != Run{};
      tiers_[tier]->prefetch_presence(std::move(queued.keys), prefix ? KeyOrder::kPrefix : KeyOrder::kNone);
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

void TierIo::forget() {
  std::vector<OpId> in_flight;
  for (const auto& [id, op] : ops_) {
    if (!op.stale) in_flight.push_back(id);
  }
  std::sort(in_flight.begin(), in_flight.end());  // rows are released in the order in which they were taken
  for (const OpId id : in_flight) {
    Op& op = ops_.at(id);
    op.stale = true;
    op.waiters.clear();
    chunks_.quarantine(op.row);
    tiers_[op.tier]->cancel(id);  // if it has started, its completion ends the hold
  }
  reads_.clear();
  queued_writes_.clear();
}

void TierIo::reset() {
  for (std::size_t tier = 0; tier < tiers_.size(); ++tier) {
    // The tier has forgotten its records whatever status it returns, and retries failed work later (see
    // Tier::reset).
    const Status status = tiers_[tier]->reset();
    if (!status.is_ok()) {
      metrics_.add("kv_offload_failures_total", {slots_[tier].name, "reset", to_string(status.kind())});
    }
  }
  poll();
}

void TierIo::close() {
  for (const OpId op : queued_writes_) drop_write(op, "closing");
  for (const auto& tier : tiers_) tier->close();
  poll();
}

// ---- metrics

void TierIo::publish() {
  for (std::size_t tier = 0; tier < tiers_.size(); ++tier) publish(slots_[tier], tiers_[tier]->stats());
}

void TierIo::publish(TierSlot& slot, const TierStats& stats) {
  metrics_.set("kv_offload_tier_bytes", {slot.name}, static_cast<double>(stats.bytes));
  metrics_.set("kv_offload_tier_capacity_bytes", {slot.name}, static_cast<double>(stats.capacity_bytes));
  metrics_.set("kv_offload_tier_chunks", {slot.name}, static_cast<double>(stats.chunks));
  const auto queue = [&](std::string_view op, std::uint32_t depth, double oldest) {
    metrics_.set("kv_offload_queue_depth", {slot.name, op}, depth);
    metrics_.set("kv_offload_oldest_op_seconds", {slot.name, op}, oldest);
  };
  queue("read", stats.queued_reads, stats.oldest_read_seconds);
  queue("write", stats.queued_writes, stats.oldest_write_seconds);
  const auto count = [&](std::string_view metric, Metrics::Labels labels, std::uint64_t now,
                         std::uint64_t before) {
    if (now > before) metrics_.add(metric, labels, static_cast<double>(now - before));
  };
  const TierStats& before = slot.published;
  count("kv_offload_evicted_bytes_total", {slot.name}, stats.evicted_bytes, before.evicted_bytes);
  count("kv_offload_read_record_bytes_total", {slot.name}, stats.read_record_bytes, before.read_record_bytes);
  count("kv_offload_write_record_bytes_total", {slot.name}, stats.written_record_bytes,
        before.written_record_bytes);
  count("kv_offload_io_ops_total", {slot.name, "direct"}, stats.direct_ops, before.direct_ops);
  count("kv_offload_io_ops_total", {slot.name, "buffered"}, stats.buffered_ops, before.buffered_ops);
  count("kv_offload_tier_rebuilds_total", {slot.name}, stats.rebuilds, before.rebuilds);
  count("kv_offload_tier_lost_bytes_total", {slot.name}, stats.lost_bytes, before.lost_bytes);
  count("kv_offload_breaker_trips_total", {slot.name}, stats.breaker_trips, before.breaker_trips);
  count("kv_offload_failures_total", {slot.name, "read", "timeout"}, stats.read_timeouts,
        before.read_timeouts);
  count("kv_offload_failures_total", {slot.name, "write", "timeout"}, stats.write_timeouts,
        before.write_timeouts);
  publish_codec(slot, stats);
  slot.published = stats;
}

void TierIo::publish_codec(const TierSlot& slot, const TierStats& stats) {
  if (!stats.may_encode) return;
  const TierStats& before = slot.published;
  metrics_.set("kv_offload_codec_on", {slot.name}, stats.encodes ? 1 : 0);
  if (stats.encoded_stored_bytes > 0) {
    metrics_.set(
        "kv_offload_codec_ratio", {slot.name},
        static_cast<double>(stats.encoded_raw_bytes) / static_cast<double>(stats.encoded_stored_bytes));
  }
  const auto count = [&](std::string_view metric, Metrics::Labels labels, double now, double then) {
    if (now > then) metrics_.add(metric, labels, now - then);
  };
  const auto saved = [](const TierStats& of) {
    return static_cast<double>(of.encoded_raw_bytes - of.encoded_stored_bytes);
  };
  count("kv_offload_codec_saved_bytes_total", {slot.name}, saved(stats), saved(before));
  count("kv_offload_codec_seconds_total", {slot.name, "write"}, stats.encode_seconds, before.encode_seconds);
  count("kv_offload_codec_seconds_total", {slot.name, "read"}, stats.decode_seconds, before.decode_seconds);
}

}  // namespace kv_offload
