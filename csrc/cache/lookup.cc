// SPDX-License-Identifier: Apache-2.0
// Lookup of one key: the result for the request, and how it is counted.
//
// The reason for an absent chunk is looked up when it is counted, not here: vLLM asks again in each step for
// each waiting request.
//
// Counting: a chunk is counted once per admission of a request, when the outcome of its last lookup pass is
// known. Hits are the chunks that the request loads; misses are the chunks that were kMiss in the pass, with
// the reason. vLLM ends the scan of a full-attention group at its first miss. If the request's length is
// known (set_span), the chunks after that miss count under its reason, because it made them useless. Parts of
// a chunk, which vLLM looks up after all whole chunks, count when they are loaded, with the tokens that they
// have. lookup_tokens = hit_tokens + miss_tokens, over all tiers and reasons.
#include <algorithm>
#include <array>

#include "cache/request_table.h"

namespace kv_offload {

LookupResult RequestTable::lookup(RequestHandle handle, const ChunkKey& key, std::uint32_t part_tokens) {
  RequestState& request = requests_[handle];
  if (request.pass.step != step_) begin_pass(request);
  request.pass.part_tokens = part_tokens;
  if (part_tokens > 0) request.pass.whole = std::min(request.pass.whole, request.pass.lookups.size());
  const ChunkEntry* entry = chunks_.find(key);
  if (entry != nullptr && entry->state == ChunkState::kResident && request.host_hits) [[likely]] {
    request.pass.lookups.push_back({chunks_.slot_of(entry), entry->group, Lookup::Kind::kHit, 0});
    return LookupResult::kHit;
  }
  return lookup_unready(handle, request, key, entry);
}

void RequestTable::begin_pass(RequestState& request) {
  ops_.poll_once_per_step();
  if (request.waiting || request.expired) continue_wait(request);
  request.pass.clear();
  request.pass.step = step_;
  request.pass.time = clock_.now();
  request.pass.uncounted = true;
  if (!request.first_lookup) request.first_lookup = request.report.first_lookup = request.pass.time;
  request.report.last_lookup = request.pass.time;
  if (!request.waiting && !request.expired && request.load_policy == LoadPolicy::kAuto) {
    request.host_too_slow = !costs_.host_pays(groups_.bytes_per_token(), request.pass.time);
  }
  request.held_back = device_loads_.must_wait(request.last_end);
  request.host_lost = !tickets_.hear_all_ranks();
  request.host_hits =
      request.options.load_from_cpu && !request.host_too_slow && !request.held_back && !request.host_lost;
}

LookupResult RequestTable::lookup_unready(RequestHandle handle, RequestState& request, const ChunkKey& key,
                                          const ChunkEntry* entry) {
  const auto group = groups_.position_of(key);
  if (!group) return LookupResult::kMiss;
  if (request.host_lost) return miss(request, *group, MissReason::kHostLost);
  if (entry == nullptr && request.options.load_from_cpu) entry = chunks_.borrow(key, *group);
  if (entry != nullptr) return lookup_in_host(handle, request, *group, *entry);
  if (!request.failed.empty()) {
    const auto failed = request.failed.find(KeyHistory::fingerprint(key));
    if (failed != request.failed.end()) return miss(request, *group, failed->second);
  }
  return lookup_in_tiers(handle, request, *group, key);
}

// The key has a row: resident but not a plain hit for this request, or still on its way.
LookupResult RequestTable::lookup_in_host(RequestHandle handle, RequestState& request, std::uint32_t group,
                                          const ChunkEntry& entry) {
  using Kind = Lookup::Kind;
  const bool is_fetch = entry.state == ChunkState::kFetching;
  const Slot slot = chunks_.slot_of(&entry);
  // The tier being probed, or host memory, was judged too slow.
  const bool too_slow =
      is_fetch ? ops_.is_probe(slot) : request.host_too_slow && request.options.load_from_cpu;
  if (too_slow && request.load_policy == LoadPolicy::kAuto) {
    return miss(request, group, MissReason::kRecomputeCheaper);
  }
  if (entry.state == ChunkState::kResident) {
    const bool needs_tier = !request.options.load_from_cpu;
    const bool is_from_tier = entry.origin == ChunkOrigin::kTier;
    const std::uint8_t tiers = request.options.load_tiers;
    // A chunk that came from a tier hits without further checks only if the request may load from all tiers.
    const bool is_allowed = is_from_tier && tiers == RequestOptions::kAllTiers;
    if (needs_tier && !is_allowed && !ops_.is_recorded(entry.key, tiers)) {
      return miss(request, group, MissReason::kDisabled);
    }
    if (request.held_back) {
      if (const auto reason = refuse_wait(request, needs_tier)) return miss(request, group, *reason);
      return pending(handle, request, {slot, entry.group, Kind::kHit, 0}, LookupResult::kPending);
    }
    request.pass.lookups.push_back({slot, entry.group, Kind::kHit, 0});
    return LookupResult::kHit;
  }
  if (const auto reason = refuse_wait(request, is_fetch)) return miss(request, group, *reason);
  const std::uint8_t tiers = request.options.load_tiers;
  if (is_fetch && tiers != RequestOptions::kAllTiers && !ops_.is_recorded(entry.key, tiers)) {
    return miss(request, group, MissReason::kDisabled);
  }
  return pending(handle, request, {slot, entry.group, is_fetch ? Kind::kFetching : Kind::kFilling, 0},
                 LookupResult::kPending);
}

// What the tiers know about a key that is not in host memory. Masks have one bit per tier.
struct RequestTable::TierResults {
  std::optional<std::uint8_t> first_tier;  // the first tier that has it; later tiers were not checked
  std::uint32_t unknown = 0;               // the request should wait for the answer
  std::uint32_t stale = 0;                 // of these: the last answer was "absent" and is stale
  std::uint32_t lookup_pending = 0;        // of these: a lookup is pending
  bool unreadable = false;                 // a tier has or may have the record, but cannot be read or queried
  bool disallowed = false;                 // a tier has it that this request may not load from
  bool may_appear = false;                 // another server may still write it
  bool answered = true;                    // no tier's answer is outstanding
};

// earlier: nullopt if this request has not asked for the key.
RequestTable::TierResults RequestTable::check_catalogs(const RequestState& request, std::uint32_t group,
                                                       const ChunkKey& key,
                                                       std::optional<TierLookup> earlier) const {
  const bool was_asked = earlier.has_value(), had_failed = earlier == TierLookup::kFailed;
  const bool was_answered = had_failed || earlier == TierLookup::kAnswered;
  // Do not wait for a chunk that would not be loaded anyway.
  const bool awaits = request.waits_for_remote() && !request.closed[group] && !refuse_wait(request, true);
  TierResults found;
  for (std::size_t tier = 0; tier < ops_.size(); ++tier) {
    const Presence presence = ops_.contains(tier, key);
    if ((request.options.load_tiers >> tier & 1) == 0) {
      found.disallowed |= presence == Presence::kPresent;
      continue;
    }
    if (!ops_.is_readable(tier)) {
      found.unreadable |= presence == Presence::kPresent || presence == Presence::kLookupFailed;
      continue;
    }
    if (presence == Presence::kPresent) {
      found.first_tier = static_cast<std::uint8_t>(tier);
      return found;
    }
    const bool may_appear_here = awaits && ops_.is_shared(tier);
    found.may_appear |= may_appear_here;
    const bool is_unknown = presence == Presence::kUnknown || presence == Presence::kLookupPending;
    found.answered &= !is_unknown;
    found.unreadable |= presence == Presence::kLookupFailed || (is_unknown && had_failed);
    // A request asks once per key: asking again for each stale answer would never end. A request that waits
    // for other servers' records does ask again, until its deadline.
    if ((is_unknown && (may_appear_here || !was_answered)) ||
        (presence == Presence::kStaleMiss && (may_appear_here || !was_asked))) {
      found.unknown |= 1u << tier;
      if (presence == Presence::kStaleMiss) found.stale |= 1u << tier;
      if (presence == Presence::kLookupPending) found.lookup_pending |= 1u << tier;
    }
  }
  return found;
}

void RequestTable::queue_lookups(RequestState& request, std::uint32_t group, const ChunkKey& key,
                                 const TierResults& results) {
  // A change of group begins another scan. A full-attention scan lists the chunks of one prompt from the
  // left, so a tier may stop at the first absent one. Windows are scanned from the right and have gaps; parts
  // of a last block are looked up one after the other in all groups.
  if (request.pass.lookups.empty() || request.pass.lookups.back().group != group) ++request.pass.scans;
  const TierIo::Run run =
      groups_[group].full_attention ? TierIo::Run{request.number, group, request.pass.scans} : TierIo::Run{};
  request.tier_lookups.try_emplace(KeyHistory::fingerprint(key), TierLookup::kAsked);
  for (std::size_t tier = 0; tier < ops_.size(); ++tier) {
    if (((results.unknown & ~results.lookup_pending) >> tier & 1) == 0) continue;
    const bool stale = (results.stale >> tier & 1) != 0;
    ops_.queue_lookup(tier, key, stale ? Presence::kStaleMiss : Presence::kUnknown, run);
  }
  request.pass.awaits |= results.may_appear;
}

LookupResult RequestTable::lookup_in_tiers(RequestHandle handle, RequestState& request, std::uint32_t group,
                                           const ChunkKey& key) {
  using Kind = Lookup::Kind;
  const auto position = static_cast<std::uint16_t>(group);
  const std::uint64_t print = KeyHistory::fingerprint(key);
  if (ops_.size() == 0) return absent(request, group, print);
  const auto earlier = request.tier_lookups.find(print);
  const bool was_asked = earlier != request.tier_lookups.end();
  const TierResults results =
      check_catalogs(request, group, key, was_asked ? std::optional(earlier->second) : std::nullopt);
  if (results.first_tier) {
    if (const auto reason = refuse_wait(request, true)) return miss(request, group, *reason);
    // The planner gave up fetches for this group.
    if (request.closed[group]) return miss(request, group, *request.closed[group]);
    request.pass.keys.push_back({key, request.pass.part_tokens});
    return pending(handle, request,
                   {static_cast<std::uint32_t>(request.pass.keys.size() - 1), position, Kind::kRecorded,
                    *results.first_tier},
                   LookupResult::kPending);
  }
  if (was_asked && results.answered)
    earlier->second = results.unreadable ? TierLookup::kFailed : TierLookup::kAnswered;
  if (results.unknown != 0) {
    const auto reason = refuse_wait(request, true);
    if (!reason) {
      queue_lookups(request, group, key, results);
      return pending(handle, request, {0, position, Kind::kUnknown, 0}, LookupResult::kRetry);
    }
    // A request that loads from no tier gets the reason that it would have without these tiers.
    if (*reason != MissReason::kDisabled) return miss(request, group, *reason);
  } else if (results.may_appear) {
    request.pass.awaits = true;
    return pending(handle, request, {0, position, Kind::kUnknown, 0}, LookupResult::kRetry);
  }
  if (results.unreadable) return miss(request, group, MissReason::kIoError);
  if (results.disallowed) return miss(request, group, MissReason::kDisabled);
  return absent(request, group, print);
}

// The reason is looked up when the miss is counted: vLLM asks again in each step.
LookupResult RequestTable::absent(RequestState& request, std::uint32_t group, std::uint64_t print) {
  const auto at = static_cast<std::uint32_t>(request.pass.absent.size());
  request.pass.absent.push_back(print);  // first, because either may throw
  request.pass.lookups.push_back(
      {at, static_cast<std::uint16_t>(group), Lookup::Kind::kMiss, Lookup::kReasonLater});
  return LookupResult::kMiss;
}

std::optional<MissReason> RequestTable::refuse_wait(const RequestState& request, bool from_tier) const {
  if (from_tier ? request.options.load_tiers == 0 || request.load_policy == LoadPolicy::kNever
                : !request.options.load_from_cpu) {
    return MissReason::kDisabled;
  }
  if (request.expired) return request.expired_for;
  if (request.waiting && request.pass.time >= request.deadline) return MissReason::kDeadline;
  return std::nullopt;
}

LookupResult RequestTable::pending(RequestHandle handle, RequestState& request, Lookup lookup,
                                   LookupResult result) {
  request.pass.lookups.push_back(lookup);
  if (!request.pass.pending) {
    request.pass.pending = true;
    pending_.push_back(handle);
    start_waiting(handle, request);
  }
  return result;
}

LookupResult RequestTable::miss(RequestState& request, std::uint32_t group, MissReason reason) {
  request.pass.lookups.push_back(
      {0, static_cast<std::uint16_t>(group), Lookup::Kind::kMiss, static_cast<std::uint8_t>(reason)});
  return LookupResult::kMiss;
}

// ---- counting

MissReason RequestTable::miss_reason(const RequestState& request, const Lookup& lookup) const {
  if (lookup.detail != Lookup::kReasonLater) return static_cast<MissReason>(lookup.detail);
  const auto reason = key_history_.eviction_reason(request.pass.absent[lookup.index]);
  return reason ? static_cast<MissReason>(*reason) : MissReason::kNotStored;
}

void RequestTable::count_pass(RequestState& request) {
  LookupPass& pass = request.pass;
  if (!pass.uncounted) return;
  pass.uncounted = false;
  // A group that was scanned again (vLLM's boundary moved) counts once, with its last scan.
  std::vector<bool> counted(groups_.size(), false);
  const std::span<const Lookup> lookups(pass.lookups.data(), std::min(pass.whole, pass.lookups.size()));
  const std::uint16_t first = lookups.empty() ? 0 : lookups.front().group;
  for (std::size_t end = lookups.size(); end > 0;) {
    const std::uint16_t group = lookups[end - 1].group;
    std::size_t begin = end;
    while (begin > 0 && lookups[begin - 1].group == group) --begin;
    if (!counted[group]) count_scan(request, lookups.subspan(begin, end - begin), group == first);
    counted[group] = true;
    end = begin;
  }
  pass.clear();
}

void RequestTable::count_scan(RequestState& request, std::span<const Lookup> scan, bool first) {
  const std::uint16_t group = scan.front().group;
  const std::uint64_t chunk = groups_[group].tokens;
  std::uint64_t misses = 0;
  std::array<std::uint64_t, RequestReport::kReasons> by_reason{};
  for (const Lookup& lookup : scan) {
    if (lookup.kind != Lookup::Kind::kMiss) continue;
    ++misses;
    ++by_reason[static_cast<std::size_t>(miss_reason(request, lookup))];
  }
  for (std::size_t reason = 0; reason < by_reason.size(); ++reason) {
    count_misses(request, static_cast<MissReason>(reason), by_reason[reason] * chunk);
  }
  lookup_counts_[group].missed += misses;
  lookup_counts_[group].found += scan.size() - misses;
  // A scan from the left that ended at its only miss.
  if (!first || misses != 1 || scan.back().kind != Lookup::Kind::kMiss) return;
  const std::uint64_t scanned = request.first_end + (scan.size() - 1) * chunk;
  if (!request.has_span || scanned >= request.last_end) return;
  count_misses(request, miss_reason(request, scan.back()), round_down(request.last_end - scanned, chunk));
}

void RequestTable::count_misses(RequestState& request, MissReason reason, std::uint64_t tokens) {
  if (tokens == 0) return;
  request.report.miss_tokens[static_cast<std::size_t>(reason)] += tokens;
  metrics_.add("kv_offload_miss_tokens_total", {to_string(reason)}, static_cast<double>(tokens));
  metrics_.add("kv_offload_lookup_tokens_total", {}, static_cast<double>(tokens));
  if (chunks_.tenants() == nullptr) return;
  metrics_.add("kv_offload_tenant_miss_tokens_total", {chunks_.tenant_name(request.options.tenant)},
               static_cast<double>(tokens));
}

}  // namespace kv_offload
