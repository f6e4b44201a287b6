// RowSupply: a row for a chunk, whatever it takes: a free one; else that of the chunk
// that is evicted next, or a slab of several where groups have rows of several sizes;
// else those of queued writes, which are cancelled. Chunks in use and those of the
// request that asks are never taken.
//
// It holds no row of its own: a row is free, a chunk's or the caller's.
#pragma once

#include <cstdint>
#include <vector>

#include "cache/chunk_groups.h"
#include "cache/host_chunks.h"
#include "cache/key_memory.h"
#include "cache/tier_ops.h"
#include "cache/write_back.h"
#include "metrics/metrics.h"

namespace kv_offload {

class RowSupply {
 public:
  RowSupply(const ChunkGroups& groups, HostChunks& chunks, KeyMemory& memory, TierOps& ops,
            WriteBack& write_back, Metrics& metrics)
      : groups_(groups),
        chunks_(chunks),
        memory_(memory),
        ops_(ops),
        write_back_(write_back),
        metrics_(metrics) {}

  // A row for a chunk of this group, of the request with this number; kNoRow when
  // there is none. Appends the keys that it evicted, unless nullptr; they stay evicted
  // when it throws.
  RowId take(std::uint32_t group, std::uint32_t request, std::vector<ChunkKey>* evicted);
  // Evicts this chunk, which may be of the request that asks. REQUIRES: resident, without pins.
  void give_up(Slot slot);
  // Counts in the metrics what was evicted since the last call.
  void flush_metrics();

 private:
  bool evict_one(std::uint32_t request, bool may_write, std::vector<ChunkKey>* evicted);
  bool evict_slab(std::uint32_t group, std::uint32_t request, std::vector<ChunkKey>* evicted);
  void evict(Slot slot, std::vector<ChunkKey>* evicted);

  const ChunkGroups& groups_;
  HostChunks& chunks_;
  KeyMemory& memory_;
  TierOps& ops_;
  WriteBack& write_back_;
  Metrics& metrics_;
  std::uint64_t evicted_bytes_ = 0;  // not in the metrics yet
};

}  // namespace kv_offload
