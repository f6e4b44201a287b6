// SPDX-License-Identifier: Apache-2.0
// FsCatalog: the knowledge of this process about the records of one epoch: key, file size, eviction order,
// reads in flight, back-off. With tenants, also the tenant that each record is charged to. No I/O and no
// lock: the owner serialises the calls. Every call is O(1) or costs what the eviction policy costs, table
// growth included. So the owner holds its lock for a time that does not depend on the number of records.
//
// TENANTS share the bytes that the records take on disk. Records are evicted only while the root is full, so
// the bytes of all records together are what there is to share: no share has to be subtracted for other
// files, and each tenant loses its part if another server takes space (Shares). The victim is a record of the
// tenant that is furthest above its share (PerTenant). A record belongs to the tenant that wrote it; a record
// without a known tenant belongs to tenant 0, until a tenant uses it.
//
// Invariants: an entry is in the table, in the policy and in entries_, or in none of them. A slot is pinned
// in the policy while its entry has readers.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "base/clock.h"
#include "base/segmented_vector.h"
#include "base/split_table.h"
#include "base/types.h"
#include "policy/eviction_policy.h"
#include "policy/tenant_shares.h"

namespace kv_offload {

class FsCatalog {
 public:
  static constexpr Nanos kTouchEvery{std::chrono::seconds(60)};
  static constexpr Nanos kFirstBackOff{std::chrono::seconds(1)};
  static constexpr Nanos kLastBackOff{std::chrono::seconds(60)};

  // tenants: empty, or as in CacheOptions. Throws InvalidArgument.
  explicit FsCatalog(std::string policy_name, std::span<const TenantOptions> tenants = {});

  struct Record {
    ChunkKey key;
    std::uint64_t file_bytes = 0;         // of the raw record
    std::uint64_t charge = 0;             // bytes on disk; 0: unknown
    std::optional<TenantId> tenant = {};  // that it belongs to; empty: unknown
    bool reported = false;                // see is_reported()
  };
  // The write that needs space: its tenant and bytes.
  struct Need {
    TenantId tenant = 0;
    std::uint64_t bytes = 0;
  };
  // Identifies one entry. A later entry in the same slot has another serial.
  struct Ref {
    Slot slot = 0;
    std::uint32_t serial = 0;
    std::uint64_t file_bytes = 0;
  };

  bool holds(const ChunkKey& key) const { return find(key) != kNone; }
  // True if offers() or begin_read() reported the record as present, or it was inserted as reported. Removals
  // of other records need not be reported.
  bool is_reported(const ChunkKey& key) const;
  // Marks a known record as reported. Returns false if the record is unknown.
  bool mark_reported(const ChunkKey& key);
  // True if the record is known and not in back-off, so readers may use it.
  bool offers(const ChunkKey& key, Nanos now) const;
  // Returns false if the record was known already; then only its size is updated. If adding a record throws,
  // the record is not known.
  bool insert(const Record& record, const EntryInfo& entry_info);
  // For a start, when the last uses are not known yet. insert_unordered() adds a record with unknown recency.
  // insert_in_order() is called from the least recently used record on and gives each its place in the
  // eviction order, including records from insert_unordered(). It returns false if the record was used
  // meanwhile; then the record keeps its place.
  void insert_unordered(const Record& record);
  bool insert_in_order(const Record& record);
  bool erase(const ChunkKey& key);
  std::size_t size() const { return table_.size(); }
  std::uint64_t bytes() const { return bytes_; }  // sum of the file sizes
  // Returns the file size of a record of this group; all records of a group have the same size. Empty until
  // one was seen.
  std::optional<std::uint64_t> file_bytes_of(std::uint32_t group) const;
  // Removes the next victim and returns it. Skips entries with readers. need: only records that this write
  // may evict, see TenantShares::Request. Null: any tenant's.
  std::optional<Record> take_victim(const Need* need = nullptr);
  // True if this request was the last to write or use the next victim.
  bool next_is_of(std::uint32_t request, const Need* need = nullptr);
  bool has_victim() { return victim(nullptr).has_value(); }
  // Returns the bytes on disk of each tenant's records; empty without tenants.
  std::vector<std::uint64_t> tenant_bytes() const;
  // Appends the records in up to `most` slots from `first` on. Returns the slot after those.
  Slot records_from(Slot first, std::size_t most, std::vector<Record>* records) const;
  // Moves everything into *all, which must be empty and have the same policy, and leaves this object empty.
  // O(1). A Ref taken before the call never matches an entry added after it.
  void move_into(FsCatalog* all) noexcept;
  // For iteration over all entries: slots below slots() are in use (key_at() returns the key) or free (null).
  Slot slots() const { return static_cast<Slot>(entries_.size()); }
  const ChunkKey* key_at(Slot slot) const { return entries_[slot].used ? &entries_[slot].key : nullptr; }

  // Pins the entry until end_read().
  std::optional<Ref> begin_read(const ChunkKey& key);
  void end_read(const Ref& ref);
  void read_failed(const ChunkKey& key, Nanos now);  // starts the back-off: 1 s, doubling to 60 s
  void read_succeeded(const ChunkKey& key);

  // hit(): the record was read for the request in `entry_info`. touch(): the record was in use elsewhere
  // until now.
  void hit(const ChunkKey& key, const EntryInfo& entry_info, Nanos now);
  void touch(const ChunkKey& key, Nanos now);
  // Appends the entries touched since the last call, oldest touch first, each at most once a minute. Looks at
  // `most` entries. Returns true if more are left.
  bool take_touched(std::size_t most, std::vector<Record>* records);

 private:
  static constexpr Slot kNone = 0xFFFFFFFFu;
  struct Entry {
    ChunkKey key;
    std::uint64_t file_bytes = 0;
    std::uint32_t serial = 0;
    std::uint32_t readers = 0;
    std::uint32_t touched_second = 0;  // clock time in seconds; 0: never touched
    std::uint32_t request = 0;         // the last request that wrote or used it; 0: not known
    Slot next_free = kNone;
    bool used = false;
    bool touched = false;
    bool unordered = false;
    mutable bool reported = false;
    std::uint8_t failures = 0;  // consecutive failed reads
    Nanos offered_from{0};      // end of the back-off
    bool has_tenant = false;    // the tenant is known; otherwise it is 0
    TenantId tenant = 0;        // that is charged
    std::uint64_t charge = 0;   // bytes on disk, estimated if unknown
  };
  // Bound on known groups: other users of a shared directory may write records of any number of groups.
  static constexpr std::size_t kMostGroups = 1024;
  Slot find(const ChunkKey& key) const;
  // REQUIRES: the record is not known. The policy gets `entry_info` unchanged, including its id.
  Slot add(const Record& record, const EntryInfo& entry_info);
  void add_known(Slot slot);
  std::optional<Slot> victim(const Need* need);
  void set_charge(Entry& entry, std::uint64_t bytes);
  // Sets the charge and the tenant that the record has, where they were unknown.
  void learn(Slot slot, const Record& record);
  // Reports an access to the policy, and charges the entry to info.tenant.
  void access_as(Slot slot, const EntryInfo& info);
  void drop(Slot slot);
  void mark_touched(Slot slot, Nanos now);
  auto is(const ChunkKey& key) const {
    return [this, &key](Slot slot) { return entries_[slot].key == key; };
  }

  std::string policy_name_;
  std::shared_ptr<TenantShares> shares_;  // null: no tenants
  std::unique_ptr<EvictionPolicy> policy_;
  SegmentedVector<Entry> entries_;
  Slot first_free_ = kNone;
  SplitTable table_;  // keyed by IdTable::tag of the chunk_id()
  std::uint64_t bytes_ = 0, charged_ = 0;
  std::unordered_map<std::uint32_t, std::uint64_t> file_bytes_of_;  // by group
  std::uint32_t next_serial_ = 1;
  std::deque<Ref> touched_;
};

}  // namespace kv_offload
