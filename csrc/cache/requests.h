// Requests: who is there, what each was answered in its last lookup pass, and what it
// waits for.
//
// Invariant: a request that waits has a deadline, and is told kMiss, with a reason,
// for what is not there by then. It holds one pin on each chunk in `held`; it is among
// the waiters of exactly the reads of `awaited`; both are given back when it is
// admitted (its load or store begins), expires or ends. Reads are given back a bounded number at a time, in
// the calls and steps that follow: who awaited them then is nobody's waiter. Each chunk that it was told
// about is counted once per admission, as a hit or as a miss with its reason.
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
#include "cache/host_chunks.h"
#include "cache/key_memory.h"
#include "cache/load_jobs.h"
#include "cache/request_state.h"
#include "cache/tier_ops.h"
#include "metrics/metrics.h"

namespace kv_offload {

class Requests {
 public:
  // Reads that one call or step cancels. All reads of a prompt of a million tokens at once would stop the
  // scheduler for tenths of a second. The oldest go first, so that few are begun meanwhile.
  static constexpr std::size_t kReadsGivenBackAtOnce = 2048;
  // What it works with; all of it outlives this.
  struct Context {
    const ChunkGroups& groups;
    HostChunks& chunks;
    KeyMemory& memory;
    CostModel& costs;
    TierOps& ops;
    LoadJobs& load_jobs;
    Metrics& metrics;
    const Clock& clock;
  };
  Requests(const Context& context, const CacheOptions& options);

  // ---- who is there
  RequestHandle begin(const RequestOptions& options);
  void end(RequestHandle request);
  void set_span(RequestHandle request, std::uint32_t first_end, std::uint32_t last_end);
  // REQUIRES: a handle that begin() gave, ended or not.
  const RequestState& at(RequestHandle request) const { return requests_[request]; }
  // Throws InvalidArgument when it is not live.
  const RequestState& require_live(RequestHandle request) const;
  bool is_handle(RequestHandle request) const { return request < requests_.size(); }

  // ---- one key's answer
  // part_tokens: not 0, of a part of a chunk, which is asked for after all whole ones and counts only if it
  // is loaded.
  LookupResult lookup(RequestHandle request, const ChunkKey& key, std::uint32_t part_tokens = 0);

  // ---- admission: it gets what it gets, or goes without. Its wait is over.
  LoadJobs::Load load_of(RequestHandle request) const;
  void admit_load(RequestHandle request, std::span<const ChunkKey> keys, const LoadJobs::Begun& load);
  // It runs: what it was told is counted, and it waits for nothing more.
  void admit(RequestHandle request);
  Offers& offers(RequestHandle request) { return requests_[request].offers; }

  // ---- plans: see Planner
  // Those that were told kPending or kRetry in this step and still wait, the oldest
  // first; once.
  std::vector<RequestHandle> take_pending();
  const std::vector<RequestHandle>& waiting() const { return waiting_; }
  // Keeps what it hit until it is admitted; what is not resident any more is left out.
  void hold(RequestHandle request, std::span<const Slot> hits);
  // Removes chunks from what the request keeps, without unpinning them. O(n) in all that it keeps.
  void remove_held(RequestHandle request, std::span<const Slot> slots);
  // It waits for this read, if it does not already.
  void await(RequestHandle request, Slot slot);
  // Of the reads that it alone waits for, some go on as probes: it does not wait for them.
  void leave_probes(RequestHandle request, std::size_t most, Nanos now);
  // Nothing (more) is fetched for it, of one group or of all.
  void close_group(RequestHandle request, std::uint32_t group, MissReason reason);
  void close_all(RequestHandle request, MissReason reason);
  void set_decided(RequestHandle request) { requests_[request].decided = true; }
  void report_decision(RequestHandle request, std::string_view choice, const Decision& decision);
  // It waits for its reads no longer than until `end`. `budget`: what a decision gave them.
  void set_load_budget(RequestHandle request, Nanos budget, Nanos end);
  // Chunks that it is to load are not written yet: the time of its reads begins after this pass.
  void restart_load_budget(RequestHandle request);
  // It waits no longer: what is not resident is a miss, for this reason.
  void expire(RequestHandle request, MissReason reason);

  // A read that it waited for ended.
  void read_ended(TierOps::Waiter waiter, const TierOps::ReadEnd& end);
  void end_step();
  // Some request waits for a read or a plan.
  bool has_pending_work() const;
  // Nothing is held or awaited any more; requests live on. REQUIRES: pins and reads are gone.
  void forget();

  // ---- figures
  const std::vector<LookupCounts>& lookup_counts() const { return lookup_counts_; }  // by group position
  std::size_t live() const { return requests_.size() - free_.size(); }
  std::uint64_t longest_prompt() const { return longest_prompt_; }

 private:
  void begin_pass(RequestState& request);
  LookupResult lookup_unready(RequestHandle handle, RequestState& request, const ChunkKey& key,
                              const ChunkEntry* entry);
  LookupResult lookup_here(RequestHandle handle, RequestState& request, std::uint32_t group,
                           const ChunkEntry& entry);
  LookupResult lookup_on_tiers(RequestHandle handle, RequestState& request, std::uint32_t group,
                               const ChunkKey& key);
  LookupResult pending(RequestHandle handle, RequestState& request, Lookup lookup, LookupResult result);
  LookupResult miss(RequestState& request, std::uint32_t group, MissReason reason);
  std::optional<MissReason> may_not_wait(const RequestState& request, bool from_tier) const;
  void start_waiting(RequestHandle handle, RequestState& request);
  void stop_waiting(RequestState& request);  // gives back pins and reads
  void give_back_reads();                    // some of those that were left
  // Counts the misses of the last pass, once.
  void count_pass(RequestState& request);
  void count_scan(RequestState& request, std::span<const Lookup> scan, bool first);
  void count_misses(RequestState& request, MissReason reason, std::uint64_t tokens);
  MissReason why_missed(const RequestState& request, const Lookup& lookup) const;

  const ChunkGroups& groups_;
  HostChunks& chunks_;
  KeyMemory& memory_;
  CostModel& costs_;
  TierOps& ops_;
  LoadJobs& load_jobs_;
  Metrics& metrics_;
  const Clock& clock_;
  const LoadPolicy load_policy_;
  const Nanos lookup_deadline_;

  std::vector<RequestState> requests_;  // by handle
  std::vector<RequestHandle> free_;
  std::uint32_t last_number_ = 0;
  std::uint32_t last_wait_ = 0;
  // Reads that were awaited by who left, the oldest first. They are cancelled in parts.
  struct LeftReads {
    TierOps::Waiter waiter;
    std::map<OpId, Slot> reads;
  };
  std::deque<LeftReads> left_;
  Nanos idle_since_;  // while no request lives
  std::uint64_t step_ = 1;
  std::vector<RequestHandle> pending_;  // with a pending answer in this step
  std::vector<RequestHandle> waiting_;
  std::uint64_t longest_prompt_ = 0;
  std::vector<LookupCounts> lookup_counts_;
  std::vector<std::uint64_t> seen_in_;  // by slot, scratch of hold(): the call that saw it last
  std::uint64_t hold_call_ = 0;
};

}  // namespace kv_offload
