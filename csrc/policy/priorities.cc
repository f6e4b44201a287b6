// SPDX-License-Identifier: Apache-2.0
#include "policy/priorities.h"

#include <utility>

namespace kv_offload {

Prioritised::Prioritised(Make make) : make_(std::move(make)) { levels_[kNormal] = make_(); }

EvictionPolicy& Prioritised::make_level(Level level) {
  if (!levels_[level]) {
    levels_[level] = make_();
    levels_[level]->set_now(now_);
  }
  return *levels_[level];
}

void Prioritised::insert(Slot slot, const EntryInfo& info) {
  states_.grow_to(std::size_t{slot} + 1);
  const Level level = level_of_priority(info.priority);
  make_level(level).insert(slot, info);  // the last call that may throw
  states_[slot] = {.level = level};
  ++known_[level];
}

void Prioritised::access(Slot slot, const EntryInfo& info) {
  const Level level = level_of_priority(info.priority);
  if (level <= states_[slot].level) return level_of(slot).access(slot, info);
  move(slot, level, info);
}

void Prioritised::set_priority(Slot slot, const EntryInfo& info) {
  const Level level = level_of_priority(info.priority);
  if (level == states_[slot].level) return level_of(slot).refresh(slot, info);
  move(slot, level, info);
}

void Prioritised::move(Slot slot, Level level, const EntryInfo& info) {
  State& state = states_[slot];
  make_level(level).insert(slot, info);  // first, because it may throw
  level_of(slot).erase(slot);
  --known_[state.level];
  state.level = level;
  ++known_[level];
  if (state.recorded) level_of(slot).set_recorded(slot, true);
  if (state.pinned) level_of(slot).pin(slot);
}

void Prioritised::set_recorded(Slot slot, bool recorded) {
  states_[slot].recorded = recorded;
  level_of(slot).set_recorded(slot, recorded);
}

void Prioritised::set_now(double seconds) {
  now_ = seconds;
  for (const auto& level : levels_) {
    if (level) level->set_now(seconds);
  }
}

void Prioritised::erase(Slot slot) {
  State& state = states_[slot];
  levels_[state.level]->erase(slot);
  --known_[state.level];
  state = State{};
}

void Prioritised::pin(Slot slot) {
  State& state = states_[slot];
  state.pinned = true;
  levels_[state.level]->pin(slot);
}

void Prioritised::unpin(Slot slot) {
  State& state = states_[slot];
  state.pinned = false;
  levels_[state.level]->unpin(slot);
}

std::optional<Slot> Prioritised::victim() {
  if (!levels_[kLow] && !levels_[kHigh]) return levels_[kNormal]->victim();
  const bool is_high_crowded = 2 * known_[kHigh] > known_[kLow] + known_[kNormal] + known_[kHigh];
  constexpr std::array<Level, 3> kUsual = {kLow, kNormal, kHigh};
  constexpr std::array<Level, 3> kCrowded = {kLow, kHigh, kNormal};
  for (const Level level : is_high_crowded ? kCrowded : kUsual) {
    if (!levels_[level]) continue;
    if (const auto victim = levels_[level]->victim()) return victim;
  }
  return std::nullopt;
}

}  // namespace kv_offload
