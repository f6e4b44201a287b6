// FsCatalogue: what this process knows of one generation's records: key, file
// size, order of eviction, reads in flight, back-off. No I/O, no lock: its owner
// serialises. Every call is O(1) or the policy's cost, growing included: the owner's
// lock is never held for a time that depends on the number of records.
//
// Invariants: an entry is in the table, in the policy and in entries_, or in none of
// them; a slot is pinned in the policy while its entry has readers.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "base/clock.h"
#include "base/segmented_vector.h"
#include "base/split_table.h"
#include "base/types.h"
#include "policy/eviction_policy.h"

namespace kv_offload {

class FsCatalogue {
 public:
  static constexpr Nanos kTouchEvery{std::chrono::seconds(60)};
  static constexpr Nanos kFirstBackOff{std::chrono::seconds(1)};
  static constexpr Nanos kLastBackOff{std::chrono::seconds(60)};

  explicit FsCatalogue(std::string policy_name);  // throws InvalidArgument

  struct Record {
    ChunkKey key;
    std::uint64_t file_bytes = 0;
  };
  // Names one entry; a later entry in the same slot has another serial.
  struct Ref {
    Slot slot = 0;
    std::uint32_t serial = 0;
    std::uint64_t file_bytes = 0;
  };

  bool holds(const ChunkKey& key) const { return find(key) != kNone; }
  // Held and not backing off: what is offered to readers.
  bool offers(const ChunkKey& key, Nanos now) const;
  // False when it was there already (then only its size is kept up to date).
  bool insert(const Record& record, const EntryInfo& about);
  // For a start that does not know yet what was used when. The first: nothing is known of its recency. The
  // second, called from the least recently used on, gives it its place, also to those of the first; false
  // when it has been used meanwhile (it keeps the place it has).
  void insert_unordered(const Record& record);
  bool insert_in_order(const Record& record);
  bool erase(const ChunkKey& key);
  std::size_t size() const { return table_.size(); }
  std::uint64_t bytes() const { return bytes_; }  // of their files
  // Of a record of this group: they are all of one size. Nothing while none was seen.
  std::optional<std::uint64_t> file_bytes_of(std::uint32_t group) const;
  // Takes out the next to go; entries with readers are passed over.
  std::optional<Record> take_victim();
  // The next to go was used last, or written, by this request.
  bool next_is_of(std::uint32_t request);
  // Appends the records in up to `most` slots from `first` on; returns the slot after those.
  Slot records_from(Slot first, std::size_t most, std::vector<Record>* records) const;
  // Forgets all, and leaves it in *all, which is empty before. O(1). No Ref of before names an entry of
  // after.
  void hand_over(FsCatalogue* all);
  // For who goes through all of them: slots below slots() are in use (then their key) or not (then null).
  Slot slots() const { return static_cast<Slot>(entries_.size()); }
  const ChunkKey* key_at(Slot slot) const { return entries_[slot].used ? &entries_[slot].key : nullptr; }

  // Pins until end_read.
  std::optional<Ref> begin_read(const ChunkKey& key);
  void end_read(const Ref& ref);
  void read_failed(const ChunkKey& key, Nanos now);  // back off: 1 s doubling to 60 s
  void read_succeeded(const ChunkKey& key);

  // It was read for the request in `about`; or it was in use elsewhere until now.
  void hit(const ChunkKey& key, const EntryInfo& about, Nanos now);
  void touch(const ChunkKey& key, Nanos now);
  // Appends entries touched since, oldest touch first; each at most once a minute. It looks at `most` of
  // them; false: these were all.
  bool take_touched(std::size_t most, std::vector<Record>* records);

 private:
  static constexpr Slot kNone = 0xFFFFFFFFu;
  struct Entry {
    ChunkKey key;
    std::uint64_t file_bytes = 0;
    std::uint32_t serial = 0;
    std::uint32_t readers = 0;
    std::uint32_t touched_second = 0;  // of the clock; 0: not yet
    std::uint32_t request = 0;         // that wrote or used it last; 0: not known
    Slot next_free = kNone;
    bool used = false;
    bool touched = false;
    bool unordered = false;
    std::uint8_t failures = 0;  // of reads, in a row
    Nanos offered_from{0};      // after those
  };
  // A directory that others write to may hold records of any number of groups.
  static constexpr std::size_t kMostGroups = 1024;
  Slot find(const ChunkKey& key) const;
  // REQUIRES: not there. What the policy is told of it is `about`, its id too.
  Slot add(const Record& record, const EntryInfo& about);
  void make_known(Slot slot);
  void drop(Slot slot);
  void note_touched(Slot slot, Nanos now);
  auto is(const ChunkKey& key) const {
    return [this, &key](Slot slot) { return entries_[slot].key == key; };
  }

  std::string policy_name_;
  std::unique_ptr<EvictionPolicy> policy_;
  SegmentedVector<Entry> entries_;
  Slot first_free_ = kNone;
  SplitTable table_;  // by IdTable::tag of their chunk_id()
  std::uint64_t bytes_ = 0;
  std::unordered_map<std::uint32_t, std::uint64_t> file_bytes_of_;  // by group
  std::uint32_t next_serial_ = 1;
  std::deque<Ref> touched_;
};

}  // namespace kv_offload
