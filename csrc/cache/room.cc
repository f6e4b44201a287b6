// A row for a chunk: eviction in the policy's order, shedding of queued writes.
#include <algorithm>

#include "cache/cache_impl.h"

namespace kv_offload {
namespace {

constexpr int kShedAtOnce = 16;

}  // namespace

RowId TieredCache::Impl::take_row(std::uint32_t group, std::uint32_t holder, std::vector<ChunkKey>* evicted) {
  bool reclaimed = true;
  bool may_write = true;
  for (;;) {
    const RowId row = rows.allocate(group);
    if (row != kNoRow) return row;
    // Evicted rows of other sizes lie free in slabs that are not empty: when they
    // are many, empty a slab instead of evicting on.
    const std::uint64_t used = rows.bytes_in_use() + rows.wasted_bytes();
    const bool scattered = !one_row_size && used + region.area_bytes() / 50 < region.area_bytes();
    if (scattered && reclaimed) {
      reclaimed = reclaim_slab(group, holder, evicted);
      if (reclaimed) continue;
    }
    if (evict_one(holder, may_write, evicted)) continue;
    if (!one_row_size && reclaimed) {
      reclaimed = reclaim_slab(group, holder, evicted);
      if (reclaimed) continue;
    }
    if (!shed_writes()) return kNoRow;
    may_write = false;  // or what was shed would be queued again
  }
}

bool TieredCache::Impl::evict_one(std::uint32_t holder, bool may_write, std::vector<ChunkKey>* evicted) {
  for (;;) {
    const auto victim = index.victim(holder);
    if (!victim) return false;
    if (may_write && write_before_eviction(*victim)) continue;  // pinned now: the next one
    evict(*victim, evicted);
    return true;
  }
}

bool TieredCache::Impl::reclaim_slab(std::uint32_t group, std::uint32_t holder,
                                     std::vector<ChunkKey>* evicted) {
  const std::uint64_t pages = row_unit / kPageBytes;
  const auto movable = [&](RowId row) {
    const Slot slot = owner_of_row[row / pages];
    if (slot == static_cast<Slot>(-1)) return false;
    const ChunkEntry& entry = index.at(slot);
    return entry.state == ChunkState::kResident && entry.pins == 0 && entry.holder != holder;
  };
  const std::vector<RowId> cleared = rows.slab_to_reclaim(group, movable);
  for (const RowId row : cleared) evict(owner_of_row[row / pages], evicted);
  return !cleared.empty();
}

void TieredCache::Impl::evict(Slot slot, std::vector<ChunkKey>* evicted) {
  const ChunkEntry& entry = index.at(slot);
  const ChunkKey key = entry.key;
  index.prefetch_erase(slot);
  memory.prefetch(key);
  evicted_bytes += groups[entry.group].bytes;
  // A tier counts its records as used until now: they were, from here.
  for (TierSlot& tier : tier_slots) tier.tier->touch(key);
  note_event(key, false, true, {});
  if (evicted != nullptr) evicted->push_back(key);
  free_row(take_out(slot));
  memory.note_gone(key, static_cast<std::uint8_t>(MissReason::kEvicted));
}

bool TieredCache::Impl::shed_writes() {
  int shed = 0;
  while (shed < kShedAtOnce && !write_order.empty()) {
    const OpId op = write_order.front();
    write_order.pop_front();
    if (drop_write(op, "pressure") > 0) ++shed;
  }
  if (shed == 0) return false;
  const std::size_t pinned = index.pinned();
  poll_tiers();
  return index.pinned() < pinned;
}

Slot TieredCache::Impl::insert(const ChunkKey& key, std::uint32_t group, RowId row, const EntryInfo& about,
                               ChunkState state) {
  const Slot slot = index.insert(key, group, row, about, state);
  if (!one_row_size) owner_of_row[row / (row_unit / kPageBytes)] = slot;
  return slot;
}

void TieredCache::Impl::make_resident(Slot slot, ChunkOrigin origin) {
  index.make_resident(slot, origin);
  const ChunkEntry& entry = index.at(slot);
  ++resident_by_group[entry.group];
  note_event(entry.key, false, false, {});
}

RowId TieredCache::Impl::take_out(Slot slot) {
  const ChunkEntry& entry = index.at(slot);
  const RowId row = entry.row;
  if (entry.state == ChunkState::kResident) --resident_by_group[entry.group];
  if (!one_row_size) owner_of_row[row / (row_unit / kPageBytes)] = static_cast<Slot>(-1);
  index.erase(slot);
  return row;
}

}  // namespace kv_offload
