// SPDX-License-Identifier: Apache-2.0
// ChunkIndex: maps a key to the state of every chunk that has a host memory row, or is being loaded into one.
// (Chunks that are only on a tier are known to that tier: see Tier::contains.)
//
//   absent -> filling -> resident -> absent         store from the workers
//   absent -> fetching -> resident -> absent        read from a tier
//
// A chunk in `filling` or `fetching` has a row but no valid bytes. `resident` means that every rank's bytes
// are present and verified. Pins count the jobs, ops and plans that use the row; a pinned chunk is never
// evicted. The policy decides the eviction order. Invariants, asserted: pins == 0 for absent; a row belongs
// to one entry; the policy knows exactly the resident entries, and its pins equal (entry.pins > 0 ||
// entry.spared).
//
// Spared entries: entries that victim(holder) reached and skipped because they belong to this holder, and all
// entries before them in their prefix, whichever request used those last: a chunk is worthless without the
// chunks before it. Spared entries stay pinned in the policy, so the holder skips each of them once instead
// of once per call. Another holder that asks takes the first spared entry and leaves the others spared, so
// two long requests that ask in turn go through each other's chunks once. Invariant: each spared entry
// belongs to the holder that it is spared for, or precedes such an entry, or did when it was spared. All
// spared entries become candidates again when none is left that another holder may take, when another request
// uses one, or when one is erased.
//
// Forgotten entries: forget() makes all entries absent at once, whatever their number. They keep their slots
// and rows until the owner erases them (next_forgotten), a few at a time. All calls except victim() and those
// that name forgotten entries ignore them: find(), for_each() and the counts.
//
// Not thread-safe: owned by the scheduler thread. All calls are O(1) except for the policy's O(log n);
// victim() is amortised over the calls of all holders.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "base/table_vector.h"
#include "base/types.h"
#include "policy/eviction_policy.h"

namespace kv_offload {

enum class ChunkState : std::uint8_t { kAbsent, kFilling, kResident, kFetching };

// Source of a resident chunk's bytes, for hit accounting. kBefore: the previous engine left it in host
// memory, and no request has used it since. kNeighbour: the row belongs to another engine of this host.
enum class ChunkOrigin : std::uint8_t { kStore, kTier, kBefore, kNeighbour };

struct ChunkEntry {
  ChunkKey key;
  Ticket ticket = kNoTicket;  // the store job that fills it
  ChunkId parent = 0;         // the chunk before it in its prefix; 0 = none or not known
  RowId row = kNoRow;         // kAbsent: the next free slot, internal to the index
  std::uint32_t pins = 0;
  std::uint32_t depth = 0;
  std::uint32_t holder = 0;  // number of the request that stored or loaded it last; 0 = none
  std::uint32_t family = 0;  // the sessions that use it; see HostChunks::claim
  float returns_at = 0;      // see EntryInfo; kept here until the policy knows the entry
  std::uint8_t group = 0;    // position, not id
  std::int8_t priority = 0;  // highest among its requests and all chunks after it
  ChunkState state : 4 = ChunkState::kAbsent;
  ChunkOrigin origin : 4 = ChunkOrigin::kStore;
  TenantId tenant = 0;        // that it is charged to
  std::uint8_t tier = 0;      // index of the tier it was read from, if origin == kTier
  std::uint8_t writes = 0;    // bit t: a write op to tier t is queued or running
  std::uint8_t tried = 0;     // bit t: a write op ended, in success or failure, while the chunk is here
  bool counted : 1 = false;   // its fetch was counted as a hit of that tier
  bool spared : 1 = false;    // set by victim(); internal to the index
  bool recorded : 1 = false;  // at the last check, a tier worth reading had it too
  bool first : 1 = false;     // first of its group in the store job that fills it
  bool retained : 1 = false;  // its priority is raised until its next use: see retain()
  // Number of forget() calls before its insert, modulo kMostEpochs + 1; internal to the index.
  std::uint8_t epoch : 3 = 0;
};
static_assert(sizeof(ChunkEntry) == 96);

// Memory: 96 bytes per entry, 9 bytes per table cell at a load of 0.25 to 0.5 (18 to 36), 26 bytes of the
// policy (lru): 140 to 158 bytes per chunk.
class ChunkIndex {
 public:
  // More entries than `capacity` still work, but then one insert() may move all of them at once.
  ChunkIndex(std::unique_ptr<EvictionPolicy> policy, std::size_t capacity);
  ~ChunkIndex();

  // Returns nullptr if absent. The pointer is valid until the next insert or erase. Keys that are looked up
  // in insertion order (a prefix) are found without a probe of the table.
  ChunkEntry* find(const ChunkKey& key);
  // Hints that find(key) follows soon: with millions of chunks its cell is not in the CPU cache.
  void prefetch(const ChunkKey& key) const;
  // Hints to the policy that this entry becomes resident or is used soon.
  void prefetch(Slot slot) const;
  // Hints that this entry is erased soon, followed by the entry before it in its prefix.
  void prefetch_erase(Slot slot) const;
  // Adds an entry in `state` (filling or fetching) that holds `row`, with one pin for the job or op that
  // brings the bytes. REQUIRES: absent, also among the forgotten ones. Slots are reused in the order in which
  // they were freed, so that the chunks of a prefix stay adjacent. Stores `entry_info` except its id, which
  // follows from the key.
  Slot insert(const ChunkKey& key, std::uint32_t group, RowId row, const EntryInfo& entry_info,
              ChunkState state);
  Slot slot_of(const ChunkEntry* entry) const { return static_cast<Slot>(entry - entries_->data()); }
  ChunkEntry& at(Slot slot) { return (*entries_)[slot]; }
  const ChunkEntry& at(Slot slot) const { return (*entries_)[slot]; }

  // filling/fetching -> resident. Drops the first pin and adds the entry to the policy.
  void make_resident(Slot slot, ChunkOrigin origin);
  // Any state -> absent. The caller frees the row. REQUIRES: forgotten, or no pins, except the first one of a
  // filling/fetching entry.
  void erase(Slot slot);
  // Forgets all entries, whatever their pins. O(1). REQUIRES: may_forget().
  void forget();
  // False after kMostEpochs calls of forget() if the entries of the first one are not all erased yet.
  bool may_forget() const;
  static constexpr unsigned kMostEpochs = 7;
  std::size_t forgotten() const { return *forgotten_; }  // entries that are forgotten and not erased
  bool is_forgotten(Slot slot) const;
  std::optional<Slot> find_forgotten(const ChunkKey& key) const;
  // Checks one slot, the next in turn, and returns it if its entry is forgotten. The turn stays there until
  // the entry is erased. REQUIRES: forgotten() > 0.
  std::optional<Slot> next_forgotten();
  // Sets whether a tier that is worth reading now has the chunk too. REQUIRES: resident.
  void set_recorded(Slot slot, bool recorded);
  void pin(Slot slot);
  void unpin(Slot slot);
  // A request (number and priority) uses the entry and becomes its holder. As with insert(), the entries
  // before it get at least its priority; an entry is raised at most once per priority level.
  // Whatever return was expected has happened.
  // The entry is charged to `tenant` from now on.
  void access(Slot slot, std::uint32_t request, std::int8_t priority, TenantId tenant = 0);
  // The entry was used elsewhere: makes it as recent as a hit does, and changes nothing else. REQUIRES:
  // resident.
  void refresh(Slot slot);
  // Raises the entry to the highest level of priority until its next use, or ends that and sets the priority
  // that it has instead. Throws std::bad_alloc without any change. REQUIRES: resident.
  void retain(Slot slot);
  void end_retention(Slot slot, std::int8_t priority);
  // Sets when the session of the entry is expected back: see EntryInfo. Any state except absent.
  void set_return(Slot slot, double returns_at);
  // Reports the time to the policy, in seconds on the owner's clock.
  void set_now(double seconds);
  // Returns the entry with this id (nullopt if absent), and the entry before `slot` in its prefix.
  std::optional<Slot> find(ChunkId id) const;
  std::optional<Slot> parent_of(Slot slot) const;
  // Returns the facts of an entry that policies use, here and in tiers.
  static EntryInfo entry_info(const ChunkEntry& entry) {
    return {chunk_id(entry.key), entry.parent,     entry.depth, entry.holder,
            entry.priority,      entry.returns_at, entry.tenant};
  }
  // Returns the next victim that is not spared for this holder. (The first chunk of a prompt is spared only
  // after victim() reached a later chunk of it. If the policy returns the first chunk earlier, as lru may, it
  // is evicted.) It may be a forgotten entry: erase it instead of evicting it.
  std::optional<Slot> victim(std::uint32_t spared_holder = 0);
  // Returns the next victims in eviction order, at most `most`, as if nothing else happened. Spared entries
  // stay spared. O(most) calls of the policy. Returns none while forgotten entries are left: these make room.
  std::vector<Slot> next_victims(std::size_t most);

  std::size_t size() const;
  std::size_t resident() const;
  std::size_t pinned() const;  // entries with pins
  // `visit` may erase the entry that it is called with.
  void for_each(const std::function<void(Slot, ChunkEntry&)>& visit);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
  TableVector<ChunkEntry>* entries_;  // of impl_
  const std::size_t* forgotten_;      // of impl_
};

}  // namespace kv_offload
