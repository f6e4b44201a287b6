#include "storage/presence.h"

#include <algorithm>

namespace kv_offload {

PresenceCache::PresenceCache(const Clock& clock, Nanos absent_for, std::size_t most_keys)
    : clock_(clock), absent_for_(absent_for), most_keys_(std::max<std::size_t>(most_keys, 2)) {}

const PresenceCache::Entry* PresenceCache::find(const ChunkKey& key) const {
  if (const auto found = young_.find(key); found != young_.end()) return &found->second;
  if (const auto found = old_.find(key); found != old_.end()) return &found->second;
  return nullptr;
}

Presence PresenceCache::presence_of(const Entry* entry, Nanos now) const {
  if (entry == nullptr || entry->state == State::kAsking) return Presence::kUnknown;
  if (entry->state == State::kPresent) return Presence::kPresent;
  return now < entry->time ? Presence::kAbsent : Presence::kWasAbsent;
}

void PresenceCache::put(const ChunkKey& key, Entry entry, Entries* forgotten) {
  old_.erase(key);
  young_[key] = entry;
  if (young_.size() <= most_keys_ / 2) return;
  forgotten->swap(old_);
  old_.clear();
  old_.swap(young_);
}

Presence PresenceCache::contains(const ChunkKey& key) const {
  const Nanos now = clock_.now();
  const MutexLock lock(mutex_);
  return presence_of(find(key), now);
}

void PresenceCache::begin_asking(std::vector<ChunkKey>* keys) {
  const Nanos now = clock_.now();
  Entries forgotten;
  std::vector<ChunkKey> asked;
  const MutexLock lock(mutex_);
  for (const ChunkKey& key : *keys) {
    const Entry* entry = find(key);
    const bool asking = entry != nullptr && entry->state == State::kAsking;
    const Presence presence = presence_of(entry, now);
    if (asking || presence == Presence::kPresent || presence == Presence::kAbsent) continue;
    put(key, {State::kAsking, now}, &forgotten);
    asked.push_back(key);
  }
  keys->swap(asked);
}

void PresenceCache::give_up_asking(std::span<const ChunkKey> keys) {
  const Nanos until = clock_.now() + absent_for_;
  Entries forgotten;
  const MutexLock lock(mutex_);
  for (const ChunkKey& key : keys) {
    const Entry* entry = find(key);
    if (entry != nullptr && entry->state == State::kAsking) put(key, {State::kAbsent, until}, &forgotten);
  }
}

PresenceCache::Era PresenceCache::era() const {
  const MutexLock lock(mutex_);
  return era_;
}

void PresenceCache::answered(const ChunkKey& key, bool present, Era era) {
  const Nanos now = clock_.now();
  Entries forgotten;
  const MutexLock lock(mutex_);
  if (era != era_) return;
  const Entry* entry = find(key);
  if (entry == nullptr || entry->state != State::kAsking) return;
  if (present) return put(key, {State::kPresent}, &forgotten);
  const Nanos absent = std::max(kLeastAbsent, kAbsentPerAsking * (now - entry->time));
  put(key, {State::kAbsent, now + std::min(absent, absent_for_)}, &forgotten);
}

void PresenceCache::written(const ChunkKey& key, Era era) {
  Entries forgotten;
  const MutexLock lock(mutex_);
  if (era == era_) put(key, {State::kPresent}, &forgotten);
}

void PresenceCache::gone(const ChunkKey& key, TierRemoval::Reason reason, Era era) {
  const Nanos until = clock_.now() + absent_for_;
  Entries forgotten;
  const MutexLock lock(mutex_);
  if (era != era_) return;
  const Entry* entry = find(key);
  const bool known = entry != nullptr && entry->state == State::kPresent;
  if (known) removals_.push_back({key, reason});
  put(key, {State::kAbsent, until}, &forgotten);
}

void PresenceCache::reset() {
  Entries young, old;
  const MutexLock lock(mutex_);
  ++era_;
  young.swap(young_);
  old.swap(old_);
  for (const Entries* entries : {&young, &old}) {
    for (const auto& [key, entry] : *entries) {
      if (entry.state == State::kPresent) removals_.push_back({key, TierRemoval::Reason::kReset});
    }
  }
}

void PresenceCache::take_removals(std::vector<TierRemoval>* removals) {
  const MutexLock lock(mutex_);
  removals->insert(removals->end(), removals_.begin(), removals_.end());
  removals_.clear();
}

}  // namespace kv_offload
