// SPDX-License-Identifier: Apache-2.0
// Prioritised: applies any policy in three levels of EntryInfo::priority. Entries of requests with a priority
// below 0 are evicted first. Entries that a request above 0 stored or hit are evicted last. Within a level
// the policy decides. To keep requests above 0 from filling the cache for good, their level gives up entries
// before level 0 while it holds more than half of all.
#pragma once

#include <array>
#include <functional>
#include <vector>

#include "base/segmented_vector.h"
#include "policy/eviction_policy.h"

namespace kv_offload {

class Prioritised final : public EvictionPolicy {
 public:
  // `make` is called for a level when its first entry is inserted.
  using Make = std::function<std::unique_ptr<EvictionPolicy>()>;
  explicit Prioritised(Make make);

  void insert(Slot slot, const EntryInfo& info) override;
  // A request of higher priority raises the entry that it hits to its own level.
  void access(Slot slot, const EntryInfo& info) override;
  void set_priority(Slot slot, const EntryInfo& info) override;
  void refresh(Slot slot, const EntryInfo& info) override { level_of(slot).refresh(slot, info); }
  void identify(Slot slot, const EntryInfo& info) override { level_of(slot).identify(slot, info); }
  void set_recorded(Slot slot, bool recorded) override;
  void set_now(double seconds) override;
  void set_return(Slot slot, double returns_at, ChunkId id) override {
    level_of(slot).set_return(slot, returns_at, id);
  }
  void prefetch(ChunkId id) const override { levels_[kNormal]->prefetch(id); }
  void erase(Slot slot) override;
  void pin(Slot slot) override;
  void unpin(Slot slot) override;
  std::optional<Slot> victim() override;
  void set_aside(Slot slot) override { level_of(slot).set_aside(slot); }
  void put_back(Slot slot) override { level_of(slot).put_back(slot); }
  std::string_view name() const override { return levels_[kNormal]->name(); }

 private:
  enum Level : std::uint8_t { kLow, kNormal, kHigh };
  struct State {
    Level level = kNormal;
    bool pinned = false;
    bool recorded = false;
  };
  static Level level_of_priority(std::int8_t priority) {
    return priority < 0 ? kLow : priority == 0 ? kNormal : kHigh;
  }
  EvictionPolicy& level_of(Slot slot) { return *levels_[states_[slot].level]; }
  EvictionPolicy& make_level(Level level);
  void move(Slot slot, Level level, const EntryInfo& info);

  Make make_;
  std::array<std::unique_ptr<EvictionPolicy>, 3> levels_;
  std::array<std::size_t, 3> known_{};
  SegmentedVector<State> states_;
  double now_ = -1;  // until the first set_now(): then a new level has no clock either
};

}  // namespace kv_offload
