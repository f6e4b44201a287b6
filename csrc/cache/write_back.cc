#include "cache/write_back.h"

#include <utility>

namespace kv_offload {
namespace {

// on_evict: writes in flight for chunks that are about to go, and how many chunks of
// the cold end are looked at per step, once less than 1 / kColdShare of the area is free.
constexpr std::uint32_t kMaxEvictionWrites = 64;
constexpr std::size_t kColdEnd = 64;
constexpr std::uint64_t kColdShare = 8;

}  // namespace

WriteBack::WriteBack(const ChunkGroups& groups, HostChunks& chunks, KeyMemory& memory, TierOps& ops,
                     Metrics& metrics, std::vector<TierSlotOptions> policies)
    : groups_(groups),
      chunks_(chunks),
      memory_(memory),
      ops_(ops),
      metrics_(metrics),
      policies_(std::move(policies)) {
  policies_.resize(ops_.size());
}

void WriteBack::note_stored(std::span<const Slot> slots) {
  write_through(slots);
  for (const Slot slot : slots) count_use(slot);
}

void WriteBack::write_through(std::span<const Slot> slots) {
  for (std::size_t tier = 0; tier < policies_.size(); ++tier) {
    if (is(tier, WritePolicy::kThrough)) ops_.write(static_cast<std::uint8_t>(tier), slots, true);
  }
}

void WriteBack::note_used(Slot slot) {
  if (!policies_.empty()) uses_.push_back({chunks_.at(slot).key, chunks_.about(slot)});
  if (chunks_.is_first_use_since_before(slot)) write_through({&slot, 1});
  count_use(slot);
}

void WriteBack::count_use(Slot slot) {
  std::uint32_t uses = 0;
  for (std::size_t tier = 0; tier < policies_.size(); ++tier) {
    if (!is(tier, WritePolicy::kReuse)) continue;
    if (uses == 0) uses = memory_.count_use(chunks_.at(slot).key);
    if (uses >= policies_[tier].reuse_threshold) ops_.write(static_cast<std::uint8_t>(tier), {&slot, 1});
  }
}

void WriteBack::tell_uses() {
  if (uses_.empty()) return;
  const TierUses uses = std::make_shared<const std::vector<TierUse>>(std::exchange(uses_, {}));
  for (std::size_t tier = 0; tier < policies_.size(); ++tier) {
    if (!is(tier, WritePolicy::kOnEvict)) ops_.used(tier, uses);
  }
}

void WriteBack::note_fetched(Slot slot, std::uint8_t from) {
  for (std::uint8_t tier = 0; tier < from; ++tier) {
    if (is(tier, WritePolicy::kThrough)) ops_.write(tier, {&slot, 1});
  }
}

bool WriteBack::write_before_eviction(Slot slot) {
  bool started = false;
  for (std::size_t tier = 0; tier < policies_.size(); ++tier) {
    if (!is(tier, WritePolicy::kOnEvict)) continue;
    if (chunks_.was_tried_on(slot, tier)) continue;
    if (ops_.is_recorded(tier, chunks_.at(slot).key)) continue;
    if (!ops_.is_writable(tier) || ops_.writes_in_flight(tier) >= kMaxEvictionWrites) {
      metrics_.add("kv_offload_dropped_bytes_total", {ops_.name(tier), "pressure"},
                   static_cast<double>(groups_[chunks_.at(slot).group].bytes));
      continue;
    }
    ops_.write(static_cast<std::uint8_t>(tier), {&slot, 1});
    started = true;
  }
  return started;
}

void WriteBack::write_cold_end() {
  bool any = false;
  for (std::size_t tier = 0; tier < policies_.size(); ++tier) {
    any |= is(tier, WritePolicy::kOnEvict) && ops_.is_writable(tier);
  }
  if (!any || chunks_.has_free(kColdShare)) return;
  std::vector<Slot> visited;
  while (visited.size() < kColdEnd) {
    const auto victim = chunks_.victim();
    if (!victim) break;
    chunks_.pin(*victim);
    visited.push_back(*victim);
    for (std::size_t tier = 0; tier < policies_.size(); ++tier) {
      if (!is(tier, WritePolicy::kOnEvict) || !ops_.is_writable(tier)) continue;
      if (chunks_.was_tried_on(*victim, tier)) continue;  // a failed write is not repeated
      if (ops_.writes_in_flight(tier) < kMaxEvictionWrites) {
        ops_.write(static_cast<std::uint8_t>(tier), {&*victim, 1});
      }
    }
  }
  // From the most recent to the oldest, so that their order stays.
  for (std::size_t i = visited.size(); i-- > 0;) chunks_.unpin(visited[i]);
}

}  // namespace kv_offload
