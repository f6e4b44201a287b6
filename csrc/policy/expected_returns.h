// SPDX-License-Identifier: Apache-2.0
// ExpectedReturns: adds hints about the return of sessions (EntryInfo::returns_at) to a policy.
//
// An entry with an expected return is kept out of the other policy's order until that time is over or the
// entry is used. Of these entries, the one that returns last is evicted first, and the deepest one of a
// prompt before the others. The other policy's victim is evicted instead if it has been unused for so long
// that it is expected later: an entry that was unused for a time T is expected back after kReturnPatience *
// T. So an entry without a hint is neither worth nothing nor kept for ever.
//
// A hint whose time is over counts no more: the entry has the place in the other policy's order that follows
// from its last use. Without a clock (set_now), hints are ignored.
//
// O(log n) more per call; for an entry without a hint, a few instructions. Memory: 16 bytes per slot and 56
// per entry with a hint. If memory runs out, the hint is ignored.
//
// REQUIRES: the first set_now() comes before the first insert().
#pragma once

#include <compare>
#include <new>
#include <set>

#include "base/segmented_vector.h"
#include "policy/eviction_policy.h"

namespace kv_offload {

// Chosen by replaying recorded agent sessions (docs/benchmarks/agent-sessions.md): 0.3 to 0.5 differ by less
// than a point of hit rate.
inline constexpr double kReturnPatience = 0.4;

// Others: the other policy. It also has a call is_pinned(slot).
template <typename Others>
class ExpectedReturns final : public EvictionPolicy {
 public:
  void insert(Slot slot, const EntryInfo& info) override {
    State* const state = state_of(slot);
    others_.insert(slot, info);  // the last call that may throw
    if (state != nullptr) on_used(*state, slot, info);
  }
  void access(Slot slot, const EntryInfo& info) override {
    State* const state = state_of(slot);
    others_.access(slot, info);  // the last call that may throw
    if (state != nullptr) on_used(*state, slot, info);
  }
  void refresh(Slot slot, const EntryInfo& info) override {
    State* const state = state_of(slot);
    others_.refresh(slot, info);  // the last call that may throw
    if (state != nullptr) on_used(*state, slot, info);
  }
  void set_recorded(Slot slot, bool recorded) override { others_.set_recorded(slot, recorded); }
  void set_now(double seconds) override {
    others_.set_now(seconds);
    if (seconds > now_) now_ = seconds;
  }
  void set_return(Slot slot, double returns_at, ChunkId) override;
  void identify(Slot slot, const EntryInfo& info) override { others_.identify(slot, info); }
  void prefetch(ChunkId id) const override { others_.prefetch(id); }
  void erase(Slot slot) override {
    if (has_hint(slot)) [[unlikely]] {
      if (!states_[slot].pinned) by_return_.erase(place_of(slot));
      end_hint(states_[slot]);
    }
    others_.erase(slot);
  }
  void pin(Slot slot) override {
    if (has_hint(slot)) [[unlikely]]
      return pin_hinted(slot);
    others_.pin(slot);
  }
  void unpin(Slot slot) override {
    if (has_hint(slot)) [[unlikely]]
      return unpin_hinted(slot);
    others_.unpin(slot);
  }
  std::optional<Slot> victim() override {
    if (by_return_.empty()) [[likely]]
      return others_.victim();
    return victim_with_hints();
  }
  void set_aside(Slot slot) override {
    if (has_hint(slot)) return pin_hinted(slot);
    others_.set_aside(slot);
  }
  void put_back(Slot slot) override {
    if (has_hint(slot)) return unpin_hinted(slot);
    others_.put_back(slot);
  }
  std::string_view name() const override { return others_.name(); }

 private:
  static constexpr int kMostOverdue = 64;  // entries that one victim() call returns to the other policy
  struct State {
    float returns_at;  // 0: no hint
    float used;        // seconds, when it was used last
    std::uint32_t depth;
    bool pinned;  // by the owner; valid with a hint only. The other policy's entry is pinned then
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
  bool has_hint(Slot slot) const {
    return hints_ != 0 && slot < states_.size() && states_[slot].returns_at != 0;
  }
  Place place_of(Slot slot) const { return {states_[slot].returns_at, states_[slot].depth, slot}; }
  void end_hint(State& state) {
    state.returns_at = 0;
    --hints_;
  }
  void on_used(State& state, Slot slot, const EntryInfo& info) {
    if (state.returns_at != 0) drop_hint(slot);
    state.used = static_cast<float>(now_);
    state.depth = info.depth;
    if (info.returns_at != 0) set_return(slot, info.returns_at, info.id);
  }
  void drop_hint(Slot slot);
  void pin_hinted(Slot slot);
  void unpin_hinted(Slot slot);
  std::optional<Slot> victim_with_hints();

  Others others_;
  SegmentedVector<State> states_;
  std::size_t hints_ = 0;      // entries with hints
  std::set<Place> by_return_;  // of these, those without pins
  double now_ = -1;
};

template <typename Others>
[[gnu::noinline]] void ExpectedReturns<Others>::set_return(Slot slot, double returns_at, ChunkId) {
  if (!has_clock()) return;
  try {
    State& state = *state_of(slot);
    drop_hint(slot);
    if (!(returns_at > now_)) return;  // or not a number
    const auto rounded = static_cast<float>(returns_at);
    if (rounded == 0) return;
    state.pinned = others_.is_pinned(slot);
    if (!state.pinned) {
      by_return_.insert({rounded, state.depth, slot});
      others_.pin(slot);
    }
    state.returns_at = rounded;
    ++hints_;
  } catch (const std::bad_alloc&) {  // without a hint
  }
}

template <typename Others>
[[gnu::noinline]] void ExpectedReturns<Others>::drop_hint(Slot slot) {
  if (!has_hint(slot)) return;
  State& state = states_[slot];
  if (!state.pinned) {
    others_.unpin(slot);
    by_return_.erase(place_of(slot));
  }
  end_hint(state);
}

template <typename Others>
[[gnu::noinline]] void ExpectedReturns<Others>::pin_hinted(Slot slot) {
  states_[slot].pinned = true;
  by_return_.erase(place_of(slot));
}

template <typename Others>
[[gnu::noinline]] void ExpectedReturns<Others>::unpin_hinted(Slot slot) {
  State& state = states_[slot];
  state.pinned = false;
  try {
    by_return_.insert(place_of(slot));
  } catch (const std::bad_alloc&) {
    end_hint(state);
    others_.unpin(slot);
  }
}

template <typename Others>
[[gnu::noinline]] std::optional<Slot> ExpectedReturns<Others>::victim_with_hints() {
  for (int left = kMostOverdue; left > 0 && !by_return_.empty(); --left) {
    const Place first = *by_return_.begin();
    if (static_cast<double>(first.returns_at) > now_) break;
    drop_hint(first.slot);
  }
  const std::optional<Slot> other = others_.victim();
  if (by_return_.empty()) return other;
  const Place last = *by_return_.rbegin();
  if (!other) return last.slot;
  const double unused = now_ - (*other < states_.size() ? static_cast<double>(states_[*other].used) : 0);
  return static_cast<double>(last.returns_at) - now_ > kReturnPatience * unused ? last.slot : *other;
}

}  // namespace kv_offload
