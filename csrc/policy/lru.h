// SPDX-License-Identifier: Apache-2.0
// Least recently used: one intrusive list of slots, most recent first.
//
// A pinned slot keeps its place. victim() parks pinned slots that it meets at the cold end, once per pin, so
// that it stays O(1) however many are pinned. A parked slot is older than the whole list. Once unpinned, it
// waits in a set ordered by age, from which victims are taken first: O(log n) for those.
#pragma once

#include <set>
#include <utility>
#include <vector>

#include "base/segmented_vector.h"
#include "policy/eviction_policy.h"
#include "policy/recency_list.h"

namespace kv_offload {

class LruPolicy final : public EvictionPolicy {
 public:
  void insert(Slot slot, const EntryInfo& info) override;
  void access(Slot slot, const EntryInfo& info) override;
  void erase(Slot slot) override;
  void pin(Slot slot) override;
  void unpin(Slot slot) override;
  std::optional<Slot> victim() override;
  bool is_pinned(Slot slot) const { return nodes_[slot].pinned; }
  std::string_view name() const override { return "lru"; }

 private:
  static constexpr Slot kNone = RecencyList::kNone;
  enum class Place : std::uint8_t { kUnknown, kList, kParked /* pinned */, kReturned };
  struct Node {
    Slot newer = kNone;
    Slot older = kNone;
    std::uint64_t age = 0;  // larger is more recent
    Place place = Place::kUnknown;
    bool pinned = false;
  };

  void link_newest(Slot slot);
  // Of a slot that is not in the list.
  void pin_returned(Slot slot);
  void unpin_parked(Slot slot);
  void unlink(Slot slot);  // removes the slot from its list or set

  SegmentedVector<Node> nodes_;
  RecencyList list_;
  std::set<std::pair<std::uint64_t, Slot>> returned_;  // by age; all older than the list
  std::uint64_t last_age_ = 0;
};

}  // namespace kv_offload
