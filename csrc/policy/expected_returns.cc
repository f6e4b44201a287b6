// SPDX-License-Identifier: Apache-2.0
#include "policy/expected_returns.h"

#include <new>

namespace kv_offload {

void ExpectedReturns::insert(Slot slot, const EntryInfo& info) {
  State* const state = state_of(slot);
  if (state != nullptr) *state = {};
  others_->insert(slot, info);  // the last call that may throw
  if (state != nullptr) on_used(*state, slot, info);
}

void ExpectedReturns::access(Slot slot, const EntryInfo& info) {
  State* const state = state_of(slot);
  others_->access(slot, info);  // the last call that may throw
  if (state != nullptr) on_used(*state, slot, info);
}

void ExpectedReturns::refresh(Slot slot, const EntryInfo& info) {
  State* const state = state_of(slot);
  others_->refresh(slot, info);  // the last call that may throw
  if (state != nullptr) on_used(*state, slot, info);
}

void ExpectedReturns::on_used(State& state, Slot slot, const EntryInfo& info) {
  if (state.returns_at != 0) drop_hint(slot);
  state.used = static_cast<float>(now_);
  state.depth = info.depth;
  if (info.returns_at != 0) set_return(slot, info.returns_at, info.id);
}

void ExpectedReturns::set_now(double seconds) {
  others_->set_now(seconds);
  if (seconds > now_) now_ = seconds;
}

void ExpectedReturns::set_return(Slot slot, double returns_at, ChunkId) {
  if (!has_clock()) return;
  try {
    State& state = *state_of(slot);
    drop_hint(slot);
    if (!(returns_at > now_)) return;  // or not a number
    const auto rounded = static_cast<float>(returns_at);
    if (rounded == 0) return;
    if (!state.pinned) {
      by_return_.insert({rounded, state.depth, slot});
      others_->pin(slot);
    }
    state.returns_at = rounded;
  } catch (const std::bad_alloc&) {  // without a hint
  }
}

void ExpectedReturns::drop_hint(Slot slot) {
  if (!has_hint(slot)) return;
  State& state = states_[slot];
  if (!state.pinned) {
    others_->unpin(slot);
    by_return_.erase(place_of(slot));
  }
  state.returns_at = 0;
}

void ExpectedReturns::erase(Slot slot) {
  if (has_hint(slot) && !states_[slot].pinned) by_return_.erase(place_of(slot));
  others_->erase(slot);
  if (slot < states_.size()) states_[slot] = {};
}

void ExpectedReturns::pin(Slot slot) {
  State* const state = state_of(slot);
  if (state != nullptr) state->pinned = true;
  if (state != nullptr && state->returns_at != 0) {
    by_return_.erase(place_of(slot));
  } else {
    others_->pin(slot);
  }
}

void ExpectedReturns::unpin(Slot slot) {
  State* const state = slot < states_.size() ? &states_[slot] : nullptr;
  if (state != nullptr) state->pinned = false;
  if (state != nullptr && state->returns_at != 0) {
    try {
      by_return_.insert(place_of(slot));
      return;
    } catch (const std::bad_alloc&) {
      state->returns_at = 0;
    }
  }
  others_->unpin(slot);
}

std::optional<Slot> ExpectedReturns::victim() {
  for (int left = kMostOverdue; left > 0 && !by_return_.empty(); --left) {
    const Place first = *by_return_.begin();
    if (static_cast<double>(first.returns_at) > now_) break;
    drop_hint(first.slot);
  }
  const std::optional<Slot> other = others_->victim();
  if (by_return_.empty()) return other;
  const Place last = *by_return_.rbegin();
  if (!other) return last.slot;
  const double unused = now_ - (*other < states_.size() ? static_cast<double>(states_[*other].used) : 0);
  return static_cast<double>(last.returns_at) - now_ > kPatience * unused ? last.slot : *other;
}

void ExpectedReturns::set_aside(Slot slot) {
  if (has_hint(slot)) return pin(slot);
  others_->set_aside(slot);
}

void ExpectedReturns::put_back(Slot slot) {
  if (has_hint(slot)) return unpin(slot);
  others_->put_back(slot);
}

}  // namespace kv_offload
