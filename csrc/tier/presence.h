// SPDX-License-Identifier: Apache-2.0
// Presence: which keys a store has records for, as far as this process knows. Catalog is the interface that
// ThreadPoolTier queries. PresenceCache implements it for stores without a catalog of their own, which other
// processes write to and which drop records by their own rules.
//
// Threads: any. No call does I/O or waits for a thread that does.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <optional>
#include <span>
#include <vector>

#include "base/clock.h"
#include "base/segmented_vector.h"
#include "base/thread_annotations.h"
#include "base/types.h"
#include "base/zeroed_memory.h"
#include "policy/id_table.h"
#include "tier/tier.h"

namespace kv_offload {

class Catalog {
 public:
  // Number of an epoch (the time between two resets); 0 where epochs are not distinguished.
  using EpochNumber = std::uint64_t;

  virtual ~Catalog() = default;
  // O(1); changes nothing.
  virtual Presence contains(const ChunkKey& key) const = 0;
  // Appends those keys that have to be looked up: unknown, without a pending lookup, and only if
  // `epoch_number` is current. Each appended key has a pending lookup until its RecordStore::locate() ended
  // or the lookup is given up. If memory runs out, that holds for the keys appended so far, provided that
  // *started had room for all.
  virtual void begin_lookup(std::span<const ChunkKey> keys, EpochNumber epoch_number,
                            std::vector<ChunkKey>* started) = 0;
  // See Tier.
  virtual void forget_miss(const ChunkKey& key) = 0;
  // Ends lookups that failed or never ran. The keys are kLookupFailed for now, so that callers do not ask in
  // a loop, and then unknown. `epoch_number`: the epoch in which the lookup began. Allocates nothing: a
  // lookup that cannot be given up would stay pending forever.
  virtual void cancel_lookup(std::span<const ChunkKey> keys, EpochNumber epoch_number) = 0;
  virtual void touch(const ChunkKey& key) = 0;
  virtual void used(const TierUses&) {}  // see Tier
  // Appends the keys that were removed since the last call.
  virtual void take_removals(std::vector<TierRemoval>* removals) = 0;
  virtual bool has_removals() const { return false; }  // see Tier
};

// Bounded: the keys that were updated least recently are forgotten first and become unknown again. Each call
// is O(1) per key, regardless of the number of known keys: tables of forgotten keys (also after a reset) are
// set aside, and I/O threads free them without the lock.
//
// A present key stays present until a read or the store's watch() finds its record missing. An absent key is
// worth another lookup after some time, because other processes write to the store. That time is
// kAbsentPerLatency times the latency of the answer: a fast store is seen up to date, and a slow one is not
// kept busy with lookups. After a read that found no record the time is kMinAbsent. The result of an op
// counts only in the epoch that the op was submitted in.
class PresenceCache final : public Catalog {
 public:
  static constexpr int kAbsentPerLatency = 8;
  static constexpr Nanos kMinAbsent{std::chrono::milliseconds(10)};

  // `absent_for`: the longest time a key stays absent, and how long a lookup counts as failed.
  PresenceCache(const Clock& clock, Nanos absent_for, std::size_t most_keys);

  Presence contains(const ChunkKey& key) const override EXCLUDES(mutex_);
  void begin_lookup(std::span<const ChunkKey> keys, EpochNumber epoch_number,
                    std::vector<ChunkKey>* started) override EXCLUDES(mutex_);
  void forget_miss(const ChunkKey& key) override EXCLUDES(mutex_);
  void cancel_lookup(std::span<const ChunkKey> keys, EpochNumber epoch_number) override EXCLUDES(mutex_);
  void touch(const ChunkKey&) override {}  // the store sees the reads itself and needs no other recency
  void take_removals(std::vector<TierRemoval>* removals) override EXCLUDES(mutex_);
  bool has_removals() const override EXCLUDES(mutex_);
  // True if take_removals() would append nothing, also after a reset.
  bool has_reported_all() const EXCLUDES(mutex_);

  Nanos now() const { return clock_.now(); }
  EpochNumber epoch_number() const EXCLUDES(mutex_);
  // Records the answer of locate(). The result of a write or a read since then is newer and wins.
  void answered(const ChunkKey& key, bool present, EpochNumber epoch_number) EXCLUDES(mutex_);
  void written(const ChunkKey& key, EpochNumber epoch_number) EXCLUDES(mutex_);
  // Records a successful read. Absent and pending keys keep their state. The key was present when the read
  // was submitted, so its removal is newer.
  void was_read(const ChunkKey& key, EpochNumber epoch_number) EXCLUDES(mutex_);
  void removed(const ChunkKey& key, TierRemoval::Reason reason, EpochNumber epoch_number) EXCLUDES(mutex_);
  // Records that a present key had no record when the store was asked, at `asked` or later. False: the key
  // has become present since, so that the answer may be older than its record; nothing changes.
  bool vanished(const ChunkKey& key, Nanos asked, EpochNumber epoch_number) EXCLUDES(mutex_);
  // Appends the present keys among the next `most` entries from *next on, and advances *next, which begins
  // with 0. Returns false at the end. Keys that were present before the first of several calls and still are
  // at the end are found, unless a reset came between.
  bool list_present(std::uint64_t* next, std::size_t most, std::vector<ChunkKey>* keys) const
      EXCLUDES(mutex_);
  // Makes every key unknown. If memory runs out, throws and changes nothing.
  void reset() EXCLUDES(mutex_);

 private:
  static constexpr std::size_t kAhead = 8;  // entries prefetched into the CPU cache
  // Most removals that one take_removals() call reports; the next calls report the rest.
  static constexpr std::size_t kMostRemovals = 2048;
  static constexpr std::size_t kRemovalsPerLock = 64;
  static constexpr std::size_t kListedPerLock = 128;
  static_assert(kMostRemovals % kRemovalsPerLock == 0);
  enum class State : std::uint8_t { kUnknown, kPending, kPresent, kAbsent, kFailed };
  struct Entry {
    ChunkKey key;
    Nanos time{0};  // kAbsent, kFailed: until then; kPending, kPresent: since then
    State state = State::kAbsent;
  };
  // Entries in insertion order, found by a hash of their keys. The scheduler looks up thousands of keys at
  // once: a node for each would cost an allocation and a cache miss. It looks them up again in insertion
  // order, so find() first checks the entry after the last one found, which is already prefetched. If two
  // keys share one 64-bit hash, only the later one is kept.
  //
  // A new prompt has thousands of unknown keys, and each probe of a hash table that other threads write to is
  // a cache miss. `marks_` is a bitmap with one bit per entry hash, mostly unset. It answers "not here" for
  // nearly all unknown keys and is small enough to stay in the CPU cache.
  class Entries {
   public:
    explicit Entries(std::size_t most);
    // Returns null if the key has no entry.
    const Entry* find(const ChunkKey& key) const;
    void prefetch(const ChunkKey& key) const;
    void put(const Entry& entry);  // REQUIRES: size() below `most`, or the key is in it
    std::size_t size() const { return entries_.size(); }
    const Entry& operator[](std::size_t at) const { return entries_[at]; }

   private:
    static constexpr std::size_t kMarksPerEntry = 16;  // at least: 1 in 16 unknown keys is probed needlessly
    std::uint32_t place_of(ChunkId id) const;
    std::uint64_t& mark_word(std::size_t mark) const {
      return static_cast<std::uint64_t*>(marks_.data())[mark / 64];
    }
    std::size_t mark_of(ChunkId id) const { return IdTable::tag(id) & (marks_in_all_ - 1); }
    SegmentedVector<Entry> entries_;
    std::size_t marks_in_all_;  // a power of two
    ZeroedMemory marks_;
    IdTable places_;
    mutable std::size_t next_ = 0;  // index after the entry found last
  };

  void remove(const ChunkKey& key, TierRemoval::Reason reason) REQUIRES(mutex_);
  bool list_some_present(std::uint64_t* next, std::size_t most, std::vector<ChunkKey>* keys) const
      EXCLUDES(mutex_);
  bool take_some_removals(std::vector<TierRemoval>* removals) EXCLUDES(mutex_);
  const Entry* find(const ChunkKey& key) const REQUIRES(mutex_);
  // Puts the key into the young table. When the young table holds half of all keys, the old table is dropped
  // and the young one becomes the old one.
  void put(const Entry& entry) REQUIRES(mutex_);
  // Entries from before a reset. Its present keys have yet to be reported as removed.
  struct DroppedEntries {
    Entries young, old;
    std::size_t reported = 0;  // entries reported so far: the young ones first, then the old ones
  };
  bool was_present(const DroppedEntries& dropped, const Entry& entry) const REQUIRES(mutex_);
  Presence presence_of(const Entry* entry) const;

  const Clock& clock_;
  const Nanos absent_for_;
  const std::size_t most_keys_;
  mutable Mutex mutex_;
  // The young entry of a key is newer than the old one.
  Entries young_ GUARDED_BY(mutex_), old_ GUARDED_BY(mutex_);
  // Number of entries dropped so far: the position of old_[0] in list_present().
  std::uint64_t dropped_entries_ GUARDED_BY(mutex_) = 0;
  EpochNumber epoch_number_ GUARDED_BY(mutex_) = 0;
  std::deque<TierRemoval> removals_ GUARDED_BY(mutex_);
  std::deque<DroppedEntries> dropped_ GUARDED_BY(mutex_);  // oldest first
  std::vector<Entries> spent_ GUARDED_BY(mutex_);          // to be freed by I/O threads
};

}  // namespace kv_offload
