// SPDX-License-Identifier: Apache-2.0
#include "cache/planner.h"

#include <algorithm>
#include <string_view>
#include <unordered_set>
#include <utility>

#include "cache/planned_reads.h"

namespace kv_offload {
namespace {

constexpr std::uint32_t kProbeChunks = 8;  // several sizes in one queue, to separate latency from rate
constexpr double kDeadlineShare = 0.8;     // share of the remaining time that a plan may use
constexpr Nanos kMinLoadBudget = std::chrono::milliseconds(5);
constexpr std::size_t kChecksPerStep = 4096;
// vLLM looks up all chunks of requests that wait in each step: this many take some tens of milliseconds.
constexpr std::size_t kMostLookups = 65536;

std::string_view to_string(Decision::Choice choice) {
  switch (choice) {
    case Decision::Choice::kLoad:
      return "load";
    case Decision::Choice::kPartial:
      return "partial";
    case Decision::Choice::kRecompute:
      return "recompute";
  }
  return "unknown";
}

Nanos to_nanos(double seconds) {
  return std::chrono::duration_cast<Nanos>(std::chrono::duration<double>(seconds));
}

}  // namespace

void Planner::plan_step(Nanos now) {
  const std::vector<RequestHandle>& waiting = context_.requests.waiting();
  for (std::size_t i = waiting.size(); i-- > 0;) expire(waiting[i], now);  // erases at most this one
  rows_are_awaited_.reset();
  checks_ = kChecksPerStep;
  lookups_ = 0;
  std::vector<RequestHandle> pending = context_.requests.take_pending();
  if (const TenantShares* shares = context_.chunks.tenants()) {
    std::stable_partition(pending.begin(), pending.end(),
                          [&](RequestHandle handle) { return shares->excess(tenant_of(handle)) < 0; });
  }
  for (const RequestHandle handle : pending) plan(handle);
}

// ---- expired waits

void Planner::expire(RequestHandle handle, Nanos now) {
  const RequestState& request = context_.requests.at(handle);
  const bool late = now >= request.deadline;
  const Nanos budget_end = request.load_budget_end;
  // Without rows nothing is read. See may_wait_for_rows.
  const bool too_slow = budget_end > Nanos(0) && now >= budget_end && !request.awaits_rows() &&
                        !extend_load_budget(handle, now);
  if (!late && !too_slow) return;
  const bool lacks_rows = request.awaits_rows() && request.awaited.empty();
  // The oldest read, because the fewest bytes were ahead of it.
  if (!request.awaited.empty()) context_.ops.on_overdue(request.awaited.begin()->second, now);
  if (!late) {
    // The timeout does not show why the reads were slow: the first of them continue as probes and measure it.
    context_.metrics.add("kv_offload_decisions_total", {"give_up"});
    context_.requests.continue_as_probes(handle, kProbeChunks, now);
  }
  const MissReason of_late = lacks_rows ? MissReason::kPressure : MissReason::kDeadline;
  context_.requests.expire(handle, late ? of_late : MissReason::kRecomputeCheaper);
}

bool Planner::extend_load_budget(RequestHandle handle, Nanos now) {
  const RequestState& request = context_.requests.at(handle);
  const std::size_t missing = request.awaited.size();
  if (missing == 0) return true;  // all arrived, but not looked up again yet
  if (request.fetched_for <= missing) return false;
  const std::size_t arrived = request.fetched_for - missing;
  const double so_far = to_seconds(now - request.reads_since);
  const double rest = so_far / static_cast<double>(arrived) * static_cast<double>(missing);
  const std::uint32_t group = context_.chunks.at(request.awaited.begin()->second).group;
  const double tokens = context_.groups[group].tokens;
  const double before = context_.groups.tokens_before(group, request.first_end);
  const double compute = context_.costs.prefill.seconds(static_cast<double>(missing) * tokens,
                                                        before + static_cast<double>(arrived) * tokens);
  if (rest >= compute) return false;
  context_.requests.set_load_budget(handle, request.load_budget,
                                    now + std::max(kMinLoadBudget, to_nanos(rest)));
  return true;
}

// ---- plans

void Planner::plan(RequestHandle handle) {
  const RequestState& request = context_.requests.at(handle);
  const Scans scans = scans_of(request.pass, context_.groups, context_.chunks);
  // Chunks that the request already hit must still be there when the rest has arrived, and must not be
  // evicted for the rest.
  for (const Scan& scan : scans) {
    context_.requests.hold(handle, scan.hits);
    for (const Slot slot : scan.fetching) context_.requests.await(handle, slot);
  }
  if (request.pass.awaits) context_.requests.restart_load_budget(handle);
  const auto first = std::find_if(scans.begin(), scans.end(), [](const Scan& scan) { return scan.pending; });
  Scans chosen;
  for (auto scan = first; scan != scans.end(); ++scan) {
    if (scan->candidates.empty() || request.closed[scan->group]) continue;
    const bool together =
        context_.groups[first->group].full_attention && context_.groups[scan->group].full_attention;
    if (scan == first || together) chosen.push_back(*scan);
  }
  if (!chosen.empty()) decide(handle, chosen);
  const std::uint64_t most = chosen.empty() || !chosen.front().is_prefix ? 0 : request.load_tokens;
  if (most > 0) keep_first(&chosen, most, request.pass, context_.groups);
  bool has_rows = true;
  for (const Scan& scan : chosen) has_rows &= fetch(handle, scan);
  if (!has_rows) {
    lookups_ += request.pass.lookups.size();
    return context_.requests.await_rows(handle);
  }
  context_.requests.end_row_wait(handle);
  if (most == 0) return;
  for (const Scan& scan : chosen) {
    if (!request.closed[scan.group])
      context_.requests.close_group(handle, scan.group, MissReason::kRecomputeCheaper);
  }
  context_.requests.set_load_tokens(handle, 0);
}

std::optional<TierIo::Read> Planner::make_fetch(const RequestState& request, std::uint32_t group,
                                                const Scan::Candidate& candidate) {
  const RowId row = context_.row_provider.take(group, request.requester(), nullptr);
  if (row == kNoRow) return std::nullopt;
  FreeRow free_row(context_.chunks, row);
  const auto& [key, part_tokens] = request.pass.keys[candidate.key];
  // The depth of a whole chunk is unknown. For a part, any depth that is not a chunk boundary will do.
  const EntryInfo entry_info = request.entry_info(candidate.parent, part_tokens);
  const Slot slot = context_.chunks.insert_fetching(key, group, row, entry_info);
  free_row.keep();
  context_.chunks.claim(slot, request.options.family, true);
  return TierIo::Read{slot, candidate.tier};
}

// The chunks that a request hit after those it still has to read, last one first.
class Planner::Tail {
 public:
  Tail(const Context& context, RequestHandle handle) : context_(context), handle_(handle) {}
  ~Tail() { context_.requests.remove_held(handle_, evicted_); }
  Tail(const Tail&) = delete;
  Tail& operator=(const Tail&) = delete;

  // Evicts a chunk after the candidate. False if there is none.
  bool evict_last_hit(const Scan& scan, const Scan::Candidate& candidate) {
    if (!scan.is_prefix) return false;
    if (!std::exchange(gathered_, true)) gather(scan, candidate.at);
    while (!hits_.empty()) {
      const auto [place, slot] = hits_.back();
      if (place < candidate.at) return false;
      hits_.pop_back();
      const ChunkEntry& entry = context_.chunks.at(slot);
      if (entry.state != ChunkState::kResident || entry.pins > 1) continue;  // in use by another request
      if (context_.chunks.is_read_by_neighbour(slot)) continue;
      evicted_.push_back(slot);
      // Unpin only now: an unpinned chunk could be evicted for a candidate while a later chunk remains.
      context_.chunks.unpin(slot);
      context_.row_provider.evict_chunk(slot);
      return true;
    }
    return false;
  }

 private:
  // Only hits that the request holds. Another plan of this step may have evicted other hits, and their slots
  // may belong to chunks of another request by now.
  void gather(const Scan& scan, std::uint32_t after) {
    const RequestState& request = context_.requests.at(handle_);
    std::unordered_set<Slot> held(request.held.begin(), request.held.end());
    for (std::uint32_t i = after; i < scan.end; ++i) {
      const Lookup& lookup = request.pass.lookups[i];
      if (lookup.kind == Lookup::Kind::kHit && held.erase(lookup.index) > 0)
        hits_.emplace_back(i, lookup.index);
    }
  }

  const Context& context_;
  const RequestHandle handle_;
  bool gathered_ = false;
  std::vector<std::pair<std::uint32_t, Slot>> hits_;  // index in the lookups; pinned by the request
  std::vector<Slot> evicted_;
};

// Time in which vLLM does not look up the request does not count: it would not be computed then.
bool Planner::may_wait_for_rows(RequestHandle handle) {
  const RequestState& request = context_.requests.at(handle);
  const Nanos most = std::max(request.load_budget, to_nanos(request.report.compute_seconds));
  if (request.rows_since && request.load_budget > Nanos(0) && request.pass.time - *request.rows_since >= most)
    return false;
  if (lookups_ > 0 && lookups_ + request.pass.lookups.size() > kMostLookups) return false;
  return rows_are_awaited_[tenant_of(handle)] || context_.requests.rows_become_free(handle, &checks_);
}

bool Planner::fetch(RequestHandle handle, const Scan& scan) {
  const RequestState& request = context_.requests.at(handle);
  Tail tail(context_, handle);
  PlannedReads planned(context_.chunks, context_.ops, scan.candidates.size());
  bool rows_are_short = false, waits = false, may_wait = true;
  for (const Scan::Candidate& candidate : scan.candidates) {
    // Another plan of this step has begun to fetch it.
    if (const ChunkEntry* entry = context_.chunks.find(request.pass.keys[candidate.key].key)) {
      context_.requests.await(handle, context_.chunks.slot_of(entry));
      continue;
    }
    std::optional<TierIo::Read> read;
    if (!rows_are_awaited_[tenant_of(handle)]) read = make_fetch(request, scan.group, candidate);
    if (!read && may_wait) waits = may_wait = may_wait_for_rows(handle);
    while (!read && !waits && tail.evict_last_hit(scan, candidate))
      read = make_fetch(request, scan.group, candidate);
    rows_are_short = !read;
    if (rows_are_short) break;
    planned.add(*read);
  }
  if (rows_are_short) {
    if (waits) rows_are_awaited_.set(tenant_of(handle));
    if (!waits) context_.requests.close_group(handle, scan.group, MissReason::kPressure);
    // Leave rows for the windows of the other groups: without them these reads are useless.
    const std::size_t before = request.rows_since ? scan.hits.size() + scan.fetching.size() : 0;
    std::size_t spared = context_.groups.size() > 1 ? (before + planned.size() + 3) / 4 : 0;
    for (spared = std::min(spared, planned.size()); spared > 0; --spared) planned.discard_last();
  }
  for (const TierIo::Read& read : planned.submit(request.deadline, false))
    context_.requests.await(handle, read.slot);
  return !waits;
}

// ---- load or recompute

void Planner::decide(RequestHandle handle, Scans& scans) {
  const RequestState& request = context_.requests.at(handle);
  // The next request to get rows, which has read nothing: since its decision, tiers may have become slower,
  // and less time is left.
  const bool is_next =
      request.awaits_rows() && request.fetched_for == 0 && !rows_are_awaited_[tenant_of(handle)];
  if (request.decided && !is_next) return;
  if (request.load_policy != LoadPolicy::kAuto) {
    if (context_.requests.set_decided(handle, "load"))
      context_.metrics.add("kv_offload_decisions_total", {"load"});
    return;
  }
  const Scan first = scans.front();  // complete, because the part that is cut may be probed
  const Loadable loadable = loadable_of(request.pass, scans, context_.groups);
  const Decision decision = decide_by_cost(request, scans, loadable);
  if (decision.choice != Decision::Choice::kLoad && first.ends_unknown && !request.pass.awaits) {
    for (Scan& scan : scans) scan.candidates.clear();
    return;
  }
  report(handle, decision);
  if (decision.choice == Decision::Choice::kRecompute) {
    context_.requests.close_all(handle, MissReason::kRecomputeCheaper);
    for (Scan& scan : scans) scan.candidates.clear();
  } else {
    set_load_budget(handle, decision);
  }
  const bool is_partial = decision.choice == Decision::Choice::kPartial;
  const std::uint64_t chunks = std::uint64_t{loadable.hits_before} + decision.chunks;
  context_.requests.set_load_tokens(handle, is_partial ? chunks * context_.groups[first.group].tokens : 0);
  if (!rows_are_awaited_[tenant_of(handle)]) probe(request, first);
}

Decision Planner::decide_by_cost(const RequestState& request, const Scans& scans, const Loadable& loadable) {
  std::vector<double> hints(context_.ops.size(), 0);
  for (const Stretch& stretch : loadable.stretches) {
    if (stretch.tier >= 0)
      hints[static_cast<std::size_t>(stretch.tier)] += static_cast<double>(stretch.bytes);
  }
  for (std::size_t tier = 0; tier < hints.size(); ++tier) {
    if (hints[tier] <= 0) continue;
    hints[tier] = context_.ops.estimate_read_seconds(tier, static_cast<std::uint64_t>(hints[tier]));
  }
  const std::uint32_t group = scans.front().group;
  CostModel::DecisionInput input;
  input.by = context_.chunks.reader(request.options.tenant);
  input.stretches = loadable.stretches;
  input.hints = hints;
  input.context = context_.groups.tokens_before(group, request.first_end) +
                  loadable.hits_before * static_cast<double>(context_.groups[group].tokens);
  input.loads_anyway = loadable.hits_before > 0;
  input.deadline_seconds = kDeadlineShare * to_seconds(request.deadline - request.pass.time);
  input.divisible = scans.front().is_prefix;  // a window is needed as a whole
  return context_.costs.decide(input);
}

void Planner::report(RequestHandle handle, const Decision& decision) {
  const std::string_view choice = to_string(decision.choice);
  context_.requests.report_decision(handle, choice, decision);
  if (!context_.requests.set_decided(handle, choice)) return;
  context_.metrics.add("kv_offload_decisions_total", {choice});
  if (decision.load_seconds <= 0 || decision.compute_seconds <= 0) return;
  context_.metrics.add("kv_offload_estimated_seconds_total", {choice, "load"}, decision.load_seconds);
  context_.metrics.add("kv_offload_estimated_seconds_total", {choice, "compute"}, decision.compute_seconds);
}

// A tier that is slower than estimated costs at most the compute time, and usually a quarter of it. While
// reads arrive, see extend_load_budget.
void Planner::set_load_budget(RequestHandle handle, const Decision& decision) {
  if (decision.compute_seconds <= 0) return;
  const double compute = decision.compute_seconds;
  const double seconds = std::clamp(2 * decision.load_seconds, compute / 4, compute);
  const Nanos budget = std::max(kMinLoadBudget, to_nanos(seconds));
  context_.requests.set_load_budget(handle, budget, context_.requests.at(handle).pass.time + budget);
}

void Planner::probe(const RequestState& request, const Scan& scan) {
  for (std::size_t tier = 0; tier < context_.ops.size(); ++tier) {
    const bool holds = std::any_of(scan.candidates.begin(), scan.candidates.end(),
                                   [&](const auto& candidate) { return candidate.tier == tier; });
    if (!holds || !context_.costs.should_probe(tier, request.pass.time)) continue;
    PlannedReads planned(context_.chunks, context_.ops, kProbeChunks);
    for (const Scan::Candidate& candidate : scan.candidates) {
      if (candidate.tier != tier || planned.size() == kProbeChunks) continue;
      if (context_.chunks.find(request.pass.keys[candidate.key].key) != nullptr) continue;
      const auto read = make_fetch(request, scan.group, candidate);
      if (!read) break;
      planned.add(*read);
    }
    (void)planned.submit(Nanos(0), true);
    context_.metrics.add("kv_offload_decisions_total", {"probe"});
  }
}

}  // namespace kv_offload
