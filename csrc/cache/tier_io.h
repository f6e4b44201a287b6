// SPDX-License-Identifier: Apache-2.0
// TierIo: reads from tiers and writes to tiers, from submission to completion, and what the tiers report
// meanwhile.
//
// Invariant: the row of an op that has not completed is not reused.
// - A read's chunk is fetching, and no other read brings that chunk.
// - A write's chunk is resident and holds one pin for the write.
// - After forget(), either row is in quarantine until the op completes.
// For each request that await() accepted, the chunk is pinned or the wait ends, exactly once. A failure is
// counted once and never makes a chunk resident.
//
// If memory runs out in read() or write(), the ops of that call that no tier has accepted do not exist. If it
// runs out in poll(), the next poll() continues; the op that it reached has ended. forget() allocates
// nothing.
//
// Each call costs O(log n) per op that it names, starts or ends, whatever else is in flight.
//
// Threads: one (the scheduler's). No call except close() waits for storage.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "base/clock.h"
#include "cache/cache_events.h"
#include "cache/chunk_groups.h"
#include "cache/cost_model.h"
#include "cache/host_chunks.h"
#include "cache/key_history.h"
#include "cache/tier_figures.h"
#include "memory/host_region.h"
#include "metrics/metrics.h"
#include "tier/tier.h"

namespace kv_offload {

class TierIo {
 public:
  // Dependencies; all of them outlive this.
  struct Context {
    const ChunkGroups& groups;
    HostChunks& chunks;
    KeyHistory& key_history;
    CostModel& costs;
    CacheEvents& events;
    Metrics& metrics;
    const Clock& clock;
  };
  // The end of a read, reported to each waiting request. The chunk is resident if it arrived. Otherwise it is
  // still fetching, and becomes absent right after.
  struct ReadEnd {
    OpId op;
    Slot slot;
    const ChunkKey& key;
    bool arrived;
    std::uint8_t tier;
    std::uint64_t bytes;  // 0 unless it arrived
    Nanos submitted, ended;
    // The reason for a failure; nullopt if the read was given up before it was tried.
    std::optional<MissReason> failed;
  };
  // Identifies a request that waits for reads. The caller must never reuse a number: the reads of a request
  // that stopped waiting may not be cancelled yet.
  using Waiter = std::uint64_t;
  // It must not throw.
  using OnReadEnd = std::function<void(Waiter waiter, const ReadEnd& end)>;
  // Called when a read's chunk has become resident.
  using OnFetched = std::function<void(Slot slot, std::uint8_t tier)>;

  // Ops in flight share ownership of the region, so it stays mapped for a thread that a tier had to abandon.
  // Throws InvalidArgument (too many tiers).
  TierIo(const Context& context, std::shared_ptr<const HostRegion> region,
         std::vector<std::unique_ptr<Tier>> tiers, OnReadEnd on_read_end, OnFetched on_fetched);

  // ---- tiers, by index
  std::size_t size() const { return slots_.size(); }
  const std::vector<std::unique_ptr<Tier>>& tiers() const { return tiers_; }
  std::string_view name(std::size_t tier) const { return slots_[tier].name; }
  // True if the tier accepted reads (writes) at the last poll, and its last reset did not throw.
  bool is_readable(std::size_t tier) const { return slots_[tier].readable; }
  bool is_writable(std::size_t tier) const { return slots_[tier].writable; }
  // True if records written by others can appear on the tier and be found.
  bool is_shared(std::size_t tier) const { return slots_[tier].is_shared; }
  Presence contains(std::size_t tier, const ChunkKey& key) {
    return slots_[tier].needs_reset ? Presence::kAbsent : tiers_[tier]->contains(key);
  }
  bool is_recorded(std::size_t tier, const ChunkKey& key) {
    return contains(tier, key) == Presence::kPresent;
  }
  // True if some tier in `tiers` (one bit each) has the key. Queues a lookup for this tenant in the tiers
  // that do not know.
  bool is_recorded(const ChunkKey& key, std::uint32_t tiers, TenantId tenant);
  double estimate_read_seconds(std::size_t tier, std::uint64_t bytes) const {
    return tiers_[tier]->estimate_read_seconds(bytes);
  }
  // Keys that vLLM looks up from the left, for one request in one scan of a group. {} = unrelated keys.
  struct Run {
    std::uint32_t request = 0, group = 0, scan = 0;  // request numbers are never 0
    bool operator==(const Run&) const = default;
  };
  // Asks the tier whether it has the key, at the end of the step and together with all keys of the run, so
  // that the answer is known soon. `presence`: the result of contains(). `tenant`: of the request; lookups of
  // several tenants start in turn. REQUIRES: must_ask(presence).
  void queue_lookup(std::size_t tier, const ChunkKey& key, Presence presence, TenantId tenant, Run run);
  // The key was in use in host memory until now.
  void touch(const ChunkKey& key);
  // Reports uses in host memory to the tier. `uses` is never empty.
  void used(std::size_t tier, const TierUses& uses) { tiers_[tier]->used(uses); }

  // ---- reads. If read() throws, the caller discards those chunks that is_read() does not name.
  struct Read {
    Slot slot;  // a fetching chunk
    std::uint8_t tier;
  };
  // `deadline`: the reads must not start after it (0 = none). `probe`: the reads only measure the current
  // speed of the tier; no request needs the chunks.
  void read(std::span<const Read> reads, Nanos deadline, bool probe);
  bool is_read(Slot slot) const { return reads_.contains(slot); }  // its read is in flight
  // Waits for the read that brings the chunk, and returns it; nullopt if it waits already or no read brings
  // it.
  std::optional<OpId> await(Slot slot, Waiter waiter);
  std::size_t waiters(Slot slot) const;  // of the read that brings the chunk; 0: there is no such read
  // Stops waiting for this read, which may have ended. A read without waiters is cancelled.
  void stop_awaiting(OpId read, Waiter waiter);
  // Removes the only waiter but continues the read as a probe. False if other requests wait too.
  bool continue_as_probe(Slot slot, Nanos now);
  bool is_probe(Slot slot) const;  // in flight and without waiters
  // The read is later than planned: the tier is slower than estimated.
  void on_overdue(Slot slot, Nanos now);

  // ---- writes
  // Writes resident chunks, except those that the tier has or that are on the way. may_decline: see TierOp.
  void write(std::uint8_t tier, std::span<const Slot> slots, bool may_decline = false);
  // Marks those of these resident chunks that the tier already has; writes nothing.
  void mark_recorded(std::size_t tier, std::span<const Slot> slots);
  std::uint32_t writes_in_flight(std::size_t tier) const { return slots_[tier].writes; }
  // Of chunks that were charged to this tenant when their writes began.
  std::uint32_t writes_in_flight(std::size_t tier, TenantId tenant) const {
    return slots_[tier].writes_of[tenant];
  }
  // Cancels some of the oldest queued writes. True if chunks lost their last pins. With tenants: only writes
  // of chunks that `by` may take, see HostChunks::may_take().
  bool shed_writes(const Requester& by = {});

  // ---- completions
  void poll();
  // Polls, unless poll() was called since the last end_step().
  void poll_once_per_step();
  void end_step();

  // ---- shutdown and reset
  // Forgets all chunks. Ops in flight keep their rows in quarantine; those that have not started are
  // cancelled.
  void forget() noexcept;
  // Resets all tiers and polls. If the reset of a tier throws, the others are reset anyway. That tier counts
  // as empty and gets no ops until poll() has reset it, which it tries once a second.
  void reset();
  void close();  // cancels queued writes, closes all tiers, and polls

  void publish();  // gauges and running totals of each tier

 private:
  struct QueuedLookup {
    TenantId tenant;
    Run run;
    std::vector<ChunkKey> keys;
  };
  struct TierSlot {
    std::string name;
    bool readable = true;
    bool writable = true;
    bool is_shared = true;
    std::uint32_t writes = 0;                                          // in flight
    std::array<std::uint32_t, TenantShares::kMaxTenants> writes_of{};  // of these, by tenant
    bool needs_reset = false;  // its reset threw: it may still have records from before
    Nanos next_reset{0};
    std::string_view failed_reset;  // kind of a failure that is not counted yet
    // At the end of the step, the tier forgets that these were absent, and is asked for the unknown ones.
    std::vector<ChunkKey> old_results;
    std::vector<QueuedLookup> unknown;
    TierFigures figures;
  };
  struct Op {
    OpKind kind;
    std::uint8_t tier;
    bool stale = false;  // submitted before forget(): only its row is released
    bool probe = false;
    bool dropped = false;  // a cancelled write, already counted
    Slot slot = 0;
    RowId row = kNoRow;
    std::uint32_t group = 0;
    TenantId tenant = 0;  // that was charged when the op was submitted
    Nanos submitted{0};
    double bytes_ahead = 0;    // pending on the tier at submission, including its own
    std::set<Waiter> waiters;  // for a read
  };

  TierOp make_op(OpKind kind, std::uint8_t tier, Slot slot);  // registers the op
  // Undoes what read() or write() did for the ops from `first` on, of this tier or a later one: these did not
  // accept them.
  void withdraw(OpId first, std::size_t tier);
  void finish_completions();
  void cancel(OpId id, const Op& op) noexcept;  // an op that is not cancelled ends as usual
  std::vector<Shard> shards_of(RowId row, std::uint32_t group) const;
  Op* read_of(Slot slot);
  void finish_read(Op& op, const Completion& completion);
  void finish_write(Op& op, const Completion& completion);
  bool make_resident(const Op& op);  // false: memory ran out
  void count_read(const Op& op, const Completion& completion);
  void count_of_tenant(std::string_view metric, const Op& op, const Completion& completion);
  void learn_from_read(const Op& op, const Completion& completion);
  void mark_recorded(std::size_t tier, Slot slot);
  void publish_recorded(std::size_t tier, const ChunkKey& key);
  void handle_removal(const TierSlot& from, const TierRemoval& removal);
  bool drop_write(OpId op, std::string_view reason);  // false: cannot be cancelled
  void reset(std::size_t tier) noexcept;
  void drop_writes(std::size_t tier, std::span<const Slot> slots);

  const ChunkGroups& groups_;
  HostChunks& chunks_;
  KeyHistory& key_history_;
  CostModel& costs_;
  CacheEvents& events_;
  Metrics& metrics_;
  const Clock& clock_;
  const std::shared_ptr<const HostRegion> region_;
  const std::vector<std::unique_ptr<Tier>> tiers_;
  const OnReadEnd on_read_end_;
  const OnFetched on_fetched_;
  std::vector<TierSlot> slots_;
  bool polled_ = false;
  OpId last_op_ = 0;
  std::map<OpId, Op> ops_;
  std::unordered_map<Slot, OpId> reads_;  // by the chunk that they bring
  // Oldest first. Contains only ops in flight. Writes found to be running are removed, so a stuck write keeps
  // no later write in this set.
  std::set<OpId> queued_writes_;
  std::vector<Completion> completions_;  // polled; those before next_completion_ are done
  std::size_t next_completion_ = 0;
  std::vector<TierRemoval> removals_;  // scratch of poll()
};

}  // namespace kv_offload
