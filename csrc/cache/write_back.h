// WriteBack: which chunks of host memory are written to which tier, and when: the
// write policies.
//
//   through    what was stored, at once; a full tier may decline the end of a prompt. What the
//              engine before left in host memory, when it is used: that one may have been killed
//              before it was written
//   reuse      what was offered or loaded as often as reuse_threshold says
//   never      nothing: others fill it
//   on_evict   what goes from host memory next, ahead of need: an eighth of it is free or
//              written as long as the tier keeps up. A write that failed is not repeated
//              for the same stay in host memory
//
// It decides; TierOps does. It holds no chunk and no op of its own.
#pragma once

#include <span>
#include <vector>

#include "cache/chunk_groups.h"
#include "cache/host_chunks.h"
#include "cache/key_memory.h"
#include "cache/tier_ops.h"
#include "metrics/metrics.h"

namespace kv_offload {

class WriteBack {
 public:
  // `policies`: by tier; a tier without one is written through.
  WriteBack(const ChunkGroups& groups, HostChunks& chunks, KeyMemory& memory, TierOps& ops, Metrics& metrics,
            std::vector<TierSlotOptions> policies);

  void note_stored(std::span<const Slot> slots);  // just became resident
  void note_used(Slot slot);                      // resident, and offered or loaded again
  // Just became resident, from this tier: the faster ones above it that record all record it too. Under the
  // other policies it is written when it is used again or goes from host memory, as any chunk is.
  void note_fetched(Slot slot, std::uint8_t from);
  // Before this chunk is evicted. True when a write began: it is pinned until that ends. False: it goes.
  bool write_before_eviction(Slot slot);
  // It goes, written or not: what is lost by it is counted.
  void note_going(Slot slot);
  bool writes_ahead() const;  // some tier is on_evict
  // At the end of a step: writes what is evicted next while rows are still free.
  void write_cold_end();
  // At the end of a step: a record whose chunk is in use in host memory is in use. But for on_evict, where it
  // may go and is written again when its chunk does: two places for one chunk are one too many.
  void tell_uses();

 private:
  void write_through(std::span<const Slot> slots);  // other tiers: what they have is noted
  void count_use(Slot slot);                        // for reuse
  // It is on_evict, and neither has this chunk nor failed to take it.
  bool lacks(std::size_t tier, Slot slot);
  std::size_t most_ahead() const;  // chunks that are written ahead of their eviction
  bool is_cold_end_due(std::size_t most) const;
  bool is(std::size_t tier, WritePolicy policy) const { return policies_[tier].write_policy == policy; }

  const ChunkGroups& groups_;
  HostChunks& chunks_;
  KeyMemory& memory_;
  TierOps& ops_;
  Metrics& metrics_;
  std::vector<TierSlotOptions> policies_;
  std::vector<TierUse> uses_;  // of this step
  std::size_t gone_ = 0;       // evictions since all of the cold end was visited
  bool all_ahead_ = false;     // all of it was written, or on its way, then
};

}  // namespace kv_offload
