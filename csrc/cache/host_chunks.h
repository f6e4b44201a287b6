// SPDX-License-Identifier: Apache-2.0
// HostChunks: the chunks in host memory and the rows that store them. Tracks the owner of each row and when a
// row may be reused.
//
// Invariant: each row is in exactly one state:
// - free;
// - returned by allocate() and not inserted yet;
// - owned by a chunk (filling, fetching or resident);
// - owned by a forgotten chunk: forget() takes the same time for any number of chunks, and the calls after it
//   free their rows and report their removal, a few chunks at a time;
// - in quarantine: it has no owner, but a rank, a tier or a neighbour may still touch it.
// A row is reused only when no rank copies under an unreported ticket and no tier op runs on it. A pinned
// chunk is never evicted. Each load, each write and each request that relies on a chunk holds a pin; while a
// chunk has no bytes yet, the store or read that brings them holds one.
//
// With share_in(), other engines of this host read resident chunks here (LentRows), and this engine reads
// theirs (Neighbours). A borrowed chunk is a resident chunk in a neighbour's row. It holds a pin of its own,
// so it is never a victim, and it is neither written to tiers nor counted as memory in use. It is dropped
// soon after its last use: the memory is the neighbour's.
//
// Threads: one (the scheduler's).
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "cache/cache_events.h"
#include "cache/chunk_groups.h"
#include "cache/cost_model.h"
#include "cache/lent_rows.h"
#include "cache/neighbours.h"
#include "cache/quarantine.h"
#include "cache/tickets.h"
#include "index/chunk_index.h"
#include "memory/host_region.h"
#include "memory/row_allocator.h"
#include "memory/row_table.h"
#include "policy/tenant_shares.h"

namespace kv_offload {

// The request that needs a row, and its tenant.
struct Requester {
  Requester(std::uint32_t number = 0, TenantId of = 0) : request(number), tenant(of) {}  // NOLINT: implicit
  std::uint32_t request;                                                                 // 0: none
  TenantId tenant;
};

class HostChunks {
 public:
  // Everything passed by reference must outlive this. Throws InvalidArgument (an area smaller than one row of
  // each group, unknown policy).
  // `tenants`: empty, or the tenants that share the memory; see TenantShares.
  HostChunks(const ChunkGroups& groups, const HostRegion& region, const Tickets& tickets, CacheEvents& events,
             const std::string& eviction_policy, std::span<const TenantOptions> tenants = {});

  // ---- host memory that outlives the engine
  // Maintains a table of resident chunks in the memory after the areas of `region`, for the next engine.
  // Chunks listed there by the previous engine become resident again if its `identity` was the same; the
  // identity covers everything that the bytes of a chunk depend on. REQUIRES: this holds no chunks. Returns
  // false if the region cannot be kept (HostRegion::keep). Throws ResourceError (no memory for the table). If
  // the region is shared too: REQUIRES: after lend_in(), before share_in().
  bool keep_in(HostRegion& region, std::string_view identity);
  // Stops updating the table: it keeps the chunks that are resident now, whatever happens here later.
  void stop_table_updates() { table_.reset(); }
  HostChunks(const HostChunks&) = delete;
  HostChunks& operator=(const HostChunks&) = delete;

  // ---- host memory that engines of this host share
  // From now on, resident chunks are entered in the table of shared rows; neighbours do not find it yet.
  // `identity` as for keep_in(). REQUIRES: this holds no chunks; the region has share_for. Throws
  // ResourceError.
  void lend_in(HostRegion& region, std::string_view identity);
  // From now on neighbours read resident chunks, and borrow() finds theirs. Rows of no resident chunk that
  // neighbours still read since the time of an earlier owner are used again once no neighbour reads them.
  // `interval`: see Neighbours. Calls lend_in() if that was not done.
  void share_in(HostRegion& region, std::string_view identity, Nanos interval);
  // Returns the chunk if a neighbour has it: resident, in the neighbour's row. REQUIRES: the key is absent.
  const ChunkEntry* borrow(const ChunkKey& key, std::uint32_t group) {
    return may_be_at_neighbour(key) ? borrow_now(key, group) : nullptr;
  }
  // True if a neighbour has the chunk; its owner then counts a use.
  bool use_neighbours(const ChunkKey& key, std::uint32_t group) {
    return neighbours_ && neighbours_->use(key, group);
  }
  // False: no neighbour has the chunk. See leave_neighbours().
  bool may_be_at_neighbour(const ChunkKey& key) { return neighbours_ && neighbours_->may_have(key); }
  // Ends the use of the neighbours' filters, so that the background thread can unmap tables of neighbours
  // that have ended. Call it after the last borrow(), may_be_at_neighbour() or prefetch() of a key in a call,
  // unless poll_neighbours() follows: otherwise an idle engine keeps these tables mapped.
  void leave_neighbours() {
    if (neighbours_) neighbours_->leave_filters();
  }
  bool is_borrowed(Slot slot) const { return at(slot).origin == ChunkOrigin::kNeighbour; }
  unsigned neighbour_of(Slot slot) const { return neighbours_->number_of(at(slot).row); }
  // Drops borrowed chunks that nothing uses: all, or those borrowed at least a moment ago, of which one call
  // visits LentRows::kRowsPerPoll at most. Reports each as lost, although it was never reported as present:
  // a request has found it.
  void return_borrowed(bool all);
  // True if a neighbour reads the chunk now, or has used it since the last call: the chunk is not a victim
  // then.
  bool is_used_by_neighbour(Slot slot) { return lent_ && !lent_->is_idle(at(slot).row) && take_use(slot); }
  // True if a neighbour reads the chunk now: its eviction would free no row.
  bool is_read_by_neighbour(Slot slot) const {
    const RowId row = at(slot).row;
    return lent_ && is_own(row) && lent_->is_read(row);
  }
  void poll_neighbours(Nanos now);
  bool is_shared() const { return lent_.has_value(); }
  std::size_t neighbours() const { return neighbours_ ? neighbours_->size() : 0; }
  std::size_t borrowed() const { return borrowed_.size(); }
  std::size_t lent() const { return lent_ ? lent_->waiting() + read_by_neighbours_.size() : 0; }
  std::vector<std::string> take_neighbour_problems() {
    return neighbours_ ? neighbours_->take_problems() : std::vector<std::string>();
  }

  // ---- lookup. See ChunkIndex for how long an entry is valid.
  const ChunkEntry* find(const ChunkKey& key) { return index_.find(key); }
  const ChunkEntry* find_resident(const ChunkKey& key) {
    const ChunkEntry* entry = index_.find(key);
    return entry != nullptr && entry->state == ChunkState::kResident ? entry : nullptr;
  }
  const ChunkEntry& at(Slot slot) const { return index_.at(slot); }
  Slot slot_of(const ChunkEntry* entry) const { return index_.slot_of(entry); }
  EntryInfo entry_info(Slot slot) const { return index_.entry_info(index_.at(slot)); }
  // Prefetch hints. The chunk will soon be looked up (by key), become resident or be used (by slot), be
  // evicted.
  void prefetch(const ChunkKey& key) const {
    index_.prefetch(key);
    if (neighbours_) neighbours_->prefetch(key);
  }
  void prefetch(Slot slot) const {
    index_.prefetch(slot);
    if (lent_ && is_own(at(slot).row)) lent_->prefetch(at(slot).row, at(slot).key);
  }
  void prefetch_eviction(Slot slot) const { index_.prefetch_erase(slot); }

  // ---- rows
  // Returns a free row; kNoRow if there is none. The caller owns it until it inserts or frees it. Drops some
  // forgotten chunks if no row is free.
  RowId allocate(std::uint32_t group) {
    const RowId row = rows_.allocate(group);
    return row != kNoRow || index_.forgotten() == 0 ? row : allocate_forgotten(group);
  }
  void free(RowId row) { rows_.free(row); }

  // ---- life of a chunk. Inserts REQUIRE an absent key and a row from allocate().
  // `first`: this is the first chunk of its group in the store job.
  Slot insert_filling(const ChunkKey& key, std::uint32_t group, RowId row, const EntryInfo& entry_info,
                      Ticket ticket, bool first = false);
  Slot insert_fetching(const ChunkKey& key, std::uint32_t group, RowId row, const EntryInfo& entry_info);
  void finish_store(Slot slot) { make_resident(slot, ChunkOrigin::kStore); }
  void finish_fetch(Slot slot, std::uint8_t tier);
  // Makes the chunk absent and frees its row at once. REQUIRES: no pins except the one of the op that was to
  // bring its bytes, and nothing can still touch the row.
  void discard(Slot slot) { free_or_lend(remove(slot)); }
  // Same, for a failed store: the row is quarantined while a rank may still copy. Allocates no memory.
  void discard_store(Slot slot);
  // Discards every store that has not ended.
  void discard_stores();
  // Called for each chunk that becomes absent, except by forget(). It must not throw. Replaces an earlier
  // one.
  using OnRemoved = std::function<void(const ChunkEntry&)>;
  void set_on_removed(OnRemoved on_removed) { on_removed_ = std::move(on_removed); }

  // ---- use
  void pin(Slot slot) { index_.pin(slot); }
  void unpin(Slot slot) { index_.unpin(slot); }
  // Charges the chunk to `tenant` if its own tenant is above its share: see TenantShares::should_move.
  void access(Slot slot, std::uint32_t request, std::int8_t priority, TenantId tenant = 0);
  // ---- sessions. A family is a session with its branches, as a number: 0 = none. A chunk belongs to the
  // only family that used it since it is here; a chunk used by several families, or by one and by requests
  // without a session, belongs to none, like the chunks before it. `is_new`: the chunk was inserted for this
  // request.
  void claim(Slot slot, std::uint32_t family, bool is_new = false) {
    has_families_ |= family != 0;
    if (has_families_) claim_now(slot, family, is_new);
  }
  bool belongs_to(Slot slot, std::uint32_t family) const { return family != 0 && at(slot).family == family; }
  static std::uint32_t valid_family(std::uint32_t family) { return family == kShared ? 1 : family; }
  std::optional<Slot> find(ChunkId id) const { return index_.find(id); }
  std::optional<Slot> parent_of(Slot slot) const { return index_.parent_of(slot); }
  // See ChunkIndex.
  void retain(Slot slot) { index_.retain(slot); }
  void end_retention(Slot slot, std::int8_t priority) { index_.end_retention(slot, priority); }
  // Sets when the chunk is expected to be used again: see EntryInfo. A use ends the expectation.
  void set_return(Slot slot, double returns_at) { index_.set_return(slot, returns_at); }
  // The time in seconds, for hints. Call it before the first insert.
  void set_now(double seconds) {
    now_ = seconds;
    index_.set_now(seconds);
  }
  double now() const { return now_; }
  // True if the chunk has an expected return before this time (infinity: never).
  bool returns_before(Slot slot, double seconds) const {
    const double returns_at = at(slot).returns_at;
    return returns_at > now_ && returns_at < seconds;
  }

  // True once per chunk, if the previous engine left it here and it has not been used since.
  bool take_inherited_use(Slot slot);
  // Begins or ends a write to this tier, which holds a pin. `tried`: the write was not cancelled.
  void begin_write(Slot slot, std::uint8_t tier);
  void end_write(Slot slot, std::uint8_t tier, bool tried);
  bool is_written_to(Slot slot, std::size_t tier) const { return (at(slot).writes >> tier & 1) != 0; }
  bool was_write_tried(Slot slot, std::size_t tier) const { return (at(slot).tried >> tier & 1) != 0; }
  // Records whether a tier that is worth reading holds this chunk. This is only a hint for choosing victims:
  // some tiers lose records without reporting it, and a tier may become slow later.
  void set_recorded(Slot slot, bool recorded) { index_.set_recorded(slot, recorded); }
  // Begins a load, which holds a pin. Returns the tier that the chunk was fetched from if this is its first
  // load since.
  std::optional<std::uint8_t> begin_load(Slot slot);
  void end_load(Slot slot);

  // ---- eviction order
  // Returns a chunk to evict for a row of this group. Never returns a chunk of the requesting request: the
  // tail of its own prefix is worthless without the rest. With tenants, returns only chunks that the
  // requester's tenant may take: see PerTenant. It may be forgotten: see drop_forgotten().
  std::optional<Slot> victim(const Requester& by = {}, std::uint32_t group = 0) {
    return shares_ ? victim_within_shares(by, group) : index_.victim(by.request);
  }
  // Drops this chunk and returns true if it is forgotten.
  bool drop_forgotten(Slot slot) { return index_.forgotten() > 0 && drop_if_forgotten(slot); }
  // Returns the chunks that would be evicted next, in order, if nothing else happened; at most `most`.
  std::vector<Slot> next_victims(std::size_t most) { return index_.next_victims(most); }
  // Returns chunks whose eviction frees a slab that this group can use; empty if there are none. Some may be
  // forgotten. With tenants, each of them may be taken by the requester's tenant before the others are. For
  // no request (0), spares the chunks that are expected to be used again.
  std::vector<Slot> slab_to_evict(std::uint32_t group, const Requester& by);
  // True unless the tenant of the chunk is closer to its share than the requester's tenant would be. The
  // chunk may be pinned. REQUIRES: tenants are configured.
  bool may_take(const Requester& by, Slot slot) const;
  // True if the requester may take the row of this chunk once its last pin is gone, apart from those of
  // writes.
  bool frees_row(const Requester& by, Slot slot) const;
  bool has_one_row_size() const { return one_row_size_; }
  // True if more than 1 / `share` of the area is neither in use by rows nor wasted.
  bool has_free(std::uint64_t share) const;

  // ---- rows without an owner that may still be touched
  // None of these calls allocates memory, except for events. Holds the chunk's row for a load or a tier op
  // until release(row). Returns the row. REQUIRES: forget() follows.
  RowId quarantine(Slot slot) noexcept;
  void release(RowId row) { is_own(row) ? quarantine_.release(row) : neighbours_->release(row); }
  // Frees the rows whose tickets have been reported, and drops some forgotten chunks.
  void poll();
  // Makes all chunks absent, whatever their pins. Clears the table for the next engine and stops updating it:
  // chunks stored from now on may be computed with weights that only this process has. Rows in quarantine
  // stay there, and rows of unreported stores join them, with the other forgotten chunks. REQUIRES:
  // prepare_forget() was called, and loads and tier ops have quarantined their rows. O(1) for each of these,
  // and for all other chunks together.
  void forget() noexcept;
  // Drops forgotten chunks while forget() has no room for more. Throws only if memory for events runs out.
  void prepare_forget();

  // ---- statistics
  std::size_t taken_over() const { return taken_over_; }  // chunks from the previous engine
  std::size_t resident() const { return index_.resident() - borrowed_.size(); }
  std::uint64_t resident_bytes() const;
  std::size_t pinned() const { return index_.pinned(); }
  // Null unless tenants are configured. Counts the bytes of the rows of all chunks, in any state.
  const TenantShares* tenants() const { return shares_.get(); }
  // REQUIRES: tenants are configured.
  const std::string& tenant_name(TenantId tenant) const { return shares_->name(tenant); }
  // Returns the tenant with its part of a tier's bandwidth.
  Reader reader(TenantId tenant) const { return {tenant, shares_ ? shares_->weight(tenant) : 1}; }
  std::size_t quarantined_rows() const { return quarantine_.rows(); }
  std::size_t capacity() const { return capacity_; }  // chunks, if one group used all rows
  // Returns the number of forgotten chunks that are not dropped yet.
  std::size_t forgotten() const { return index_.forgotten(); }
  // Places of chunks that one call checks for forgotten ones.
  static constexpr std::size_t kCheckedAtOnce = 1024;

 private:
  Slot insert(const ChunkKey& key, std::uint32_t group, RowId row, const EntryInfo& entry_info,
              ChunkState state);
  void make_resident(Slot slot, ChunkOrigin origin);
  void update_table(const ChunkEntry& entry);
  std::uint64_t row_bytes(std::uint32_t group) const { return rows_.row_bytes(group); }
  RowId remove(Slot slot);  // the caller owns the row
  void drop_some_forgotten();
  bool drop_if_forgotten(Slot slot);
  RowId allocate_forgotten(std::uint32_t group);
  std::optional<Slot> victim_within_shares(const Requester& by, std::uint32_t group);
  bool take_use(Slot slot);
  bool is_own(RowId row) const { return !neighbours_ || !neighbours_->owns(row); }
  void free_or_lend(RowId row);
  const ChunkEntry* borrow_now(const ChunkKey& key, std::uint32_t group);
  bool drop_borrowed(Slot slot);
  void access_as(Slot slot, std::uint32_t request, std::int8_t priority, TenantId tenant);
  void claim_now(Slot slot, std::uint32_t family, bool is_new);
  bool take_over(const RowTable::Row& row);
  SharedRowsLayout shared_layout() const;
  std::string shared_identity(std::string_view identity) const;
  static constexpr std::uint32_t kShared = 0xFFFFFFFFu;
  Slot& owner_of(RowId row) { return owners_[row / (row_unit_ / kPageBytes)]; }

  const ChunkGroups& groups_;
  const Tickets& tickets_;
  CacheEvents& events_;
  const std::uint64_t area_bytes_;
  RowAllocator rows_;
  const std::uint64_t row_unit_;  // the smallest row
  const std::size_t capacity_;
  const std::shared_ptr<TenantShares> shares_;  // null: no tenants
  std::vector<std::uint32_t> tenant_tags_;      // by tenant, for the table
  ChunkIndex index_;
  Quarantine quarantine_;
  std::vector<std::uint64_t> resident_by_group_;
  bool one_row_size_ = true;
  std::vector<Slot> owners_;  // by row; only with several row sizes
  std::optional<RowTable> table_;
  std::optional<LentRows> lent_;
  std::unique_ptr<Neighbours> neighbours_;
  struct Borrowed {
    Slot slot;
    double at;  // seconds
  };
  std::vector<Borrowed> borrowed_;
  std::vector<Slot> read_by_neighbours_;           // own chunks, each pinned once for that reason
  std::size_t next_borrowed_ = 0, next_read_ = 0;  // the next ones to visit
  OnRemoved on_removed_;
  std::size_t taken_over_ = 0;
  double now_ = 0;
  bool has_families_ = false;  // until a session exists, every chunk has family 0
};

}  // namespace kv_offload
