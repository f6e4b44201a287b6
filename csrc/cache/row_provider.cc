// SPDX-License-Identifier: Apache-2.0
#include "cache/row_provider.h"

#include <utility>

namespace kv_offload {
namespace {

constexpr std::uint64_t kScatteredShare = 50;  // of the area, free in slabs that are not empty

}  // namespace

RowId RowProvider::take(std::uint32_t group, const Requester& by, std::vector<ChunkKey>* evicted,
                        double returns_at, bool may_cancel) {
  bool may_evict_slabs = !chunks_.has_one_row_size();
  bool may_write = true;
  for (;;) {
    const RowId row = chunks_.allocate(group);
    if (row != kNoRow) return row;
    if (write_back_.writes_ahead()) ops_.poll_once_per_step();  // chunks written ahead may be evicted now
    // Free rows of other sizes are scattered over slabs that are not empty. If there are many, empty a slab
    // instead of evicting further single chunks.
    if (may_evict_slabs && chunks_.has_free(kScatteredShare)) {
      may_evict_slabs = evict_slab(group, by, evicted);
      if (may_evict_slabs) continue;
    }
    const Eviction eviction = evict_one(group, by, may_write, evicted, returns_at, !may_cancel);
    if (eviction == Eviction::kDone) continue;
    if (eviction == Eviction::kNotWorthIt) return kNoRow;
    if (may_evict_slabs) {
      may_evict_slabs = evict_slab(group, by, evicted);
      if (may_evict_slabs) continue;
    }
    if (!may_cancel || !ops_.shed_writes(by)) return kNoRow;
    may_write = false;  // else the cancelled writes would be queued again
  }
}

RowProvider::Eviction RowProvider::evict_one(std::uint32_t group, const Requester& by, bool may_write,
                                             std::vector<ChunkKey>* evicted, double returns_at,
                                             bool is_spare) {
  for (;;) {
    const auto victim = chunks_.victim(by, group);
    if (!victim) return Eviction::kNone;
    if (chunks_.drop_forgotten(*victim)) return Eviction::kDone;
    if (chunks_.is_used_by_neighbour(*victim)) continue;  // pinned or used now: take the next one
    if (chunks_.returns_before(*victim, returns_at)) return Eviction::kNotWorthIt;
    if (is_spare && write_back_.is_lost_by_eviction(*victim)) return Eviction::kNotWorthIt;
    if (may_write && write_back_.write_before_eviction(*victim)) continue;  // pinned now: take the next one
    evict(*victim, evicted);
    return Eviction::kDone;
  }
}

bool RowProvider::evict_slab(std::uint32_t group, const Requester& by, std::vector<ChunkKey>* evicted) {
  const std::vector<Slot> slots = chunks_.slab_to_evict(group, by);
  for (const Slot slot : slots) {
    if (chunks_.drop_forgotten(slot)) continue;
    write_back_.count_eviction(slot);  // a slab that is needed now waits for no write
    evict(slot, evicted);
  }
  return !slots.empty();
}

void RowProvider::evict_chunk(Slot slot) {
  write_back_.count_eviction(slot);
  evict(slot, nullptr);
}

void RowProvider::evict(Slot slot, std::vector<ChunkKey>* evicted) {
  const ChunkEntry& entry = chunks_.at(slot);
  const ChunkKey key = entry.key;
  chunks_.prefetch_eviction(slot);
  key_history_.prefetch(key);
  evicted_bytes_ += groups_[entry.group].bytes;
  evicted_of_[entry.tenant] += groups_[entry.group].bytes;
  // The chunk was in use here until now, so its records count as used until now.
  ops_.touch(key);
  if (evicted != nullptr) evicted->push_back(key);
  chunks_.discard(slot);
  key_history_.record_removal(key, static_cast<std::uint8_t>(MissReason::kEvicted));
}

void RowProvider::flush_metrics() {
  if (evicted_bytes_ == 0) return;
  metrics_.add("kv_offload_evicted_bytes_total", {"cpu"}, static_cast<double>(evicted_bytes_));
  evicted_bytes_ = 0;
  for (std::size_t i = 0; chunks_.tenants() != nullptr && i < chunks_.tenants()->size(); ++i) {
    const std::uint64_t bytes = std::exchange(evicted_of_[i], 0);
    if (bytes == 0) continue;
    metrics_.add("kv_offload_tenant_evicted_bytes_total", {chunks_.tenant_name(static_cast<TenantId>(i))},
                 static_cast<double>(bytes));
  }
}

}  // namespace kv_offload
