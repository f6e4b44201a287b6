// SPDX-License-Identifier: Apache-2.0
// Planner: decides what is fetched for waiting requests and how long each of them waits: load or recompute.
// It plans once per step, for all requests that got kPending.
//
// Invariant: a plan holds no resources itself. Rows belong to fetching chunks (HostChunks), reads to ops
// (TierIo), pins and waits to requests (RequestTable), and those classes release them.
//
// A request that is short of rows gets the beginning of its prompt. Rows are taken from the left, and as a
// last resort from its own hits further to the right, which are worthless without the beginning.
//
// Rows that other requests hold become free when those have loaded their chunks. A request waits for them
// until its deadline, and no longer than computing takes. Until it has all of them it keeps those that it
// got, and requests of its tenant that arrived later get none. It waits only while another request holds rows
// that its tenant may take, and does not wait for rows itself. Otherwise the request takes the rows that are
// free: requests that hold parts of what they need do not wait for each other. The requests that wait for
// rows have a bounded number of lookups together, because vLLM repeats them in each step.
//
// For each request, first those of tenants below their shares, in order of arrival: decide once per wait;
// take rows for the reads, or trim the plan to the rows available; read; hold the chunks that it already hit.
// The first group (in lookup order) that has to wait is read; later groups are not read in this step, so that
// nothing is read beyond the agreed prefix. Groups with full attention are read together.
//
// A request waits until its deadline, or until its load budget is spent. Then recomputing is cheaper than
// waiting longer, unless the reads that have arrived indicate otherwise.
//
// Threads: one (the scheduler's).
#pragma once

#include <bitset>
#include <cstdint>
#include <optional>

#include "base/clock.h"
#include "cache/chunk_groups.h"
#include "cache/cost_model.h"
#include "cache/host_chunks.h"
#include "cache/pass_scans.h"
#include "cache/request_table.h"
#include "cache/row_provider.h"
#include "cache/tier_io.h"
#include "metrics/metrics.h"

namespace kv_offload {

class Planner {
 public:
  // Dependencies; all of them outlive this.
  struct Context {
    const ChunkGroups& groups;
    HostChunks& chunks;
    CostModel& costs;
    TierIo& ops;
    RowProvider& row_provider;
    RequestTable& requests;
    Metrics& metrics;
  };
  explicit Planner(const Context& context) : context_(context) {}

  // Call at the end of a step: ends the waits that are over, then plans for the others.
  void plan_step(Nanos now);

 private:
  void expire(RequestHandle handle, Nanos now);
  // The load budget is spent. Extends it and returns true if the rest arrives sooner than it can be
  // recomputed.
  bool extend_load_budget(RequestHandle handle, Nanos now);
  void plan(RequestHandle handle);
  // Reduces `scans` to the chunks to fetch and closes the groups that are cut. Postpones the decision if less
  // than everything known so far would be fetched and more keys become known soon.
  void decide(RequestHandle handle, Scans& scans);
  Decision decide_by_cost(const RequestState& request, const Scans& scans, const Loadable& loadable);
  void report(RequestHandle handle, const Decision& decision);
  void set_load_budget(RequestHandle handle, const Decision& decision);
  // Reads the first chunks from tiers that are currently not used. The chunks are useful, but no request
  // waits for them.
  void probe(const RequestState& request, const Scan& scan);
  // False: the request waits for rows.
  bool fetch(RequestHandle handle, const Scan& scan);
  bool may_wait_for_rows(RequestHandle handle);
  TenantId tenant_of(RequestHandle handle) const { return context_.requests.at(handle).options.tenant; }
  // The request's own hits after a candidate in its prefix, which may be evicted to free rows.
  class Tail;
  // Takes a row for a chunk to fetch; nullopt if there is none.
  std::optional<TierIo::Read> make_fetch(const RequestState& request, std::uint32_t group,
                                         const Scan::Candidate& candidate);

  const Context context_;
  // Of this step:
  // By tenant: by a request that was planned before.
  std::bitset<TenantShares::kMaxTenants> rows_are_awaited_;
  std::size_t checks_ = 0;   // requests that may still be checked for rows that become free
  std::size_t lookups_ = 0;  // of the requests that wait for rows
};

}  // namespace kv_offload
