// SPDX-License-Identifier: Apache-2.0
#include "backends/fs/catalog.h"

#include <algorithm>
#include <tuple>
#include <utility>

#include "base/steps.h"
#include "policy/id_table.h"

namespace kv_offload {
namespace {

constexpr int kMostFailures = 8;  // after this many doublings the back-off is at its maximum

std::uint32_t tag_of(const ChunkKey& key) { return IdTable::tag(chunk_id(key)); }

}  // namespace

FsCatalog::FsCatalog(std::string policy_name, std::span<const TenantOptions> tenants)
    : policy_name_(std::move(policy_name)),
      shares_(tenants.empty() ? nullptr : std::make_shared<TenantShares>(tenants, 0)),
      policy_(shares_ ? make_tenant_policy(policy_name_, shares_) : make_eviction_policy(policy_name_)) {}

Slot FsCatalog::find(const ChunkKey& key) const { return table_.find(tag_of(key), is(key)); }

bool FsCatalog::offers(const ChunkKey& key, Nanos now) const {
  const Slot slot = find(key);
  if (slot == kNone) return false;
  const Entry& entry = entries_[slot];
  if (entry.failures > 0 && entry.offered_from > now) return false;
  entry.reported = true;
  return true;
}

bool FsCatalog::is_reported(const ChunkKey& key) const {
  const Slot slot = find(key);
  return slot != kNone && entries_[slot].reported;
}

bool FsCatalog::mark_reported(const ChunkKey& key) {
  const Slot slot = find(key);
  if (slot != kNone) entries_[slot].reported = true;
  return slot != kNone;
}

std::optional<std::uint64_t> FsCatalog::file_bytes_of(std::uint32_t group) const {
  const auto found = file_bytes_of_.find(group);
  if (found == file_bytes_of_.end()) return std::nullopt;
  return found->second;
}

bool FsCatalog::insert(const Record& record, const EntryInfo& entry_info) {
  const Slot known = find(record.key);
  if (known != kNone) {
    bytes_ += record.file_bytes - entries_[known].file_bytes;
    entries_[known].file_bytes = record.file_bytes;
    entries_[known].reported |= record.reported;
    add_known(known);
    learn(known, record);
    return false;
  }
  EntryInfo info = entry_info;
  info.id = chunk_id(record.key);
  add(record, info);
  return true;
}

// The policy gets no chunk id yet: insert_in_order() reports the same record again, and the policy must not
// count that as a reuse.
void FsCatalog::insert_unordered(const Record& record) {
  if (!holds(record.key)) entries_[add(record, {})].unordered = true;
}

bool FsCatalog::insert_in_order(const Record& record) {
  const Slot slot = find(record.key);
  if (slot == kNone) {
    add(record, {.id = chunk_id(record.key)});
    return true;
  }
  Entry& entry = entries_[slot];
  if (!entry.unordered || entry.readers > 0) {
    learn(slot, record);
    return false;
  }
  add_known(slot);  // first: a record that changes its tenant then has an id
  learn(slot, record);
  return true;
}

// Gives the policy the chunk id of an unordered record; the record takes the place of one inserted now.
void FsCatalog::add_known(Slot slot) {
  Entry& entry = entries_[slot];
  if (!entry.unordered) return;
  policy_->identify(slot, {.id = chunk_id(entry.key)});  // first, because it may throw
  entry.unordered = false;
}

Slot FsCatalog::add(const Record& record, const EntryInfo& entry_info) {
  // Calls that may throw come first. Until the last of them has returned, the slot stays free.
  if (first_free_ == kNone) {
    entries_.push_back({});
    first_free_ = static_cast<Slot>(entries_.size() - 1);
  }
  const std::uint32_t group = record.key.group_id();
  if (file_bytes_of_.size() < kMostGroups || file_bytes_of_.contains(group))
    file_bytes_of_[group] = record.file_bytes;
  EntryInfo info = entry_info;
  info.tenant = shares_ ? record.tenant.value_or(0) : 0;
  const Slot slot = table_.find_or_add(tag_of(record.key), is(record.key), [this, &info] {
    policy_->insert(first_free_, info);
    return first_free_;
  });
  Entry& entry = entries_[slot];
  first_free_ = entry.next_free;
  entry = {};
  entry.key = record.key;
  entry.file_bytes = record.file_bytes;
  entry.serial = next_serial_++;
  entry.request = entry_info.request;
  entry.used = true;
  entry.reported = record.reported;
  entry.tenant = info.tenant;
  entry.has_tenant = record.tenant.has_value();
  // The records on disk are encoded alike, as far as is known.
  const bool estimated = record.charge == 0 && bytes_ > 0;
  const double encoded = estimated ? static_cast<double>(charged_) / static_cast<double>(bytes_) : 1;
  set_charge(entry, record.charge != 0
                        ? record.charge
                        : static_cast<std::uint64_t>(static_cast<double>(record.file_bytes) * encoded));
  bytes_ += record.file_bytes;
  return slot;
}

void FsCatalog::set_charge(Entry& entry, std::uint64_t bytes) {
  charged_ += bytes - entry.charge;
  if (shares_) {
    shares_->refund(entry.tenant, entry.charge);
    shares_->charge(entry.tenant, bytes);
  }
  entry.charge = bytes;
}

void FsCatalog::access_as(Slot slot, const EntryInfo& info) {
  Entry& entry = entries_[slot];
  policy_->access(slot, info);  // first, because it may throw
  if (!shares_ || info.tenant == entry.tenant) return;
  shares_->refund(entry.tenant, entry.charge);
  shares_->charge(info.tenant, entry.charge);
  entry.tenant = info.tenant;
}

void FsCatalog::learn(Slot slot, const Record& record) {
  Entry& entry = entries_[slot];
  if (record.charge != 0) set_charge(entry, record.charge);
  if (!shares_ || entry.has_tenant || !record.tenant) return;
  if (*record.tenant != entry.tenant) access_as(slot, {.id = chunk_id(entry.key), .tenant = *record.tenant});
  entry.has_tenant = true;
}

void FsCatalog::drop(Slot slot) {
  Entry& entry = entries_[slot];
  table_.erase(tag_of(entry.key), [slot](Slot other) { return other == slot; });
  policy_->erase(slot);
  set_charge(entry, 0);
  entry.used = false;
  bytes_ -= entry.file_bytes;
  entry.next_free = first_free_;
  first_free_ = slot;
}

bool FsCatalog::erase(const ChunkKey& key) {
  const Slot slot = find(key);
  if (slot == kNone) return false;
  drop(slot);
  return true;
}

std::optional<Slot> FsCatalog::victim(const Need* need) {
  if (!shares_) return policy_->victim();
  shares_->set_capacity(charged_);
  std::optional<TenantShares::Request> request;
  if (need != nullptr) request.emplace(*shares_, need->tenant, need->bytes);
  return policy_->victim();
}

std::optional<FsCatalog::Record> FsCatalog::take_victim(const Need* need) {
  const std::optional<Slot> slot = victim(need);
  if (!slot) return std::nullopt;
  const Entry& entry = entries_[*slot];
  Record record{entry.key, entry.file_bytes, entry.charge, {}, entry.reported};
  if (entry.has_tenant) record.tenant = entry.tenant;
  drop(*slot);
  return record;
}

bool FsCatalog::next_is_of(std::uint32_t request, const Need* need) {
  const std::optional<Slot> slot = victim(need);
  return slot && entries_[*slot].request == request;
}

std::vector<std::uint64_t> FsCatalog::tenant_bytes() const {
  std::vector<std::uint64_t> bytes;
  for (std::size_t i = 0; shares_ && i < shares_->size(); ++i)
    bytes.push_back(shares_->used(static_cast<TenantId>(i)));
  return bytes;
}

Slot FsCatalog::records_from(Slot first, std::size_t most, std::vector<Record>* records) const {
  const std::size_t end = std::min(entries_.size(), std::size_t{first} + most);
  for (std::size_t slot = first; slot < end; ++slot) {
    if (entries_[slot].used) records->push_back({entries_[slot].key, entries_[slot].file_bytes});
  }
  return static_cast<Slot>(std::max<std::size_t>(end, first));
}

void FsCatalog::move_into(FsCatalog* all) noexcept {
  // Member by member: moving a whole object creates a deque, which may throw halfway.
  const auto members_of = [](FsCatalog& of) {
    return std::tie(of.policy_name_, of.shares_, of.policy_, of.entries_, of.first_free_, of.table_,
                    of.bytes_, of.charged_, of.file_bytes_of_, of.touched_);
  };
  auto own = members_of(*this), others = members_of(*all);
  own.swap(others);
  all->next_serial_ = next_serial_;
}

std::optional<FsCatalog::Ref> FsCatalog::begin_read(const ChunkKey& key) {
  const Slot slot = find(key);
  if (slot == kNone) return std::nullopt;
  Entry& entry = entries_[slot];
  entry.reported = true;
  if (entry.readers++ == 0) policy_->pin(slot);
  return Ref{slot, entry.serial, entry.file_bytes};
}

void FsCatalog::end_read(const Ref& ref) {
  if (ref.slot >= entries_.size()) return;
  Entry& entry = entries_[ref.slot];
  // The entry may have been erased meanwhile, and its slot reused.
  if (!entry.used || entry.serial != ref.serial) return;
  if (--entry.readers == 0) policy_->unpin(ref.slot);
}

void FsCatalog::read_failed(const ChunkKey& key, Nanos now) {
  const Slot slot = find(key);
  if (slot == kNone) return;
  Entry& entry = entries_[slot];
  entry.offered_from = now + std::min(kFirstBackOff * (std::int64_t{1} << entry.failures), kLastBackOff);
  entry.failures = static_cast<std::uint8_t>(std::min(entry.failures + 1, kMostFailures));
}

void FsCatalog::read_succeeded(const ChunkKey& key) {
  const Slot slot = find(key);
  if (slot != kNone) entries_[slot].failures = 0;
}

void FsCatalog::touch(const ChunkKey& key, Nanos now) {
  const Slot slot = find(key);
  if (slot == kNone) return;
  add_known(slot);
  policy_->refresh(slot, {.id = chunk_id(key)});
  mark_touched(slot, now);
}

void FsCatalog::hit(const ChunkKey& key, const EntryInfo& entry_info, Nanos now) {
  const Slot slot = find(key);
  if (slot == kNone) return;
  EntryInfo info = entry_info;
  info.id = chunk_id(key);
  add_known(slot);
  Entry& entry = entries_[slot];
  entry.request = entry_info.request;
  entry.reported = true;
  if (shares_) {
    shares_->set_capacity(charged_);
    const TenantId user = entry_info.tenant;
    const bool moves = !entry.has_tenant || shares_->should_move(entry.tenant, user, entry.charge);
    info.tenant = moves ? user : entry.tenant;
  }
  access_as(slot, info);
  entry.has_tenant = true;
  mark_touched(slot, now);
}

void FsCatalog::mark_touched(Slot slot, Nanos now) {
  Entry& entry = entries_[slot];
  const auto second =
      static_cast<std::uint32_t>(std::chrono::duration_cast<std::chrono::seconds>(now).count());
  constexpr auto kEvery =
      static_cast<std::uint32_t>(std::chrono::duration_cast<std::chrono::seconds>(kTouchEvery).count());
  if (entry.touched || (entry.touched_second != 0 && second - entry.touched_second < kEvery)) return;
  touched_.push_back({slot, entry.serial, entry.file_bytes});  // first, because it may throw
  entry.touched = true;
  entry.touched_second = second;
}

bool FsCatalog::take_touched(std::size_t most, std::vector<Record>* records) {
  for (; most > 0 && !touched_.empty(); --most) {
    count_steps(1);
    const Ref ref = touched_.front();
    touched_.pop_front();
    Entry& entry = entries_[ref.slot];
    if (!entry.used || entry.serial != ref.serial) continue;
    entry.touched = false;
    records->push_back({entry.key, entry.file_bytes});
  }
  return !touched_.empty();
}

}  // namespace kv_offload
