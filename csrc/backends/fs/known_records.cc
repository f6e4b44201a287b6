#include "backends/fs/known_records.h"

#include <algorithm>
#include <utility>

#include "backends/fs/layout.h"
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

}  // namespace

KnownRecords::KnownRecords(const std::string& eviction_policy, const Clock& clock)
    : policy_name_(eviction_policy),
      clock_(clock),
      catalogue_(eviction_policy),
      leaves_(layout::kLeaves),
      declined_(kDeclinedCells),
      not_found_(clock, kAskAgainAfter, kMostNotFound) {}

// ---- Catalogue

bool KnownRecords::is_unknown(const Leaf& leaf, Nanos now) const {
  if (extent_ != Extent::kSome) return false;
  return leaf.state == Leaf::State::kUnknown ||
         (leaf.state == Leaf::State::kGivenUp && now >= leaf.ask_again);
}

Presence KnownRecords::contains(const ChunkKey& key) const {
  const Nanos now = clock_.now();
  {
    const MutexLock lock(mutex_);
    if (catalogue_.offers(key, now)) return Presence::kPresent;
    if (catalogue_.holds(key)) return Presence::kAbsent;
    if (extent_ == Extent::kSome) {
      const Leaf& leaf = leaves_[layout::leaf_of(key)];
      if (leaf.state == Leaf::State::kAsking) return Presence::kAsked;
      return is_unknown(leaf, now) ? Presence::kUnknown : Presence::kAbsent;
    }
    if (!shared_) return Presence::kAbsent;
  }
  return not_found_.contains(key);
}

void KnownRecords::begin_asking(std::span<const ChunkKey> keys, Era, std::vector<ChunkKey>* asked) {
  std::vector<ChunkKey> by_name;
  const Nanos now = clock_.now();
  {
    const MutexLock lock(mutex_);
    const bool names_known = extent_ != Extent::kSome;
    for (const ChunkKey& key : keys) {
      if (names_known) {
        if (shared_ && !catalogue_.holds(key)) by_name.push_back(key);
        continue;
      }
      Leaf& leaf = leaves_[layout::leaf_of(key)];
      if (!is_unknown(leaf, now)) continue;
      asked->push_back(key);  // one key per directory
      leaf.state = Leaf::State::kAsking;
    }
  }
  not_found_.begin_asking(by_name, not_found_.era(), asked);
}

// Ignores the era of the caller: an epoch may end without a reset, and pending lookups must end then too.
void KnownRecords::give_up_asking(std::span<const ChunkKey> keys, Era) {
  not_found_.give_up_asking(keys, not_found_.era());
  const Nanos ask_again = clock_.now() + kAskAgainAfter;
  const MutexLock lock(mutex_);
  count_steps(keys.size());
  for (const ChunkKey& key : keys) {
    Leaf& leaf = leaves_[layout::leaf_of(key)];
    if (leaf.state == Leaf::State::kAsking) leaf = {Leaf::State::kGivenUp, ask_again};
  }
}

void KnownRecords::touch(const ChunkKey& key) {
  const Nanos now = clock_.now();
  const MutexLock lock(mutex_);
  catalogue_.touch(key, now);
}

void KnownRecords::used(const TierUses& uses) {
  if (uses->empty()) return;
  std::vector<TierUses> forgotten;  // freed after the lock is released
  const MutexLock lock(mutex_);
  uses_.push_back(uses);
  used_keys_ += uses->size();
  while ((used_keys_ > kMostUses && uses_.size() > 1) || uses_.size() > kMostUseLists) {
    count_steps(1);
    used_keys_ -= uses_.front()->size();
    forgotten.push_back(std::move(uses_.front()));
    uses_.pop_front();
    next_use_ = 0;
  }
}

void KnownRecords::apply_uses() {
  while (apply_some_uses()) mutex_.let_others_in();
}

// Returns true if there are more.
bool KnownRecords::apply_some_uses() {
  const Nanos now = clock_.now();
  const MutexLock lock(mutex_);
  for (std::size_t n = 0; n < kRecordsPerLock && !uses_.empty(); ++n) {
    count_steps(1);
    const std::vector<TierUse>& oldest = *uses_.front();
    catalogue_.hit(oldest[next_use_].key, oldest[next_use_].about, now);
    if (++next_use_ < oldest.size()) continue;
    used_keys_ -= oldest.size();
    uses_.pop_front();
    next_use_ = 0;
  }
  return !uses_.empty();
}

void KnownRecords::take_removals(std::vector<TierRemoval>* removals) {
  const MutexLock lock(mutex_);
  std::size_t left = kMostRemovals;
  for (; left > 0 && !removals_.empty(); --left) {
    removals->push_back(removals_.front());
    removals_.pop_front();
  }
  while (left > 0 && !forgotten_.empty()) {
    Forgotten& oldest = *forgotten_.front();
    for (; left > 0 && oldest.told < oldest.catalogue.slots(); --left, ++oldest.told) {
      const ChunkKey* key = oldest.catalogue.key_at(oldest.told);
      // Skips a key that was written again since: it was reported as present.
      if (key != nullptr && !catalogue_.holds(*key)) removals->push_back({*key, TierRemoval::Reason::kReset});
    }
    if (oldest.told < oldest.catalogue.slots()) break;
    told_.push_back(std::move(forgotten_.front()));
    forgotten_.pop_front();
  }
  count_steps(kMostRemovals - left);
}

// ---- the epoch

KnownRecords::GenerationPtr KnownRecords::generation() const {
  const MutexLock lock(mutex_);
  return generation_;
}

std::optional<KnownRecords::Next> KnownRecords::next() const {
  const MutexLock lock(mutex_);
  if (generation_) return std::nullopt;
  return next_;
}

bool KnownRecords::begin(GenerationPtr generation, const Next& made_for, Extent extent) {
  const MutexLock lock(mutex_);
  if (next_.by_reset != made_for.by_reset) return false;
  // Not shared with servers that were reset; neither are the epochs after it.
  next_.by_reset |= generation->by_reset;
  generation_ = std::move(generation);
  leaves_.assign(layout::kLeaves, {});
  extent_ = extent;
  shared_ = false;
  return true;
}

void KnownRecords::note_shared(bool shared) {
  const MutexLock lock(mutex_);
  shared_ = shared;
}

void KnownRecords::drop(const GenerationPtr& generation) {
  std::unique_ptr<Forgotten> forgotten = nothing();
  const MutexLock lock(mutex_);
  if (generation != generation_) return;
  next_.by_reset |= apart_;
  drop_all(std::move(forgotten));
}

void KnownRecords::reset() {
  std::unique_ptr<Forgotten> forgotten = nothing();
  const MutexLock lock(mutex_);
  next_.by_reset = true;
  drop_all(std::move(forgotten));
}

void KnownRecords::drop_all(std::unique_ptr<Forgotten> forgotten) {
  if (generation_) {
    next_.least_number = generation_->number + 1;
    over_.push_back(generation_);
    generation_.reset();
  }
  forgotten_.push_back(std::move(forgotten));  // first, because it may throw
  catalogue_.hand_over(&forgotten_.back()->catalogue);
  forgotten_.back()->uses.swap(uses_);
  used_keys_ = next_use_ = 0;
  apart_ = false;
  declined_.assign(kDeclinedCells, 0);
  extent_ = Extent::kOrder;  // without an epoch there is nothing to find
}

// A use count of 1 cannot rise: the only other references come from this object, under the lock.
void KnownRecords::free_unused() {
  std::vector<GenerationPtr> unused;  // closed after the lock is released
  std::vector<std::unique_ptr<Forgotten>> told;
  const MutexLock lock(mutex_);
  told.swap(told_);
  std::erase_if(over_, [&](GenerationPtr& generation) {
    if (generation.use_count() > 1) return false;
    unused.push_back(std::move(generation));
    return true;
  });
}

void KnownRecords::close() {
  GenerationPtr last;  // closed after the lock is released
  std::vector<GenerationPtr> over;
  const MutexLock lock(mutex_);
  last.swap(generation_);
  over.swap(over_);
}

void KnownRecords::note_newer(const GenerationPtr& generation, bool newer) {
  const MutexLock lock(mutex_);
  // A process that was reset itself does not share records either, but is not reported as split off.
  if (generation == generation_) apart_ = newer && !next_.by_reset;
}

// ---- ops

Status KnownRecords::begin_read(const ChunkKey& key, const GenerationPtr& generation, Pin* pin) {
  const MutexLock lock(mutex_);
  if (generation != generation_) return was_reset();
  const std::optional<FsCatalogue::Ref> found = catalogue_.begin_read(key);
  if (!found) return Status::error(StatusKind::kNotFound, "no record of this key");
  pin->ref_ = *found;
  pin->records_ = this;
  return Status::ok();
}

void KnownRecords::unpin(const FsCatalogue::Ref& ref) {
  const MutexLock lock(mutex_);
  catalogue_.end_read(ref);
}

Status KnownRecords::finish_read(const TierOp& op, const GenerationPtr& generation, Status status) {
  const MutexLock lock(mutex_);
  if (generation != generation_) return was_reset();
  if (status) {
    catalogue_.read_succeeded(op.key);
    catalogue_.hit(op.key, op.about, clock_.now());
  } else if (status.kind() == StatusKind::kIo) {
    catalogue_.read_failed(op.key, clock_.now());
  }
  return status;
}

Status KnownRecords::begin_write(const ChunkKey& key, const GenerationPtr& generation, bool* present,
                                 bool* replace) {
  const MutexLock lock(mutex_);
  if (generation != generation_) return was_reset();
  *present = catalogue_.offers(key, clock_.now());
  *replace = !*present && catalogue_.holds(key);  // in back-off: write it again
  return Status::ok();
}

Status KnownRecords::written(const FsCatalogue::Record& record, const EntryInfo& about,
                             const GenerationPtr& generation) {
  const MutexLock lock(mutex_);
  if (generation != generation_) return was_reset();
  catalogue_.insert(record, about);
  catalogue_.read_succeeded(record.key);
  const std::uint64_t mark = declined_mark(chunk_id(record.key), about.request);
  if (declined_[declined_place(mark)] == mark) declined_[declined_place(mark)] = 0;
  return Status::ok();
}

void KnownRecords::remove(const ChunkKey& key, const GenerationPtr& generation, TierRemoval::Reason reason) {
  const MutexLock lock(mutex_);
  if (generation == generation_ && catalogue_.erase(key)) removals_.push_back({key, reason});
}

void KnownRecords::answered(std::span<const ChunkKey> keys) {
  const PresenceCache::Era era = not_found_.era();
  for (const ChunkKey& key : keys) not_found_.answered(key, false, era);
}

void KnownRecords::note_declined(const ChunkKey& key, std::uint32_t request,
                                 const GenerationPtr& generation) {
  const std::uint64_t mark = declined_mark(chunk_id(key), request);
  const MutexLock lock(mutex_);
  if (generation == generation_) declined_[declined_place(mark)] = mark;
}

bool KnownRecords::is_declined(ChunkId id, std::uint32_t request) const {
  const std::uint64_t mark = declined_mark(id, request);
  const MutexLock lock(mutex_);
  return id != 0 && declined_[declined_place(mark)] == mark;
}

Status KnownRecords::offered(std::span<const ChunkKey> keys, const RecordStore::EpochPtr& epoch,
                             std::vector<bool>* present) const {
  const Nanos now = clock_.now();
  const MutexLock lock(mutex_);
  if (epoch != generation_) return was_reset();
  for (std::size_t i = 0; i < keys.size(); ++i) (*present)[i] = catalogue_.offers(keys[i], now);
  return Status::ok();
}

// ---- eviction

std::optional<KnownRecords::Victim> KnownRecords::take_victim(std::uint32_t spared_request, bool* own) {
  apply_uses();
  const MutexLock lock(mutex_);
  if (!generation_) return std::nullopt;
  if (spared_request != 0 && catalogue_.next_is_of(spared_request)) {
    *own = true;
    return std::nullopt;
  }
  const std::optional<FsCatalogue::Record> record = catalogue_.take_victim();
  if (!record) return std::nullopt;
  return Victim{*record, generation_};
}

void KnownRecords::put_back(const Victim& victim) {
  const MutexLock lock(mutex_);
  if (victim.generation == generation_) catalogue_.insert(victim.record, {});
}

void KnownRecords::evicted(const Victim& victim) {
  const MutexLock lock(mutex_);
  if (catalogue_.holds(victim.record.key)) return;  // it was written again meanwhile
  removals_.push_back({victim.record.key, TierRemoval::Reason::kEvicted});
}

// ---- scans

KnownRecords::Extent KnownRecords::extent() const {
  const MutexLock lock(mutex_);
  return extent_;
}

std::vector<std::uint64_t> KnownRecords::file_bytes_of(std::span<const ChunkKey> keys) const {
  std::vector<std::uint64_t> file_bytes;
  file_bytes.reserve(keys.size());
  const MutexLock lock(mutex_);
  for (const ChunkKey& key : keys) file_bytes.push_back(catalogue_.file_bytes_of(key.group_id()).value_or(0));
  return file_bytes;
}

void KnownRecords::note_extent(const GenerationPtr& generation, Extent extent) {
  const MutexLock lock(mutex_);
  if (generation == generation_) extent_ = std::max(extent_, extent);
}

void KnownRecords::note_listed(const GenerationPtr& generation, std::uint32_t leaf) {
  const MutexLock lock(mutex_);
  if (generation == generation_) leaves_[leaf].state = Leaf::State::kListed;
}

template <typename Visit>
bool KnownRecords::in_pieces(std::size_t count, const GenerationPtr* generation,
                             const std::atomic<bool>& stop, Visit visit) const {
  for (std::size_t next = 0; next < count;) {
    if (stop.load()) return false;
    mutex_.let_others_in();
    const MutexLock lock(mutex_);
    if (generation != nullptr && *generation != generation_) return false;
    const std::size_t end = std::min(next + kRecordsPerLock, count);
    count_steps(end - next);
    for (; next < end; ++next) visit(next);
  }
  return true;
}

void KnownRecords::adopt_names(const GenerationPtr& generation, std::span<const FoundRecord> records,
                               bool newest, const std::atomic<bool>& stop) {
  in_pieces(records.size(), &generation, stop, [&](std::size_t at) REQUIRES(mutex_) {
    const FsCatalogue::Record record{records[at].key, records[at].file_bytes};
    if (newest) {
      catalogue_.insert(record, {});
    } else {
      catalogue_.insert_unordered(record);
    }
  });
}

void KnownRecords::adopt_in_order(const GenerationPtr& generation, std::span<const FoundRecord> records,
                                  std::span<const LastUse> order, bool first, const std::atomic<bool>& stop) {
  std::vector<ChunkKey> used;  // used since the epoch was opened
  in_pieces(order.size(), &generation, stop, [&](std::size_t at) REQUIRES(mutex_) {
    const FoundRecord& record = records[order[at].second];
    if (!catalogue_.insert_in_order({record.key, record.file_bytes}) && first) used.push_back(record.key);
  });
  const Nanos now = clock_.now();
  static constexpr std::atomic<bool> kToTheEnd{false};
  in_pieces(used.size(), &generation, kToTheEnd,
            [&](std::size_t at) REQUIRES(mutex_) { catalogue_.touch(used[at], now); });
}

bool KnownRecords::known_from(const GenerationPtr& generation, Slot* slot,
                              std::vector<FsCatalogue::Record>* records) const {
  const MutexLock lock(mutex_);
  if (generation != generation_ || *slot >= catalogue_.slots()) return false;
  *slot = catalogue_.records_from(*slot, kRecordsPerLock, records);
  return true;
}

std::vector<FoundRecord> KnownRecords::unknown_of(std::span<const FoundRecord> records) const {
  std::vector<FoundRecord> unknown;
  static constexpr std::atomic<bool> kToTheEnd{false};
  in_pieces(records.size(), nullptr, kToTheEnd, [&](std::size_t at) REQUIRES(mutex_) {
    if (!catalogue_.holds(records[at].key)) unknown.push_back(records[at]);
  });
  return unknown;
}

// ---- figures

std::vector<FsCatalogue::Record> KnownRecords::take_touched(GenerationPtr* generation) {
  std::vector<FsCatalogue::Record> records;
  for (bool more = true, first = true; more; first = false) {
    mutex_.let_others_in();
    const MutexLock lock(mutex_);
    if (first) *generation = generation_;
    if (*generation != generation_) return {};
    more = catalogue_.take_touched(kRecordsPerLock, &records);
  }
  return records;
}

std::uint64_t KnownRecords::bytes() const {
  const MutexLock lock(mutex_);
  return catalogue_.bytes();
}

void KnownRecords::figures(TierStats* stats) const {
  const MutexLock lock(mutex_);
  stats->chunks = catalogue_.size();
  stats->names_complete = extent_ != Extent::kSome;
  stats->scan_complete = extent_ == Extent::kOrder;
  stats->apart = apart_;
}

}  // namespace kv_offload
