// A row for a chunk: eviction in the policy's order, shedding of queued writes.
#include <algorithm>

#include "cache/cache_impl.h"

namespace kv_offload {
namespace {

constexpr int kShedAtOnce = 16;
constexpr std::uint64_t kScatteredShare = 50;  // 1 / 50 of the area

}  // namespace

RowId TieredCache::Impl::take_row(std::uint32_t group, std::uint32_t holder, std::vector<ChunkKey>* evicted) {
  bool reclaimed = true;
  bool may_write = true;
  for (;;) {
    const RowId row = chunks.allocate(group);
    if (row != kNoRow) return row;
    // Evicted rows of other sizes lie free in slabs that are not empty: when they
    // are many, empty a slab instead of evicting on.
    const bool scattered = !chunks.has_one_row_size() && chunks.has_free(kScatteredShare);
    if (scattered && reclaimed) {
      reclaimed = reclaim_slab(group, holder, evicted);
      if (reclaimed) continue;
    }
    if (evict_one(holder, may_write, evicted)) continue;
    if (!chunks.has_one_row_size() && reclaimed) {
      reclaimed = reclaim_slab(group, holder, evicted);
      if (reclaimed) continue;
    }
    if (!shed_writes()) return kNoRow;
    may_write = false;  // or what was shed would be queued again
  }
}

bool TieredCache::Impl::evict_one(std::uint32_t holder, bool may_write, std::vector<ChunkKey>* evicted) {
  for (;;) {
    const auto victim = chunks.victim(holder);
    if (!victim) return false;
    if (may_write && write_before_eviction(*victim)) continue;  // pinned now: the next one
    evict(*victim, evicted);
    return true;
  }
}

bool TieredCache::Impl::reclaim_slab(std::uint32_t group, std::uint32_t holder,
                                     std::vector<ChunkKey>* evicted) {
  const std::vector<Slot> slots = chunks.slab_to_evict(group, holder);
  for (const Slot slot : slots) evict(slot, evicted);
  return !slots.empty();
}

void TieredCache::Impl::evict(Slot slot, std::vector<ChunkKey>* evicted) {
  const ChunkEntry& entry = chunks.at(slot);
  const ChunkKey key = entry.key;
  chunks.prefetch_eviction(slot);
  memory.prefetch(key);
  evicted_bytes += groups[entry.group].bytes;
  // A tier counts its records as used until now: they were, from here.
  for (TierSlot& tier : tier_slots) tier.tier->touch(key);
  if (evicted != nullptr) evicted->push_back(key);
  chunks.discard(slot);
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
  const std::size_t pinned = chunks.pinned();
  poll_tiers();
  return chunks.pinned() < pinned;
}

}  // namespace kv_offload
