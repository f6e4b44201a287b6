// TieredCache: the one place where index, region and tiers meet. It is the
// scheduler-side brain behind vLLM's OffloadingManager.
//
// Threads: one (the scheduler's); no call waits for storage. Tier results are
// polled in end_step() and at the start of lookup passes.
//
// It holds nothing itself: it wires its parts together and hands each call to one of
// them. Each part has a header that says what it keeps; a part knows those above it in
// this list and none below (tests/python/test_layers.py), but for the end of a read,
// which TierOps tells to whoever waits for it.
//
//   cache_types, chunk_groups, tickets, cache_events, key_memory, cost_model
//   host_chunks   rows and chunks in host memory: who holds a row, when it is given back
//   tier_ops      reads from tiers and writes to them, from submission to completion
//   write_back    which chunks are written to which tier, and when
//   row_supply    a row for a chunk: free, evicted, or of a write that is cancelled
//   load_jobs     copies to the device: which run, which may run side by side
//   requests      lookups and their answers, waiting, admission, counting
//   planner       what is fetched for requests that wait: load or recompute
//   stores        rows for what is offered; what the ranks reported
//
// States of a key: HostChunks knows what has a row; a tier's catalogue knows what is
// recorded. lookup():
//   resident            -> kHit
//                          (kPending while it must be held back, see LoadJobs)
//   filling, fetching   -> kPending until the request's deadline, then kMiss
//   recorded on a tier  -> kPending, noted; end_step() makes a plan (see Planner)
//   tier says unknown   -> kRetry (bounded by the same deadline); end_step() asks
//                          the tier for all such keys at once
//   else                -> kMiss, with a reason that is counted once per request
//
// Failure: a fetch or store that fails makes the key absent for everybody, with
// the reason, once. prepare_load only ever gets resident chunks and pins them.
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
#include "storage/tier.h"

namespace kv_offload {

class TieredCache {
 public:
  // The region must have all ranks attached. It lives until the cache is gone and
  // no op of a tier can touch it any more. Throws InvalidArgument (region smaller
  // than one row of each group, unknown policy, too many groups or tiers).
  TieredCache(const CacheOptions& options, const std::shared_ptr<HostRegion>& region,
              std::vector<std::unique_ptr<Tier>> tiers, Metrics& metrics, const Clock& clock);
  ~TieredCache();  // close()

  // ---- requests
  RequestHandle begin_request(std::string_view request_id, const RequestOptions& options);
  void end_request(RequestHandle request);  // drops its pins and plan
  // It runs, so that it waits for nothing more; known by itself once it loads or stores.
  void admit(RequestHandle request);
  // Where in its prompt a request's lookups start and how long it is: end
  // positions, in tokens, of the first chunk that is asked for and of its last
  // whole chunk. Without it the cost of computing is taken as that of a prompt's
  // first tokens, and a miss counts its own chunk alone.
  bool knows_span(RequestHandle request) const;
  void set_span(RequestHandle request, std::uint32_t first_end, std::uint32_t last_end);
  // So far; complete once the request ended (until the handle is used again).
  RequestReport report(RequestHandle request) const;

  // ---- vLLM's manager verbs
  LookupResult lookup(RequestHandle request, const ChunkKey& key, std::uint32_t part_tokens = 0);
  // -1: host memory by a store; else index of the tier its bytes came from.
  int load_source(const ChunkKey& key) const;
  bool is_in_memory(const ChunkKey& key) const;  // resident, or on its way there
  // REQUIRES: all hit in this step. Pins until complete_load or reset.
  RowTransfer prepare_load(RequestHandle request, std::span<const ChunkKey> keys);
  void complete_load(std::span<const ChunkKey> keys);
  // Accepts a prefix of what is new (keys known in any state with a row are
  // skipped, not declined). The first decline ends it: no holes. When it throws,
  // it has accepted nothing; what it evicted stays evicted.
  StoreGrant prepare_store(RequestHandle request, std::span<const ChunkKey> keys,
                           std::span<const std::uint32_t> depths = {});
  // All ranks reported; the ticket in the control page decides per group
  // whether the keys become resident.
  void complete_store(std::span<const ChunkKey> keys, bool success = true);
  // Poll tiers, make plans, expire deadlines, free quarantined rows, tell the region
  // whether has_pending_work().
  void end_step();
  bool has_pending_work() const;  // only while a request waits for us
  void reset();                   // forget everything in memory and on every tier; rows of copies in flight
                                  // are reused only after their tickets are reported
  // The caller has dropped its jobs and reports the end of none: what is being stored is discarded, and what
  // is being loaded stays pinned until the ranks have reported. Everything else is kept.
  void abandon_jobs();
  std::vector<CacheEvent> take_events();

  // ---- figures
  struct Stats {
    std::uint64_t resident_chunks, resident_bytes, capacity_bytes;
    std::uint64_t pinned_chunks, quarantined_rows, waiting_requests, requests;
    std::uint64_t longest_prompt;     // tokens, of those asked for since the start
    std::uint64_t taken_over_chunks;  // of the engine before, at the start
    bool is_kept;                     // host memory outlives this cache
  };
  Stats stats() const;
  std::vector<LookupCounts> lookup_counts() const;  // by group position
  void publish_gauges();                            // residency, capacities, queue depths into Metrics
  const std::vector<std::unique_ptr<Tier>>& tiers() const;
  void close();  // sheds queued writes, closes tiers. Idempotent

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace kv_offload
