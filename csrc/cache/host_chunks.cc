// SPDX-License-Identifier: Apache-2.0
#include "cache/host_chunks.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <new>

#include "base/make_room.h"
#include "base/status.h"
#include "base/steps.h"
#include "base/xxh3.h"

namespace kv_offload {
namespace {

constexpr Slot kNoOwner = static_cast<Slot>(-1);
constexpr double kOverdue = 60;  // seconds; as Prefetcher::kGrace

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

std::shared_ptr<TenantShares> shares_of(std::span<const TenantOptions> tenants, std::uint64_t area_bytes) {
  return tenants.empty() ? nullptr : std::make_shared<TenantShares>(tenants, area_bytes);
}

std::unique_ptr<EvictionPolicy> policy_of(const std::string& name,
                                          const std::shared_ptr<TenantShares>& shares) {
  return shares ? make_tenant_policy(name, shares) : make_eviction_policy(name);
}

// Visits at most `most` items, from *next on, and removes those for which remove(item) returns true.
template <typename Item, typename Remove>
void remove_some(std::vector<Item>& items, std::size_t* next, std::size_t most, const Remove& remove) {
  for (std::size_t left = std::min(most, items.size()); left > 0; --left) {
    count_steps(1);
    if (*next >= items.size()) *next = 0;
    Item& item = items[*next];
    if (remove(item)) {
      item = items.back();
      items.pop_back();
    } else {
      ++*next;
    }
  }
}

// Identifies a tenant for the next engine, whose settings may number the tenants differently. Tenant 0 and
// memory of engines without tenants have tag 0.
std::uint32_t tag_of(const std::string& tenant) {
  return static_cast<std::uint32_t>(XXH3_64bits(tenant.data(), tenant.size())) | 1;
}

}  // namespace

HostChunks::HostChunks(const ChunkGroups& groups, const HostRegion& region, const Tickets& tickets,
                       CacheEvents& events, const std::string& eviction_policy,
                       std::span<const TenantOptions> tenants)
    : groups_(groups),
      tickets_(tickets),
      events_(events),
      area_bytes_(region.area_bytes()),
      rows_(area_bytes_, groups.row_bytes()),
      row_unit_(smallest_row(rows_, groups.size())),
      capacity_(capacity_of(rows_, groups.size())),
      shares_(shares_of(tenants, area_bytes_)),
      index_(policy_of(eviction_policy, shares_), capacity_),
      quarantine_(area_bytes_ / kPageBytes, row_unit_ / kPageBytes, [this](RowId row) { rows_.free(row); }),
      resident_by_group_(groups.size(), 0) {
  for (std::uint32_t g = 1; g < groups.size(); ++g) one_row_size_ &= rows_.row_bytes(g) == rows_.row_bytes(0);
  if (!one_row_size_) owners_.assign(area_bytes_ / row_unit_ + 1, kNoOwner);
  for (std::size_t i = 0; i < tenants.size(); ++i)
    tenant_tags_.push_back(i == 0 ? 0 : tag_of(tenants[i].name));
}

bool HostChunks::keep_in(HostRegion& region, std::string_view identity) {
  const std::uint64_t offset = lent_ ? shared_layout().bytes : 0;
  const std::span<std::byte> memory =
      region.memory_after_areas(RowTable::bytes(area_bytes_, row_unit_), offset);
  std::string all(identity);
  for (std::uint32_t g = 0; g < groups_.size(); ++g) all += fmt::format(" {}", rows_.row_bytes(g));
  // The place of the table depends on the sizes of the rows, so one from before other sizes may still be
  // there.
  if (lent_) all += fmt::format(" {:x}", lent_->table_id());
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
  const auto tag = std::find(tenant_tags_.begin(), tenant_tags_.end(), row.tenant_tag);
  const auto tenant = static_cast<TenantId>(tag == tenant_tags_.end() ? 0 : tag - tenant_tags_.begin());
  const EntryInfo entry_info{chunk_id(row.key), row.parent, row.depth, 0, row.priority, 0, tenant};
  make_resident(insert_filling(row.key, row.group, row.row, entry_info, kNoTicket), ChunkOrigin::kBefore);
  return true;
}

SharedRowsLayout HostChunks::shared_layout() const {
  SharedRowsLayout layout = SharedRowsLayout::of(area_bytes_, row_unit_);
  const std::string sizes = shared_identity("");
  layout.row_sizes = XXH3_64bits(sizes.data(), sizes.size());
  return layout;
}

std::string HostChunks::shared_identity(std::string_view identity) const {
  std::string all(identity);
  for (std::uint32_t g = 0; g < groups_.size(); ++g) all += fmt::format(" {}", rows_.row_bytes(g));
  return all;
}

void HostChunks::lend_in(HostRegion& region, std::string_view identity) {
  lent_.emplace(region, shared_layout(), shared_identity(identity));
}

void HostChunks::share_in(HostRegion& region, std::string_view identity, Nanos interval) {
  if (!lent_) lend_in(region, identity);
  // A pin that holds is on a row that the earlier owner had in use: it is in use here, or can be claimed. A
  // pin that a stopped neighbour has set and not checked yet may be on a row that was in the same slab
  // before.
  lent_->for_each_pinned([&](RowId row, std::uint32_t group) {
    if (group >= groups_.size()) return;  // damaged
    if (rows_.claim(group, row)) {
      free_or_lend(row);
    } else if (rows_.is_in_slab_of_other_class(group, row)) {
      throw_resource(
          "another process reads the memory of the previous server, and its rows cannot be told from unused "
          "ones. Start again in a few seconds. If that process is stopped, end it or remove "
          "{}/kv_offload-kept-*",
          region.options().shm_directory);
    }
  });
  lent_->share();
  std::vector<std::uint64_t> row_bytes;
  for (std::uint32_t g = 0; g < groups_.size(); ++g) row_bytes.push_back(rows_.row_bytes(g));
  neighbours_ = std::make_unique<Neighbours>(region, shared_layout(), shared_identity(identity),
                                             std::move(row_bytes), interval);
  if (!lent_->problem().empty()) neighbours_->add_problem(lent_->problem());
}

const ChunkEntry* HostChunks::borrow_now(const ChunkKey& key, std::uint32_t group) {
  make_room(borrowed_, 1);
  const auto found = neighbours_->borrow(key, group);
  if (!found) return nullptr;
  std::optional<Slot> slot;
  try {
    slot = insert(key, group, found->row, {chunk_id(key), 0, found->depth, 0, 0}, ChunkState::kFilling);
    index_.make_resident(*slot, ChunkOrigin::kNeighbour);
  } catch (...) {
    if (slot) index_.erase(*slot);
    neighbours_->release(found->row);
    throw;
  }
  index_.pin(*slot);
  borrowed_.push_back({*slot, now_});
  return &index_.at(*slot);
}

void HostChunks::return_borrowed(bool all) {
  constexpr double kMoment = 0.1;  // a request that is looked up in each step borrows its chunks less often
  const std::size_t most = all ? borrowed_.size() : LentRows::kRowsPerPoll;
  remove_some(borrowed_, &next_borrowed_, most, [&](const Borrowed& one) {
    if (index_.at(one.slot).pins > 1 || (!all && now_ - one.at < kMoment)) return false;
    return drop_borrowed(one.slot);
  });
}

// Returns false if memory for the event runs out: the chunk is then returned later.
bool HostChunks::drop_borrowed(Slot slot) {
  const ChunkEntry& entry = index_.at(slot);
  const RowId row = entry.row;
  try {
    events_.host_lost(entry.key);
  } catch (const std::bad_alloc&) {
    return false;
  }
  if (on_removed_) on_removed_(entry);
  index_.unpin(slot);
  index_.erase(slot);
  neighbours_->release(row);
  return true;
}

bool HostChunks::take_use(Slot slot) {
  const ChunkEntry& entry = index_.at(slot);
  if (lent_->is_read(entry.row)) {
    read_by_neighbours_.push_back(slot);
    index_.pin(slot);
    return true;
  }
  if (!lent_->take_use(entry.row)) return false;
  index_.refresh(slot);
  return true;
}

void HostChunks::poll_neighbours(Nanos now) {
  if (!lent_) return;
  neighbours_->poll();
  lent_->poll(to_seconds(now), !read_by_neighbours_.empty(), [&](RowId row) { quarantine_.release(row); });
  remove_some(read_by_neighbours_, &next_read_, LentRows::kRowsPerPoll, [&](Slot slot) {
    if (lent_->is_read(index_.at(slot).row)) return false;
    index_.unpin(slot);
    return true;
  });
}

void HostChunks::free_or_lend(RowId row) {
  if (!lent_ || lent_->withdraw(row)) return rows_.free(row);
  quarantine_.hold_owned(row);
  quarantine_.disown(row);
}

RowId HostChunks::allocate_forgotten(std::uint32_t group) {
  drop_some_forgotten();
  return rows_.allocate(group);
}

Slot HostChunks::insert(const ChunkKey& key, std::uint32_t group, RowId row, const EntryInfo& entry_info,
                        ChunkState state) {
  if (index_.forgotten() > 0) {
    if (const std::optional<Slot> old = index_.find_forgotten(key)) drop_forgotten(*old);
  }
  const Slot slot = index_.insert(key, group, row, entry_info, state);
  const bool is_mine = is_own(row);
  if (!one_row_size_ && is_mine) owner_of(row) = slot;
  if (shares_ && is_mine) shares_->charge(entry_info.tenant, row_bytes(group));
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
  if (lent_) lent_->publish(entry.row, entry.key, entry.depth, entry.group);
}

void HostChunks::update_table(const ChunkEntry& entry) {
  table_->put({entry.row, entry.key, entry.parent, entry.depth, entry.priority, entry.group,
               tenant_tags_.empty() ? 0 : tenant_tags_[entry.tenant]});
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
  if (shares_) shares_->refund(entry.tenant, row_bytes(entry.group));
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

void HostChunks::access(Slot slot, std::uint32_t request, std::int8_t priority, TenantId tenant) {
  const ChunkEntry& entry = index_.at(slot);
  const std::int8_t priority_before = entry.priority;
  const TenantId tenant_before = entry.tenant;
  if (shares_) {
    access_as(slot, request, priority, tenant);
  } else {
    index_.access(slot, request, priority, tenant_before);
  }
  if (!table_ || entry.state != ChunkState::kResident || is_borrowed(slot)) return;
  if (entry.priority != priority_before || entry.tenant != tenant_before) {
    update_table(entry);
  } else {
    table_->use(entry.row);
  }
}

void HostChunks::access_as(Slot slot, std::uint32_t request, std::int8_t priority, TenantId tenant) {
  const ChunkEntry& entry = index_.at(slot);
  const TenantId charged = entry.tenant;
  const std::uint64_t bytes = row_bytes(entry.group);
  // A neighbour's row takes none of this engine's memory.
  const bool moves = !is_borrowed(slot) && shares_->should_move(charged, tenant, bytes);
  const auto move_charge = [&] {
    if (entry.tenant == charged) return;
    shares_->refund(charged, bytes);
    shares_->charge(tenant, bytes);
  };
  try {
    index_.access(slot, request, priority, moves ? tenant : charged);
  } catch (...) {
    move_charge();  // the entry may have moved before memory ran out
    throw;
  }
  move_charge();
}

void HostChunks::claim_now(Slot slot, std::uint32_t family, bool is_new) {
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
  ChunkEntry& entry = index_.at(slot);
  if (entry.origin != ChunkOrigin::kBefore) return false;
  entry.origin = ChunkOrigin::kStore;
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

std::optional<Slot> HostChunks::victim_within_shares(const Requester& by, std::uint32_t group) {
  const TenantShares::Request request(*shares_, by.tenant, row_bytes(group));
  return index_.victim(by.request);
}

std::vector<Slot> HostChunks::slab_to_evict(std::uint32_t group, const Requester& by) {
  std::optional<TenantShares::Request> request;
  if (shares_) request.emplace(*shares_, by.tenant, row_bytes(group));
  const std::uint64_t pages = row_unit_ / kPageBytes;
  // For prefetches: true if a use of the chunk is expected, or is overdue by at most kOverdue.
  const auto is_awaited = [&](const ChunkEntry& entry) {
    return std::isfinite(entry.returns_at) && entry.returns_at > 0 && entry.returns_at + kOverdue > now_;
  };
  const auto movable = [&](RowId row) {
    const Slot slot = owners_[row / pages];
    if (slot == kNoOwner) return false;
    const ChunkEntry& entry = index_.at(slot);
    // A transfer may still access the bytes, or another engine reads them.
    if (entry.state != ChunkState::kResident || quarantine_.holds(row)) return false;
    if (lent_ && lent_->is_read(row)) return false;
    if (index_.is_forgotten(slot)) return true;  // no request can find it any more
    const bool is_spared = by.request == 0 ? is_awaited(entry) : entry.holder == by.request;
    return entry.pins == 0 && !is_spared && (!shares_ || shares_->may_take_from(entry.tenant));
  };
  std::vector<Slot> slots;
  for (const RowId row : rows_.slab_to_reclaim(group, movable)) slots.push_back(owners_[row / pages]);
  return slots;
}

bool HostChunks::may_take(const Requester& by, Slot slot) const {
  const TenantShares::Request request(*shares_, by.tenant, row_bytes(at(slot).group));
  return shares_->may_take_from(at(slot).tenant);
}

bool HostChunks::frees_row(const Requester& by, Slot slot) const {
  const ChunkEntry& entry = at(slot);
  if (is_borrowed(slot) || (shares_ && !may_take(by, slot))) return false;
  return entry.pins == 1u + static_cast<unsigned>(std::popcount(entry.writes));
}

bool HostChunks::has_free(std::uint64_t share) const {
  return rows_.bytes_in_use() + rows_.wasted_bytes() + area_bytes_ / share < area_bytes_;
}

RowId HostChunks::quarantine(Slot slot) noexcept {
  const RowId row = at(slot).row;
  is_own(row) ? quarantine_.hold_owned(row) : neighbours_->hold(row);
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
  if (lent_) {
    lent_->close();
    neighbours_->stop();
    // Loads that still run have holds of their own.
    for (const Borrowed& one : borrowed_) neighbours_->release(index_.at(one.slot).row);
    borrowed_.clear();
    read_by_neighbours_.clear();
  }
  index_.forget();
  std::fill(resident_by_group_.begin(), resident_by_group_.end(), 0);
}

bool HostChunks::drop_if_forgotten(Slot slot) {
  if (!index_.is_forgotten(slot)) return false;
  const ChunkEntry& entry = index_.at(slot);
  const RowId row = entry.row;
  const bool is_filling = entry.state == ChunkState::kFilling;
  const Ticket ticket = entry.ticket;
  if (entry.origin == ChunkOrigin::kNeighbour) {  // forget() has released its row
    index_.erase(slot);
    return true;
  }
  // First, because it may throw: then the chunk is dropped later.
  if (entry.state == ChunkState::kResident) events_.host_lost(entry.key);
  if (!one_row_size_) owner_of(row) = kNoOwner;
  if (shares_) shares_->refund(entry.tenant, row_bytes(entry.group));
  index_.erase(slot);
  if (is_filling && !tickets_.is_reported(ticket, TicketKind::kStore)) {
    quarantine_.hold(ticket, row);
  } else {
    if (lent_ && !lent_->withdraw(row)) quarantine_.hold_owned(row);
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
