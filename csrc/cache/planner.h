// Planner: what is fetched for the requests that wait, and how long each waits for it:
// load or recompute. Plans are made once a step, for all that were told kPending.
//
// Invariant: what a plan takes is given back by others: rows are chunks that fetch
// (HostChunks), reads are ops (TierOps), pins and waits are a request's (Requests).
// Between two steps a plan is nothing but those; this holds none of them.
//
// Where rows run out, a request has the beginning of its prompt: rows are taken from the left, and in the end
// from what it hit itself further to the right, which is worth nothing without them.
//
// Per request, in the order in which they arrived: decide once per wait; take rows for
// the reads, or trim the plan to what fits; read; hold what it already hit. Groups after
// the first one (in lookup order) that has to wait are not read in this step, so that
// nothing is read that the agreed prefix does not need; groups with full attention are
// read together.
//
// A request waits no longer than its deadline, and no longer than its load budget: once
// that is spent, computing is cheaper than waiting on, unless the reads that arrived
// say otherwise.
//
// Threads: one (the scheduler's).
#pragma once

#include <cstdint>
#include <optional>

#include "base/clock.h"
#include "cache/chunk_groups.h"
#include "cache/cost_model.h"
#include "cache/host_chunks.h"
#include "cache/pass_scans.h"
#include "cache/requests.h"
#include "cache/row_supply.h"
#include "cache/tier_ops.h"
#include "metrics/metrics.h"

namespace kv_offload {

class Planner {
 public:
  // What it works with; all of it outlives this.
  struct Context {
    const ChunkGroups& groups;
    HostChunks& chunks;
    CostModel& costs;
    TierOps& ops;
    RowSupply& row_supply;
    Requests& requests;
    Metrics& metrics;
  };
  explicit Planner(const Context& context) : with_(context) {}

  // At the end of a step: waits that are over, then plans for those that are not.
  void plan_step(Nanos now);

 private:
  void expire(RequestHandle handle, Nanos now);
  // The load budget is spent: does it get the rest sooner by waiting on? Then it has a new one.
  bool extend_load_budget(RequestHandle handle, Nanos now);
  void plan(RequestHandle handle);
  // Leaves in `scans` what is to be fetched; closes the groups of which not all is. Nothing is decided where
  // less than all would be fetched of what is known so far, and more is to be known soon.
  void decide(RequestHandle handle, Scans& scans);
  Decision ask_costs(const RequestState& request, const Scans& scans, const Loadable& loadable);
  void report(RequestHandle handle, const Decision& decision);
  void set_load_budget(RequestHandle handle, const Decision& decision);
  // Reads the first chunks from tiers that are not used at present. They are worth
  // having, but nobody is told to wait for them.
  void probe(const RequestState& request, const Scan& scan);
  void fetch(RequestHandle handle, const Scan& scan);
  // What it hit of a prefix behind a place in its lookups, kept no longer from eviction.
  class Tail;
  // A chunk that is fetched; nothing when there is no row for it.
  std::optional<TierOps::Read> make_fetch(const RequestState& request, std::uint32_t group,
                                          const Scan::Candidate& candidate);
  std::optional<TierOps::Read> make_fetch(const RequestState& request, const Scan& scan,
                                          const Scan::Candidate& candidate, Tail* tail);

  const Context with_;
};

}  // namespace kv_offload
