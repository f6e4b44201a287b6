// ChunkIndex: key -> state of every chunk that has a row or is on the way to
// one. (What is only on a tier is known by that tier: see Tier::contains.)
//
//   absent -> filling -> resident -> absent         store from the workers
//   absent -> fetching -> resident -> absent        read from a tier
//
// A chunk in `filling` or `fetching` has a row but no valid bytes; `resident`
// means every rank's bytes are there and verified. Pins count the jobs, ops and
// plans that use the row; a pinned chunk is never evicted. Eviction order is the
// policy's. Invariants, asserted: pins == 0 for absent; a row belongs to one
// entry; the policy knows exactly the resident entries, and pins of the policy
// equal (entry.pins > 0 || entry.spared).
//
// Spared entries: those that victim(holder) came to and passed over, as they are of
// this holder, and what lies before them in their prefix, whoever used that last: they
// are worth nothing without it. They stay pinned in the policy, so that their holder passes
// over each of them once and not once a call. Whoever else asks takes the first of them, and
// leaves the others spared: two long requests that ask in turn go through each other's chunks
// once. Invariant: each spared entry is of the holder that they are spared for, or lies before
// such a one, or did when it was spared. When none is left that another may have, or another
// request uses a spared entry, or one is erased, all of them are candidates again.
//
// Not thread-safe: the scheduler thread owns it. All calls O(1) but for the
// policy's O(log n); victim() amortised over the calls of all holders.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "base/types.h"
#include "policy/eviction_policy.h"

namespace kv_offload {

enum class ChunkState : std::uint8_t { kAbsent, kFilling, kResident, kFetching };

// Where a resident chunk's bytes came from, for hit accounting.
// kBefore: the engine before left it in host memory, and nobody has used it since.
enum class ChunkOrigin : std::uint8_t { kStore, kTier, kBefore };

struct ChunkEntry {
  ChunkKey key;
  Ticket ticket = kNoTicket;  // the store that fills it
  ChunkId parent = 0;         // the chunk before it in its prefix; 0 = none or not known
  RowId row = kNoRow;
  std::uint32_t pins = 0;
  std::uint32_t depth = 0;
  std::uint32_t holder = 0;  // number of the request that stored or loaded it last; 0 = none
  std::uint8_t group = 0;    // position, not id
  std::int8_t priority = 0;  // the highest of those requests, and of what lies behind it
  ChunkState state = ChunkState::kAbsent;
  ChunkOrigin origin = ChunkOrigin::kStore;
  std::uint8_t tier = 0;      // index of the tier it came from, when origin == kTier
  std::uint8_t writes = 0;    // bit t: a write op to tier t is queued or running
  std::uint8_t tried = 0;     // bit t: such an op ended, well or not, since the chunk is here
  bool counted : 1 = false;   // its fetch was counted as a hit of that tier
  bool spared : 1 = false;    // by victim(); the index's own
  bool recorded : 1 = false;  // when last seen, a tier worth reading had it too
  bool first : 1 = false;     // of its group in the store job that fills it
};
static_assert(sizeof(ChunkEntry) == 88);

// Memory: 88 bytes an entry, 9 bytes a table cell at a load of 0.25 to 0.5 (18 to
// 36), 26 of the policy (lru), 4 of the free queue: 136 to 154 bytes a chunk.
class ChunkIndex {
 public:
  // With more entries than `capacity` it still works, but an insert() may move all of them at once.
  ChunkIndex(std::unique_ptr<EvictionPolicy> policy, std::size_t capacity);
  ~ChunkIndex();

  // nullptr when absent. The pointer is valid until the next insert or erase.
  // Keys that are asked for in the order in which they were inserted (a prefix)
  // are found without a probe of the table.
  ChunkEntry* find(const ChunkKey& key);
  // A hint that find(key) comes soon: with millions of chunks its cell is far away.
  void prefetch(const ChunkKey& key) const;
  // As much for the policy: that this entry becomes resident or is used soon.
  void prefetch(Slot slot) const;
  // That this entry is erased soon, and the one before it in its prefix next.
  void prefetch_erase(Slot slot) const;
  // New entry in `state` (filling or fetching) holding `row`, with one pin
  // (the job or op that brings the bytes). REQUIRES: absent. Slots are reused in
  // the order in which they were freed, so that a prefix stays side by side.
  // `about` (but its id) is what the policy is told of it.
  Slot insert(const ChunkKey& key, std::uint32_t group, RowId row, const EntryInfo& about, ChunkState state);
  Slot slot_of(const ChunkEntry* entry) const;
  ChunkEntry& at(Slot slot);
  const ChunkEntry& at(Slot slot) const;

  // filling/fetching -> resident, dropping that first pin; the policy learns it.
  void make_resident(Slot slot, ChunkOrigin origin);
  // Any state -> absent. The caller frees the row. REQUIRES: no pins but the
  // first one of a filling/fetching entry.
  void erase(Slot slot);
  // All entries -> absent, whatever their pins. The caller has dealt with rows.
  void clear();
  // A tier has it too that is worth reading now, or none any more. REQUIRES: resident.
  void set_recorded(Slot slot, bool recorded);
  void pin(Slot slot);
  void unpin(Slot slot);
  // A request (its number and priority) uses it, and is its holder from now on. As with
  // insert(), what lies before it becomes as important: a chunk is raised once a level.
  void access(Slot slot, std::uint32_t request, std::int8_t priority);
  // What is known of an entry, for policies: its own and those of tiers.
  static EntryInfo about(const ChunkEntry& entry) {
    return {chunk_id(entry.key), entry.parent, entry.depth, entry.holder, entry.priority};
  }
  // The next to go that is not spared for this holder. (A head is known as such once
  // victim() came to what lies behind it: where the policy gives a head before that,
  // as lru may, it goes.)
  std::optional<Slot> victim(std::uint32_t spared_holder = 0);
  // What would go, one after the other, if nothing else happened; at most so many.
  std::vector<Slot> next_victims(std::size_t most);

  std::size_t size() const;
  std::size_t resident() const;
  std::size_t pinned() const;  // entries with pins
  // `visit` may erase the entry that it is given.
  void for_each(const std::function<void(Slot, ChunkEntry&)>& visit);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace kv_offload
