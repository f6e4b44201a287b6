// SPDX-License-Identifier: Apache-2.0
// Live requests, waiting and admission. See lookup.cc for the lookup of one key.
#include "cache/request_table.h"

#include <algorithm>
#include <new>
#include <utility>

#include "base/make_room.h"
#include "base/status.h"
#include "base/steps.h"

namespace kv_offload {

RequestTable::RequestTable(const Context& context, const CacheOptions& options)
    : groups_(context.groups),
      chunks_(context.chunks),
      key_history_(context.key_history),
      tickets_(context.tickets),
      costs_(context.costs),
      ops_(context.ops),
      device_loads_(context.device_loads),
      metrics_(context.metrics),
      clock_(context.clock),
      load_policy_(options.load_policy),
      lookup_timeout_(options.lookup_timeout),
      idle_since_(clock_.now()),
      lookup_counts_(groups_.size()) {}

// ---- live requests

RequestHandle RequestTable::begin(const RequestOptions& options) {
  if (free_.empty()) {
    make_room(free_, requests_.size() + 1);  // for all handles: end() needs no memory
    requests_.emplace_back();
    free_.push_back(static_cast<RequestHandle>(requests_.size() - 1));
  }
  if (live() == 0) costs_.prefill.on_idle(idle_since_, clock_.now());
  const RequestHandle handle = free_.back();
  if (++last_number_ == 0) ++last_number_;
  RequestOptions valid = options;
  valid.family = HostChunks::valid_family(options.family);
  // The last call that may throw.
  requests_[handle].begin(last_number_, valid, options.load_policy.value_or(load_policy_), groups_.size());
  requests_[handle].report.begun = clock_.now();
  free_.pop_back();
  return handle;
}

const RequestState& RequestTable::require_live(RequestHandle request) const {
  if (request >= requests_.size() || !requests_[request].live) {
    throw_invalid("request handle {} is not live; the number of live requests is {}", request, live());
  }
  return requests_[request];
}

void RequestTable::end(RequestHandle handle) {
  require_live(handle);
  try {
    count_pass(requests_[handle]);
  } catch (...) {
    release(handle);
    throw;
  }
  release(handle);
}

void RequestTable::release(RequestHandle handle) {
  stop_waiting(requests_[handle]);
  requests_[handle].report.ended = clock_.now();
  requests_[handle].end();
  free_.push_back(handle);
  if (live() == 0) idle_since_ = clock_.now();
}

void RequestTable::set_span(RequestHandle handle, std::uint32_t first_end, std::uint32_t last_end) {
  require_live(handle);
  RequestState& request = requests_[handle];
  request.has_span = true;
  request.first_end = first_end;
  request.last_end = last_end;
  longest_prompt_ = std::max<std::uint64_t>(longest_prompt_, last_end);
}

// ---- waiting

void RequestTable::start_waiting(RequestHandle handle, RequestState& request) {
  if (request.waiting || request.expired) return;
  waiting_.push_back(handle);  // first, because it may throw
  request.waiting_index = waiting_.size() - 1;
  request.waiting = true;
  request.waits_since = request.reads_since = request.pass.time;
  request.deadline = request.pass.time + lookup_timeout_ - request.waited;
}

void RequestTable::stop_waiting(RequestState& request) {
  for (const Slot slot : std::exchange(request.held, {})) chunks_.unpin(slot);
  request.report.unfinished_reads += static_cast<std::uint32_t>(request.awaited.size());
  if (!request.awaited.empty()) {
    try {
      abandoned_reads_.emplace_back();
      abandoned_reads_.back() = {request.waiter, std::move(request.awaited)};
    } catch (const std::bad_alloc&) {  // they are not cancelled
    }
    request.waiter = 0;
    request.awaited.clear();
    cancel_abandoned_reads();
  }
  if (request.waiting) {
    waiting_[request.waiting_index] = waiting_.back();
    requests_[waiting_.back()].waiting_index = request.waiting_index;
    waiting_.pop_back();
  }
  request.waiting = false;
}

void RequestTable::cancel_abandoned_reads() {
  for (std::size_t i = 0; i < kReadsCancelledPerStep && !abandoned_reads_.empty(); ++i) {
    AbandonedReads& left = abandoned_reads_.front();
    ops_.stop_awaiting(left.reads.begin()->first, left.waiter);
    left.reads.erase(left.reads.begin());
    if (left.reads.empty()) abandoned_reads_.pop_front();
  }
}

void RequestTable::end_step() {
  ++step_;
  cancel_abandoned_reads();
}

void RequestTable::expire(RequestHandle handle, MissReason reason) {
  RequestState& request = requests_[handle];
  stop_waiting(request);
  request.expired = true;
  request.expired_for = reason;
}

// In each step, vLLM looks up the first queued request, and the others only while it has room. A request
// without room waits for vLLM and not for a tier.
void RequestTable::continue_wait(RequestState& request) {
  const Nanos now = clock_.now(), since = now - request.pass.time;
  const std::uint64_t steps = step_ - request.pass.step;
  if (request.pass.pending && steps < kUnaskedSteps) request.waited += since;
  if (request.rows_since && steps > 1) *request.rows_since += since;
  if (!request.expired && now < request.deadline) return;
  const bool was_unasked = steps >= kUnaskedSteps && since >= lookup_timeout_ / 4;
  if (request.pass.pending && !was_unasked) return;
  const Nanos waited = request.waited + lookup_timeout_ / kMostWaits;
  if (waited >= lookup_timeout_) return;
  if (request.waiting) stop_waiting(request);
  request.report.waited_seconds += to_seconds(request.pass.time - request.waits_since);
  request.clear_wait();
  decltype(request.tier_lookups)().swap(request.tier_lookups);
  request.waited = waited;
}

std::vector<RequestHandle> RequestTable::take_pending() {
  std::vector<RequestHandle> pending = std::exchange(pending_, {});
  std::erase_if(pending, [&](RequestHandle handle) {
    const RequestState& request = requests_[handle];
    return !request.live || !request.waiting || request.pass.step != step_;
  });
  std::sort(pending.begin(), pending.end(),
            [&](RequestHandle a, RequestHandle b) { return requests_[a].number < requests_[b].number; });
  return pending;
}

void RequestTable::hold(RequestHandle handle, std::span<const Slot> hits) {
  RequestState& request = requests_[handle];
  make_room(request.held, hits.size() + request.awaited.size());
  ++hold_call_;
  const auto is_new = [&](Slot slot) {
    if (slot >= seen_in_.size()) seen_in_.resize(std::size_t{slot} + 1, 0);
    return std::exchange(seen_in_[slot], hold_call_) != hold_call_;
  };
  for (const Slot slot : request.held) is_new(slot);
  for (const Slot slot : hits) {
    // It may have been evicted since the lookup.
    if (chunks_.at(slot).state != ChunkState::kResident || !is_new(slot)) continue;
    chunks_.pin(slot);
    request.held.push_back(slot);
  }
}

void RequestTable::remove_held(RequestHandle handle, std::span<const Slot> slots) {
  if (slots.empty()) return;
  ++hold_call_;
  for (const Slot slot : slots) {
    if (slot < seen_in_.size()) seen_in_[slot] = hold_call_;
  }
  std::erase_if(requests_[handle].held,
                [&](Slot slot) { return slot < seen_in_.size() && seen_in_[slot] == hold_call_; });
}

void RequestTable::await(RequestHandle handle, Slot slot) {
  RequestState& request = requests_[handle];
  if (request.awaited.empty()) request.waiter = std::uint64_t{++last_wait_} << 32 | handle;
  make_room(request.held, request.awaited.size() + 1);  // for read_ended()
  const std::optional<OpId> read = ops_.await(slot, request.waiter);
  if (!read) return;
  request.awaited.emplace(*read, slot);
  ++request.fetched_for;
}

void RequestTable::continue_as_probes(RequestHandle handle, std::size_t most, Nanos now) {
  std::size_t left = 0;
  std::erase_if(requests_[handle].awaited, [&](const auto& read) {
    if (left == most || !ops_.continue_as_probe(read.second, now)) return false;
    ++left;
    return true;
  });
}

void RequestTable::close_group(RequestHandle handle, std::uint32_t group, MissReason reason) {
  requests_[handle].closed[group] = reason;
}

void RequestTable::close_all(RequestHandle handle, MissReason reason) {
  for (auto& closed : requests_[handle].closed) closed = reason;
}

void RequestTable::await_rows(RequestHandle handle) {
  RequestState& request = requests_[handle];
  if (!request.rows_since) request.rows_since = request.pass.time;
}

void RequestTable::end_row_wait(RequestHandle handle) {
  if (!requests_[handle].rows_since) return;
  requests_[handle].rows_since.reset();
  restart_load_budget(handle);
}

// Checks only the last chunks: other requests are least likely to use them.
bool RequestTable::frees_rows(const RequestState& request, const Requester& by) const {
  if (!request.awaited.empty()) {
    const Slot last = request.awaited.rbegin()->second;
    if (ops_.waiters(last) == 1 && chunks_.frees_row(by, last)) return true;
  }
  return !request.held.empty() && chunks_.frees_row(by, request.held.back());
}

bool RequestTable::rows_become_free(RequestHandle handle, std::size_t* most) const {
  const Requester by = requests_[handle].requester();
  if (device_loads_.frees_rows(by)) return true;
  return std::any_of(waiting_.begin(), waiting_.end(), [&](RequestHandle other) {
    if (*most == 0) return false;
    --*most;
    count_steps(1);
    return other != handle && !requests_[other].awaits_rows() && frees_rows(requests_[other], by);
  });
}

bool RequestTable::set_decided(RequestHandle handle, std::string_view choice) {
  requests_[handle].decided = true;
  return std::exchange(requests_[handle].counted_choice, choice) != choice;
}

void RequestTable::report_decision(RequestHandle handle, std::string_view choice, const Decision& decision) {
  RequestReport& report = requests_[handle].report;
  report.choice = choice;
  report.decided = clock_.now();
  report.load_seconds = decision.load_seconds;
  report.compute_seconds = decision.compute_seconds;
}

void RequestTable::set_load_budget(RequestHandle handle, Nanos budget, Nanos end) {
  requests_[handle].load_budget = budget;
  requests_[handle].load_budget_end = end;
}

void RequestTable::restart_load_budget(RequestHandle handle) {
  RequestState& request = requests_[handle];
  request.reads_since = request.pass.time;
  request.fetched_for = static_cast<std::uint32_t>(request.awaited.size());
  if (request.load_budget > Nanos(0)) request.load_budget_end = request.reads_since + request.load_budget;
}

static void count_read(RequestReport* report, const TierIo::ReadEnd& end) {
  if (!end.arrived && !end.failed) {
    ++report->unfinished_reads;
    return;
  }
  RequestReport::Reads& reads = report->reads[end.tier];
  const bool is_first = reads.arrived + reads.failed == 0;
  reads.begin = is_first ? end.submitted : std::min(reads.begin, end.submitted);
  reads.end = std::max(reads.end, end.ended);
  reads.bytes += end.bytes;
  ++(end.arrived ? reads.arrived : reads.failed);
  if (end.failed) reads.failure = *end.failed;
}

void RequestTable::read_ended(TierIo::Waiter waiter, const TierIo::ReadEnd& end) {
  RequestState& request = requests_[static_cast<RequestHandle>(waiter)];
  if (request.waiter != waiter) return;  // the request has stopped waiting
  request.awaited.erase(end.op);
  count_read(&request.report, end);
  if (end.arrived) {
    chunks_.pin(end.slot);
    request.held.push_back(end.slot);
  } else if (end.failed && !(end.failed == MissReason::kEvicted && request.waits_for_remote())) {
    try {
      request.failed.try_emplace(KeyHistory::fingerprint(end.key), *end.failed);
    } catch (const std::bad_alloc&) {  // the chunk may be fetched again for it
    }
  }
}

bool RequestTable::has_pending_work() const {
  if (!abandoned_reads_.empty()) return true;  // else these reads would run on while no request arrives
  return std::any_of(waiting_.begin(), waiting_.end(), [&](RequestHandle handle) {
    const RequestState& request = requests_[handle];
    if (!request.awaited.empty()) return true;
    // Looked up in this step and not planned yet.
    const LookupPass& pass = request.pass;
    return pass.pending && pass.step == step_ &&
           std::any_of(pass.lookups.begin(), pass.lookups.end(), [](const Lookup& lookup) {
             return lookup.kind == Lookup::Kind::kRecorded || lookup.kind == Lookup::Kind::kUnknown;
           });
  });
}

void RequestTable::forget() {
  for (RequestState& request : requests_) {
    request.has_span = false;
    request.failed.clear();
    request.offers.clear_declined();
    request.clear_wait();
    request.pass.release();
  }
  waiting_.clear();
  pending_.clear();
  abandoned_reads_.clear();
}

// ---- admission

void RequestTable::admit(RequestHandle handle) {
  RequestState& request = requests_[handle];
  count_pass(request);
  request.pass.release();
  decltype(request.tier_lookups)().swap(request.tier_lookups);  // frees its buckets, too
  request.has_span = false;  // vLLM may ask about it again from another position
  request.waited = Nanos(0);
  request.counted_choice = {};
  if (!request.waiting && !request.expired) return;
  request.report.waited_seconds += request.waited_seconds();
  stop_waiting(request);
  request.clear_wait();
}

void RequestTable::preempt(RequestHandle handle) {
  if (requests_[handle].pass.step != step_) admit(handle);
}

DeviceLoads::Load RequestTable::load_of(RequestHandle handle) const {
  const RequestState& request = requests_[handle];
  DeviceLoads::Load load;
  load.id = {handle, request.number, request.report.load_count};
  load.priority = request.priority();
  load.tenant = request.options.tenant;
  load.family = request.options.family;
  load.returns_at = request.returns_at(chunks_.now());
  load.first_end = request.first_end;
  load.last_end = request.last_end;
  load.waited_seconds = request.waited_seconds();
  load.began = request.pass.step == step_ ? request.pass.time : clock_.now();
  return load;
}

void RequestTable::end_load(const DeviceLoads::LoadId& load) {
  RequestState& request = requests_[load.handle];
  if (request.number == load.request && load.index < RequestReport::kLoads)
    request.report.loads[load.index].end = clock_.now();
}

void RequestTable::admit_load(RequestHandle handle, std::span<const ChunkKey> keys,
                              const DeviceLoads::Begun& load) {
  RequestState& request = requests_[handle];
  std::size_t end = 0;
  for (std::uint32_t group = 0; group < groups_.size(); ++group) {
    const std::size_t begin = std::exchange(end, end + load.transfer.group_rows[group]);
    if (begin == end) continue;
    const ChunkKey& last = keys[end - 1];
    request.offers.set_last(group, last, chunks_.find(last)->depth);
    if (request.options.family == 0) continue;  // without hints about its session
    // A chain is found from its last chunk; the chunks of a window are held one by one.
    const bool is_chain = groups_[group].full_attention;
    for (std::size_t i = is_chain ? end - 1 : begin; i < end; ++i)
      request.offers.hold(group, chunk_id(keys[i]));
  }
  for (std::size_t place = 0; place < load.hit_tokens.size(); ++place) {
    const std::uint64_t tokens = load.hit_tokens[place];
    if (tokens == 0) continue;
    const std::string_view tier = place == 0                           ? "cpu"
                                  : place == RequestReport::kNeighbour ? kNeighbourPlace
                                                                       : ops_.name(place - 1);
    request.report.hit_tokens[place] += tokens;
    metrics_.add("kv_offload_hit_tokens_total", {tier}, static_cast<double>(tokens));
    metrics_.add("kv_offload_lookup_tokens_total", {}, static_cast<double>(tokens));
    if (chunks_.tenants() != nullptr) {
      metrics_.add("kv_offload_tenant_hit_tokens_total", {chunks_.tenant_name(request.options.tenant), tier},
                   static_cast<double>(tokens));
    }
  }
  for (std::size_t number = 0; number < load.neighbour_tokens.size(); ++number) {
    const std::uint64_t tokens = load.neighbour_tokens[number];
    if (tokens == 0) continue;
    request.report.neighbour_tokens[number] += tokens;
    metrics_.add("kv_offload_neighbour_hit_tokens_total", {fmt::format("{}", number)},
                 static_cast<double>(tokens));
  }
  admit(handle);
  // The report has times of the first loads only, but counts all of them.
  RequestReport& report = request.report;
  if (report.load_count < RequestReport::kLoads) report.loads[report.load_count].begin = clock_.now();
  ++report.load_count;
}

}  // namespace kv_offload
