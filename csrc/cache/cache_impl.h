// The inside of TieredCache, shared by the files that implement it:
//
//   tiered_cache.cc  construction, requests, figures, events
//   lookup.cc        one key's answer; misses and their reasons
//   store_path.cc    prepare_store, complete_store
//   load_path.cc     prepare_load, complete_load
//   plans.cc         end_step: what waiting requests get fetched
//   decision.cc      load or recompute: what of it, how long to wait, probes
//   tier_ops.cc      ops to and from tiers, write policies
//   room.cc          a row for a chunk: eviction, shedding
//   reset.cc         reset, close
//
// Who holds a row: exactly one of an index entry (filling, resident, fetching)
// and the quarantine. Who pins an entry: each load job, each write op, each
// request that holds it, and while it has no bytes the job or op that brings them.
#pragma once

#include <deque>
#include <memory>
#include <optional>
#include <unordered_map>
#include <vector>

#include "cache/cost_model.h"
#include "cache/key_memory.h"
#include "cache/quarantine.h"
#include "cache/request_state.h"
#include "cache/tiered_cache.h"

namespace kv_offload {

struct TieredCache::Impl {
  // ---- what it is built from
  struct Group {
    std::uint32_t id = 0;
    std::uint32_t tokens = 0;     // per chunk
    std::uint64_t bytes = 0;      // of a chunk in all areas, padded
    bool full_attention = false;  // known to be
    GroupGeometry geometry;
  };
  struct TierSlot {
    Tier* tier = nullptr;
    TierSlotOptions options;
    std::string name;
    bool readable = true;           // asked once per step
    bool writable = true;           // the same
    std::uint32_t writes = 0;       // ops in flight
    std::vector<ChunkKey> unknown;  // waited for in this step: asked for at its end
    TierStats published;            // running totals up to here are in the metrics
  };
  struct Waiter {
    RequestHandle request;
    std::uint32_t number;  // of the request: handles are reused
  };
  struct Op {
    OpKind kind;
    std::uint8_t tier;
    bool stale = false;    // of before a reset: only its row is given back
    bool probe = false;    // a read that nobody waits for: how fast is the tier now
    bool dropped = false;  // a write that was cancelled, and counted then
    Slot slot = 0;
    RowId row = kNoRow;
    std::uint32_t group = 0;
    Nanos submitted{0};
    double bytes_ahead = 0;       // on the tier when it was submitted, its own included
    std::vector<Waiter> waiters;  // kRead
  };
  struct LoadJob {
    Ticket ticket;
    std::uint64_t fold;  // of its keys, in any order
    bool completed = false;
    std::uint64_t cache_blocks = 0;  // that its request needs, for all of its prompt
    std::vector<Slot> slots;
    // What it is worth, told when it ends.
    Nanos prepared{0};
    double waited_seconds = 0, compute_seconds = 0, bytes = 0;
  };
  struct ForgottenLoad {  // by a reset, while it ran: vLLM does not say when it ends
    Ticket ticket;
    std::uint64_t cache_blocks;
  };

  CacheOptions options;
  // Shared with the ops in flight: a thread that a tier had to let go finds the memory mapped.
  const std::shared_ptr<const void> region_memory;
  HostRegion& region;
  Metrics& metrics;
  const Clock& clock;
  std::vector<Group> groups;
  std::vector<std::unique_ptr<Tier>> tiers;
  std::vector<TierSlot> tier_slots;
  RowAllocator rows;
  ChunkIndex index;
  KeyMemory memory;
  Quarantine quarantine;
  CostModel costs;
  double bytes_per_token = 0;  // of all groups

  // ---- rows
  bool one_row_size = true;
  std::uint64_t row_unit = kPageBytes;  // the smallest row
  std::vector<Slot> owner_of_row;       // by row * 4 KiB / row_unit; only with several row sizes
  std::vector<std::uint64_t> resident_by_group;

  // ---- requests
  std::vector<RequestState> requests;
  std::vector<RequestHandle> free_requests;
  std::uint32_t last_number = 0;
  Nanos idle_since{0};  // while no request lives
  std::uint64_t longest_prompt = 0;
  std::vector<Sights> sights;  // by group position
  std::uint64_t step = 1;
  bool polled_in_step = false;
  std::vector<RequestHandle> asked;    // with a pending answer in this step
  std::vector<RequestHandle> waiting;  // all that hold or await something, or may
  std::vector<std::uint64_t> marks;    // by slot: scratch of hold_hits
  std::uint64_t mark = 0;

  // ---- jobs and ops
  Ticket last_ticket = kNoTicket;
  std::vector<LoadJob> load_jobs;
  std::vector<ForgottenLoad> forgotten_loads;
  OpId last_op = 0;
  std::unordered_map<OpId, Op> ops;
  std::unordered_map<Slot, OpId> fetches;
  std::deque<OpId> write_order;  // oldest first; may name ops that ended
  std::vector<Completion> completions;
  std::vector<TierRemoval> removals;

  std::uint64_t evicted_bytes = 0;  // of host memory, not in the metrics yet
  std::vector<CacheEvent> events;
  bool closed = false;

  Impl(CacheOptions cache_options, const std::shared_ptr<HostRegion>& host_region,
       std::vector<std::unique_ptr<Tier>> cache_tiers, Metrics& cache_metrics, const Clock& cache_clock);

  // ---- tiered_cache.cc
  // Position of vLLM's group id; nullopt when it is none of ours.
  std::optional<std::uint32_t> position_of(const ChunkKey& key) const;
  std::uint32_t require_position(const ChunkKey& key, std::uint32_t at_least) const;
  RequestState& require_live(RequestHandle request);
  void flush_tallies();
  void note_event(const ChunkKey& key, bool storage, bool removed, std::string_view owner);

  // ---- lookup.cc
  LookupResult lookup(RequestHandle handle, const ChunkKey& key);
  void begin_pass(RequestState& request);
  LookupResult lookup_unready(RequestHandle handle, RequestState& request, const ChunkKey& key,
                              const ChunkEntry* entry);
  LookupResult pending(RequestHandle handle, RequestState& request, Sight sight, LookupResult result);
  LookupResult miss(RequestState& request, std::uint32_t group, MissReason reason);
  bool is_probe(Slot slot) const;  // being read, and nobody waits for it
  std::optional<MissReason> may_not_wait(const RequestState& request, bool from_tier) const;
  MissReason why_missed(const RequestState& request, const Sight& sight) const;
  bool from_tier(const ChunkEntry& entry);
  // Counts the misses of the last pass, once.
  void settle(RequestState& request);
  void settle_scan(RequestState& request, std::span<const Sight> scan, bool first);
  void count_misses(RequestState& request, MissReason reason, std::uint64_t tokens);
  // The request got what it gets (prepare_load) or goes without (prepare_store).
  void admit(RequestHandle handle, RequestState& request);
  void start_waiting(RequestHandle handle, RequestState& request);
  void stop_waiting(RequestHandle handle, RequestState& request);  // gives back pins and fetches

  // ---- plans.cc
  // The parts of a pass that its outcome depends on.
  struct Scan {
    std::vector<Slot> hits, fetching;
    bool pending = false;              // filling, fetching, recorded or unknown
    std::uint32_t begin = 0, end = 0;  // in the pass
    bool is_prefix = false;            // scanned from the left
    struct Candidate {
      std::uint32_t key;  // place in pass_keys
      std::uint8_t tier;
      ChunkId parent;  // what was looked up before it
    };
    std::vector<Candidate> candidates;
  };
  using Scans = std::vector<std::pair<std::uint32_t, Scan>>;  // by group position
  Scans scans_of(const RequestState& request);
  void plan(RequestHandle handle, RequestState& request);
  void hold_hits(RequestState& request, const std::vector<Slot>& hits);
  void fetch(RequestHandle handle, RequestState& request, std::uint32_t group,
             std::span<const Scan::Candidate> candidates);
  void submit_reads(const std::vector<std::pair<Slot, std::uint8_t>>& planned, Nanos deadline, bool probe);
  void await(RequestHandle handle, RequestState& request, Slot slot);
  void expire_deadlines(Nanos now);
  // The chunk that this is a sight of; 0 when it was not remembered.
  ChunkId seen_chunk(const RequestState& request, const Sight& sight);

  // ---- decision.cc
  // Leaves in `scans` what is to be fetched; closes the groups of which not all is.
  void decide(RequestState& request, Scans& scans);
  std::vector<Stretch> stretches_of(const RequestState& request, const Scans& scans,
                                    std::uint32_t* hits_before) const;
  void cut(RequestState& request, Scans& scans, std::uint64_t tokens) const;
  void record(RequestState& request, const Decision& decision);
  void be_patient(RequestState& request, const Decision& decision) const;
  // Its patience ended: does it get the rest sooner by waiting on?
  bool waits_on(RequestState& request, Nanos now);
  void give_up(RequestState& request, Nanos now);
  void probe(RequestState& request, std::uint32_t group, std::span<const Scan::Candidate> candidates);
  double context_of(const RequestState& request, std::uint32_t group) const;
  void note_outcome(const LoadJob& job);
  void publish_speeds();

  // ---- tier_ops.cc
  void poll_tiers();
  void finish_read(Op& op, const Completion& completion);
  void finish_write(Op& op, const Completion& completion);
  void note_removal(TierSlot& from, const TierRemoval& removal);
  std::vector<Shard> shards_of(RowId row, std::uint32_t group) const;
  TierOp make_op(OpKind kind, std::uint8_t tier, Slot slot);  // registers it
  void note_read_ended(const Op& op, const Completion& completion);
  bool is_recorded(TierSlot& slot, const ChunkKey& key);
  void ask_for_unknown();
  void start_writes(std::uint8_t tier, const std::vector<Slot>& slots);
  void write_stored(const std::vector<Slot>& slots);  // just became resident
  void promote(Slot slot, std::uint8_t from);         // was fetched: to the faster tiers that record all
  void see_again(Slot slot);                          // offered or loaded again
  // Writes a chunk to the on_evict tiers that lack it; true when a write was started.
  bool write_before_eviction(Slot slot);
  void clean_cold_end();  // on_evict: writes what goes next, ahead of need
  std::uint64_t drop_write(OpId op, std::string_view reason);  // 0 when it cannot be cancelled

  // ---- room.cc
  RowId take_row(std::uint32_t group, std::uint32_t holder, std::vector<ChunkKey>* evicted);
  bool evict_one(std::uint32_t holder, bool may_write, std::vector<ChunkKey>* evicted);
  bool reclaim_slab(std::uint32_t group, std::uint32_t holder, std::vector<ChunkKey>* evicted);
  void evict(Slot slot, std::vector<ChunkKey>* evicted);
  bool shed_writes();
  Slot insert(const ChunkKey& key, std::uint32_t group, RowId row, const EntryInfo& about, ChunkState state);
  void make_resident(Slot slot, ChunkOrigin origin);
  // The entry goes; its row is the caller's.
  RowId take_out(Slot slot);
  void free_row(RowId row) { rows.free(row); }

  // ---- load_path.cc
  std::uint64_t cache_blocks_of(const RequestState& request) const;
  bool must_hold_back(const RequestState& request) const;
  RowTransfer prepare_load(RequestHandle handle, std::span<const ChunkKey> keys);
  void complete_load(std::span<const ChunkKey> keys);
  bool release_load(const LoadJob& job);
  void poll_loads();
  bool is_reported(Ticket ticket, TicketKind kind) const;

  // ---- store_path.cc
  class Taken;
  StoreGrant prepare_store(RequestHandle handle, std::span<const ChunkKey> keys,
                           std::span<const std::uint32_t> depths);
  void complete_store(std::span<const ChunkKey> keys, bool success);
  void fail_store(Slot slot);
  void note_prefill(RequestState& request, std::span<const ChunkKey> keys,
                    std::span<const std::uint32_t> depths);

  // ---- reset.cc
  void forget_memory();
  void reset();
  void close();
};

}  // namespace kv_offload
