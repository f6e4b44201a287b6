// SPDX-License-Identifier: Apache-2.0
#include "cache/host_chunks.h"

#include <algorithm>

namespace kv_offload {
namespace {

constexpr Slot kNoOwner = static_cast<Slot>(-1);

std::size_t capacity_of(const RowAllocator& rows, std::size_t groups) {
  std::size_t capacity = 0;
  for (std::uint32_t g = 0; g < groups; ++g)
    capacity = std::max<std::size_t>(capacity, rows.capacity_rows(g));
  return capacity;
}

std::uint64_t smallest_row(const RowAllocator& rows, std::size_t groups) {
  std::uint64_t bytes = rows.row_bytes(0);
  for (std::uint32_t g = 1; g < groups; ++g) bytes = std::min(bytes, rows.row_bytes(g));
  return bytes;
}

}  // namespace

HostChunks::HostChunks(const ChunkGroups& groups, const HostRegion& region, const Tickets& tickets,
                       CacheEvents& events, const std::string& eviction_policy)
    : groups_(groups),
      tickets_(tickets),
      events_(events),
      area_bytes_(region.area_bytes()),
      rows_(area_bytes_, groups.row_bytes()),
      row_unit_(smallest_row(rows_, groups.size())),
      capacity_(capacity_of(rows_, groups.size())),
      index_(make_eviction_policy(eviction_policy), capacity_),
      quarantine_(area_bytes_ / kPageBytes, row_unit_ / kPageBytes, [this](RowId row) { rows_.free(row); }),
      resident_by_group_(groups.size(), 0) {
  for (std::uint32_t g = 1; g < groups.size(); ++g) one_row_size_ &= rows_.row_bytes(g) == rows_.row_bytes(0);
  if (!one_row_size_) owners_.assign(area_bytes_ / row_unit_ + 1, kNoOwner);
}

bool HostChunks::keep_in(HostRegion& region, std::string_view identity) {
  const std::span<std::byte> memory = region.memory_after_areas(RowTable::bytes(area_bytes_, row_unit_));
  std::string all(identity);
  for (std::uint32_t g = 0; g < groups_.size(); ++g) all += fmt::format(" {}", rows_.row_bytes(g));
  RowTable table(memory, area_bytes_, row_unit_, all);
  for (const RowTable::Row& row : table.rows()) {
    if (take_over(row)) {
      ++taken_over_;
    } else {
      table.erase(row.row);
    }
  }
  table_ = table;
  return region.keep();
}

bool HostChunks::take_over(const RowTable::Row& row) {
  if (groups_.position_of(row.key) != row.group || index_.find(row.key) != nullptr) return false;
  if (!rows_.claim(row.group, row.row)) return false;
  const EntryInfo entry_info{chunk_id(row.key), row.parent, row.depth, 0, row.priority};
  make_resident(insert_filling(row.key, row.group, row.row, entry_info, kNoTicket), ChunkOrigin::kBefore);
  return true;
}

RowId HostChunks::allocate(std::uint32_t group) {
  const RowId row = rows_.allocate(group);
  if (row != kNoRow || index_.forgotten() == 0) return row;
  drop_some_forgotten();
  return rows_.allocate(group);
}

Slot HostChunks::insert(const ChunkKey& key, std::uint32_t group, RowId row, const EntryInfo& entry_info,
                        ChunkState state) {
  if (index_.forgotten() > 0) {
    if (const std::optional<Slot> old = index_.find_forgotten(key)) drop_forgotten(*old);
  }
  const Slot slot = index_.insert(key, group, row, entry_info, state);
  if (!one_row_size_) owner_of(row) = slot;
  return slot;
}

Slot HostChunks::insert_filling(const ChunkKey& key, std::uint32_t group, RowId row,
                                const EntryInfo& entry_info, Ticket ticket, bool first) {
  const Slot slot = insert(key, group, row, entry_info, ChunkState::kFilling);
  ChunkEntry& entry = index_.at(slot);
  entry.ticket = ticket;
  entry.first = first;
  return slot;
}

Slot HostChunks::insert_fetching(const ChunkKey& key, std::uint32_t group, RowId row,
                                 const EntryInfo& entry_info) {
  return insert(key, group, row, entry_info, ChunkState::kFetching);
}

void HostChunks::make_resident(Slot slot, ChunkOrigin origin) {
  const ChunkEntry& entry = index_.at(slot);
  // Either may run out of memory: then the chunk has not changed.
  events_.host_has(entry.key);
  try {
    index_.make_resident(slot, origin);
  } catch (...) {
    events_.take_back();
    throw;
  }
  ++resident_by_group_[entry.group];
  if (table_) update_table(entry);
}

void HostChunks::update_table(const ChunkEntry& entry) {
  table_->put({entry.row, entry.key, entry.parent, entry.depth, entry.priority, entry.group});
}

void HostChunks::finish_fetch(Slot slot, std::uint8_t tier) {
  index_.at(slot).tier = tier;
  make_resident(slot, ChunkOrigin::kTier);
}

RowId HostChunks::remove(Slot slot) {
  const ChunkEntry& entry = index_.at(slot);
  const RowId row = entry.row;
  if (entry.state == ChunkState::kResident) {
    events_.host_lost(entry.key);
    --resident_by_group_[entry.group];
    if (table_) table_->erase(row);
  }
  if (on_removed_) on_removed_(entry);
  if (!one_row_size_) owner_of(row) = kNoOwner;
  index_.erase(slot);
  return row;
}

void HostChunks::discard_store(Slot slot) {
  const Ticket ticket = index_.at(slot).ticket;
  const RowId row = remove(slot);
  if (tickets_.is_reported(ticket, TicketKind::kStore)) {
    rows_.free(row);
  } else {
    quarantine_.hold(ticket, row);
  }
}

void HostChunks::discard_stores() {
  index_.for_each([&](Slot slot, const ChunkEntry& entry) {
    if (entry.state == ChunkState::kFilling) discard_store(slot);
  });
}

void HostChunks::access(Slot slot, std::uint32_t request, std::int8_t priority) {
  const std::int8_t before = index_.at(slot).priority;
  index_.access(slot, request, priority);
  const ChunkEntry& entry = index_.at(slot);
  if (!table_ || entry.state != ChunkState::kResident) return;
  if (entry.priority != before) {
    update_table(entry);
  } else {
    table_->use(entry.row);
  }
}

void HostChunks::claim(Slot slot, std::uint32_t family, bool is_new) {
  has_families_ |= family != 0;
  if (!has_families_) return;
  std::optional<Slot> other = slot;
  if (is_new) {
    index_.at(slot).family = family;
    other = index_.parent_of(slot);
  }
  // The chunks before one of this family are of this family or shared.
  for (; other; other = index_.parent_of(*other)) {
    ChunkEntry& entry = index_.at(*other);
    if (entry.family == family || entry.family == kShared) return;
    entry.family = kShared;
    index_.set_return(*other, 0);
  }
}

void HostChunks::begin_write(Slot slot, std::uint8_t tier) {
  index_.at(slot).writes |= static_cast<std::uint8_t>(1u << tier);
  index_.pin(slot);
}

void HostChunks::end_write(Slot slot, std::uint8_t tier, bool tried) {
  ChunkEntry& entry = index_.at(slot);
  entry.writes &= static_cast<std::uint8_t>(~(1u << tier));
  if (tried) entry.tried |= static_cast<std::uint8_t>(1u << tier);
  index_.unpin(slot);
}

bool HostChunks::take_inherited_use(Slot slot) {
  ChunkOrigin& origin = index_.at(slot).origin;
  if (origin != ChunkOrigin::kBefore) return false;
  origin = ChunkOrigin::kStore;
  return true;
}

std::optional<std::uint8_t> HostChunks::begin_load(Slot slot) {
  index_.pin(slot);
  ChunkEntry& entry = index_.at(slot);
  if (entry.origin != ChunkOrigin::kTier || entry.counted) return std::nullopt;
  entry.counted = true;
  return entry.tier;
}

void HostChunks::end_load(Slot slot) {
  ChunkEntry& entry = index_.at(slot);
  // Loaded once since the fetch: from now on it counts as host memory's own.
  if (entry.counted) entry.origin = ChunkOrigin::kStore;
  index_.unpin(slot);
}

std::vector<Slot> HostChunks::slab_to_evict(std::uint32_t group, std::uint32_t spared_holder) {
  const std::uint64_t pages = row_unit_ / kPageBytes;
  const auto movable = [&](RowId row) {
    const Slot slot = owners_[row / pages];
    if (slot == kNoOwner) return false;
    const ChunkEntry& entry = index_.at(slot);
    if (entry.state != ChunkState::kResident || quarantine_.holds(row)) return false;
    return index_.is_forgotten(slot) || (entry.pins == 0 && entry.holder != spared_holder);
  };
  std::vector<Slot> slots;
  for (const RowId row : rows_.slab_to_reclaim(group, movable)) slots.push_back(owners_[row / pages]);
  return slots;
}

bool HostChunks::has_free(std::uint64_t share) const {
  return rows_.bytes_in_use() + rows_.wasted_bytes() + area_bytes_ / share < area_bytes_;
}

RowId HostChunks::quarantine(Slot slot) noexcept {
  const RowId row = at(slot).row;
  quarantine_.hold_owned(row);
  return row;
}

void HostChunks::poll() {
  quarantine_.poll([&](Ticket ticket) { return tickets_.is_reported(ticket, TicketKind::kStore); });
  drop_some_forgotten();
}

void HostChunks::prepare_forget() {
  while (!index_.may_forget()) drop_some_forgotten();  // only after many resets within a few steps
}

void HostChunks::forget() noexcept {
  if (table_) table_->clear();
  table_.reset();
  index_.forget();
  std::fill(resident_by_group_.begin(), resident_by_group_.end(), 0);
}

bool HostChunks::drop_forgotten(Slot slot) {
  if (!index_.is_forgotten(slot)) return false;
  const ChunkEntry& entry = index_.at(slot);
  const RowId row = entry.row;
  const bool is_filling = entry.state == ChunkState::kFilling;
  const Ticket ticket = entry.ticket;
  // First, because it may throw: then the chunk is dropped later.
  if (entry.state == ChunkState::kResident) events_.host_lost(entry.key);
  if (!one_row_size_) owner_of(row) = kNoOwner;
  index_.erase(slot);
  if (is_filling && !tickets_.is_reported(ticket, TicketKind::kStore)) {
    quarantine_.hold(ticket, row);
  } else {
    quarantine_.disown(row);
  }
  return true;
}

void HostChunks::drop_some_forgotten() {
  for (std::size_t left = kCheckedAtOnce; left > 0 && index_.forgotten() > 0; --left) {
    if (const std::optional<Slot> slot = index_.next_forgotten()) (void)drop_forgotten(*slot);
  }
}

std::uint64_t HostChunks::resident_bytes() const {
  std::uint64_t bytes = 0;
  for (std::size_t g = 0; g < groups_.size(); ++g) bytes += resident_by_group_[g] * groups_[g].bytes;
  return bytes;
}

}  // namespace kv_offload
