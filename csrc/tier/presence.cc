// SPDX-License-Identifier: Apache-2.0
#include "tier/presence.h"

#include <algorithm>
#include <bit>
#include <utility>

#include "base/make_room.h"
#include "base/steps.h"

namespace kv_offload {

PresenceCache::PresenceCache(const Clock& clock, Nanos absent_for, std::size_t most_keys)
    : clock_(clock),
      absent_for_(absent_for),
      most_keys_(std::max<std::size_t>(most_keys, 2)),
      young_(most_keys_ / 2),
      old_(most_keys_ / 2) {}

PresenceCache::Entries::Entries(std::size_t most)
    : marks_in_all_(std::bit_ceil(std::max<std::size_t>(kMarksPerEntry * most, 64))),
      marks_(marks_in_all_ / 8) {}

std::uint32_t PresenceCache::Entries::place_of(ChunkId id) const {
  return places_.find(id, [&](std::uint32_t place) { return chunk_id(entries_[place].key); });
}

void PresenceCache::Entries::prefetch(const ChunkKey& key) const {
  const ChunkId id = chunk_id(key);
  places_.prefetch(id);
  __builtin_prefetch(&mark_word(mark_of(id)));
}

const PresenceCache::Entry* PresenceCache::Entries::find(const ChunkKey& key) const {
  std::size_t place = next_;
  if (place >= entries_.size() || entries_[place].key != key) {
    const ChunkId id = chunk_id(key);
    const std::size_t mark = mark_of(id);
    if ((mark_word(mark) >> mark % 64 & 1) == 0) return nullptr;
    place = place_of(id);
    if (place == IdTable::kNone || entries_[place].key != key) return nullptr;
  }
  next_ = place + 1;
  if (next_ + kAhead < entries_.size()) __builtin_prefetch(&entries_[next_ + kAhead]);
  return &entries_[place];
}

void PresenceCache::Entries::put(const Entry& entry) {
  const ChunkId id = chunk_id(entry.key);
  const auto id_of = [&](std::uint32_t place) { return chunk_id(entries_[place].key); };
  const std::uint32_t place = places_.find_or_add(id, id_of, [&] {
    entries_.push_back(entry);
    return static_cast<std::uint32_t>(entries_.size() - 1);
  });
  entries_[place] = entry;
  mark_word(mark_of(id)) |= std::uint64_t{1} << mark_of(id) % 64;
}

const PresenceCache::Entry* PresenceCache::find(const ChunkKey& key) const {
  if (const Entry* entry = young_.find(key); entry != nullptr) return entry;
  return old_.find(key);
}

Presence PresenceCache::presence_of(const Entry* entry) const {
  if (entry == nullptr || entry->state == State::kUnknown) return Presence::kUnknown;
  if (entry->state == State::kPending) return Presence::kLookupPending;
  if (entry->state == State::kPresent) return Presence::kPresent;
  if (entry->state == State::kFailed)
    return clock_.now() < entry->time ? Presence::kLookupFailed : Presence::kUnknown;
  return clock_.now() < entry->time ? Presence::kAbsent : Presence::kStaleMiss;
}

void PresenceCache::put(const Entry& entry) {
  if (young_.size() >= most_keys_ / 2) {
    spent_.emplace_back(most_keys_ / 2);  // first: it may throw
    dropped_entries_ += old_.size();
    std::swap(spent_.back(), old_);
    std::swap(old_, young_);
  }
  young_.put(entry);
}

Presence PresenceCache::contains(const ChunkKey& key) const {
  const MutexLock lock(mutex_);
  return presence_of(find(key));
}

void PresenceCache::begin_lookup(std::span<const ChunkKey> keys, EpochNumber epoch_number,
                                 std::vector<ChunkKey>* started) {
  const Nanos now = clock_.now();
  std::vector<Entries> spent;  // destroyed after the lock is released
  const MutexLock lock(mutex_);
  spent.swap(spent_);
  if (epoch_number != epoch_number_) return;
  for (std::size_t i = 0; i < keys.size(); ++i) {
    if (i + kAhead < keys.size()) {
      young_.prefetch(keys[i + kAhead]);
      old_.prefetch(keys[i + kAhead]);
    }
    const ChunkKey& key = keys[i];
    const Presence presence = presence_of(find(key));
    if (presence != Presence::kUnknown && presence != Presence::kStaleMiss) continue;
    put({key, now, State::kPending});
    started->push_back(key);
  }
}

void PresenceCache::forget_miss(const ChunkKey& key) {
  const MutexLock lock(mutex_);
  if (presence_of(find(key)) == Presence::kStaleMiss) put({key, Nanos{0}, State::kUnknown});
}

void PresenceCache::cancel_lookup(std::span<const ChunkKey> keys, EpochNumber epoch_number) {
  const Nanos until = clock_.now() + absent_for_;
  const MutexLock lock(mutex_);
  if (epoch_number != epoch_number_) return;  // the keys may have a new lookup by now
  count_steps(keys.size());
  for (const ChunkKey& key : keys) {
    Entry* entry = const_cast<Entry*>(find(key));  // in place: put() may need memory
    if (entry != nullptr && entry->state == State::kPending) *entry = {key, until, State::kFailed};
  }
}

PresenceCache::EpochNumber PresenceCache::epoch_number() const {
  const MutexLock lock(mutex_);
  return epoch_number_;
}

void PresenceCache::answered(const ChunkKey& key, bool present, EpochNumber epoch_number) {
  const Nanos now = clock_.now();
  std::vector<Entries> spent;  // as above
  const MutexLock lock(mutex_);
  spent.swap(spent_);
  if (epoch_number != epoch_number_) return;
  const Entry* entry = find(key);
  if (entry == nullptr || entry->state != State::kPending) return;
  if (present) return put({key, now, State::kPresent});
  const Nanos absent = std::max(kMinAbsent, kAbsentPerLatency * (now - entry->time));
  put({key, now + std::min(absent, absent_for_), State::kAbsent});
}

void PresenceCache::written(const ChunkKey& key, EpochNumber epoch_number) {
  const Nanos now = clock_.now();
  std::vector<Entries> spent;  // as above
  const MutexLock lock(mutex_);
  spent.swap(spent_);
  if (epoch_number == epoch_number_) put({key, now, State::kPresent});
}

void PresenceCache::was_read(const ChunkKey& key, EpochNumber epoch_number) {
  const Nanos now = clock_.now();
  std::vector<Entries> spent;  // as above
  const MutexLock lock(mutex_);
  spent.swap(spent_);
  if (epoch_number != epoch_number_) return;
  const Entry* entry = find(key);
  if (entry != nullptr && (entry->state == State::kAbsent || entry->state == State::kPending)) return;
  put({key, now, State::kPresent});
}

void PresenceCache::remove(const ChunkKey& key, TierRemoval::Reason reason) {
  // Lookups of a prompt do not check every key, so a key that counted as present may be about to be written.
  const bool vanished = reason == TierRemoval::Reason::kVanished;
  const Nanos until = clock_.now() + (vanished ? std::min(kMinAbsent, absent_for_) : absent_for_);
  const Entry* entry = find(key);
  const bool known = entry != nullptr && entry->state == State::kPresent;
  if (known) removals_.push_back({key, reason});
  put({key, until, State::kAbsent});
}

void PresenceCache::removed(const ChunkKey& key, TierRemoval::Reason reason, EpochNumber epoch_number) {
  const MutexLock lock(mutex_);
  if (epoch_number == epoch_number_) remove(key, reason);
}

bool PresenceCache::vanished(const ChunkKey& key, Nanos asked, EpochNumber epoch_number) {
  const MutexLock lock(mutex_);
  const Entry* entry = find(key);
  const bool is_current =
      epoch_number == epoch_number_ && entry != nullptr && entry->state == State::kPresent;
  if (is_current && entry->time > asked) return false;
  if (is_current) remove(key, TierRemoval::Reason::kVanished);
  return true;
}

void PresenceCache::reset() {
  DroppedEntries dropped{Entries(most_keys_ / 2), Entries(most_keys_ / 2)};  // empty tables for the new epoch
  const MutexLock lock(mutex_);
  dropped_.push_back(std::move(dropped));  // the last step that may throw
  std::swap(dropped_.back().young, young_);
  std::swap(dropped_.back().old, old_);
  dropped_entries_ += dropped_.back().young.size() + dropped_.back().old.size();
  ++epoch_number_;
}

bool PresenceCache::list_present(std::uint64_t* next, std::size_t most, std::vector<ChunkKey>* keys) const {
  keys->reserve(keys->size() + most);
  bool more = true;
  for (std::size_t left = most; more && left > 0;) {
    const std::size_t some = std::min(left, kListedPerLock);
    more = list_some_present(next, some, keys);
    left -= some;
  }
  return more;
}

// Returns true if there are more. REQUIRES: room for `most` in the list.
bool PresenceCache::list_some_present(std::uint64_t* next, std::size_t most,
                                      std::vector<ChunkKey>* keys) const {
  const MutexLock lock(mutex_);
  count_steps(most);
  *next = std::max(*next, dropped_entries_);
  const std::uint64_t end = dropped_entries_ + old_.size() + young_.size();
  for (; most > 0 && *next < end; --most, ++*next) {
    const auto at = static_cast<std::size_t>(*next - dropped_entries_);
    const Entry& entry = at < old_.size() ? old_[at] : young_[at - old_.size()];
    if (presence_of(find(entry.key)) == Presence::kPresent) keys->push_back(entry.key);
  }
  return *next < end;
}

// False for keys that are present again: their new presence was reported.
bool PresenceCache::was_present(const DroppedEntries& dropped, const Entry& entry) const {
  if (entry.state != State::kPresent) return false;
  const bool is_old = dropped.reported >= dropped.young.size();
  if (is_old && dropped.young.find(entry.key) != nullptr) return false;  // the young entry is newer
  return presence_of(find(entry.key)) != Presence::kPresent;
}

void PresenceCache::take_removals(std::vector<TierRemoval>* removals) {
  for (std::size_t left = kMostRemovals; left > 0; left -= kRemovalsPerLock) {
    make_room(*removals, kRemovalsPerLock);
    if (!take_some_removals(removals)) return;
  }
}

bool PresenceCache::has_removals() const {
  const MutexLock lock(mutex_);
  return !removals_.empty();
}

bool PresenceCache::has_reported_all() const {
  const MutexLock lock(mutex_);
  return removals_.empty() && dropped_.empty();
}

// Returns true if there are more. REQUIRES: room for kRemovalsPerLock in the list.
bool PresenceCache::take_some_removals(std::vector<TierRemoval>* removals) {
  const MutexLock lock(mutex_);
  std::size_t left = kRemovalsPerLock;
  for (; left > 0 && !removals_.empty(); --left) {
    removals->push_back(removals_.front());
    removals_.pop_front();
  }
  while (left > 0 && !dropped_.empty()) {
    DroppedEntries& oldest = dropped_.front();
    const std::size_t young = oldest.young.size(), all = young + oldest.old.size();
    for (; left > 0 && oldest.reported < all; --left, ++oldest.reported) {
      const Entry& entry =
          oldest.reported < young ? oldest.young[oldest.reported] : oldest.old[oldest.reported - young];
      if (was_present(oldest, entry)) removals->push_back({entry.key, TierRemoval::Reason::kReset});
    }
    if (oldest.reported < all) break;
    spent_.push_back(std::move(oldest.young));
    spent_.push_back(std::move(oldest.old));
    dropped_.pop_front();
  }
  count_steps(kRemovalsPerLock - left);
  return left == 0;
}

}  // namespace kv_offload
