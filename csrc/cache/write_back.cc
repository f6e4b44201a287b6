// SPDX-License-Identifier: Apache-2.0
#include "cache/write_back.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "base/make_room.h"

namespace kv_offload {
namespace {

// on_evict: when less than 1 / kColdShare of the area is free, as many chunks are written ahead of their
// eviction. Bounded by the rows that writes hold and by the time to visit the chunks (about 0.2 us each).
constexpr std::uint64_t kColdShare = 8;
constexpr std::size_t kMinAhead = 64, kMaxAhead = 1024;

}  // namespace

WriteBack::WriteBack(const ChunkGroups& groups, HostChunks& chunks, KeyHistory& key_history, TierIo& ops,
                     Metrics& metrics, std::vector<TierSlotOptions> policies)
    : groups_(groups),
      chunks_(chunks),
      key_history_(key_history),
      ops_(ops),
      metrics_(metrics),
      policies_(std::move(policies)) {
  policies_.resize(ops_.size());
}

void WriteBack::on_stored(std::span<const Slot> slots) {
  write_through(slots);
  for (const Slot slot : slots) count_use(slot);
}

void WriteBack::write_through(std::span<const Slot> slots) {
  for (std::size_t tier = 0; tier < policies_.size(); ++tier) {
    if (is(tier, WritePolicy::kWriteThrough)) {
      ops_.write(static_cast<std::uint8_t>(tier), slots, true);
    } else {
      ops_.mark_recorded(tier, slots);
    }
  }
}

void WriteBack::on_used(Slot slot, TenantId tenant) {
  if (!policies_.empty()) {
    uses_.push_back({chunks_.at(slot).key, chunks_.entry_info(slot)});
    uses_.back().entry_info.tenant = tenant;  // a tier charges its record by itself
    uses_.back().entry_info.returns_at = 0;   // a time on this host's clock; hints apply to host memory only
  }
  if (chunks_.is_borrowed(slot)) return;  // its owner writes it
  if (chunks_.take_inherited_use(slot)) write_through({&slot, 1});
  count_use(slot);
}

void WriteBack::make_room_for_uses(std::size_t count) {
  if (!policies_.empty()) make_room(uses_, count);
}

void WriteBack::count_use(Slot slot) {
  std::uint32_t uses = 0;
  for (std::size_t tier = 0; tier < policies_.size(); ++tier) {
    if (!is(tier, WritePolicy::kReuse)) continue;
    if (uses == 0) uses = key_history_.count_use(chunks_.at(slot).key);
    if (uses >= policies_[tier].reuse_threshold) ops_.write(static_cast<std::uint8_t>(tier), {&slot, 1});
  }
}

void WriteBack::publish_uses() {
  if (uses_.empty()) return;
  const TierUses uses = std::make_shared<const std::vector<TierUse>>(std::exchange(uses_, {}));
  for (std::size_t tier = 0; tier < policies_.size(); ++tier) {
    if (!is(tier, WritePolicy::kOnEvict)) ops_.used(tier, uses);
  }
}

void WriteBack::on_fetched(Slot slot, std::uint8_t from) {
  for (std::uint8_t tier = 0; tier < from; ++tier) {
    if (is(tier, WritePolicy::kWriteThrough)) ops_.write(tier, {&slot, 1});
  }
}

bool WriteBack::needs_write(std::size_t tier, Slot slot) {
  return is(tier, WritePolicy::kOnEvict) && !chunks_.was_write_tried(slot, tier) &&
         !ops_.is_recorded(tier, chunks_.at(slot).key);
}

std::size_t WriteBack::max_written_ahead() const {
  return std::clamp(chunks_.capacity() / kColdShare, kMinAhead, kMaxAhead);
}

// Each tenant has its part, even while writes of others are queued: the tier starts writes of several tenants
// in turn.
bool WriteBack::may_write_before_eviction(std::size_t tier, TenantId tenant) const {
  if (!ops_.is_writable(tier)) return false;
  if (ops_.writes_in_flight(tier) < kMinAhead) return true;
  const TenantShares* shares = chunks_.tenants();
  if (shares == nullptr) return false;
  return ops_.writes_in_flight(tier, tenant) < std::max(1.0, shares->weight(tenant) * kMinAhead);
}

bool WriteBack::is_lost_by_eviction(Slot slot) {
  for (std::size_t tier = 0; tier < policies_.size(); ++tier) {
    if (needs_write(tier, slot) && !may_write_before_eviction(tier, chunks_.at(slot).tenant)) return true;
  }
  return false;
}

bool WriteBack::write_before_eviction(Slot slot) {
  bool started = false;
  for (std::size_t tier = 0; tier < policies_.size(); ++tier) {
    // The end of a prompt is evicted first. If something must be lost, that is better than losing what
    // precedes it.
    if (!needs_write(tier, slot) || !may_write_before_eviction(tier, chunks_.at(slot).tenant)) continue;
    ops_.write(static_cast<std::uint8_t>(tier), {&slot, 1});
    started = true;
  }
  if (!started) count_eviction(slot);
  return started;
}

void WriteBack::count_eviction(Slot slot) {
  ++evictions_;
  for (std::size_t tier = 0; tier < policies_.size(); ++tier) {
    if (!needs_write(tier, slot)) continue;
    metrics_.add("kv_offload_dropped_bytes_total", {ops_.name(tier), "pressure"},
                 static_cast<double>(groups_[chunks_.at(slot).group].bytes));
  }
}

bool WriteBack::writes() const {
  return std::any_of(policies_.begin(), policies_.end(),
                     [](const auto& policy) { return policy.write_policy != WritePolicy::kReadOnly; });
}

bool WriteBack::writes_ahead() const {
  return std::any_of(policies_.begin(), policies_.end(),
                     [](const auto& policy) { return policy.write_policy == WritePolicy::kOnEvict; });
}

// True if the whole cold end should be visited again: a quarter of it was evicted, or half of the maximum
// number of writes have ended. This costs a few visits per evicted or written chunk, and a short look at
// newly cold chunks in each step.
bool WriteBack::is_cold_end_due(std::size_t most) const {
  if (cold_end_written_) return 4 * evictions_ >= most;
  for (std::size_t tier = 0; tier < policies_.size(); ++tier) {
    if (is(tier, WritePolicy::kOnEvict) && ops_.is_writable(tier) && 2 * ops_.writes_in_flight(tier) <= most)
      return true;
  }
  return false;
}

void WriteBack::write_cold_end() {
  bool any = false;
  for (std::size_t tier = 0; tier < policies_.size(); ++tier) {
    any |= is(tier, WritePolicy::kOnEvict) && ops_.is_writable(tier);
  }
  if (!any || chunks_.has_free(kColdShare) || chunks_.forgotten() > 0) {
    cold_end_written_ = false;  // nothing that fills it next is written ahead
    return;
  }
  const std::size_t most = max_written_ahead();
  const bool due = is_cold_end_due(most);
  const std::vector<Slot> next = chunks_.next_victims(due ? most : kMinAhead);
  bool all_written = true;
  for (std::size_t tier = 0; tier < policies_.size(); ++tier) {
    if (!ops_.is_writable(tier)) continue;
    std::vector<Slot> ahead;
    std::copy_if(next.begin(), next.end(), std::back_inserter(ahead),
                 [&](Slot slot) { return needs_write(tier, slot) && !chunks_.is_written_to(slot, tier); });
    const std::size_t in_flight = ops_.writes_in_flight(tier);
    const std::size_t room = most - std::min(most, in_flight);
    all_written &= ahead.size() <= room;
    ahead.resize(std::min(ahead.size(), room));
    ops_.write(static_cast<std::uint8_t>(tier), ahead);
  }
  if (!due) return;
  cold_end_written_ = all_written;
  evictions_ = 0;
}

}  // namespace kv_offload
