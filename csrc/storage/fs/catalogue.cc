#include "storage/fs/catalogue.h"

#include <algorithm>
#include <utility>

namespace kv_offload {
namespace {
constexpr std::size_t kFirstBuckets = 1024;
}

FsCatalogue::FsCatalogue(std::string policy_name)
    : policy_name_(std::move(policy_name)),
      policy_(make_eviction_policy(policy_name_, kFirstBuckets)),
      table_(kFirstBuckets, kNone) {}

Slot FsCatalogue::find(const ChunkKey& key) const {
  for (std::size_t at = home(key); table_[at] != kNone; at = (at + 1) & (table_.size() - 1)) {
    if (entries_[table_[at]].key == key) return table_[at];
  }
  return kNone;
}

void FsCatalogue::link(Slot slot) {
  std::size_t at = home(entries_[slot].key);
  while (table_[at] != kNone) at = (at + 1) & (table_.size() - 1);
  table_[at] = slot;
}

// Closes the gap by moving later members of the run back (no tombstones).
void FsCatalogue::unlink(Slot slot) {
  const std::size_t mask = table_.size() - 1;
  std::size_t gap = home(entries_[slot].key);
  while (table_[gap] != slot) gap = (gap + 1) & mask;
  for (std::size_t at = (gap + 1) & mask; table_[at] != kNone; at = (at + 1) & mask) {
    const std::size_t wanted = home(entries_[table_[at]].key);
    if (((at - wanted) & mask) >= ((at - gap) & mask)) {
      table_[gap] = table_[at];
      gap = at;
    }
  }
  table_[gap] = kNone;
}

void FsCatalogue::grow(std::size_t buckets) {
  table_.assign(buckets, kNone);
  for (Slot slot = 0; slot < entries_.size(); ++slot) {
    if (entries_[slot].used) link(slot);
  }
}

void FsCatalogue::reserve(std::size_t entries) {
  std::size_t buckets = table_.size();
  while (buckets < entries * 2) buckets *= 2;
  if (buckets != table_.size()) grow(buckets);
  entries_.reserve(entries);
}

bool FsCatalogue::offers(const ChunkKey& key, Nanos now) const {
  const Slot slot = find(key);
  if (slot == kNone) return false;
  return !entries_[slot].backing_off || back_off_.at(slot).until <= now;
}

std::optional<std::uint64_t> FsCatalogue::file_bytes_of(std::uint32_t group) const {
  const auto found = file_bytes_of_.find(group);
  if (found == file_bytes_of_.end()) return std::nullopt;
  return found->second;
}

bool FsCatalogue::insert(const Record& record, const EntryInfo& about) {
  const Slot known = find(record.key);
  if (known != kNone) {
    bytes_ += record.file_bytes - entries_[known].file_bytes;
    entries_[known].file_bytes = record.file_bytes;
    make_known(known);
    return false;
  }
  EntryInfo info = about;
  info.id = chunk_id(record.key);
  add(record, info);
  return true;
}

// To the policy it is nobody as yet: it is told of the same record again, and that is no return.
void FsCatalogue::insert_unordered(const Record& record) {
  if (!holds(record.key)) entries_[add(record, {})].unordered = true;
}

bool FsCatalogue::insert_in_order(const Record& record) {
  const Slot slot = find(record.key);
  if (slot == kNone) {
    add(record, {.id = chunk_id(record.key)});
    return true;
  }
  Entry& entry = entries_[slot];
  if (!entry.unordered || entry.readers > 0) return false;
  make_known(slot);
  return true;
}

// From now on the policy knows which one it is, in the place of one that comes now.
void FsCatalogue::make_known(Slot slot) {
  Entry& entry = entries_[slot];
  if (!entry.unordered) return;
  entry.unordered = false;
  policy_->erase(slot);
  policy_->insert(slot, {.id = chunk_id(entry.key)});
  if (entry.readers > 0) policy_->pin(slot);
}

Slot FsCatalogue::add(const Record& record, const EntryInfo& about) {
  if ((used_ + 1) * 2 > table_.size()) grow(table_.size() * 2);
  Slot slot;
  if (free_.empty()) {
    slot = static_cast<Slot>(entries_.size());
    entries_.emplace_back();
  } else {
    slot = free_.back();
    free_.pop_back();
  }
  Entry& entry = entries_[slot];
  entry = {};
  entry.key = record.key;
  entry.file_bytes = record.file_bytes;
  entry.serial = next_serial_++;
  entry.request = about.request;
  entry.used = true;
  link(slot);
  ++used_;
  bytes_ += record.file_bytes;
  file_bytes_of_[record.key.group_id()] = record.file_bytes;
  policy_->insert(slot, about);
  return slot;
}

void FsCatalogue::drop(Slot slot) {
  unlink(slot);
  policy_->erase(slot);
  if (entries_[slot].backing_off) back_off_.erase(slot);
  entries_[slot].used = false;
  --used_;
  bytes_ -= entries_[slot].file_bytes;
  free_.push_back(slot);
}

bool FsCatalogue::erase(const ChunkKey& key) {
  const Slot slot = find(key);
  if (slot == kNone) return false;
  drop(slot);
  return true;
}

std::optional<FsCatalogue::Record> FsCatalogue::take_victim() {
  const std::optional<Slot> slot = policy_->victim();
  if (!slot) return std::nullopt;
  const Record record{entries_[*slot].key, entries_[*slot].file_bytes};
  drop(*slot);
  return record;
}

bool FsCatalogue::next_is_of(std::uint32_t request) {
  const std::optional<Slot> slot = policy_->victim();
  return slot && entries_[*slot].request == request;
}

Slot FsCatalogue::records_from(Slot first, std::size_t most, std::vector<Record>* records) const {
  const std::size_t end = std::min(entries_.size(), std::size_t{first} + most);
  for (std::size_t slot = first; slot < end; ++slot) {
    if (entries_[slot].used) records->push_back({entries_[slot].key, entries_[slot].file_bytes});
  }
  return static_cast<Slot>(std::max<std::size_t>(end, first));
}

std::vector<ChunkKey> FsCatalogue::clear() {
  std::vector<ChunkKey> keys;
  keys.reserve(used_);
  for (const Entry& entry : entries_) {
    if (entry.used) keys.push_back(entry.key);
  }
  policy_ = make_eviction_policy(policy_name_, kFirstBuckets);
  entries_.clear();
  free_.clear();
  table_.assign(kFirstBuckets, kNone);
  used_ = 0;
  bytes_ = 0;
  back_off_.clear();
  touched_.clear();
  return keys;
}

std::optional<FsCatalogue::Ref> FsCatalogue::begin_read(const ChunkKey& key) {
  const Slot slot = find(key);
  if (slot == kNone) return std::nullopt;
  Entry& entry = entries_[slot];
  if (entry.readers++ == 0) policy_->pin(slot);
  return Ref{slot, entry.serial, entry.file_bytes};
}

void FsCatalogue::end_read(const Ref& ref) {
  if (ref.slot >= entries_.size()) return;
  Entry& entry = entries_[ref.slot];
  // The entry may have been erased, and its slot taken again, meanwhile.
  if (!entry.used || entry.serial != ref.serial) return;
  if (--entry.readers == 0) policy_->unpin(ref.slot);
}

void FsCatalogue::read_failed(const ChunkKey& key, Nanos now) {
  const Slot slot = find(key);
  if (slot == kNone) return;
  BackOff& back_off = back_off_[slot];
  back_off.wait = back_off.wait.count() == 0 ? kFirstBackOff : std::min(back_off.wait * 2, kLastBackOff);
  back_off.until = now + back_off.wait;
  entries_[slot].backing_off = true;
}

void FsCatalogue::read_succeeded(const ChunkKey& key) {
  const Slot slot = find(key);
  if (slot == kNone || !entries_[slot].backing_off) return;
  entries_[slot].backing_off = false;
  back_off_.erase(slot);
}

void FsCatalogue::touch(const ChunkKey& key, Nanos now) {
  const Slot slot = find(key);
  if (slot == kNone) return;
  make_known(slot);
  policy_->refresh(slot, {.id = chunk_id(key)});
  note_touched(slot, now);
}

void FsCatalogue::hit(const ChunkKey& key, const EntryInfo& about, Nanos now) {
  const Slot slot = find(key);
  if (slot == kNone) return;
  EntryInfo info = about;
  info.id = chunk_id(key);
  make_known(slot);
  entries_[slot].request = about.request;
  policy_->access(slot, info);
  note_touched(slot, now);
}

void FsCatalogue::note_touched(Slot slot, Nanos now) {
  Entry& entry = entries_[slot];
  const auto second =
      static_cast<std::uint32_t>(std::chrono::duration_cast<std::chrono::seconds>(now).count());
  constexpr auto kEvery =
      static_cast<std::uint32_t>(std::chrono::duration_cast<std::chrono::seconds>(kTouchEvery).count());
  if (entry.touched || (entry.touched_second != 0 && second - entry.touched_second < kEvery)) return;
  entry.touched = true;
  entry.touched_second = second;
  touched_.push_back({slot, entry.serial, entry.file_bytes});
}

std::vector<FsCatalogue::Record> FsCatalogue::take_touched() {
  std::vector<Record> records;
  records.reserve(touched_.size());
  for (const Ref& ref : touched_) {
    Entry& entry = entries_[ref.slot];
    if (!entry.used || entry.serial != ref.serial) continue;
    entry.touched = false;
    records.push_back({entry.key, entry.file_bytes});
  }
  touched_.clear();
  return records;
}

}  // namespace kv_offload
