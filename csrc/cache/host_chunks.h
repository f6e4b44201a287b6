// HostChunks: the chunks in host memory and the rows they lie in: who holds a row,
// and when it may be given back.
//
// Invariant: a row is in exactly one place. It is free; or handed out by allocate()
// and not inserted yet; or a chunk's (filling, fetching, resident); or in quarantine:
// nobody's any more, but a rank or a tier may still touch it. It is handed out again
// only when no rank copies under a ticket that is not reported and no op of a tier
// runs on it. A chunk with pins is never a victim: each load, each write, each request
// that counts on it holds one, and while it has no bytes the store or read that
// brings them.
//
// Threads: one (the scheduler's).
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "cache/cache_events.h"
#include "cache/chunk_groups.h"
#include "cache/quarantine.h"
#include "cache/tickets.h"
#include "index/chunk_index.h"
#include "memory/host_region.h"
#include "memory/row_allocator.h"
#include "memory/row_table.h"

namespace kv_offload {

class HostChunks {
 public:
  // All that is passed by reference outlives this. Throws InvalidArgument (an area
  // smaller than one row of each group, unknown policy).
  HostChunks(const ChunkGroups& groups, const HostRegion& region, const Tickets& tickets, CacheEvents& events,
             const std::string& eviction_policy);

  // ---- over the end of the engine
  // Behind the areas of `region` is told from now on what is resident, for the next
  // engine, and what the one before told there is resident again, if it was of the same
  // `identity`: everything that the bytes of a chunk depend on. REQUIRES: nothing is here.
  // False when it cannot be kept (HostRegion::keep). Throws ResourceError (no memory for
  // the table).
  bool keep_in(HostRegion& region, std::string_view identity);
  // What is resident now stays told, whatever happens to it here.
  void stop_telling() { table_.reset(); }
  HostChunks(const HostChunks&) = delete;
  HostChunks& operator=(const HostChunks&) = delete;

  // ---- what is here. See ChunkIndex for how long an entry is valid.
  const ChunkEntry* find(const ChunkKey& key) { return index_.find(key); }
  const ChunkEntry* find_resident(const ChunkKey& key) {
    const ChunkEntry* entry = index_.find(key);
    return entry != nullptr && entry->state == ChunkState::kResident ? entry : nullptr;
  }
  const ChunkEntry& at(Slot slot) const { return index_.at(slot); }
  Slot slot_of(const ChunkEntry* entry) const { return index_.slot_of(entry); }
  EntryInfo about(Slot slot) const { return index_.about(index_.at(slot)); }
  // Hints: found soon; becomes resident or is used soon; is evicted soon.
  void prefetch(const ChunkKey& key) const { index_.prefetch(key); }
  void prefetch(Slot slot) const { index_.prefetch(slot); }
  void prefetch_eviction(Slot slot) const { index_.prefetch_erase(slot); }

  // ---- rows
  // A row that is free; kNoRow when none is. The caller's until it is inserted or freed.
  RowId allocate(std::uint32_t group) { return rows_.allocate(group); }
  void free(RowId row) { rows_.free(row); }

  // ---- a chunk's life. REQUIRES for inserts: absent, a row from allocate().
  // `first`: the first chunk of its group in the store job.
  Slot insert_filling(const ChunkKey& key, std::uint32_t group, RowId row, const EntryInfo& about,
                      Ticket ticket, bool first = false);
  Slot insert_fetching(const ChunkKey& key, std::uint32_t group, RowId row, const EntryInfo& about);
  void finish_store(Slot slot) { make_resident(slot, ChunkOrigin::kStore); }
  void finish_fetch(Slot slot, std::uint8_t tier);
  // It is absent from now on. Its row is free at once. REQUIRES: no pins but the one of
  // what was to bring its bytes, and nobody who could still touch the row.
  void discard(Slot slot) { rows_.free(remove(slot)); }
  // Likewise of a store that failed: a rank may still copy, then the row is quarantined.
  void discard_store(Slot slot);
  // Discards every store that has not ended.
  void discard_stores();

  // ---- who uses it
  void pin(Slot slot) { index_.pin(slot); }
  void unpin(Slot slot) { index_.unpin(slot); }
  void access(Slot slot, std::uint32_t request, std::int8_t priority);
  // Whether the engine before left it here and nobody has asked since: once for each.
  bool is_first_use_since_before(Slot slot);
  // A write to this tier begins: it has a pin. Ends; `tried` unless it was cancelled.
  void begin_write(Slot slot, std::uint8_t tier);
  void end_write(Slot slot, std::uint8_t tier, bool tried);
  bool is_written_to(Slot slot, std::size_t tier) const { return (at(slot).writes >> tier & 1) != 0; }
  bool was_tried_on(Slot slot, std::size_t tier) const { return (at(slot).tried >> tier & 1) != 0; }
  // A tier that is worth reading now has its record, or none has it any more. A hint for who goes next: some
  // tiers lose records without a word, and one may become slow later.
  void set_recorded(Slot slot, bool recorded) { index_.set_recorded(slot, recorded); }
  // A load of it begins and has a pin. The tier that it is the first load from, if any.
  std::optional<std::uint8_t> begin_load(Slot slot);
  void end_load(Slot slot);

  // ---- what goes next
  // Not of this holder: the end of its own prefix is worth nothing without the rest.
  std::optional<Slot> victim(std::uint32_t spared_holder = 0) { return index_.victim(spared_holder); }
  // What would go, one after the other, if nothing else happened; at most so many.
  std::vector<Slot> next_victims(std::size_t most) { return index_.next_victims(most); }
  // Chunks that together leave a slab which this group can use; empty when there are none.
  std::vector<Slot> slab_to_evict(std::uint32_t group, std::uint32_t spared_holder);
  bool has_one_row_size() const { return one_row_size_; }
  // More than 1 / `share` of the area lies in no row.
  bool has_free(std::uint64_t share) const;

  // ---- rows of nobody that may still be touched
  // By an op of a tier, until release(row).
  void quarantine(RowId row) { quarantine_.hold(row); }
  void release(RowId row) { quarantine_.release(row); }
  // By a load, until its ticket is reported.
  void quarantine(Ticket load, Slot slot) { quarantine_.hold(load, TicketKind::kLoad, at(slot).row); }
  // Frees those whose tickets are reported by now.
  void poll();
  // All chunks are absent, whatever their pins, here and for the next engine, which is told
  // nothing more: what is stored from now on may be of weights that only this process has.
  // Rows in quarantine stay there, and those of stores that are not reported join them.
  // REQUIRES: loads and ops have put their rows there.
  void forget();

  // ---- figures
  std::size_t taken_over() const { return taken_over_; }  // chunks of the engine before
  std::size_t resident() const { return index_.resident(); }
  std::uint64_t resident_bytes() const;
  std::size_t pinned() const { return index_.pinned(); }
  std::size_t quarantined_rows() const { return quarantine_.rows(); }
  std::size_t capacity() const { return capacity_; }  // chunks, if one group had everything

 private:
  Slot insert(const ChunkKey& key, std::uint32_t group, RowId row, const EntryInfo& about, ChunkState state);
  void make_resident(Slot slot, ChunkOrigin origin);
  void tell(const ChunkEntry& entry);
  RowId remove(Slot slot);  // the row is the caller's
  bool take_over(const RowTable::Row& row);
  Slot& owner_of(RowId row) { return owners_[row / (row_unit_ / kPageBytes)]; }

  const ChunkGroups& groups_;
  const Tickets& tickets_;
  CacheEvents& events_;
  const std::uint64_t area_bytes_;
  RowAllocator rows_;
  const std::size_t capacity_;
  ChunkIndex index_;
  Quarantine quarantine_;
  std::vector<std::uint64_t> resident_by_group_;
  bool one_row_size_ = true;
  std::uint64_t row_unit_;    // the smallest row
  std::vector<Slot> owners_;  // by row; only with several row sizes
  std::optional<RowTable> table_;
  std::size_t taken_over_ = 0;
};

}  // namespace kv_offload
