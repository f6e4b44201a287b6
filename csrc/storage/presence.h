// Presence: which keys a store has records of, as far as is known on this side. Catalogue is what PooledTier
// asks; PresenceCache is the one for stores that keep none themselves, which others write to and which drop
// records by rules of their own.
//
// Threads: any. No call does I/O or waits for who does.
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
#include "storage/tier.h"

namespace kv_offload {

class Catalogue {
 public:
  using Era = std::uint64_t;  // the time between two resets; 0 where it is not told

  virtual ~Catalogue() = default;
  // O(1); changes nothing.
  virtual Presence contains(const ChunkKey& key) const = 0;
  // Appends those of the keys that have to be asked for: unknown, and not being asked for already; none in
  // another era. Each is being asked for from then on, until RecordStore::locate() of it ended or it is given
  // up. If memory runs out, that is so of those that were appended by then, where *asked had room for all.
  virtual void begin_asking(std::span<const ChunkKey> keys, Era era, std::vector<ChunkKey>* asked) = 0;
  // See Tier.
  virtual void forget_absence(const ChunkKey& key) = 0;
  // It failed, or never ran: absent for now, so that nobody asks in a loop. `era`: when it was asked. It
  // needs no memory: what cannot be given up would be asked for for ever.
  virtual void give_up_asking(std::span<const ChunkKey> keys, Era era) = 0;
  virtual void touch(const ChunkKey& key) = 0;
  virtual void used(const TierUses&) {}  // see Tier
  // Appends what is gone since the last call.
  virtual void take_removals(std::vector<TierRemoval>* removals) = 0;
};

// Bounded: the keys that nothing was learnt of for longest are forgotten first, and are unknown again. Each
// call is O(1) a key, whatever the number of keys that are known: those that are forgotten, by a reset too,
// are put aside, and freed by I/O threads without the lock.
//
// What is present stays so until a read finds otherwise; what is absent is worth asking again after a time,
// for others write to the store: kAbsentPerAsking times as long as the answer took, so that a store that
// answers fast is seen as it is and a slow one is not kept busy with questions; kLeastAbsent after a read
// that did not find it. What an op learnt counts only in the era (the time between two resets) that it was
// submitted in.
class PresenceCache final : public Catalogue {
 public:
  static constexpr int kAbsentPerAsking = 8;
  static constexpr Nanos kLeastAbsent{std::chrono::milliseconds(10)};

  // `absent_for`: at most, and for keys that nobody answered for.
  PresenceCache(const Clock& clock, Nanos absent_for, std::size_t most_keys);

  Presence contains(const ChunkKey& key) const override EXCLUDES(mutex_);
  void begin_asking(std::span<const ChunkKey> keys, Era era, std::vector<ChunkKey>* asked) override
      EXCLUDES(mutex_);
  void forget_absence(const ChunkKey& key) override EXCLUDES(mutex_);
  void give_up_asking(std::span<const ChunkKey> keys, Era era) override EXCLUDES(mutex_);
  void touch(const ChunkKey&) override {}  // the store knows what is read, and nothing else of use
  void take_removals(std::vector<TierRemoval>* removals) override EXCLUDES(mutex_);

  Era era() const EXCLUDES(mutex_);
  // An answer of locate(). What a write or a read told meanwhile is newer.
  void answered(const ChunkKey& key, bool present, Era era) EXCLUDES(mutex_);
  void written(const ChunkKey& key, Era era) EXCLUDES(mutex_);  // or read
  void gone(const ChunkKey& key, TierRemoval::Reason reason, Era era) EXCLUDES(mutex_);
  // Nothing is there any more. If memory runs out: it throws, and has changed nothing.
  void reset() EXCLUDES(mutex_);

 private:
  static constexpr std::size_t kAhead = 8;  // entries that are fetched into the processor's cache
  // That one call of take_removals() tells; the next calls tell the others.
  static constexpr std::size_t kMostRemovals = 2048;
  enum class State : std::uint8_t { kForgotten, kAsking, kPresent, kAbsent };
  struct Entry {
    ChunkKey key;
    Nanos time{0};  // kAbsent: until then; kAsking: since then
    State state = State::kAbsent;
  };
  // Entries one behind the other, found by a hash of their keys. The scheduler asks for thousands at once: a
  // node for each would be an allocation and a cache miss. And it asks for them again in the order that they
  // came in, so the entry behind the last that was found is looked at first: it has the next one ready. Of
  // two keys with one 64-bit hash it has the later one.
  //
  // A prompt that is new has thousands of keys that nothing is known of, and a hash table that other threads
  // write to is a cache miss for each. `marks_`, a bit for the hash of each entry among many that are not
  // set, says no of nearly all of them, and is so small that the processor's cache keeps it.
  class Entries {
   public:
    explicit Entries(std::size_t most);
    // Null: not there.
    const Entry* find(const ChunkKey& key) const;
    void prefetch(const ChunkKey& key) const;
    void put(const Entry& entry);  // REQUIRES: fewer than `most`, or it is one of them
    std::size_t size() const { return entries_.size(); }
    const Entry& operator[](std::size_t at) const { return entries_[at]; }

   private:
    static constexpr std::size_t kMarksPerEntry = 16;  // at least: of others one in 16 is looked for in vain
    std::uint32_t place_of(ChunkId id) const;
    std::uint64_t& word_of(std::size_t mark) const {
      return static_cast<std::uint64_t*>(marks_.data())[mark / 64];
    }
    std::size_t mark_of(ChunkId id) const { return IdTable::tag(id) & (marks_in_all_ - 1); }
    SegmentedVector<Entry> entries_;
    std::size_t marks_in_all_;  // a power of two
    ZeroedMemory marks_;
    IdTable places_;
    mutable std::size_t next_ = 0;  // behind the one that was found last
  };

  const Entry* find(const ChunkKey& key) const REQUIRES(mutex_);
  // The key becomes one of the young. When these are half of all before, the old are forgotten, and they are
  // the old.
  void put(const Entry& entry) REQUIRES(mutex_);
  // What was known before a reset: what was present is to be told as removed.
  struct Forgotten {
    Entries young, old;
    std::size_t told = 0;  // of both, the young first
  };
  bool was_present(const Forgotten& forgotten, const Entry& entry) const REQUIRES(mutex_);
  Presence presence_of(const Entry* entry) const;

  const Clock& clock_;
  const Nanos absent_for_;
  const std::size_t most_keys_;
  mutable Mutex mutex_;
  // What the young say of a key is newer.
  Entries young_ GUARDED_BY(mutex_), old_ GUARDED_BY(mutex_);
  Era era_ GUARDED_BY(mutex_) = 0;
  std::deque<TierRemoval> removals_ GUARDED_BY(mutex_);
  std::deque<Forgotten> forgotten_ GUARDED_BY(mutex_);  // oldest first
  std::vector<Entries> spent_ GUARDED_BY(mutex_);       // to be freed, by I/O threads
};

}  // namespace kv_offload
