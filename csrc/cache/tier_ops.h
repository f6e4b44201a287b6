// TierOps: what is being read from tiers and written to them, from submission to
// completion; what a tier says of itself between.
//
// Invariant: an op that has not completed keeps its row from being reused. A read's
// chunk is fetching, and no other read has that chunk; a write's chunk is resident and
// pinned once for it; after forget() the row of either is in quarantine until the op
// completes. A row is pinned for a request, or its waiting ends, exactly once per
// request that await() took in. A failure is counted once, and never makes a chunk
// resident.
//
// Each call is O(log n) for each op that it names, takes in or ends, whatever else is in flight.
//
// Threads: one (the scheduler's). No call waits for storage but close().
#pragma once

#include <cstdint>
#include <functional>
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
#include "cache/key_memory.h"
#include "memory/host_region.h"
#include "metrics/metrics.h"
#include "storage/tier.h"

namespace kv_offload {

class TierOps {
 public:
  // What it works with; all of it outlives this.
  struct Context {
    const ChunkGroups& groups;
    HostChunks& chunks;
    KeyMemory& memory;
    CostModel& costs;
    CacheEvents& events;
    Metrics& metrics;
    const Clock& clock;
  };
  // The end of a read, told to each request that waited for it, while the chunk is
  // still fetching: it becomes resident (arrived) or absent right after.
  struct ReadEnd {
    OpId op;
    Slot slot;
    const ChunkKey& key;
    bool arrived;
    // Why not; nothing when the read was given up before it was tried.
    std::optional<MissReason> failed;
  };
  // Who waits for reads. A number that the caller never gives to anybody else, so that one who left and whose
  // reads are not cancelled yet is not taken for another.
  using Waiter = std::uint64_t;
  using OnReadEnd = std::function<void(Waiter waiter, const ReadEnd& end)>;
  // A read's chunk has become resident.
  using OnFetched = std::function<void(Slot slot, std::uint8_t tier)>;

  // Ops in flight share the region: a thread that a tier had to let go finds it mapped.
  // Throws InvalidArgument (too many tiers).
  TierOps(const Context& context, std::shared_ptr<const HostRegion> region,
          std::vector<std::unique_ptr<Tier>> tiers, OnReadEnd on_read_end, OnFetched on_fetched);

  // ---- the tiers, by index
  std::size_t size() const { return slots_.size(); }
  const std::vector<std::unique_ptr<Tier>>& tiers() const { return tiers_; }
  std::string_view name(std::size_t tier) const { return slots_[tier].name; }
  // As of the last poll: would it take a read, a write.
  bool is_readable(std::size_t tier) const { return slots_[tier].readable; }
  bool is_writable(std::size_t tier) const { return slots_[tier].writable; }
  // May records of others come to it that we would find.
  bool is_shared(std::size_t tier) const { return slots_[tier].is_shared; }
  Presence contains(std::size_t tier, const ChunkKey& key) { return tiers_[tier]->contains(key); }
  bool is_recorded(std::size_t tier, const ChunkKey& key) {
    return contains(tier, key) == Presence::kPresent;
  }
  // On some tier of `tiers`, a bit for each; where that is not known it is asked for.
  bool is_recorded(const ChunkKey& key, std::uint32_t tiers);
  double estimate_read_seconds(std::size_t tier, std::uint64_t bytes) const {
    return tiers_[tier]->estimate_read_seconds(bytes);
  }
  // Keys that vLLM looks up from the left: of one request, in one scan of a group. As {}: keys that say
  // nothing of each other.
  struct Run {
    std::uint32_t request = 0, group = 0, scan = 0;  // the request's number is never 0
    bool operator==(const Run&) const = default;
  };
  // Whether it is there: to be known soon. Asked at the end of the step, all keys of a run at once.
  // `presence`: what contains() said, kUnknown or kWasAbsent.
  void ask_for(std::size_t tier, const ChunkKey& key, Presence presence, Run run);
  // The key was in use in host memory until now.
  void touch(const ChunkKey& key);
  // So were these; none is empty.
  void used(std::size_t tier, const TierUses& uses) { tiers_[tier]->used(uses); }

  // ---- reads
  struct Read {
    Slot slot;  // fetching
    std::uint8_t tier;
  };
  // `deadline`: not started after it (0: none). `probe`: to learn how fast the tier is
  // now; nobody needs the chunks.
  void read(std::span<const Read> reads, Nanos deadline, bool probe);
  // Waits for the read that brings the chunk, and returns it; none when it waits already or nothing reads it.
  std::optional<OpId> await(Slot slot, Waiter waiter);
  // Waits for this read no more, which may have ended. A read that nobody waits for is cancelled.
  void stop_awaiting(OpId read, Waiter waiter);
  // Its only waiter leaves, but the read goes on, as a probe. False when others wait too.
  bool leave_as_probe(Slot slot, Nanos now);
  bool is_probe(Slot slot) const;  // being read, and nobody waits for it
  // The read is later than was planned with: the tier is slower than it was thought to be.
  void note_overdue(Slot slot, Nanos now);

  // ---- writes
  // Of resident chunks; those that are recorded there or on the way are left out. may_decline: see TierOp.
  void write(std::uint8_t tier, std::span<const Slot> slots, bool may_decline = false);
  // Those of these resident chunks that are recorded there, and are not written for it.
  void note_recorded(std::size_t tier, std::span<const Slot> slots);
  std::uint32_t writes_in_flight(std::size_t tier) const { return slots_[tier].writes; }
  // Cancels some of the oldest queued writes; true when chunks lost their last pins by it.
  bool shed_writes();

  // ---- completions
  void poll();
  // Once between two calls of end_step(), unless poll() was called meanwhile.
  void poll_once_a_step();
  void end_step();

  // ---- the end
  // No chunk is known any more. What runs keeps its row in quarantine.
  void forget();
  void reset();  // all tiers; and polls
  void close();  // cancels queued writes, closes all tiers, and polls

  void publish();  // gauges and running totals of each tier

 private:
  struct Question {
    Run run;
    std::vector<ChunkKey> keys;
  };
  struct TierSlot {
    std::string name;
    bool readable = true;
    bool writable = true;
    bool is_shared = true;
    std::uint32_t writes = 0;  // ops in flight
    // At the end of the step the absence of these is forgotten, and those are asked for.
    std::vector<ChunkKey> was_absent;
    std::vector<Question> unknown;
    TierStats published;  // running totals up to here are in the metrics
  };
  struct Op {
    OpKind kind;
    std::uint8_t tier;
    bool stale = false;  // of before forget(): only its row is given back
    bool probe = false;
    bool dropped = false;  // a write that was cancelled, and counted then
    Slot slot = 0;
    RowId row = kNoRow;
    std::uint32_t group = 0;
    Nanos submitted{0};
    double bytes_ahead = 0;    // on the tier when it was submitted, its own included
    std::set<Waiter> waiters;  // of a read
  };

  TierOp make_op(OpKind kind, std::uint8_t tier, Slot slot);  // registers it
  std::vector<Shard> shards_of(RowId row, std::uint32_t group) const;
  Op* read_of(Slot slot);
  void finish_read(Op& op, const Completion& completion);
  void finish_write(Op& op, const Completion& completion);
  void learn_from_read(const Op& op, const Completion& completion);
  void note_recorded(std::size_t tier, Slot slot);
  void note_removal(const TierSlot& from, const TierRemoval& removal);
  bool drop_write(OpId op, std::string_view reason);  // false: it cannot be cancelled
  void publish(TierSlot& slot, const TierStats& stats);
  void publish_codec(const TierSlot& slot, const TierStats& stats);

  const ChunkGroups& groups_;
  HostChunks& chunks_;
  KeyMemory& memory_;
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
  std::unordered_map<OpId, Op> ops_;
  std::unordered_map<Slot, OpId> reads_;  // by the chunk that they bring
  // Oldest first. Of ops in flight only, and without those that turned out to run: a write that is stuck
  // keeps none of the writes behind it here.
  std::set<OpId> queued_writes_;
  std::vector<Completion> completions_;  // scratch of poll
  std::vector<TierRemoval> removals_;
};

}  // namespace kv_offload
