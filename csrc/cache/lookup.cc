// One key's answer. What a request is told, and what it is counted for.
//
// Why a chunk is absent is looked up when it is counted, not here: vLLM asks again
// in each step for each request that waits.
//
// Counting: a chunk is counted once per admission of a request, when the outcome
// of its last lookup pass is settled. Hits are the chunks that it loads
// (load_path.cc); misses are the chunks that the pass was told kMiss, with the
// reason. vLLM ends the scan of a full-attention group at its first miss; where
// the request's length is known (set_span), what lies behind counts under that
// chunk's reason, for that chunk made it useless. lookup_tokens = hit_tokens +
// miss_tokens, over all tiers and reasons.
#include <algorithm>
#include <array>

#include "cache/cache_impl.h"

namespace kv_offload {

LookupResult TieredCache::Impl::lookup(RequestHandle handle, const ChunkKey& key) {
  RequestState& request = requests[handle];
  if (request.pass_step != step) begin_pass(request);
  const ChunkEntry* entry = index.find(key);
  if (entry != nullptr && entry->state == ChunkState::kResident && request.host_hits) [[likely]] {
    request.pass.push_back({index.slot_of(entry), entry->group, Sight::Kind::kHit, 0});
    return LookupResult::kHit;
  }
  return lookup_unready(handle, request, key, entry);
}

void TieredCache::Impl::begin_pass(RequestState& request) {
  if (!polled_in_step) poll_tiers();
  request.clear_pass();
  request.pass_step = step;
  request.pass_time = clock.now();
  request.unsettled = true;
  if (!request.waiting && !request.expired && request.load_policy == LoadPolicy::kAuto) {
    request.host_dear = !costs.host_pays(bytes_per_token, request.pass_time);
  }
  request.held_back = must_hold_back(request);
  request.host_hits = request.options.load_from_cpu && !request.host_dear && !request.held_back;
}

bool TieredCache::Impl::is_probe(Slot slot) const {
  const auto fetch = fetches.find(slot);
  if (fetch == fetches.end()) return false;
  const Op& op = ops.at(fetch->second);
  return op.probe && op.waiters.empty();
}

LookupResult TieredCache::Impl::lookup_unready(RequestHandle handle, RequestState& request,
                                               const ChunkKey& key, const ChunkEntry* entry) {
  using Kind = Sight::Kind;
  const auto group = position_of(key);
  if (!group) return LookupResult::kMiss;
  if (entry != nullptr) {
    const bool is_fetch = entry->state == ChunkState::kFetching;
    const Slot slot = index.slot_of(entry);
    // Of a tier that was judged too slow; or host memory was.
    const bool dear = is_fetch ? is_probe(slot) : request.host_dear && request.options.load_from_cpu;
    if (dear && request.load_policy == LoadPolicy::kAuto) {
      return miss(request, *group, MissReason::kRecomputeCheaper);
    }
    if (entry->state == ChunkState::kResident) {
      const bool as_of_tier = !request.options.load_from_cpu;
      if (as_of_tier && (!request.options.load_from_tiers || !from_tier(*entry))) {
        return miss(request, *group, MissReason::kDisabled);
      }
      if (request.held_back) {
        if (const auto reason = may_not_wait(request, as_of_tier)) return miss(request, *group, *reason);
        return pending(handle, request, {slot, entry->group, Kind::kHit, 0}, LookupResult::kPending);
      }
      request.pass.push_back({slot, entry->group, Kind::kHit, 0});
      return LookupResult::kHit;
    }
    if (const auto reason = may_not_wait(request, is_fetch)) return miss(request, *group, *reason);
    return pending(handle, request, {slot, entry->group, is_fetch ? Kind::kFetching : Kind::kFilling, 0},
                   LookupResult::kPending);
  }
  if (!request.failed.empty()) {
    const std::uint64_t fingerprint = KeyMemory::fingerprint(key);
    for (const auto& failed : request.failed) {
      if (failed.fingerprint == fingerprint) return miss(request, *group, failed.reason);
    }
  }
  std::uint32_t unknown = 0;  // a bit for each tier
  bool switched_off = false;
  for (std::size_t tier = 0; tier < tier_slots.size(); ++tier) {
    const Presence presence = tier_slots[tier].tier->contains(key);
    if (!tier_slots[tier].readable) {
      switched_off |= presence == Presence::kPresent;
      continue;
    }
    if (presence == Presence::kUnknown) unknown |= 1u << tier;
    if (presence != Presence::kPresent) continue;
    if (const auto reason = may_not_wait(request, true)) return miss(request, *group, *reason);
    if (request.closed[*group]) return miss(request, *group, *request.closed[*group]);
    request.pass_keys.push_back(key);
    return pending(handle, request,
                   {static_cast<std::uint32_t>(request.pass_keys.size() - 1),
                    static_cast<std::uint16_t>(*group), Kind::kRecorded, static_cast<std::uint8_t>(tier)},
                   LookupResult::kPending);
  }
  if (unknown != 0) {
    const auto reason = may_not_wait(request, true);
    if (!reason) {
      for (std::size_t tier = 0; tier < tier_slots.size(); ++tier) {
        if ((unknown >> tier & 1) != 0) tier_slots[tier].unknown.push_back(key);
      }
      return pending(handle, request, {0, static_cast<std::uint16_t>(*group), Kind::kUnknown, 0},
                     LookupResult::kRetry);
    }
    if (*reason != MissReason::kDisabled) return miss(request, *group, *reason);
  }
  if (switched_off) return miss(request, *group, MissReason::kIoError);
  request.pass.push_back({static_cast<std::uint32_t>(request.pass_absent.size()),
                          static_cast<std::uint16_t>(*group), Kind::kMiss, Sight::kWhyLater});
  request.pass_absent.push_back(KeyMemory::fingerprint(key));
  return LookupResult::kMiss;
}

std::optional<MissReason> TieredCache::Impl::may_not_wait(const RequestState& request, bool from_tier) const {
  if (from_tier ? !request.options.load_from_tiers || request.load_policy == LoadPolicy::kNever
                : !request.options.load_from_cpu) {
    return MissReason::kDisabled;
  }
  if (request.expired) return request.expired_for;
  if (request.waiting && request.pass_time >= request.deadline) return MissReason::kDeadline;
  return std::nullopt;
}

LookupResult TieredCache::Impl::pending(RequestHandle handle, RequestState& request, Sight sight,
                                        LookupResult result) {
  request.pass.push_back(sight);
  if (!request.pass_pending) {
    request.pass_pending = true;
    asked.push_back(handle);
    start_waiting(handle, request);
  }
  return result;
}

LookupResult TieredCache::Impl::miss(RequestState& request, std::uint32_t group, MissReason reason) {
  request.pass.push_back(
      {0, static_cast<std::uint16_t>(group), Sight::Kind::kMiss, static_cast<std::uint8_t>(reason)});
  return LookupResult::kMiss;
}

MissReason TieredCache::Impl::why_missed(const RequestState& request, const Sight& sight) const {
  if (sight.detail != Sight::kWhyLater) return static_cast<MissReason>(sight.detail);
  const auto reason = memory.why_gone(request.pass_absent[sight.index]);
  return reason ? static_cast<MissReason>(*reason) : MissReason::kNotStored;
}

bool TieredCache::Impl::from_tier(const ChunkEntry& entry) {
  if (entry.origin == ChunkOrigin::kTier) return true;
  return std::any_of(tier_slots.begin(), tier_slots.end(),
                     [&](TierSlot& slot) { return is_recorded(slot, entry.key); });
}

void TieredCache::Impl::settle(RequestState& request) {
  if (!request.unsettled) return;
  request.unsettled = false;
  // A group that was scanned again (vLLM's boundary moved) counts once: its last scan.
  std::vector<bool> counted(groups.size(), false);
  const std::uint16_t first = request.pass.empty() ? 0 : request.pass.front().group;
  for (std::size_t end = request.pass.size(); end > 0;) {
    const std::uint16_t group = request.pass[end - 1].group;
    std::size_t begin = end;
    while (begin > 0 && request.pass[begin - 1].group == group) --begin;
    if (!counted[group])
      settle_scan(request, std::span(request.pass).subspan(begin, end - begin), group == first);
    counted[group] = true;
    end = begin;
  }
  request.clear_pass();
}

void TieredCache::Impl::settle_scan(RequestState& request, std::span<const Sight> scan, bool first) {
  const std::uint16_t group = scan.front().group;
  const std::uint64_t chunk = groups[group].tokens;
  std::uint64_t misses = 0;
  std::array<std::uint64_t, RequestReport::kReasons> by_reason{};
  for (const Sight& sight : scan) {
    if (sight.kind != Sight::Kind::kMiss) continue;
    ++misses;
    ++by_reason[static_cast<std::size_t>(why_missed(request, sight))];
  }
  for (std::size_t reason = 0; reason < by_reason.size(); ++reason) {
    count_misses(request, static_cast<MissReason>(reason), by_reason[reason] * chunk);
  }
  sights[group].missed += misses;
  sights[group].found += scan.size() - misses;
  // Scanned from the left, and ended there.
  if (!first || misses != 1 || scan.back().kind != Sight::Kind::kMiss) return;
  const std::uint64_t asked = request.first_end + (scan.size() - 1) * chunk;
  if (!request.knows_span || asked >= request.last_end) return;
  count_misses(request, why_missed(request, scan.back()), round_down(request.last_end - asked, chunk));
}

void TieredCache::Impl::count_misses(RequestState& request, MissReason reason, std::uint64_t tokens) {
  if (tokens == 0) return;
  request.report.miss_tokens[static_cast<std::size_t>(reason)] += tokens;
  metrics.add("kv_offload_miss_tokens_total", {to_string(reason)}, static_cast<double>(tokens));
  metrics.add("kv_offload_lookup_tokens_total", {}, static_cast<double>(tokens));
}

void TieredCache::Impl::start_waiting(RequestHandle handle, RequestState& request) {
  if (request.waiting || request.expired) return;
  request.waiting = true;
  request.waits_since = request.pass_time;
  request.deadline = request.pass_time + options.lookup_deadline;
  waiting.push_back(handle);
}

void TieredCache::Impl::stop_waiting(RequestHandle handle, RequestState& request) {
  for (const Slot slot : request.held) index.unpin(slot);
  request.held.clear();
  for (const Slot slot : request.awaited) {
    const auto fetch = fetches.find(slot);
    if (fetch == fetches.end()) continue;
    auto& waiters = ops.at(fetch->second).waiters;
    std::erase_if(waiters, [&](const Waiter& waiter) { return waiter.request == handle; });
    // Nobody needs it any more. Its completion gives the row back.
    if (waiters.empty()) tier_slots[ops.at(fetch->second).tier].tier->cancel(fetch->second);
  }
  request.awaited.clear();
  if (request.waiting) std::erase(waiting, handle);
  request.waiting = false;
}

void TieredCache::Impl::admit(RequestHandle handle, RequestState& request) {
  settle(request);
  request.knows_span = false;  // it may be asked about again, from another place
  if (!request.waiting && !request.expired) return;
  request.report.waited_seconds += to_seconds(request.pass_time - request.waits_since);
  stop_waiting(handle, request);
  request.clear_wait();
}

}  // namespace kv_offload
