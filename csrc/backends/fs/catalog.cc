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

FsCatalog::FsCatalog(std::string policy_name)
    : policy_name_(std::move(policy_name)), policy_(make_eviction_policy(policy_name_)) {}

Slot FsCatalog::find(const ChunkKey& key) const { return table_.find(tag_of(key), is(key)); }

bool FsCatalog::offers(const ChunkKey& key, Nanos now) const {
  const Slot slot = find(key);
  if (slot == kNone) return false;
  return entries_[slot].failures == 0 || entries_[slot].offered_from <= now;
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
    add_known(known);
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
  if (!entry.unordered || entry.readers > 0) return false;
  add_known(slot);
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
  const Slot slot = table_.find_or_add(tag_of(record.key), is(record.key), [this, &entry_info] {
    policy_->insert(first_free_, entry_info);
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
  bytes_ += record.file_bytes;
  return slot;
}

void FsCatalog::drop(Slot slot) {
  Entry& entry = entries_[slot];
  table_.erase(tag_of(entry.key), [slot](Slot other) { return other == slot; });
  policy_->erase(slot);
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

std::optional<FsCatalog::Record> FsCatalog::take_victim() {
  const std::optional<Slot> slot = policy_->victim();
  if (!slot) return std::nullopt;
  const Record record{entries_[*slot].key, entries_[*slot].file_bytes};
  drop(*slot);
  return record;
}

bool FsCatalog::next_is_of(std::uint32_t request) {
  const std::optional<Slot> slot = policy_->victim();
  return slot && entries_[*slot].request == request;
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
    return std::tie(of.policy_name_, of.policy_, of.entries_, of.first_free_, of.table_, of.bytes_,
                    of.file_bytes_of_, of.touched_);
  };
  auto own = members_of(*this), others = members_of(*all);
  own.swap(others);
  all->next_serial_ = next_serial_;
}

std::optional<FsCatalog::Ref> FsCatalog::begin_read(const ChunkKey& key) {
  const Slot slot = find(key);
  if (slot == kNone) return std::nullopt;
  Entry& entry = entries_[slot];
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
  entries_[slot].request = entry_info.request;
  policy_->access(slot, info);
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
