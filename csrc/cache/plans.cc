// Plans: what waiting requests get fetched, made once at the end of each step.
#include <algorithm>

#include "cache/cache_impl.h"

namespace kv_offload {

void TieredCache::end_step() {
  Impl& impl = *impl_;
  if (impl.closed) return;
  impl.poll_tiers();
  impl.poll_loads();
  impl.quarantine.poll([&](Ticket ticket, TicketKind kind) { return impl.is_reported(ticket, kind); });
  std::sort(impl.asked.begin(), impl.asked.end(), [&](RequestHandle a, RequestHandle b) {
    return impl.requests[a].number < impl.requests[b].number;
  });
  const Nanos now = impl.clock.now();
  impl.costs.prefill.end_step(now);
  impl.expire_deadlines(now);
  for (const RequestHandle handle : impl.asked) {
    RequestState& request = impl.requests[handle];
    if (request.live && request.waiting && request.pass_step == impl.step) impl.plan(handle, request);
  }
  impl.asked.clear();
  impl.ask_for_unknown();
  impl.clean_cold_end();
  impl.flush_tallies();
  ++impl.step;
  impl.polled_in_step = false;
}

void TieredCache::Impl::expire_deadlines(Nanos now) {
  for (std::size_t i = waiting.size(); i-- > 0;) {
    const RequestHandle handle = waiting[i];
    RequestState& request = requests[handle];
    const bool late = now >= request.deadline;
    const bool dear = request.patience > Nanos(0) && now >= request.patience && !waits_on(request, now);
    if (!late && !dear) continue;
    if (!request.awaited.empty()) {  // the oldest: the fewest bytes were ahead of it
      const Op& op = ops.at(fetches.at(request.awaited.front()));
      costs.note_overdue_read(op.tier, op.bytes_ahead, to_seconds(now - op.submitted), now);
    }
    if (!late) give_up(request, now);
    stop_waiting(handle, request);
    request.expired = true;
    request.expired_for = late ? MissReason::kDeadline : MissReason::kRecomputeCheaper;
  }
}

// The last scan of each group, in lookup order. A miss that is followed by more
// lookups of the same scan is one of a window group, which is scanned from the
// right: what was seen before it lies in no whole window and is not needed.
TieredCache::Impl::Scans TieredCache::Impl::scans_of(const RequestState& request) {
  using Kind = Sight::Kind;
  Scans scans;
  const std::vector<Sight>& pass = request.pass;
  for (std::size_t begin = 0, end = 0; begin < pass.size(); begin = end) {
    const std::uint16_t group = pass[begin].group;
    while (end < pass.size() && pass[end].group == group) ++end;
    std::erase_if(scans, [&](const auto& scan) { return scan.first == group; });
    Scan& scan = scans.emplace_back(group, Scan{}).second;
    ChunkId before = 0;
    // Where vLLM does not say which groups have a window, those come after the others.
    scan.is_prefix = groups[group].full_attention || (options.full_attention.empty() && scans.size() == 1);
    for (std::size_t i = begin; i < end; ++i) {
      const Sight& sight = pass[i];
      switch (sight.kind) {
        case Kind::kHit:
          scan.hits.push_back(sight.index);
          break;
        case Kind::kFetching:
          scan.fetching.push_back(sight.index);
          break;
        case Kind::kRecorded:
          scan.candidates.push_back({sight.index, sight.detail, before});
          break;
        case Kind::kMiss:
          if (i + 1 < end && !groups[group].full_attention) scan = Scan{};  // and no prefix
          break;
        case Kind::kFilling:
        case Kind::kUnknown:
          break;
      }
      scan.pending |= sight.kind != Kind::kHit && sight.kind != Kind::kMiss;
      before = groups[group].full_attention ? seen_chunk(request, sight) : 0;
    }
    scan.begin = static_cast<std::uint32_t>(begin);
    scan.end = static_cast<std::uint32_t>(end);
  }
  return scans;
}

ChunkId TieredCache::Impl::seen_chunk(const RequestState& request, const Sight& sight) {
  switch (sight.kind) {
    case Sight::Kind::kHit:
    case Sight::Kind::kFilling:
    case Sight::Kind::kFetching:  // its slot may have been given away since: then of no state
      return index.at(sight.index).state == ChunkState::kAbsent ? 0 : chunk_id(index.at(sight.index).key);
    case Sight::Kind::kRecorded:
      return chunk_id(request.pass_keys[sight.index]);
    case Sight::Kind::kUnknown:
    case Sight::Kind::kMiss:
      break;
  }
  return 0;
}

void TieredCache::Impl::plan(RequestHandle handle, RequestState& request) {
  const auto scans = scans_of(request);
  // What it hit must still be there when the rest has arrived; and no row for
  // the rest may come from it.
  for (const auto& [group, scan] : scans) {
    hold_hits(request, scan.hits);
    for (const Slot slot : scan.fetching) await(handle, request, slot);
  }
  const auto first = std::find_if(scans.begin(), scans.end(), [](const auto& s) { return s.second.pending; });
  if (first == scans.end()) return;
  Scans chosen;
  for (auto it = first; it != scans.end(); ++it) {
    if (it->second.candidates.empty() || request.closed[it->first]) continue;
    const bool together = groups[first->first].full_attention && groups[it->first].full_attention;
    if (it == first || together) chosen.push_back(*it);
  }
  if (chosen.empty()) return;
  decide(request, chosen);
  for (const auto& [group, scan] : chosen) fetch(handle, request, group, scan.candidates);
}

void TieredCache::Impl::hold_hits(RequestState& request, const std::vector<Slot>& hits) {
  ++mark;
  const auto first_time = [&](Slot slot) {
    if (slot >= marks.size()) marks.resize(std::size_t{slot} + 1, 0);
    return std::exchange(marks[slot], mark) != mark;
  };
  for (const Slot slot : request.held) first_time(slot);
  for (const Slot slot : hits) {
    // It may have been evicted since it was looked up.
    if (index.at(slot).state != ChunkState::kResident || !first_time(slot)) continue;
    index.pin(slot);
    request.held.push_back(slot);
  }
}

void TieredCache::Impl::await(RequestHandle handle, RequestState& request, Slot slot) {
  const auto fetch = fetches.find(slot);
  if (fetch == fetches.end()) return;
  auto& waiters = ops.at(fetch->second).waiters;
  const bool known = std::any_of(waiters.begin(), waiters.end(),
                                 [&](const Waiter& waiter) { return waiter.request == handle; });
  if (known) return;
  waiters.push_back({handle, request.number});
  request.awaited.push_back(slot);
  ++request.fetched_for;
}

void TieredCache::Impl::fetch(RequestHandle handle, RequestState& request, std::uint32_t group,
                              std::span<const Scan::Candidate> candidates) {
  std::vector<std::pair<Slot, std::uint8_t>> planned;
  for (const auto& candidate : candidates) {
    const ChunkKey& key = request.pass_keys[candidate.key];
    if (const ChunkEntry* entry = index.find(key)) {  // another plan of this step took it up
      await(handle, request, index.slot_of(entry));
      continue;
    }
    const RowId row = take_row(group, request.number, nullptr);
    if (row == kNoRow) {
      request.closed[group] = MissReason::kPressure;
      break;
    }
    const Slot slot = insert(key, group, row, request.about(candidate.parent, 0), ChunkState::kFetching);
    planned.push_back({slot, candidate.tier});
  }
  if (request.closed[group] == MissReason::kPressure && groups.size() > 1) {
    // Rows are short. The windows of the other groups need rows too, or all of this is in vain.
    std::size_t give_back = (planned.size() + 3) / 4;
    for (; give_back > 0; --give_back) {
      free_row(take_out(planned.back().first));
      planned.pop_back();
    }
  }
  submit_reads(planned, request.deadline, false);
  for (const auto& [slot, tier] : planned) await(handle, request, slot);
}

void TieredCache::Impl::submit_reads(const std::vector<std::pair<Slot, std::uint8_t>>& planned,
                                     Nanos deadline, bool probe) {
  const Nanos now = clock.now();
  std::vector<std::vector<TierOp>> batches(tiers.size());
  for (const auto& [slot, tier] : planned) {
    TierOp order = make_op(OpKind::kRead, tier, slot);
    order.deadline = deadline;
    Op& op = ops.at(order.id);
    op.probe = probe;
    op.submitted = now;
    costs.note_submitted(tier, static_cast<double>(groups[op.group].bytes));
    op.bytes_ahead = costs.waiting_bytes(tier);
    batches[tier].push_back(std::move(order));
  }
  for (std::size_t tier = 0; tier < tiers.size(); ++tier) {
    if (!batches[tier].empty()) tiers[tier]->submit(std::move(batches[tier]));
  }
}

bool TieredCache::has_pending_work() const {
  const Impl& impl = *impl_;
  if (impl.closed) return false;
  return std::any_of(impl.waiting.begin(), impl.waiting.end(), [&](RequestHandle handle) {
    const RequestState& request = impl.requests[handle];
    if (!request.awaited.empty()) return true;
    // Asked in this step, not planned yet.
    return request.pass_pending && request.pass_step == impl.step &&
           std::any_of(request.pass.begin(), request.pass.end(), [](const Sight& sight) {
             return sight.kind == Sight::Kind::kRecorded || sight.kind == Sight::Kind::kUnknown;
           });
  });
}

}  // namespace kv_offload
