// SPDX-License-Identifier: Apache-2.0
// TieredCache: the scheduler-side cache that implements vLLM's OffloadingManager verbs. Combines the index,
// the region and the tiers.
//
// Threads: one (the scheduler's); no call waits for storage. Tier results are polled in end_step() and at the
// start of lookup passes.
//
// It holds no cache state: it connects its parts and forwards each call to one of them. The header of each
// part describes what the part owns. A part uses only parts above it in this list
// (tests/python/test_layers.py). The exception is the end of a read, which TierIo reports to the waiting
// requests.
//
//   cache_types, chunk_groups, tickets, cache_events, key_history, cost_model
//   neighbours    chunks in host memory of other engines of this host
//   lent_rows     own rows that other engines read
//   host_chunks   rows and chunks in host memory: row owners and row reuse
//   tier_figures  statistics of a tier as metrics
//   tier_io       reads from tiers and writes to tiers, from submission to completion
//   planned_reads what a plan holds until its reads are submitted
//   write_back    which chunks are written to which tier, and when
//   row_provider  a row for a chunk: free, evicted, or from a cancelled write
//   device_loads  copies to the device: which run, and which may run concurrently
//   request_table lookups and their results, waiting, admission, counting
//   planner       what is fetched for waiting requests: load or recompute
//   store_path    rows for offered chunks, and results from the ranks
//   prefetcher    prompts of sessions, read from tiers before their return
//   retention     prompts that hints keep in host memory for a time
//   sessions      prompts of sessions, and hints about them
//
// States of a key: HostChunks knows which keys have a row; a tier's catalog knows which keys are recorded.
// lookup():
//   resident, or resident at a neighbour
//                       -> kHit
//                          (kPending while the load must be held back, see DeviceLoads)
//   a host of the engine's ranks is lost
//                       -> kMiss, for every key
//   filling, fetching   -> kPending until the request's deadline, then kMiss
//   recorded on a tier  -> kPending; end_step() makes a plan (see Planner)
//   tier says unknown   -> kRetry (bounded by the same deadline); end_step() asks
//                          the tier for all such keys at once
//   otherwise           -> kMiss, with a reason that is counted once per request
//
// Failure: a failed fetch or store makes the key absent for all requests, with the reason, once. prepare_load
// only accepts resident chunks and pins them.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string_view>
#include <vector>

#include "base/clock.h"
#include "base/types.h"
#include "cache/cache_types.h"
#include "memory/host_region.h"
#include "metrics/metrics.h"
#include "tier/tier.h"

namespace kv_offload {

class TieredCache {
 public:
  // All ranks must be attached to the region. The region stays alive until the cache is destroyed and no tier
  // op can touch it. Throws InvalidArgument (region smaller than one row of each group, unknown policy, too
  // many groups or tiers).
  TieredCache(const CacheOptions& options, const std::shared_ptr<HostRegion>& region,
              std::vector<std::unique_ptr<Tier>> tiers, Metrics& metrics, const Clock& clock);
  ~TieredCache();  // calls close()

  // ---- requests
  RequestHandle begin_request(std::string_view request_id, const RequestOptions& options);
  void end_request(RequestHandle request);  // drops its pins and plan
  // Executes hints about other sessions. end_turn() executes those about the request's own prompt: call it
  // when the request uses no more chunks, before end_request(). Each returns an outcome per hint.
  std::vector<HintOutcome> apply_hints(std::span<const Hint> hints);
  std::vector<HintOutcome> end_turn(RequestHandle request, const Turn& turn, std::span<const Hint> hints);
  // The request was scheduled and stops waiting. Not needed for a request that loads or stores, which implies
  // it.
  void admit(RequestHandle request);
  // The request was preempted: a wait from before it last ran is over. (vLLM does not report that a preempted
  // request is scheduled again.) Has no effect if the request was looked up in this step, as happens
  // after a reset.
  void preempt(RequestHandle request);
  // Sets where in its prompt a request's lookups start, and the prompt's length: end positions, in tokens, of
  // the first chunk that is looked up and of the last whole chunk. Without it, compute cost is estimated as
  // for the first tokens of a prompt, and a miss counts only its own chunk.
  bool has_span(RequestHandle request) const;
  void set_span(RequestHandle request, std::uint32_t first_end, std::uint32_t last_end);
  // The report so far; complete once the request has ended (until the handle is reused).
  const RequestReport& report(RequestHandle request) const;

  // ---- vLLM's manager verbs
  LookupResult lookup(RequestHandle request, const ChunkKey& key, std::uint32_t part_tokens = 0);
  // -1 = stored in host memory by a store; else the index of the tier that its bytes came from.
  int load_source(const ChunkKey& key) const;
  bool is_in_memory(const ChunkKey& key) const;  // resident, or on its way there
  // REQUIRES: all keys hit in this step. Pins them until complete_load or reset.
  RowTransfer prepare_load(RequestHandle request, std::span<const ChunkKey> keys);
  // `request`: the one that loads, unless it has ended. Loads of several requests may have the same keys.
  void complete_load(std::span<const ChunkKey> keys, std::optional<RequestHandle> request = std::nullopt);
  // Accepts a prefix of each group's new keys. Keys that already have a row, in any state, are skipped and
  // not declined. The first declined key ends the prefix, so that there are no holes. If it throws, it has
  // accepted nothing; what it evicted stays evicted.
  StoreGrant prepare_store(RequestHandle request, std::span<const ChunkKey> keys,
                           std::span<const std::uint32_t> depths = {});
  // All ranks have reported. The ticket in the control page decides per group whether the keys become
  // resident.
  void complete_store(std::span<const ChunkKey> keys, bool success = true);
  // Polls tiers, makes plans, expires deadlines, frees quarantined rows and reports has_pending_work() to the
  // region.
  void end_step();
  // Only while a request waits for the cache, or a completed store for the report of another host.
  bool has_pending_work() const;
  // True if the next step would report removals that no call of this engine made, such as those by another
  // server in a shared directory. Any thread, until close().
  bool has_removals() const;
  // Forgets everything in memory and on every tier. Takes the same time for any number of chunks that no copy
  // or tier op uses: later steps and stores free their rows and report their removal, a few at a time. Rows
  // of copies in flight are reused only after their tickets are reported.
  void reset();
  // The caller has dropped its jobs and will not report their end. Chunks being stored are discarded, and
  // chunks being loaded stay pinned until the ranks have reported. Everything else is kept.
  void abandon_jobs();
  std::vector<CacheEvent> take_events();

  // ---- statistics
  struct Stats {
    std::uint64_t resident_chunks, resident_bytes, capacity_bytes;
    std::uint64_t pinned_chunks, quarantined_rows, waiting_requests, requests;
    std::uint64_t longest_prompt;     // tokens, over all requests since the start
    std::uint64_t taken_over_chunks;  // from the previous engine, at the start
    std::uint64_t sessions;           // remembered for hints
    std::uint64_t hint_pinned_bytes;  // pinned by hints
    bool is_kept;                     // host memory outlives this cache
    // Engines of this host whose memory is read; their chunks that are pinned for this one; own chunks that a
    // neighbour reads although they would be evicted.
    std::uint64_t neighbours, borrowed_chunks, lent_chunks;
  };
  Stats stats() const;
  // Returns the figures of each tenant, in the order of CacheOptions::tenants.
  std::vector<TenantStats> tenant_stats() const;
  // Reasons why host memory of other engines is not used, each once.
  std::vector<std::string> take_neighbour_problems();
  std::vector<LookupCounts> lookup_counts() const;  // by group position
  void publish_gauges();                            // publishes residency, capacities and queue depths
  const std::vector<std::unique_ptr<Tier>>& tiers() const;
  void close();  // cancels queued writes, closes tiers. Idempotent

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace kv_offload
