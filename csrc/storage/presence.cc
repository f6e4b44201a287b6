#include "storage/presence.h"

#include <algorithm>
#include <utility>

namespace kv_offload {

PresenceCache::PresenceCache(const Clock& clock, Nanos absent_for, std::size_t most_keys)
    : clock_(clock), absent_for_(absent_for), most_keys_(std::max<std::size_t>(most_keys, 2)) {}

std::uint32_t PresenceCache::Entries::place_of(ChunkId id) const {
  return places_.find(id, [&](std::uint32_t place) { return chunk_id(entries_[place].key); });
}

namespace {

// Which of the marks in so many words.
std::size_t mark_of(ChunkId id, std::size_t words) { return IdTable::tag(id) & (64 * words - 1); }

}  // namespace

void PresenceCache::Entries::mark(Marks* marks, ChunkId id) {
  const std::size_t at = mark_of(id, marks->size());
  (*marks)[at / 64] |= std::uint64_t{1} << at % 64;
}

bool PresenceCache::Entries::is_marked(ChunkId id) const {
  const std::size_t at = mark_of(id, marks_.size());
  return (marks_[at / 64] >> at % 64 & 1) != 0;
}

void PresenceCache::Entries::prefetch(const ChunkKey& key) const {
  const ChunkId id = chunk_id(key);
  places_.prefetch(id);
  __builtin_prefetch(&marks_[mark_of(id, marks_.size()) / 64]);
}

const PresenceCache::Entry* PresenceCache::Entries::find(const ChunkKey& key) const {
  std::size_t place = next_;
  if (place >= entries_.size() || entries_[place].key != key) {
    const ChunkId id = chunk_id(key);
    if (!is_marked(id)) return nullptr;
    place = place_of(id);
    if (place == IdTable::kNone || entries_[place].key != key) return nullptr;
  }
  next_ = place + 1;
  if (next_ + kAhead < entries_.size()) __builtin_prefetch(&entries_[next_ + kAhead]);
  return &entries_[place];
}

void PresenceCache::Entries::put(const Entry& entry) {
  // First what may throw.
  if (kMarksPerEntry * (entries_.size() + 1) > 64 * marks_.size()) {
    Marks more(2 * marks_.size());
    for (const Entry& one : entries_) mark(&more, chunk_id(one.key));
    marks_ = std::move(more);
  }
  const ChunkId id = chunk_id(entry.key);
  mark(&marks_, id);
  const auto id_of = [&](std::uint32_t place) { return chunk_id(entries_[place].key); };
  std::uint32_t& place = places_.at(id, id_of);
  if (place != IdTable::kNone) {
    entries_[place] = entry;
    return;
  }
  entries_.push_back(entry);  // first: it may throw
  place = static_cast<std::uint32_t>(entries_.size() - 1);
}

void PresenceCache::Entries::clear() {
  Marks marks(1);  // first: these may throw
  places_ = IdTable();
  marks_ = std::move(marks);
  entries_.clear();
  next_ = 0;
}

const PresenceCache::Entry* PresenceCache::find(const ChunkKey& key) const {
  if (const Entry* entry = young_.find(key); entry != nullptr) return entry;
  return old_.find(key);
}

Presence PresenceCache::presence_of(const Entry* entry) const {
  if (entry == nullptr || entry->state == State::kForgotten) return Presence::kUnknown;
  if (entry->state == State::kAsking) return Presence::kAsked;
  if (entry->state == State::kPresent) return Presence::kPresent;
  return clock_.now() < entry->time ? Presence::kAbsent : Presence::kWasAbsent;
}

void PresenceCache::put(const Entry& entry) {
  if (young_.size() >= most_keys_ / 2) {
    old_.clear();
    std::swap(old_, young_);
  }
  young_.put(entry);
}

Presence PresenceCache::contains(const ChunkKey& key) const {
  const MutexLock lock(mutex_);
  return presence_of(find(key));
}

void PresenceCache::begin_asking(std::span<const ChunkKey> keys, Era era, std::vector<ChunkKey>* asked) {
  const Nanos now = clock_.now();
  const MutexLock lock(mutex_);
  if (era != era_) return;
  for (std::size_t i = 0; i < keys.size(); ++i) {
    if (i + kAhead < keys.size()) {
      young_.prefetch(keys[i + kAhead]);
      old_.prefetch(keys[i + kAhead]);
    }
    const ChunkKey& key = keys[i];
    const Presence presence = presence_of(find(key));
    if (presence != Presence::kUnknown && presence != Presence::kWasAbsent) continue;
    put({key, now, State::kAsking});
    asked->push_back(key);
  }
}

void PresenceCache::forget_absence(const ChunkKey& key) {
  const MutexLock lock(mutex_);
  if (presence_of(find(key)) == Presence::kWasAbsent) put({key, Nanos{0}, State::kForgotten});
}

void PresenceCache::give_up_asking(std::span<const ChunkKey> keys, Era era) {
  const Nanos until = clock_.now() + absent_for_;
  const MutexLock lock(mutex_);
  if (era != era_) return;  // it may be asked for anew by now
  for (const ChunkKey& key : keys) {
    Entry* entry = const_cast<Entry*>(find(key));  // changed where it is: put() may need memory
    if (entry != nullptr && entry->state == State::kAsking) *entry = {key, until, State::kAbsent};
  }
}

PresenceCache::Era PresenceCache::era() const {
  const MutexLock lock(mutex_);
  return era_;
}

void PresenceCache::answered(const ChunkKey& key, bool present, Era era) {
  const Nanos now = clock_.now();
  const MutexLock lock(mutex_);
  if (era != era_) return;
  const Entry* entry = find(key);
  if (entry == nullptr || entry->state != State::kAsking) return;
  if (present) return put({key, Nanos{0}, State::kPresent});
  const Nanos absent = std::max(kLeastAbsent, kAbsentPerAsking * (now - entry->time));
  put({key, now + std::min(absent, absent_for_), State::kAbsent});
}

void PresenceCache::written(const ChunkKey& key, Era era) {
  const MutexLock lock(mutex_);
  if (era == era_) put({key, Nanos{0}, State::kPresent});
}

void PresenceCache::gone(const ChunkKey& key, TierRemoval::Reason reason, Era era) {
  // What was taken for there (of a prefix not every key is looked at) may be about to be written.
  const bool vanished = reason == TierRemoval::Reason::kVanished;
  const Nanos until = clock_.now() + (vanished ? std::min(kLeastAbsent, absent_for_) : absent_for_);
  const MutexLock lock(mutex_);
  if (era != era_) return;
  const Entry* entry = find(key);
  const bool known = entry != nullptr && entry->state == State::kPresent;
  if (known) removals_.push_back({key, reason});
  put({key, until, State::kAbsent});
}

void PresenceCache::reset() {
  const MutexLock lock(mutex_);
  // First what may throw.
  std::vector<TierRemoval> removals = removals_;
  Entries young, old;
  for (const Entries* entries : {&young_, &old_}) {
    for (const Entry& entry : entries->all()) {
      if (entry.state != State::kPresent) continue;
      if (entries == &old_ && young_.find(entry.key) != nullptr) continue;  // the young tell
      removals.push_back({entry.key, TierRemoval::Reason::kReset});
    }
  }
  ++era_;
  removals_.swap(removals);
  std::swap(young_, young);
  std::swap(old_, old);
}

void PresenceCache::take_removals(std::vector<TierRemoval>* removals) {
  const MutexLock lock(mutex_);
  removals->insert(removals->end(), removals_.begin(), removals_.end());
  removals_.clear();
}

}  // namespace kv_offload
