// SPDX-License-Identifier: Apache-2.0
// RowProvider: finds a row for a chunk. It tries, in order:
// - a free row;
// - the row of the next chunk to evict, or a slab of several rows where groups differ in row size;
// - rows of queued writes, which are cancelled.
// Chunks in use and chunks of the requesting request are never taken.
//
// It owns no rows: a row is free, owned by a chunk, or owned by the caller.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "cache/chunk_groups.h"
#include "cache/host_chunks.h"
#include "cache/key_history.h"
#include "cache/tier_io.h"
#include "cache/write_back.h"
#include "metrics/metrics.h"

namespace kv_offload {

class RowProvider {
 public:
  RowProvider(const ChunkGroups& groups, HostChunks& chunks, KeyHistory& key_history, TierIo& ops,
              WriteBack& write_back, Metrics& metrics)
      : groups_(groups),
        chunks_(chunks),
        key_history_(key_history),
        ops_(ops),
        write_back_(write_back),
        metrics_(metrics) {}

  // Returns a row for a chunk of this group; kNoRow if there is none. `by`: the request
  // that asks. Appends the evicted keys to `evicted` unless it is nullptr. Keys stay evicted if this throws.
  // `returns_at`: when the new chunk is expected to be used again, in seconds; 0 = unknown. If the next
  // victim is expected before that, nothing is evicted. (Not checked where whole slabs are emptied.)
  RowId take(std::uint32_t group, const Requester& by, std::vector<ChunkKey>* evicted,
             double returns_at = 0) {
    return take(group, by, evicted, returns_at, true);
  }
  // Same for a chunk that no request needs yet: cancels no writes, and evicts no chunk that an on_evict tier
  // lacks and cannot take now. (Where whole slabs are emptied, it spares only chunks with an expected
  // use.)
  RowId take_spare(std::uint32_t group, TenantId tenant, double returns_at) {
    return take(group, {0, tenant}, nullptr, returns_at, false);
  }
  // Evicts this chunk, even one of the requesting request. REQUIRES: resident, without pins.
  void evict_chunk(Slot slot);
  // Adds the evictions since the last call to the metrics.
  void flush_metrics();

 private:
  enum class Eviction : std::uint8_t { kNone, kDone, kNotWorthIt };
  RowId take(std::uint32_t group, const Requester& by, std::vector<ChunkKey>* evicted, double returns_at,
             bool may_cancel);
  Eviction evict_one(std::uint32_t group, const Requester& by, bool may_write, std::vector<ChunkKey>* evicted,
                     double returns_at, bool is_spare);
  bool evict_slab(std::uint32_t group, const Requester& by, std::vector<ChunkKey>* evicted);
  void evict(Slot slot, std::vector<ChunkKey>* evicted);

  const ChunkGroups& groups_;
  HostChunks& chunks_;
  KeyHistory& key_history_;
  TierIo& ops_;
  WriteBack& write_back_;
  Metrics& metrics_;
  std::uint64_t evicted_bytes_ = 0;                                    // not in the metrics yet
  std::array<std::uint64_t, TenantShares::kMaxTenants> evicted_of_{};  // of these, by tenant, if configured
};

}  // namespace kv_offload
