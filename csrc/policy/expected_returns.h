// SPDX-License-Identifier: Apache-2.0
// ExpectedReturns: adds hints about the return of sessions (EntryInfo::returns_at) to any policy.
//
// An entry with an expected return is kept out of the other policy's order until that time is over or the
// entry is used. Of these entries, the one that returns last is evicted first, and the deepest one of a
// prompt before the others. The other policy's victim is evicted instead if it has been unused for so long
// that it is expected later: an entry that was unused for a time T is expected back after kPatience * T. So
// an entry without a hint is neither worth nothing nor kept for ever.
//
// A hint whose time is over counts no more: the entry has the place in the other policy's order that follows
// from its last use. Without a clock (set_now), hints are ignored.
//
// O(log n) more per call. Memory: 16 bytes per slot and 56 per entry with a hint. If memory runs out, the
// hint is ignored.
//
// REQUIRES: the first set_now() comes before the first insert().
#pragma once

#include <compare>
#include <memory>
#include <set>
#include <utility>

#include "base/segmented_vector.h"
#include "policy/eviction_policy.h"

namespace kv_offload {

class ExpectedReturns final : public EvictionPolicy {
 public:
  // Chosen by replaying recorded agent sessions (docs/benchmarks/agent-sessions.md): 0.3 to 0.5 differ by
  // less than a point of hit rate.
  static constexpr double kPatience = 0.4;

  explicit ExpectedReturns(std::unique_ptr<EvictionPolicy> others) : others_(std::move(others)) {}

  void insert(Slot slot, const EntryInfo& info) override;
  void access(Slot slot, const EntryInfo& info) override;
  void refresh(Slot slot, const EntryInfo& info) override;
  void set_recorded(Slot slot, bool recorded) override { others_->set_recorded(slot, recorded); }
  void set_now(double seconds) override;
  void set_return(Slot slot, double returns_at, ChunkId id) override;
  void identify(Slot slot, const EntryInfo& info) override { others_->identify(slot, info); }
  void prefetch(ChunkId id) const override { others_->prefetch(id); }
  void erase(Slot slot) override;
  void pin(Slot slot) override;
  void unpin(Slot slot) override;
  std::optional<Slot> victim() override;
  void set_aside(Slot slot) override;
  void put_back(Slot slot) override;
  std::string_view name() const override { return others_->name(); }

 private:
  static constexpr int kMostOverdue = 64;  // entries that one victim() call returns to the other policy
  struct State {
    float returns_at;  // 0: no hint
    float used;        // seconds, when it was used last
    std::uint32_t depth;
    bool pinned;  // by the owner. The other policy's entry is pinned if this is set or there is a hint
  };
  struct Place {
    float returns_at;
    std::uint32_t depth;
    Slot slot;
    auto operator<=>(const Place&) const = default;
  };

  bool has_clock() const { return now_ >= 0; }
  // Returns null without a clock: then there are no states. Throws std::bad_alloc.
  State* state_of(Slot slot) {
    if (!has_clock()) return nullptr;
    if (slot >= states_.size()) states_.grow_to(std::size_t{slot} + 1);
    return &states_[slot];
  }
  bool has_hint(Slot slot) const { return slot < states_.size() && states_[slot].returns_at != 0; }
  Place place_of(Slot slot) const { return {states_[slot].returns_at, states_[slot].depth, slot}; }
  void on_used(State& state, Slot slot, const EntryInfo& info);
  void drop_hint(Slot slot);

  const std::unique_ptr<EvictionPolicy> others_;
  SegmentedVector<State> states_;
  std::set<Place> by_return_;  // entries with hints and without pins
  double now_ = -1;
};

}  // namespace kv_offload
