// Least recently used: one intrusive list of slots, most recent first.
//
// A pinned slot keeps its place. victim() sets pinned slots that it meets at the
// cold end aside (parks them), once per pin, so that it stays O(1) amortised
// however many are pinned; an unpinned parked slot returns to the cold end.
#pragma once

#include <vector>

#include "policy/eviction_policy.h"

namespace kv_offload {

class LruPolicy final : public EvictionPolicy {
 public:
  explicit LruPolicy(std::size_t capacity_hint);
  void insert(Slot slot, const EntryInfo& info) override;
  void access(Slot slot) override;
  void erase(Slot slot) override;
  void pin(Slot slot) override;
  void unpin(Slot slot) override;
  std::optional<Slot> victim() override;
  std::string_view name() const override { return "lru"; }

 private:
  // Invariant: a node is in the list, or parked, or unknown; parked => pinned.
  struct Node {
    Slot newer = kNone;
    Slot older = kNone;
    bool known = false;
    bool pinned = false;
    bool parked = false;
  };
  static constexpr Slot kNone = 0xFFFFFFFFu;

  void link_newest(Slot slot);
  void link_oldest(Slot slot);
  void unlink(Slot slot);

  std::vector<Node> nodes_;
  Slot newest_ = kNone;
  Slot oldest_ = kNone;
};

}  // namespace kv_offload
