// SPDX-License-Identifier: Apache-2.0
#include "backends/fs/record_index.h"

#include <algorithm>
#include <utility>

#include "backends/fs/layout.h"
#include "base/make_room.h"
#include "base/steps.h"

namespace kv_offload {
namespace {

constexpr std::size_t kDeclinedCells = 4096;

// Never 0: the lowest bit of an id is set and stays set.
std::uint64_t declined_mark(ChunkId id, std::uint32_t request) { return id ^ (std::uint64_t{request} << 32); }
std::size_t declined_place(std::uint64_t mark) { return (mark >> 1 ^ mark >> 33) % kDeclinedCells; }

Status was_reset() {
  return Status::error(StatusKind::kCancelled, "the tier was reset after the op was submitted");
}

// The record of a file that was found.
FsCatalog::Record record_of(const FoundRecord& found) {
  return {found.key, found.file_bytes, found.size == 0 ? 0 : found.charge(), found.tenant};
}

}  // namespace

RecordIndex::RecordIndex(const std::string& eviction_policy, const Clock& clock,
                         std::vector<TenantOptions> tenants)
    : policy_name_(eviction_policy),
      tenants_(std::move(tenants)),
      clock_(clock),
      catalog_(eviction_policy, tenants_),
      leaves_(layout::kLeaves),
      declined_(kDeclinedCells),
      not_found_(clock, kLookupRetryDelay, kMostNotFound) {}

// ---- Catalog

bool RecordIndex::is_unknown(const Leaf& leaf, Nanos now) const {
  if (extent_ != Extent::kSome) return false;
  return leaf.state == Leaf::State::kUnknown ||
         (leaf.state == Leaf::State::kCancelled && now >= leaf.retry_at);
}

Presence RecordIndex::contains(const ChunkKey& key) const {
  const Nanos now = clock_.now();
  {
    const MutexLock lock(mutex_);
    if (catalog_.offers(key, now)) return Presence::kPresent;
    if (catalog_.holds(key)) return Presence::kLookupFailed;  // it could not be read
    if (extent_ == Extent::kSome) {
      const Leaf& leaf = leaves_[layout::leaf_of(key)];
      if (leaf.state == Leaf::State::kPending) return Presence::kLookupPending;
      if (is_unknown(leaf, now)) return Presence::kUnknown;
      return leaf.state == Leaf::State::kCancelled ? Presence::kLookupFailed : Presence::kAbsent;
    }
    if (!shared_) return Presence::kAbsent;
  }
  return not_found_.contains(key);
}

void RecordIndex::begin_lookup(std::span<const ChunkKey> keys, EpochNumber, std::vector<ChunkKey>* started) {
  std::vector<ChunkKey> by_name;
  by_name.reserve(keys.size());
  const Nanos now = clock_.now();
  {
    const MutexLock lock(mutex_);
    const bool names_known = extent_ != Extent::kSome;
    for (const ChunkKey& key : keys) {
      if (names_known) {
        if (shared_ && !catalog_.holds(key)) by_name.push_back(key);
        continue;
      }
      Leaf& leaf = leaves_[layout::leaf_of(key)];
      if (!is_unknown(leaf, now)) continue;
      started->push_back(key);  // one key per directory
      leaf.state = Leaf::State::kPending;
    }
  }
  not_found_.begin_lookup(by_name, not_found_.epoch_number(), started);
}

// Ignores the caller's epoch number: an epoch may end without a reset, and pending lookups must end then too.
void RecordIndex::cancel_lookup(std::span<const ChunkKey> keys, EpochNumber) {
  not_found_.cancel_lookup(keys, not_found_.epoch_number());
  const Nanos retry_at = clock_.now() + kLookupRetryDelay;
  const MutexLock lock(mutex_);
  count_steps(keys.size());
  for (const ChunkKey& key : keys) {
    Leaf& leaf = leaves_[layout::leaf_of(key)];
    if (leaf.state == Leaf::State::kPending) leaf = {Leaf::State::kCancelled, retry_at};
  }
}

void RecordIndex::touch(const ChunkKey& key) {
  const Nanos now = clock_.now();
  const MutexLock lock(mutex_);
  catalog_.touch(key, now);
}

void RecordIndex::used(const TierUses& uses) {
  if (uses->empty()) return;
  std::vector<TierUses> dropped;  // freed after the lock is released
  const MutexLock lock(mutex_);
  uses_.push_back(uses);
  used_keys_ += uses->size();
  while ((used_keys_ > kMostUses && uses_.size() > 1) || uses_.size() > kMostUseLists) {
    count_steps(1);
    used_keys_ -= uses_.front()->size();
    dropped.push_back(std::move(uses_.front()));
    uses_.pop_front();
    next_use_ = 0;
  }
}

void RecordIndex::apply_uses() {
  while (apply_use_batch()) mutex_.yield_to_waiters();
}

// Returns true if there are more.
bool RecordIndex::apply_use_batch() {
  const Nanos now = clock_.now();
  const MutexLock lock(mutex_);
  for (std::size_t n = 0; n < kRecordsPerLock && !uses_.empty(); ++n) {
    count_steps(1);
    const std::vector<TierUse>& oldest = *uses_.front();
    catalog_.hit(oldest[next_use_].key, oldest[next_use_].entry_info, now);
    if (++next_use_ < oldest.size()) continue;
    used_keys_ -= oldest.size();
    uses_.pop_front();
    next_use_ = 0;
  }
  return !uses_.empty();
}

void RecordIndex::take_removals(std::vector<TierRemoval>* removals) {
  for (std::size_t left = kMostRemovals; left > 0; left -= kRecordsPerLock) {
    make_room(*removals, kRecordsPerLock);
    if (!take_some_removals(removals)) return;
  }
}

bool RecordIndex::has_removals() const {
  const MutexLock lock(mutex_);
  return !removals_.empty();
}

// Returns true if there are more. REQUIRES: room for kRecordsPerLock in the list.
bool RecordIndex::take_some_removals(std::vector<TierRemoval>* removals) {
  const MutexLock lock(mutex_);
  std::size_t left = kRecordsPerLock;
  // Skips keys that were written or found again since. They stay reported, so that their next removal is too.
  for (; left > 0 && !removals_.empty(); --left) {
    if (!catalog_.mark_reported(removals_.front().key)) removals->push_back(removals_.front());
    removals_.pop_front();
  }
  while (left > 0 && !dropped_.empty()) {
    DroppedState& oldest = *dropped_.front();
    for (; left > 0 && oldest.reported < oldest.catalog.slots(); --left, ++oldest.reported) {
      const ChunkKey* key = oldest.catalog.key_at(oldest.reported);
      if (key != nullptr && !catalog_.mark_reported(*key))
        removals->push_back({*key, TierRemoval::Reason::kReset});
    }
    if (oldest.reported < oldest.catalog.slots()) break;
    reported_.push_back(std::move(dropped_.front()));
    dropped_.pop_front();
  }
  count_steps(kRecordsPerLock - left);
  return left == 0;
}

// ---- the epoch

RecordIndex::FsEpochPtr RecordIndex::epoch() const {
  const MutexLock lock(mutex_);
  return epoch_;
}

std::optional<RecordIndex::Next> RecordIndex::next() const {
  const MutexLock lock(mutex_);
  if (epoch_) return std::nullopt;
  return next_;
}

bool RecordIndex::begin(FsEpochPtr epoch, const Next& made_for, Extent extent) {
  const MutexLock lock(mutex_);
  if (next_.by_reset != made_for.by_reset) return false;
  // Not shared with servers that were reset; neither are the epochs after it.
  next_.by_reset |= epoch->by_reset;
  epoch_ = std::move(epoch);
  leaves_.assign(layout::kLeaves, {});
  extent_ = extent;
  shared_ = false;
  return true;
}

void RecordIndex::set_shared(bool shared) {
  const MutexLock lock(mutex_);
  shared_ = shared;
}

void RecordIndex::drop(const FsEpochPtr& epoch) {
  std::unique_ptr<DroppedState> dropped = empty_state();
  const MutexLock lock(mutex_);
  if (epoch != epoch_) return;
  drop_all(std::move(dropped), diverged_);
}

void RecordIndex::reset() {
  std::unique_ptr<DroppedState> dropped = empty_state();
  const MutexLock lock(mutex_);
  drop_all(std::move(dropped), true);
}

void RecordIndex::drop_all(std::unique_ptr<DroppedState> dropped, bool by_reset) {
  ended_epochs_.reserve(ended_epochs_.size() + 1);
  dropped_.push_back(std::move(dropped));  // the last call that may throw
  next_.by_reset |= by_reset;
  if (epoch_) {
    next_.least_number = epoch_->number + 1;
    ended_epochs_.push_back(std::move(epoch_));
  }
  catalog_.move_into(&dropped_.back()->catalog);
  dropped_.back()->uses.swap(uses_);
  used_keys_ = next_use_ = 0;
  diverged_ = false;
  declined_.assign(kDeclinedCells, 0);
  extent_ = Extent::kOrder;  // without an epoch there is nothing to find
}

// A use count of 1 cannot rise: the only other references come from this object, under the lock.
void RecordIndex::free_unused() {
  std::vector<FsEpochPtr> unused;  // closed after the lock is released
  std::vector<std::unique_ptr<DroppedState>> reported;
  const MutexLock lock(mutex_);
  reported.swap(reported_);
  std::erase_if(ended_epochs_, [&](FsEpochPtr& epoch) {
    if (epoch.use_count() > 1) return false;
    unused.push_back(std::move(epoch));
    return true;
  });
}

void RecordIndex::close() {
  FsEpochPtr last;  // closed after the lock is released
  std::vector<FsEpochPtr> ended;
  const MutexLock lock(mutex_);
  last.swap(epoch_);
  ended.swap(ended_epochs_);
}

void RecordIndex::set_newer(const FsEpochPtr& epoch, bool newer) {
  const MutexLock lock(mutex_);
  // A process that was reset itself does not share records either, but is not reported as split off.
  if (epoch == epoch_) diverged_ = newer && !next_.by_reset;
}

// ---- ops

Status RecordIndex::begin_read(const ChunkKey& key, const FsEpochPtr& epoch, Pin* pin) {
  const MutexLock lock(mutex_);
  if (epoch != epoch_) return was_reset();
  const std::optional<FsCatalog::Ref> found = catalog_.begin_read(key);
  if (!found) return Status::error(StatusKind::kNotFound, "no record of this key");
  pin->ref_ = *found;
  pin->records_ = this;
  return Status::ok();
}

void RecordIndex::unpin(const FsCatalog::Ref& ref) {
  const MutexLock lock(mutex_);
  catalog_.end_read(ref);
}

Status RecordIndex::finish_read(const TierOp& op, const FsEpochPtr& epoch, Status status) {
  const MutexLock lock(mutex_);
  if (epoch != epoch_) return was_reset();
  if (status) {
    catalog_.read_succeeded(op.key);
    catalog_.hit(op.key, op.entry_info, clock_.now());
  } else if (status.kind() == StatusKind::kIo) {
    catalog_.read_failed(op.key, clock_.now());
  }
  return status;
}

Status RecordIndex::begin_write(const ChunkKey& key, const FsEpochPtr& epoch, bool* present, bool* replace) {
  const MutexLock lock(mutex_);
  if (epoch != epoch_) return was_reset();
  *present = catalog_.offers(key, clock_.now());
  *replace = !*present && catalog_.holds(key);  // in back-off after a failed read: write it again
  return Status::ok();
}

Status RecordIndex::written(const FsCatalog::Record& record, const EntryInfo& entry_info,
                            const FsEpochPtr& epoch) {
  const MutexLock lock(mutex_);
  if (epoch != epoch_) return was_reset();
  FsCatalog::Record reported = record;
  reported.reported = true;
  catalog_.insert(reported, entry_info);
  catalog_.read_succeeded(record.key);
  const std::uint64_t mark = declined_mark(chunk_id(record.key), entry_info.request);
  if (declined_[declined_place(mark)] == mark) declined_[declined_place(mark)] = 0;
  return Status::ok();
}

void RecordIndex::remove(const ChunkKey& key, const FsEpochPtr& epoch, TierRemoval::Reason reason) {
  const MutexLock lock(mutex_);
  const bool reported = catalog_.is_reported(key);
  if (epoch == epoch_ && catalog_.erase(key)) queue_removal(key, reason, reported);
}

bool RecordIndex::forget(const ChunkKey& key, const FsEpochPtr& epoch) {
  const MutexLock lock(mutex_);
  const bool reported = catalog_.is_reported(key);
  if (epoch != epoch_ || !catalog_.erase(key)) return false;
  if (reported) removals_.push_back({key, TierRemoval::Reason::kVanished});
  return true;
}

// Removals of unreported records are optional: they only explain later misses.
void RecordIndex::queue_removal(const ChunkKey& key, TierRemoval::Reason reason, bool reported) {
  if (reported || removals_.size() < kMostUnreported) removals_.push_back({key, reason});
}

void RecordIndex::answered(std::span<const ChunkKey> keys) {
  const PresenceCache::EpochNumber epoch_number = not_found_.epoch_number();
  for (const ChunkKey& key : keys) not_found_.answered(key, false, epoch_number);
}

void RecordIndex::skipped(std::span<const ChunkKey> keys) {
  not_found_.skipped(keys, not_found_.epoch_number());
}

void RecordIndex::mark_declined(const ChunkKey& key, std::uint32_t request, const FsEpochPtr& epoch) {
  const std::uint64_t mark = declined_mark(chunk_id(key), request);
  const MutexLock lock(mutex_);
  if (epoch == epoch_) declined_[declined_place(mark)] = mark;
}

bool RecordIndex::is_declined(ChunkId id, std::uint32_t request) const {
  const std::uint64_t mark = declined_mark(id, request);
  const MutexLock lock(mutex_);
  return id != 0 && declined_[declined_place(mark)] == mark;
}

Status RecordIndex::offered(std::span<const ChunkKey> keys, const RecordStore::EpochPtr& epoch,
                            std::vector<bool>* present) const {
  const Nanos now = clock_.now();
  const MutexLock lock(mutex_);
  if (epoch != epoch_) return was_reset();
  for (std::size_t i = 0; i < keys.size(); ++i) (*present)[i] = catalog_.offers(keys[i], now);
  return Status::ok();
}

// ---- eviction

std::optional<RecordIndex::Victim> RecordIndex::take_victim(std::uint32_t spared_request, bool* own,
                                                            const FsCatalog::Need* need) {
  apply_uses();
  const MutexLock lock(mutex_);
  if (!epoch_) return std::nullopt;
  if (spared_request != 0 && catalog_.next_is_of(spared_request, need)) {
    *own = true;
    return std::nullopt;
  }
  const std::optional<FsCatalog::Record> record = catalog_.take_victim(need);
  if (!record) return std::nullopt;
  return Victim{*record, epoch_};
}

bool RecordIndex::has_victim() {
  const MutexLock lock(mutex_);
  return epoch_ && catalog_.has_victim();
}

std::optional<TenantId> RecordIndex::tenant_of(std::string_view name) const {
  // Records of tenant 0 have no name.
  for (std::size_t i = 1; i < tenants_.size(); ++i) {
    if (tenants_[i].name == name) return static_cast<TenantId>(i);
  }
  return std::nullopt;
}

void RecordIndex::put_back(const Victim& victim) {
  const MutexLock lock(mutex_);
  if (victim.epoch == epoch_) catalog_.insert(victim.record, {});
}

void RecordIndex::evicted(const Victim& victim) {
  const MutexLock lock(mutex_);
  const ChunkKey& key = victim.record.key;
  if (catalog_.holds(key)) {  // written again meanwhile, or a listing found the file before it was removed
    if (victim.record.reported) catalog_.mark_reported(key);
    return;
  }
  queue_removal(key, TierRemoval::Reason::kEvicted, victim.record.reported);
}

// ---- scans

RecordIndex::Extent RecordIndex::extent() const {
  const MutexLock lock(mutex_);
  return extent_;
}

std::vector<std::uint64_t> RecordIndex::file_bytes_of(std::span<const ChunkKey> keys) const {
  std::vector<std::uint64_t> file_bytes;
  file_bytes.reserve(keys.size());
  const MutexLock lock(mutex_);
  for (const ChunkKey& key : keys) file_bytes.push_back(catalog_.file_bytes_of(key.group_id()).value_or(0));
  return file_bytes;
}

void RecordIndex::raise_extent(const FsEpochPtr& epoch, Extent extent) {
  const MutexLock lock(mutex_);
  if (epoch == epoch_) extent_ = std::max(extent_, extent);
}

void RecordIndex::mark_listed(const FsEpochPtr& epoch, std::uint32_t leaf) {
  const MutexLock lock(mutex_);
  if (epoch == epoch_) leaves_[leaf].state = Leaf::State::kListed;
}

template <typename Visit, typename Prepare>
bool RecordIndex::in_batches(std::size_t count, const FsEpochPtr* epoch, const std::atomic<bool>& stop,
                             Visit visit, Prepare prepare) const {
  for (std::size_t next = 0; next < count;) {
    if (stop.load()) return false;
    prepare();
    mutex_.yield_to_waiters();
    const MutexLock lock(mutex_);
    if (epoch != nullptr && *epoch != epoch_) return false;
    const std::size_t end = std::min(next + kRecordsPerLock, count);
    count_steps(end - next);
    for (; next < end; ++next) visit(next);
  }
  return true;
}

void RecordIndex::adopt_names(const FsEpochPtr& epoch, std::span<const FoundRecord> records, bool newest,
                              const std::atomic<bool>& stop) {
  in_batches(records.size(), &epoch, stop, [&](std::size_t at) REQUIRES(mutex_) {
    const FsCatalog::Record record = record_of(records[at]);
    if (newest) {
      catalog_.insert(record, {});
    } else {
      catalog_.insert_unordered(record);
    }
  });
}

void RecordIndex::adopt_in_order(const FsEpochPtr& epoch, std::span<const FoundRecord> records,
                                 std::span<const LastUse> order, bool first, const std::atomic<bool>& stop) {
  std::vector<ChunkKey> used;  // used since the epoch was opened
  const auto visit = [&](std::size_t at) REQUIRES(mutex_) {
    const FoundRecord& record = records[order[at].second];
    if (!catalog_.insert_in_order(record_of(record)) && first) used.push_back(record.key);
  };
  in_batches(order.size(), &epoch, stop, visit, [&] { make_room(used, kRecordsPerLock); });
  const Nanos now = clock_.now();
  static constexpr std::atomic<bool> kToTheEnd{false};
  in_batches(used.size(), &epoch, kToTheEnd,
             [&](std::size_t at) REQUIRES(mutex_) { catalog_.touch(used[at], now); });
}

bool RecordIndex::known_from(const FsEpochPtr& epoch, Slot* slot,
                             std::vector<FsCatalog::Record>* records) const {
  mutex_.yield_to_waiters();
  const MutexLock lock(mutex_);
  if (epoch != epoch_ || *slot >= catalog_.slots()) return false;
  *slot = catalog_.records_from(*slot, kRecordsPerLock, records);
  return true;
}

std::vector<FoundRecord> RecordIndex::unknown_of(std::span<const FoundRecord> records) const {
  std::vector<FoundRecord> unknown;
  static constexpr std::atomic<bool> kToTheEnd{false};
  const auto visit = [&](std::size_t at) REQUIRES(mutex_) {
    if (!catalog_.holds(records[at].key)) unknown.push_back(records[at]);
  };
  in_batches(records.size(), nullptr, kToTheEnd, visit, [&] { make_room(unknown, kRecordsPerLock); });
  return unknown;
}

// ---- figures

std::vector<FsCatalog::Record> RecordIndex::take_touched(FsEpochPtr* epoch) {
  std::vector<FsCatalog::Record> records;
  for (bool more = true, first = true; more; first = false) {
    make_room(records, kRecordsPerLock);
    mutex_.yield_to_waiters();
    const MutexLock lock(mutex_);
    if (first) *epoch = epoch_;
    if (*epoch != epoch_) return {};
    more = catalog_.take_touched(kRecordsPerLock, &records);
  }
  return records;
}

std::uint64_t RecordIndex::bytes() const {
  const MutexLock lock(mutex_);
  return catalog_.bytes();
}

void RecordIndex::figures(TierStats* stats) const {
  const MutexLock lock(mutex_);
  stats->chunks = catalog_.size();
  stats->tenant_bytes = catalog_.tenant_bytes();
  stats->names_complete = extent_ != Extent::kSome;
  stats->scan_complete = extent_ == Extent::kOrder;
  stats->diverged = diverged_;
}

}  // namespace kv_offload
