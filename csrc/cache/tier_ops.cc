// Ops between host memory and the tiers: made, polled, finished; write policies.
#include <algorithm>
#include <utility>

#include "cache/cache_impl.h"

namespace kv_offload {
namespace {

// on_evict: writes in flight for chunks that are about to go, and how many
// chunks of the cold end are looked at per step.
constexpr std::uint32_t kMaxEvictionWrites = 64;
constexpr std::size_t kColdEnd = 64;

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

// Not: given up before it was tried (those are counted where they are cancelled), too
// late to be tried (a miss tells it), refused by a tier that is switched off (counted
// as what switched it off), not there.
bool is_failure(StatusKind kind) {
  switch (kind) {
    case StatusKind::kOk:
    case StatusKind::kNotFound:
    case StatusKind::kExpired:
    case StatusKind::kCancelled:
    case StatusKind::kUnavailable:
      return false;
    default:
      return true;
  }
}

}  // namespace

std::vector<Shard> TieredCache::Impl::shards_of(RowId row, std::uint32_t group) const {
  std::vector<Shard> shards;
  for (std::uint32_t area = 0; area < region.num_areas(); ++area) {
    const std::uint64_t bytes = groups[group].geometry.shard_bytes[area];
    if (bytes > 0) shards.push_back(region.shard(area, row, bytes));
  }
  return shards;
}

TierOp TieredCache::Impl::make_op(OpKind kind, std::uint8_t tier, Slot slot) {
  const ChunkEntry& entry = index.at(slot);
  const OpId id = ++last_op;
  Op& op = ops[id];
  op.kind = kind;
  op.tier = tier;
  op.slot = slot;
  op.row = entry.row;
  op.group = entry.group;
  if (kind == OpKind::kRead) fetches[slot] = id;
  TierOp order;
  order.id = id;
  order.kind = kind;
  order.key = entry.key;
  order.group = entry.group;
  order.about = index.about(entry);
  order.shards = shards_of(entry.row, entry.group);
  order.memory = region_memory;
  return order;
}

void TieredCache::Impl::poll_tiers() {
  polled_in_step = true;
  for (TierSlot& slot : tier_slots) {
    completions.clear();
    removals.clear();
    slot.tier->poll(&completions, &removals);
    for (const Completion& completion : completions) {
      const auto found = ops.find(completion.id);
      if (found == ops.end()) continue;
      Op op = std::move(found->second);
      ops.erase(found);
      if (op.kind == OpKind::kRead) {
        finish_read(op, completion);
      } else {
        finish_write(op, completion);
      }
    }
    for (const TierRemoval& removal : removals) note_removal(slot, removal);
    const TierStats stats = slot.tier->stats();
    slot.readable = stats.readable;
    slot.writable = stats.writable;
  }
  while (!write_order.empty() && !ops.contains(write_order.front())) write_order.pop_front();
}

void TieredCache::Impl::note_read_ended(const Op& op, const Completion& completion) {
  costs.note_ended(op.tier, static_cast<double>(groups[op.group].bytes));
  if (!completion.status.is_ok()) return;
  const double seconds = completion.queued_seconds + completion.seconds;
  const auto took = std::chrono::duration_cast<Nanos>(std::chrono::duration<double>(seconds));
  costs.note_read(op.tier, op.bytes_ahead, seconds, op.submitted + took);
}

void TieredCache::Impl::finish_read(Op& op, const Completion& completion) {
  const std::string& name = tier_slots[op.tier].name;
  const StatusKind kind = completion.status.kind();
  note_read_ended(op, completion);
  if (completion.status.is_ok()) {
    metrics.add("kv_offload_read_bytes_total", {name}, static_cast<double>(completion.bytes));
    metrics.observe("kv_offload_read_seconds", {name}, completion.queued_seconds + completion.seconds);
  } else if (is_failure(kind)) {
    metrics.add("kv_offload_failures_total", {name, "read", to_string(kind)});
  }
  if (op.stale) return quarantine.release(op.row);
  // One that expired was submitted for a request whose wait is over; another may wait on.
  const bool tried = kind != StatusKind::kCancelled && kind != StatusKind::kExpired;
  fetches.erase(op.slot);
  for (const Waiter& waiter : op.waiters) {
    RequestState& request = requests[waiter.request];
    if (!request.live || request.number != waiter.number) continue;
    std::erase(request.awaited, op.slot);
    if (completion.status.is_ok()) {
      index.pin(op.slot);
      request.held.push_back(op.slot);
    } else if (tried) {
      request.failed.push_back({KeyMemory::fingerprint(completion.key), miss_reason_of(kind)});
    }
  }
  if (completion.status.is_ok()) {
    index.at(op.slot).tier = op.tier;
    make_resident(op.slot, ChunkOrigin::kTier);
    return promote(op.slot, op.tier);
  }
  if (tried) {
    memory.note_gone(completion.key, static_cast<std::uint8_t>(miss_reason_of(kind)));
  }
  free_row(take_out(op.slot));
}

void TieredCache::Impl::finish_write(Op& op, const Completion& completion) {
  TierSlot& slot = tier_slots[op.tier];
  --slot.writes;
  const StatusKind kind = completion.status.kind();
  if (completion.status.is_ok()) {
    metrics.add("kv_offload_write_bytes_total", {slot.name}, static_cast<double>(completion.bytes));
    metrics.observe("kv_offload_write_seconds", {slot.name}, completion.queued_seconds + completion.seconds);
  } else if (!op.dropped && !(op.stale && kind == StatusKind::kCancelled)) {
    if (is_failure(kind)) metrics.add("kv_offload_failures_total", {slot.name, "write", to_string(kind)});
    metrics.add("kv_offload_dropped_bytes_total", {slot.name, to_string(kind)},
                static_cast<double>(groups[op.group].bytes));
  }
  if (op.stale) return quarantine.release(op.row);
  ChunkEntry& entry = index.at(op.slot);
  entry.writes &= static_cast<std::uint8_t>(~(1u << op.tier));
  if (kind != StatusKind::kCancelled) entry.tried |= static_cast<std::uint8_t>(1u << op.tier);
  if (completion.status.is_ok()) note_event(entry.key, true, false, slot.name);
  index.unpin(op.slot);
}

void TieredCache::Impl::note_removal(TierSlot& from, const TierRemoval& removal) {
  note_event(removal.key, true, true, from.name);
  switch (removal.reason) {
    case TierRemoval::Reason::kCorrupt:
      memory.note_gone(removal.key, static_cast<std::uint8_t>(MissReason::kCorrupt));
      break;
    case TierRemoval::Reason::kEvicted:
    case TierRemoval::Reason::kVanished:
      memory.note_gone(removal.key, static_cast<std::uint8_t>(MissReason::kEvicted));
      break;
    case TierRemoval::Reason::kReset:
      break;
  }
}

bool TieredCache::Impl::is_recorded(TierSlot& slot, const ChunkKey& key) {
  return slot.tier->contains(key) == Presence::kPresent;
}

void TieredCache::Impl::ask_for_unknown() {
  for (TierSlot& slot : tier_slots) {
    if (!slot.unknown.empty()) slot.tier->prefetch_presence(std::exchange(slot.unknown, {}));
  }
}

void TieredCache::Impl::start_writes(std::uint8_t tier, const std::vector<Slot>& slots) {
  TierSlot& to = tier_slots[tier];
  std::vector<TierOp> batch;
  for (const Slot slot : slots) {
    ChunkEntry& entry = index.at(slot);
    if ((entry.writes >> tier & 1) != 0 || is_recorded(to, entry.key)) continue;
    entry.writes |= static_cast<std::uint8_t>(1u << tier);
    index.pin(slot);
    ++to.writes;
    batch.push_back(make_op(OpKind::kWrite, tier, slot));
    write_order.push_back(batch.back().id);
  }
  if (!batch.empty()) to.tier->submit(std::move(batch));
}

void TieredCache::Impl::write_stored(const std::vector<Slot>& slots) {
  for (std::size_t tier = 0; tier < tier_slots.size(); ++tier) {
    if (tier_slots[tier].options.write_policy == WritePolicy::kThrough) {
      start_writes(static_cast<std::uint8_t>(tier), slots);
    }
  }
  for (const Slot slot : slots) see_again(slot);
}

// Under the other policies it is written when it is seen again or leaves host memory, as any chunk is.
void TieredCache::Impl::promote(Slot slot, std::uint8_t from) {
  for (std::uint8_t tier = 0; tier < from; ++tier) {
    if (tier_slots[tier].options.write_policy == WritePolicy::kThrough) start_writes(tier, {slot});
  }
}

void TieredCache::Impl::see_again(Slot slot) {
  std::uint32_t sights = 0;
  for (std::size_t tier = 0; tier < tier_slots.size(); ++tier) {
    if (tier_slots[tier].options.write_policy != WritePolicy::kReuse) continue;
    if (sights == 0) sights = memory.see(index.at(slot).key);
    if (sights >= tier_slots[tier].options.reuse_threshold) {
      start_writes(static_cast<std::uint8_t>(tier), {slot});
    }
  }
}

bool TieredCache::Impl::write_before_eviction(Slot slot) {
  bool started = false;
  for (std::size_t tier = 0; tier < tier_slots.size(); ++tier) {
    TierSlot& to = tier_slots[tier];
    if (to.options.write_policy != WritePolicy::kOnEvict) continue;
    if ((index.at(slot).tried >> tier & 1) != 0) continue;
    if (is_recorded(to, index.at(slot).key)) continue;
    if (!to.writable || to.writes >= kMaxEvictionWrites) {
      metrics.add("kv_offload_dropped_bytes_total", {to.name, "pressure"},
                  static_cast<double>(groups[index.at(slot).group].bytes));
      continue;
    }
    start_writes(static_cast<std::uint8_t>(tier), {slot});
    started = true;
  }
  return started;
}

void TieredCache::Impl::clean_cold_end() {
  const bool any = std::any_of(tier_slots.begin(), tier_slots.end(), [](const TierSlot& slot) {
    return slot.options.write_policy == WritePolicy::kOnEvict && slot.writable;
  });
  const std::uint64_t area = region.area_bytes();
  if (!any || rows.bytes_in_use() + rows.wasted_bytes() < area - area / 8) return;
  std::vector<Slot> seen;
  while (seen.size() < kColdEnd) {
    const auto victim = index.victim();
    if (!victim) break;
    index.pin(*victim);
    seen.push_back(*victim);
    for (std::size_t tier = 0; tier < tier_slots.size(); ++tier) {
      TierSlot& to = tier_slots[tier];
      if (to.options.write_policy != WritePolicy::kOnEvict || !to.writable) continue;
      if ((index.at(*victim).tried >> tier & 1) != 0) continue;  // a failed write is not repeated
      if (to.writes < kMaxEvictionWrites) start_writes(static_cast<std::uint8_t>(tier), {*victim});
    }
  }
  // From the warmest to the coldest, so that they lie as they lay.
  for (std::size_t i = seen.size(); i-- > 0;) index.unpin(seen[i]);
}

std::uint64_t TieredCache::Impl::drop_write(OpId id, std::string_view reason) {
  const auto found = ops.find(id);
  if (found == ops.end() || found->second.kind != OpKind::kWrite) return 0;
  Op& op = found->second;
  TierSlot& slot = tier_slots[op.tier];
  if (!slot.tier->cancel(id)) return 0;
  op.dropped = true;
  const std::uint64_t bytes = groups[op.group].bytes;
  metrics.add("kv_offload_dropped_bytes_total", {slot.name, reason}, static_cast<double>(bytes));
  return bytes;
}

}  // namespace kv_offload
