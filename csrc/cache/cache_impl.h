// The inside of TieredCache, shared by the files that implement it:
//
//   tiered_cache.cc  construction, requests, figures, events
//   lookup.cc        one key's answer; misses and their reasons
//   store_path.cc    prepare_store, complete_store
//   plans.cc         end_step: what waiting requests get fetched
//   decision.cc      load or recompute: what of it, how long to wait, probes
//   reset.cc         reset, close
//
// Classes of their own: host_chunks.h (rows, and who holds them), tier_ops.h (reads
// and writes of tiers), write_back.h (write policies), row_supply.h (eviction), load_jobs.h (copies to the
// device), chunk_groups.h, tickets.h, cache_events.h.
#pragma once

#include <deque>
#include <memory>
#include <optional>
#include <unordered_map>
#include <vector>

#include "cache/cost_model.h"
#include "cache/host_chunks.h"
#include "cache/key_memory.h"
#include "cache/load_jobs.h"
#include "cache/request_state.h"
#include "cache/row_supply.h"
#include "cache/tier_ops.h"
#include "cache/tiered_cache.h"
#include "cache/write_back.h"

namespace kv_offload {

struct TieredCache::Impl {
  // ---- what it is built from
  CacheOptions options;
  const std::shared_ptr<HostRegion> region;
  Metrics& metrics;
  const Clock& clock;
  const ChunkGroups groups;
  Tickets tickets;
  CacheEvents events;
  HostChunks chunks;
  KeyMemory memory;
  CostModel costs;
  TierOps ops;
  WriteBack write_back;
  RowSupply row_supply;
  LoadJobs load_jobs;

  // ---- requests
  std::vector<RequestState> requests;
  std::vector<RequestHandle> free_requests;
  std::uint32_t last_number = 0;
  Nanos idle_since{0};  // while no request lives
  std::uint64_t longest_prompt = 0;
  std::vector<Sights> sights;  // by group position
  std::uint64_t step = 1;
  std::vector<RequestHandle> asked;    // with a pending answer in this step
  std::vector<RequestHandle> waiting;  // all that hold or await something, or may
  std::vector<std::uint64_t> marks;    // by slot: scratch of hold_hits
  std::uint64_t mark = 0;

  bool closed = false;

  Impl(CacheOptions cache_options, const std::shared_ptr<HostRegion>& host_region,
       std::vector<std::unique_ptr<Tier>> cache_tiers, Metrics& cache_metrics, const Clock& cache_clock);

  // ---- tiered_cache.cc
  RequestState& require_live(RequestHandle request);

  // ---- lookup.cc
  LookupResult lookup(RequestHandle handle, const ChunkKey& key);
  void begin_pass(RequestState& request);
  LookupResult lookup_unready(RequestHandle handle, RequestState& request, const ChunkKey& key,
                              const ChunkEntry* entry);
  LookupResult pending(RequestHandle handle, RequestState& request, Sight sight, LookupResult result);
  LookupResult miss(RequestState& request, std::uint32_t group, MissReason reason);
  void read_ended(RequestHandle waiter, const TierOps::ReadEnd& end);
  std::optional<MissReason> may_not_wait(const RequestState& request, bool from_tier) const;
  MissReason why_missed(const RequestState& request, const Sight& sight) const;
  bool from_tier(const ChunkEntry& entry);
  // Counts the misses of the last pass, once.
  void settle(RequestState& request);
  void settle_scan(RequestState& request, std::span<const Sight> scan, bool first);
  void count_misses(RequestState& request, MissReason reason, std::uint64_t tokens);
  LoadJobs::Load load_of(const RequestState& request) const;
  void admit_load(RequestHandle handle, RequestState& request, std::span<const ChunkKey> keys,
                  const LoadJobs::Begun& load);
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
  void publish_speeds();

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
