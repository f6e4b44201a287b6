// SPDX-License-Identifier: Apache-2.0
// WriteBack: decides which chunks of host memory are written to which tier, and when. Write policies:
//
//   write_through  stored chunks, at once; a full tier may decline the end of a prompt. Also chunks
//                  that the previous engine left in host memory, when they are used: that engine may
//                  have been killed before it wrote them
//   reuse          chunks that were offered or loaded reuse_threshold times
//   read_only      nothing: other servers fill the tier
//   on_evict       the chunks that host memory evicts next, ahead of need: an eighth of it is free
//                  or written as long as the tier keeps up. A failed write is not repeated during
//                  the same stay in host memory
//
// It decides and TierIo executes. It owns no chunks and no ops.
#pragma once

#include <span>
#include <vector>

#include "cache/chunk_groups.h"
#include "cache/host_chunks.h"
#include "cache/key_history.h"
#include "cache/tier_io.h"
#include "metrics/metrics.h"

namespace kv_offload {

class WriteBack {
 public:
  // `policies`: by tier; a tier without one is write-through.
  WriteBack(const ChunkGroups& groups, HostChunks& chunks, KeyHistory& key_history, TierIo& ops,
            Metrics& metrics, std::vector<TierSlotOptions> policies);

  void on_stored(std::span<const Slot> slots);  // just became resident
  // Resident, and offered or loaded again by a request of this tenant.
  void on_used(Slot slot, TenantId tenant = 0);
  // Allocates at once what this many calls of on_used() need.
  void make_room_for_uses(std::size_t count);
  // The chunk just became resident from tier `from`. The faster write-through tiers above it write the chunk
  // too. Under the other policies it is written when it is used again or evicted from host memory, like any
  // chunk.
  void on_fetched(Slot slot, std::uint8_t from);
  // Call before evicting this chunk. True: a write began and pins the chunk until it ends. False: evict it
  // now.
  bool write_before_eviction(Slot slot);
  // True if an on_evict tier lacks the chunk and no write can begin now.
  bool is_lost_by_eviction(Slot slot);
  // The chunk is evicted, written or not: counts what is lost.
  void count_eviction(Slot slot);
  bool writes_ahead() const;  // some tier is on_evict
  bool writes() const;        // some tier is written
  // At the end of a step: writes the chunks that are evicted next while rows are still free.
  void write_cold_end();
  // At the end of a step: reports uses in host memory to the tiers, so that a record counts as used while its
  // chunk is. on_evict tiers are excluded: their record may be evicted and is written again when its chunk is
  // evicted, which avoids storing the chunk twice.
  void publish_uses();

 private:
  void write_through(std::span<const Slot> slots);  // also records what the other tiers have
  void count_use(Slot slot);                        // for reuse
  // True if the tier is on_evict, does not have this chunk and has not failed to take it.
  bool needs_write(std::size_t tier, Slot slot);
  // True if a write of this tenant's chunk may begin when the chunk is to be evicted.
  bool may_write_before_eviction(std::size_t tier, TenantId tenant) const;
  std::size_t max_written_ahead() const;  // chunks written ahead of their eviction
  bool is_cold_end_due(std::size_t most) const;
  bool is(std::size_t tier, WritePolicy policy) const { return policies_[tier].write_policy == policy; }

  const ChunkGroups& groups_;
  HostChunks& chunks_;
  KeyHistory& key_history_;
  TierIo& ops_;
  Metrics& metrics_;
  std::vector<TierSlotOptions> policies_;
  std::vector<TierUse> uses_;      // in this step
  std::size_t evictions_ = 0;      // evictions since the last visit of the whole cold end
  bool cold_end_written_ = false;  // at that visit, all of it was written or being written
};

}  // namespace kv_offload
