// SPDX-License-Identifier: Apache-2.0
// RequestTable: the live requests, the results of their last lookup passes, and what they wait for.
//
// Invariant: a waiting request has a deadline; chunks that are not resident by then are kMiss with a reason.
// (A request for which vLLM has no room may begin another wait: see expire().) A waiting request holds one
// pin on each chunk in `held` and is a waiter of exactly the reads in `awaited`. Both are released when it is
// admitted (its load or store begins), expires or ends. Reads are cancelled in bounded batches, over the
// following calls and steps; until then their waiter number belongs to no request. Each chunk that was looked
// up is counted once per admission, as a hit or as a miss with its reason.
//
// Threads: one (the scheduler's).
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <optional>
#include <span>
#include <vector>

#include "base/clock.h"
#include "cache/chunk_groups.h"
#include "cache/cost_model.h"
#include "cache/device_loads.h"
#include "cache/host_chunks.h"
#include "cache/key_history.h"
#include "cache/request_state.h"
#include "cache/tickets.h"
#include "cache/tier_io.h"
#include "metrics/metrics.h"

namespace kv_offload {

class RequestTable {
 public:
  // Reads cancelled per call or step. Cancelling all reads of a million-token prompt at once would block the
  // scheduler for tenths of a second. The oldest are cancelled first, so that few reads begin meanwhile.
  static constexpr std::size_t kReadsCancelledPerStep = 2048;
  // Dependencies; all of them outlive this.
  struct Context {
    const ChunkGroups& groups;
    HostChunks& chunks;
    KeyHistory& key_history;
    const Tickets& tickets;
    CostModel& costs;
    TierIo& ops;
    DeviceLoads& device_loads;
    Metrics& metrics;
    const Clock& clock;
  };
  RequestTable(const Context& context, const CacheOptions& options);

  // ---- live requests
  RequestHandle begin(const RequestOptions& options);
  void end(RequestHandle request);
  void set_span(RequestHandle request, std::uint32_t first_end, std::uint32_t last_end);
  // REQUIRES: a handle returned by begin(), ended or not.
  const RequestState& at(RequestHandle request) const { return requests_[request]; }
  // Throws InvalidArgument if the request is not live.
  const RequestState& require_live(RequestHandle request) const;
  bool is_handle(RequestHandle request) const { return request < requests_.size(); }

  // ---- lookup of one key
  // part_tokens: not 0 for a part of a chunk. Parts are looked up after all whole chunks and count only if
  // they are loaded.
  LookupResult lookup(RequestHandle request, const ChunkKey& key, std::uint32_t part_tokens = 0);

  // ---- admission: vLLM schedules the request, with or without a load, and its wait ends
  DeviceLoads::Load load_of(RequestHandle request) const;
  void admit_load(RequestHandle request, std::span<const ChunkKey> keys, const DeviceLoads::Begun& load);
  // vLLM has completed the load. Ignored once the request has ended.
  void end_load(const DeviceLoads::LoadId& load);
  // The request was scheduled: counts its lookup results and stops waiting.
  void admit(RequestHandle request);
  // The same for a preempted request, unless it was looked up in this step.
  void preempt(RequestHandle request);
  Offers& offers(RequestHandle request) { return requests_[request].offers; }

  // ---- plans: see Planner
  // Returns the requests that got kPending or kRetry in this step and still wait, oldest first. Each is
  // returned once.
  std::vector<RequestHandle> take_pending();
  const std::vector<RequestHandle>& waiting() const { return waiting_; }
  // Pins the hits until the request is admitted. Chunks that are no longer resident are skipped.
  void hold(RequestHandle request, std::span<const Slot> hits);
  // Removes chunks from `held` without unpinning them. O(n) in the size of `held`.
  void remove_held(RequestHandle request, std::span<const Slot> slots);
  // Waits for the read of this chunk, unless the request already does.
  void await(RequestHandle request, Slot slot);
  // Turns up to `most` of the reads that only this request awaits into probes, and stops waiting for them.
  void continue_as_probes(RequestHandle request, std::size_t most, Nanos now);
  // Nothing (more) is fetched for the request, in one group or in all groups.
  void close_group(RequestHandle request, std::uint32_t group, MissReason reason);
  void close_all(RequestHandle request, MissReason reason);
  // Returns false if the request made the same decision before in this admission: it waits again.
  bool set_decided(RequestHandle request, std::string_view choice);
  // Loads only the first `tokens` tokens of each scan.
  void set_load_tokens(RequestHandle request, std::uint64_t tokens) {
    requests_[request].load_tokens = tokens;
  }
  // Starts or continues the wait of the request for rows.
  void await_rows(RequestHandle request);
  // Ends the wait for rows, if any, and then restarts the time for the reads.
  void end_row_wait(RequestHandle request);
  // True if another request will soon hold fewer rows: it loads, or waits for reads or for vLLM, and not for
  // rows. Rows that this request uses too, that its tenant may not take or that are a neighbour's do not
  // count. Checks at most `*most` requests, and decrements it.
  bool rows_become_free(RequestHandle request, std::size_t* most) const;
  void report_decision(RequestHandle request, std::string_view choice, const Decision& decision);
  // The request waits for its reads until `end` at the latest. `budget`: the time that the decision allowed.
  void set_load_budget(RequestHandle request, Nanos budget, Nanos end);
  // Chunks that the request is to load are not written yet: restarts the time for its reads at this pass.
  void restart_load_budget(RequestHandle request);
  // Stops waiting: chunks that are not resident miss, with this reason. If vLLM has no room for the request
  // then, its next lookup begins another wait, for the rest of the timeout. vLLM had no room if the last
  // lookup found nothing pending, or if vLLM has not looked the request up for at least kUnaskedSteps steps
  // and a quarter of the timeout.
  void expire(RequestHandle request, MissReason reason);
  static constexpr std::uint64_t kUnaskedSteps = 4;
  static constexpr int kMostWaits = 64;  // each wait uses up at least 1 / kMostWaits of the timeout

  // A read that the request awaited has ended.
  void read_ended(TierIo::Waiter waiter, const TierIo::ReadEnd& end);
  void end_step();
  // True if some request waits for a read or a plan.
  bool has_pending_work() const;
  // Drops all holds and waits; requests stay live. REQUIRES: pins and reads were released.
  void forget();

  // ---- statistics
  const std::vector<LookupCounts>& lookup_counts() const { return lookup_counts_; }  // by group position
  std::size_t live() const { return requests_.size() - free_.size(); }
  std::uint64_t longest_prompt() const { return longest_prompt_; }

 private:
  void begin_pass(RequestState& request);
  LookupResult lookup_unready(RequestHandle handle, RequestState& request, const ChunkKey& key,
                              const ChunkEntry* entry);
  LookupResult lookup_in_host(RequestHandle handle, RequestState& request, std::uint32_t group,
                              const ChunkEntry& entry);
  LookupResult lookup_in_tiers(RequestHandle handle, RequestState& request, std::uint32_t group,
                               const ChunkKey& key);
  struct TierResults;
  using TierLookup = RequestState::TierLookup;
  TierResults check_catalogs(const RequestState& request, std::uint32_t group, const ChunkKey& key,
                             std::optional<TierLookup> earlier) const;
  void queue_lookups(RequestState& request, std::uint32_t group, const ChunkKey& key,
                     const TierResults& results);
  LookupResult pending(RequestHandle handle, RequestState& request, Lookup lookup, LookupResult result);
  LookupResult miss(RequestState& request, std::uint32_t group, MissReason reason);
  static LookupResult absent(RequestState& request, std::uint32_t group, std::uint64_t print);
  std::optional<MissReason> refuse_wait(const RequestState& request, bool from_tier) const;
  void start_waiting(RequestHandle handle, RequestState& request);
  void release(RequestHandle handle);
  void stop_waiting(RequestState& request);  // releases pins and reads; allocates nothing
  // True if the end of its wait leaves rows that the requester may take.
  bool frees_rows(const RequestState& request, const Requester& by) const;
  // Call when vLLM looks up a request that is waiting or has expired. Begins another wait if the last one is
  // over and vLLM had no room for the request: see expire().
  void continue_wait(RequestState& request);
  void cancel_abandoned_reads();  // cancels some of abandoned_reads_
  // Counts the misses of the last pass, once.
  void count_pass(RequestState& request);
  void count_scan(RequestState& request, std::span<const Lookup> scan, bool first);
  void count_misses(RequestState& request, MissReason reason, std::uint64_t tokens);
  MissReason miss_reason(const RequestState& request, const Lookup& lookup) const;

  const ChunkGroups& groups_;
  HostChunks& chunks_;
  KeyHistory& key_history_;
  const Tickets& tickets_;
  CostModel& costs_;
  TierIo& ops_;
  DeviceLoads& device_loads_;
  Metrics& metrics_;
  const Clock& clock_;
  const LoadPolicy load_policy_;
  const Nanos lookup_timeout_;

  std::vector<RequestState> requests_;  // by handle
  std::vector<RequestHandle> free_;
  std::uint32_t last_number_ = 0;
  std::uint32_t last_wait_ = 0;
  // Reads of requests that stopped waiting, oldest first. They are cancelled in batches.
  struct AbandonedReads {
    TierIo::Waiter waiter = 0;
    std::map<OpId, Slot> reads;
  };
  std::deque<AbandonedReads> abandoned_reads_;
  Nanos idle_since_;  // start of the time without live requests
  std::uint64_t step_ = 1;
  std::vector<RequestHandle> pending_;  // got kPending or kRetry in this step
  std::vector<RequestHandle> waiting_;
  std::uint64_t longest_prompt_ = 0;
  std::vector<LookupCounts> lookup_counts_;
  std::vector<std::uint64_t> seen_in_;  // by slot, scratch of hold(): the last call that saw it
  std::uint64_t hold_call_ = 0;
};

}  // namespace kv_offload
