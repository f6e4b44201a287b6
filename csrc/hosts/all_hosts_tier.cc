// SPDX-License-Identifier: Apache-2.0
#include "hosts/all_hosts_tier.h"

#include <algorithm>
#include <cerrno>
#include <exception>
#include <functional>
#include <iterator>
#include <new>
#include <thread>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include "base/make_room.h"
#include "hosts/op_table.h"
#include "tier/epoch_registry.h"

namespace kv_offload {
namespace {

constexpr std::size_t kMostMissing = std::size_t{1} << 16;  // keys that are remembered
constexpr std::size_t kMostPostponed = 4096;                // removals
constexpr Nanos kPostponedInterval = std::chrono::seconds(1);
constexpr OpId kRemoval = OpId{1} << 63;  // set in the ids of our own ops

// How much a failed part says about the whole op.
int weight_of(StatusKind kind) {
  switch (kind) {
    case StatusKind::kOk:
      return 0;
    case StatusKind::kCancelled:
      return 1;
    case StatusKind::kExpired:
      return 2;
    case StatusKind::kDeclined:
      return 3;
    case StatusKind::kUnavailable:
      return 4;
    case StatusKind::kNotFound:
      return 5;
    case StatusKind::kTimeout:
      return 6;
    case StatusKind::kNoSpace:
    case StatusKind::kIo:
    case StatusKind::kDevice:
      return 7;
    case StatusKind::kCorrupt:
      return 8;
  }
  return 7;
}

// contains() returns the one with the highest rank among the parts, unless a part is absent or has failed.
int rank_of(Presence presence) {
  switch (presence) {
    case Presence::kPresent:
      return 0;
    case Presence::kLookupPending:
      return 1;
    case Presence::kSkipped:
      return 2;
    case Presence::kStaleMiss:
      return 3;
    case Presence::kUnknown:
      return 4;
    case Presence::kAbsent:
    case Presence::kLookupFailed:
      break;
  }
  return 0;
}

bool is_in_service(const Tier& tier) {
  const TierAvailability now = tier.availability();
  return now.readable && now.writable;
}

class AllHostsTier final : public Tier {
 public:
  AllHostsTier(std::vector<PartOfTier> parts, const AllHostsOptions& options)
      : parts_(std::move(parts)),
        missing_for_(options.missing_for),
        clock_(options.clock != nullptr ? *options.clock : static_cast<const Clock&>(steady_)),
        warn_(options.warn),
        awaits_epoch_(!options.epoch_ids.empty()) {
    if (awaits_epoch_) compare_epochs(options.epoch_ids);
  }
  ~AllHostsTier() override { close(); }

  std::string_view name() const override { return parts_.front().tier->name(); }
  void submit(std::vector<TierOp> ops) override;
  bool cancel(OpId id) override;
  void poll(std::vector<Completion>* completions, std::vector<TierRemoval>* removals) override;
  Presence contains(const ChunkKey& key) const override;
  void forget_miss(const ChunkKey& key) override {
    for (const PartOfTier& part : parts_) part.tier->forget_miss(key);
  }
  void prefetch_presence(std::vector<ChunkKey> keys, const LookupOptions& options) override;
  void touch(const ChunkKey& key) override {
    for (const PartOfTier& part : parts_) part.tier->touch(key);
  }
  void used(const TierUses& uses) override {
    for (const PartOfTier& part : parts_) part.tier->used(uses);
  }
  Status reset(std::uint64_t startup_id) override;
  void begin_reset(std::uint64_t startup_id) override;
  TierStats stats() const override;
  TierAvailability availability() const override;
  std::vector<TierPart> parts() const override;
  std::string codec_reason() const override { return parts_.front().tier->codec_reason(); }
  void close() override;
  double estimate_read_seconds(std::uint64_t bytes) const override;

 private:
  struct InFlight {
    OpKind kind = OpKind::kRead;
    ChunkKey key;
    std::size_t running = 0;      // parts
    bool part_is_stored = false;  // the op has written at least one part
    bool part_is_lost = false;    // a part was removed while others were being written
    bool part_is_busy = false;    // another engine is writing a part
    Status status;
    std::uint64_t bytes = 0;
    double seconds = 0, queued_seconds = 0;  // of the slowest part
    std::size_t slowest = 0;
  };

  struct Removal {
    ChunkKey key;
    std::size_t part = 0;
  };
  using RemovalOps = std::unordered_map<OpId, Removal>;

  void compare_epochs(const std::vector<std::uint64_t>& ids);
  void replace_epochs(const std::vector<std::uint64_t>& ids);
  void forget_ops();
  void end_wait_by_reset();
  std::vector<std::uint64_t> epoch_ids() const;
  void for_all_at_once(const std::function<void(std::size_t part)>& call) const;
  void submit_parts(std::vector<TierOp> ops);
  static Completion ended_unstarted(const TierOp& op);
  void cancel_held();
  void submit_held(std::vector<Completion>* completions);
  void end_part(std::size_t part, Completion& ended, std::vector<Completion>* completions);
  static void add_failure(InFlight& op, Status status);
  void forget_write(const ChunkKey& key, OpId id);
  void handle_removal(std::size_t part, const TierRemoval& removal, std::vector<TierRemoval>* removals);
  void report(const TierRemoval& removal, std::vector<TierRemoval>* removals);
  // How long a part has been missing: found just now; not long enough, or long enough, to remove the others.
  enum class Missing : std::uint8_t { kNow, kShort, kLong };
  Missing note_missing(const ChunkKey& key);
  void remove_useless_parts(const InFlight& failed);
  void queue_removal(std::size_t part, const ChunkKey& key);
  void postpone_removal(std::size_t part, const ChunkKey& key);
  void queue_postponed();
  void submit_removals();
  void end_removal(RemovalOps::iterator removal);

  const std::vector<PartOfTier> parts_;
  const Nanos missing_for_;
  const SteadyClock steady_;
  const Clock& clock_;
  const std::function<void(std::string)> warn_;
  bool awaits_epoch_;           // see AllHostsOptions
  bool epochs_differ_ = false;  // while awaits_epoch_: of the stores that respond
  std::vector<bool> had_epoch_ = std::vector<bool>(parts_.size());  // when they were found to differ
  bool reset_ended_wait_ = false;                                   // until the tier is in service
  OpTable<InFlight> ops_;
  std::unordered_map<ChunkKey, OpId> writes_;           // of ops_: the last one of each key
  std::unordered_map<ChunkKey, std::size_t> removing_;  // number of parts that are being removed
  RemovalOps removal_ops_;
  std::unordered_map<ChunkKey, Nanos> missing_;  // since when
  std::vector<std::vector<TierOp>> queued_removals_{parts_.size()};
  bool has_queued_removals_ = false;
  std::vector<Removal> postponed_;  // until all parts are in service
  Nanos postponed_until_{0};
  OpId last_removal_ = 0;
  std::vector<TierOp> held_;  // writes that wait until parts of their chunk are removed
  std::vector<Completion> ended_held_;
  std::vector<Completion> ended_;      // polled; those before next_ended_ are done
  std::vector<std::size_t> ended_by_;  // the part of each
  std::size_t next_ended_ = 0;
  std::size_t polled_last_ = 0;                                   // the part that poll() polled last
  std::vector<std::vector<TierRemoval>> removed_{parts_.size()};  // polled
  std::unordered_set<ChunkKey> reported_;                         // by this poll()
  std::vector<TierPart> counts_{parts_.size()};                   // all but `stats` and the speed
  bool closed_ = false;
};

// Calls `call` for all parts at once, since each call may wait for its host. After all calls have returned,
// rethrows the exception of the first part that failed.
void AllHostsTier::for_all_at_once(const std::function<void(std::size_t part)>& call) const {
  std::vector<std::exception_ptr> failures(parts_.size());
  const auto call_one = [&](std::size_t part) {
    try {
      call(part);
    } catch (...) {
      failures[part] = std::current_exception();
    }
  };
  std::vector<std::thread> threads;
  threads.reserve(parts_.size());
  std::size_t part = 1;
  try {
    for (; part < parts_.size(); ++part) threads.emplace_back(call_one, part);
  } catch (const std::exception&) {  // no more threads: the rest one by one
  }
  call_one(0);
  for (; part < parts_.size(); ++part) call_one(part);
  for (std::thread& thread : threads) thread.join();
  for (const std::exception_ptr& failure : failures) {
    if (failure) std::rethrow_exception(failure);
  }
}

std::vector<std::uint64_t> AllHostsTier::epoch_ids() const {
  std::vector<std::uint64_t> ids;
  for (const PartOfTier& part : parts_) ids.push_back(part.tier->stats().epoch_id);
  return ids;
}

// Ends the wait for an epoch if all hosts have the same epoch. Each part keeps the epoch that it has once.
// But if no host may write, another engine replaces the epochs, and all hosts read theirs until they are
// equal.
void AllHostsTier::compare_epochs(const std::vector<std::uint64_t>& ids) {
  const bool can_reset = parts_.front().tier->can_reset();
  if (epochs_differ_ && can_reset) return;
  std::uint64_t first = 0;
  bool has_all = true, has_same = true;
  std::vector<std::string> hosts;  // with an epoch
  for (std::size_t part = 0; part < ids.size(); ++part) {
    has_all = has_all && ids[part] != 0;
    if (ids[part] == 0) continue;
    if (first == 0) first = ids[part];
    has_same = has_same && ids[part] == first;
    hosts.push_back(fmt::format("{} (rank {})", part, parts_[part].first_rank));
  }
  if (!has_same) {
    std::transform(ids.begin(), ids.end(), had_epoch_.begin(), [](std::uint64_t id) { return id != 0; });
    // All of them: which host has the later epoch is not known.
    for (std::size_t part = 0; !can_reset && part < parts_.size(); ++part) parts_[part].tier->refresh_epoch();
    if (std::exchange(epochs_differ_, true)) return;
    return warn_(fmt::format(
        "tier {} stays out of service: the stores of hosts {} respond, but have different epochs. {}", name(),
        fmt::join(hosts, ", "),
        can_reset ? "When the stores of all hosts take writes, the hosts begin a new, empty epoch"
                  : "This engine may not write (write_policy is read_only). It uses the tier when an engine "
                    "that writes has begun a common epoch"));
  }
  if (!has_all) return;
  epochs_differ_ = false;
  awaits_epoch_ = false;
  warn_(fmt::format("tier {} is in service: all hosts have the same epoch", name()));
}

// Begins an empty epoch, as a start does if the stores differ. Does not wait: poll() may not delay requests.
// If this host may not write (`read_only`), no other one may: all have one configuration.
void AllHostsTier::replace_epochs(const std::vector<std::uint64_t>& ids) {
  if (!parts_.front().tier->can_reset()) return;
  for (std::size_t part = 0; part < ids.size(); ++part)
    if (ids[part] == 0 || !parts_[part].tier->stats().writable) return;
  warn_(fmt::format("tier {}: the hosts replace their different epochs with a new, empty one", name()));
  begin_reset(EpochRegistry::new_id());
}

void AllHostsTier::submit(std::vector<TierOp> ops) {
  if (awaits_epoch_) {
    // Allocates all before the first op counts as accepted.
    std::vector<Completion> ended;
    ended.reserve(ops.size());
    for (const TierOp& op : ops) {
      ended.push_back({op.id, op.kind, op.key,
                       Status::error(StatusKind::kUnavailable, "the hosts have no common epoch yet"), 0, 0,
                       0});
    }
    ended_held_.reserve(ended_held_.size() + ended.size());
    std::move(ended.begin(), ended.end(), std::back_inserter(ended_held_));
    return;
  }
  const auto is_held = [this](const TierOp& op) {
    return op.kind == OpKind::kWrite && removing_.contains(op.key);
  };
  // A part that is being removed would count as stored, and then be gone.
  const auto held =
      std::stable_partition(ops.begin(), ops.end(), [&](const TierOp& op) { return !is_held(op); });
  const std::size_t before = held_.size();
  held_.insert(held_.end(), held, ops.end());
  ops.erase(held, ops.end());
  try {
    if (!ops.empty()) submit_parts(std::move(ops));
  } catch (...) {
    held_.resize(before);
    throw;
  }
}

void AllHostsTier::submit_parts(std::vector<TierOp> ops) {
  std::vector<std::vector<TierOp>> others(parts_.size() - 1);
  for (auto& batch : others) batch.reserve(ops.size());
  for (TierOp& op : ops) {
    // These are of this host. Without a copy of them, which would need an allocation for each host.
    auto shards = std::exchange(op.shards, {});
    auto memory = std::exchange(op.memory, {});
    for (auto& batch : others) batch.push_back(op);
    op.shards = std::move(shards);
    op.memory = std::move(memory);
  }
  std::vector<OpId> ids;
  ids.reserve(ops.size());
  try {
    for (const TierOp& op : ops) {
      ids.push_back(op.id);
      InFlight& made = ops_.add(op.id);
      made.kind = op.kind;
      made.key = op.key;
      made.running = parts_.size();
      if (op.kind == OpKind::kWrite) writes_[op.key] = op.id;
    }
    parts_.front().tier->submit(std::move(ops));
  } catch (...) {
    for (const OpId id : ids) {
      const InFlight* found = ops_.find(id);
      if (found == nullptr) continue;
      forget_write(found->key, id);
      ops_.erase(id);
    }
    throw;
  }
  // From here on the ops run: a part that cannot be submitted has failed.
  for (std::size_t i = 0; i < others.size(); ++i) {
    try {
      parts_[i + 1].tier->submit(std::move(others[i]));
    } catch (const std::exception&) {
      for (const OpId id : ids) {
        InFlight& op = *ops_.find(id);
        --op.running;
        add_failure(op, Status::error(StatusKind::kIo, "out of memory"));  // short: needs no memory itself
      }
    }
  }
}

bool AllHostsTier::cancel(OpId id) {
  const auto held = std::find_if(held_.begin(), held_.end(), [id](const TierOp& op) { return op.id == id; });
  if (held != held_.end()) {
    ended_held_.push_back(ended_unstarted(*held));
    held_.erase(held);
    return true;
  }
  const InFlight* found = ops_.find(id);
  const bool is_write = found != nullptr && found->kind == OpKind::kWrite;
  bool all = true;
  // This host last: a write that another host may have begun is not cancelled here either.
  for (std::size_t part = parts_.size(); part-- > 0;) {
    if (is_write && !all) return false;
    all = parts_[part].tier->cancel(id) && all;
  }
  return all;
}

void AllHostsTier::add_failure(InFlight& op, Status status) {
  if (weight_of(status.kind()) > weight_of(op.status.kind())) op.status = std::move(status);
}

void AllHostsTier::poll(std::vector<Completion>* completions, std::vector<TierRemoval>* removals) {
  for (std::size_t part = 0; part < parts_.size(); ++part) {
    // First: what a part of an earlier call has ended must not count as this part's.
    if (ended_by_.size() < ended_.size()) ended_by_.resize(ended_.size(), polled_last_);
    polled_last_ = part;
    parts_[part].tier->poll(&ended_, &removed_[part]);
    ended_by_.resize(ended_.size(), part);
  }
  if (awaits_epoch_) {
    const std::vector<std::uint64_t> ids = epoch_ids();
    compare_epochs(ids);
    if (epochs_differ_) replace_epochs(ids);
  }
  if (reset_ended_wait_ && is_in_service(*this)) {
    reset_ended_wait_ = false;
    warn_(fmt::format("tier {} is in service after a reset", name()));
  }
  // Before the completions: a write whose part was evicted already has failed.
  if (!reported_.empty()) reported_.clear();  // else it would still write its whole table
  for (std::size_t part = 0; part < parts_.size(); ++part) {
    for (const TierRemoval& removal : removed_[part]) handle_removal(part, removal, removals);
    removed_[part].clear();
  }
  // After this, each completion is passed on once, without an allocation.
  make_room(*completions, ended_.size() - next_ended_ + held_.size() + ended_held_.size());
  while (next_ended_ < ended_.size()) {
    const std::size_t at = next_ended_++;
    end_part(ended_by_[at], ended_[at], completions);
  }
  ended_.clear();
  ended_by_.clear();
  next_ended_ = 0;
  submit_held(completions);
  queue_postponed();  // drops those of keys whose write was held
  submit_removals();
  std::move(ended_held_.begin(), ended_held_.end(), std::back_inserter(*completions));
  ended_held_.clear();
}

Completion AllHostsTier::ended_unstarted(const TierOp& op) {
  return {op.id, op.kind, op.key, Status::error(StatusKind::kCancelled, "it had not started"), 0, 0, 0};
}

// If memory runs out, throws and cancels none: an op that ended and stayed held would run later.
void AllHostsTier::cancel_held() {
  std::vector<Completion> ended;
  ended.reserve(held_.size());
  std::transform(held_.begin(), held_.end(), std::back_inserter(ended), ended_unstarted);
  make_room(ended_held_, ended.size());
  std::move(ended.begin(), ended.end(), std::back_inserter(ended_held_));
  held_.clear();
}

// Submits the writes whose key is not being removed any more.
void AllHostsTier::submit_held(std::vector<Completion>* completions) {
  if (held_.empty()) return;
  const auto ready = std::stable_partition(held_.begin(), held_.end(),
                                           [this](const TierOp& op) { return removing_.contains(op.key); });
  std::vector<Completion> failed;  // allocated before the first op is taken
  failed.reserve(static_cast<std::size_t>(held_.end() - ready));
  std::transform(ready, held_.end(), std::back_inserter(failed), ended_unstarted);
  std::vector<TierOp> ops(std::make_move_iterator(ready), std::make_move_iterator(held_.end()));
  held_.erase(ready, held_.end());
  for (std::size_t i = 0; i < ops.size(); ++i) {
    try {
      submit_parts({std::move(ops[i])});
    } catch (const std::exception&) {
      completions->push_back(std::move(failed[i]));
    }
  }
}

// Allocates nothing that a completion depends on.
void AllHostsTier::end_part(std::size_t part, Completion& ended, std::vector<Completion>* completions) {
  if ((ended.id & kRemoval) != 0) {
    const auto removal = removal_ops_.find(ended.id);
    if (removal == removal_ops_.end()) return;
    const StatusKind kind = ended.status.kind();
    // Tiers that are read_only remove nothing, which does not count as a failure.
    if (kind != StatusKind::kDeclined || ended.status.error_number() != EROFS)
      ++counts_[part].removals[static_cast<std::size_t>(kind)];
    if (kind == StatusKind::kUnavailable) postpone_removal(removal->second.part, removal->second.key);
    return end_removal(removal);
  }
  InFlight* const found = ops_.find(ended.id);
  if (found == nullptr) return;
  InFlight& op = *found;
  TierPart& counts = counts_[part];
  ++(op.kind == OpKind::kRead ? counts.reads : counts.writes)[static_cast<std::size_t>(ended.status.kind())];
  // A part from before this op stays, because the failing host may have its part of the chunk, too.
  op.part_is_stored |= ended.status.is_ok() && ended.bytes > 0;
  op.part_is_busy |= ended.status.kind() == StatusKind::kUnavailable && ended.status.error_number() == EBUSY;
  add_failure(op, std::move(ended.status));
  op.bytes += ended.bytes;
  if (ended.seconds + ended.queued_seconds >= op.seconds + op.queued_seconds) {
    op.seconds = ended.seconds;
    op.queued_seconds = ended.queued_seconds;
    op.slowest = part;
  }
  if (--op.running > 0) return;
  if (op.kind == OpKind::kWrite) {
    forget_write(op.key, ended.id);
    missing_.erase(op.key);
    if (op.status && op.part_is_lost)
      op.status = Status::error(StatusKind::kNotFound, "a part was evicted before all parts were written");
  }
  const StatusKind kind = op.status.kind();
  const bool stays_for_other = op.part_is_busy && !op.part_is_lost;
  const bool parts_are_useless = op.kind == OpKind::kWrite
                                     ? kind != StatusKind::kOk && op.part_is_stored && !stays_for_other
                                     : kind == StatusKind::kCorrupt || kind == StatusKind::kNotFound;
  if (parts_are_useless) remove_useless_parts(op);
  if (op.kind == OpKind::kRead && kind == StatusKind::kOk) ++counts_[op.slowest].slowest_reads;
  completions->push_back({ended.id, op.kind, op.key, std::move(op.status),
                          kind == StatusKind::kOk ? op.bytes : 0, op.seconds, op.queued_seconds});
  ops_.erase(ended.id);
}

// A later write of the key, which was submitted after a reset, stays.
void AllHostsTier::forget_write(const ChunkKey& key, OpId id) {
  const auto write = writes_.find(key);
  if (write != writes_.end() && write->second == id) writes_.erase(write);
}

void AllHostsTier::remove_useless_parts(const InFlight& failed) {
  const ChunkKey& key = failed.key;
  if (writes_.contains(key)) return;  // its end decides
  const auto is_present = [&](const PartOfTier& part) {
    return part.tier->contains(key) == Presence::kPresent;
  };
  // The op is older than a write that has succeeded.
  if (!failed.part_is_lost && std::all_of(parts_.begin(), parts_.end(), is_present)) return;
  for (std::size_t part = 0; part < parts_.size(); ++part) {
    const Presence presence = parts_[part].tier->contains(key);
    // A host may have stored its part before its connection was lost.
    const bool is_not_known = presence == Presence::kUnknown || presence == Presence::kSkipped;
    const bool may_be_stored = is_not_known && failed.kind == OpKind::kWrite;
    if (presence == Presence::kPresent || may_be_stored) queue_removal(part, key);
    if (presence == Presence::kLookupFailed) postpone_removal(part, key);
  }
}

void AllHostsTier::handle_removal(std::size_t part, const TierRemoval& removal,
                                  std::vector<TierRemoval>* removals) {
  using enum TierRemoval::Reason;
  const ChunkKey& key = removal.key;
  const bool is_own = part == 0;
  const bool own_is_present = parts_.front().tier->contains(key) == Presence::kPresent;
  if (removal.reason == kReset && !is_own) {
    // After a reset of the whole tier, this host reports the key. If it still has its part, the connection to
    // the other host was lost.
    if (own_is_present) report(removal, removals);
    return;
  }
  if (removing_.contains(key)) return;
  // Other hosts report kVanished also for lookups that found nothing.
  const bool was_here = is_own || removal.reason != kVanished;
  if (const auto write = writes_.find(key); write != writes_.end()) {
    // kVanished and kReset may be older than the write: a lookup may have been answered before it.
    if (removal.reason == kEvicted || removal.reason == kCorrupt)
      ops_.find(write->second)->part_is_lost = true;
    if (was_here) report(removal, removals);
    return;
  }
  const bool may_remove_unknown = was_here && removal.reason != kReset;
  std::vector<std::size_t> useless;
  for (std::size_t other = 0; other < parts_.size(); ++other) {
    if (other == part) continue;
    const Tier& tier = *parts_[other].tier;
    const Presence presence = tier.contains(key);
    const bool is_not_known = presence == Presence::kAbsent || presence == Presence::kLookupFailed;
    if (may_remove_unknown && is_not_known && !is_in_service(tier)) {
      postpone_removal(other, key);
    } else if (presence == Presence::kPresent || (presence != Presence::kAbsent && may_remove_unknown)) {
      useless.push_back(other);
    }
  }
  const Missing missing = was_here || useless.empty() ? Missing::kLong : note_missing(key);
  if (missing == Missing::kLong) {
    for (const std::size_t other : useless) queue_removal(other, key);
  }
  // If another part is absent, the chunk may still have been whole: a tier reports a removal some time after
  // contains() has changed.
  if (was_here || (own_is_present && missing != Missing::kShort)) report(removal, removals);
}

void AllHostsTier::report(const TierRemoval& removal, std::vector<TierRemoval>* removals) {
  if (reported_.insert(removal.key).second) removals->push_back(removal);
}

AllHostsTier::Missing AllHostsTier::note_missing(const ChunkKey& key) {
  if (missing_for_ <= Nanos(0)) return Missing::kLong;
  const Nanos now = clock_.now();
  if (missing_.size() >= kMostMissing) missing_.clear();
  const auto [found, is_new] = missing_.emplace(key, now);
  if (is_new) return Missing::kNow;
  if (now - found->second < missing_for_) return Missing::kShort;
  missing_.erase(found);
  return Missing::kLong;
}

void AllHostsTier::queue_removal(std::size_t part, const ChunkKey& key) {
  if (closed_) return;
  // A damaged part is found by its read and as a removal at once.
  const auto is_same = [&](const auto& one) { return one.second.part == part && one.second.key == key; };
  if (removing_.contains(key) && std::any_of(removal_ops_.begin(), removal_ops_.end(), is_same)) return;
  try {
    TierOp op;
    op.id = kRemoval | ++last_removal_;
    op.kind = OpKind::kRemove;
    op.key = key;
    const OpId id = op.id;
    has_queued_removals_ = true;
    queued_removals_[part].push_back(std::move(op));
    removal_ops_.emplace(id, Removal{key, part});
    ++removing_[key];
  } catch (const std::bad_alloc&) {  // the part is evicted some time, because it is not used
  }
}

void AllHostsTier::postpone_removal(std::size_t part, const ChunkKey& key) {
  if (closed_ || postponed_.size() >= kMostPostponed) return;  // the part is evicted some time
  try {
    postponed_.push_back({key, part});
  } catch (const std::bad_alloc&) {  // as above
  }
}

void AllHostsTier::queue_postponed() {
  // A host that is in service may refuse single keys: those of a node of a cluster that is down.
  if (postponed_.empty() || clock_.now() < postponed_until_ || !is_in_service(*this)) return;
  postponed_until_ = clock_.now() + kPostponedInterval;
  for (const Removal& removal : std::exchange(postponed_, {})) {
    bool is_whole = !removing_.contains(removal.key);
    for (std::size_t other = 0; other < parts_.size(); ++other)
      is_whole &= other == removal.part || parts_[other].tier->contains(removal.key) == Presence::kPresent;
    // A chunk that was written again since is whole, or its write has not ended.
    if (!is_whole && !writes_.contains(removal.key)) queue_removal(removal.part, removal.key);
  }
}

void AllHostsTier::submit_removals() {
  if (!std::exchange(has_queued_removals_, false)) return;
  for (std::size_t part = 0; part < parts_.size(); ++part) {
    std::vector<TierOp>& queued = queued_removals_[part];
    if (queued.empty()) continue;
    const OpId last = queued.back().id, first = queued.front().id;
    try {
      parts_[part].tier->submit(std::exchange(queued, {}));
    } catch (const std::exception&) {  // these parts stay until they are evicted
      for (OpId id = first; id <= last; ++id) {
        const auto removal = removal_ops_.find(id);
        if (removal == removal_ops_.end() || removal->second.part != part) continue;
        ++counts_[part].removals[static_cast<std::size_t>(StatusKind::kIo)];
        end_removal(removal);
      }
    }
  }
}

void AllHostsTier::end_removal(RemovalOps::iterator removal) {
  const auto removing = removing_.find(removal->second.key);
  if (removing != removing_.end() && --removing->second == 0) removing_.erase(removing);
  removal_ops_.erase(removal);
}

Presence AllHostsTier::contains(const ChunkKey& key) const {
  if (awaits_epoch_) return Presence::kLookupFailed;
  if (!removing_.empty() && removing_.contains(key)) return Presence::kAbsent;
  Presence all = Presence::kPresent;
  bool has_failed = false;
  for (const PartOfTier& part : parts_) {
    const Presence presence = part.tier->contains(key);
    if (presence == Presence::kAbsent) return presence;
    has_failed |= presence == Presence::kLookupFailed;
    // A part that has to be asked for first; then there is something to wait for.
    if (rank_of(presence) > rank_of(all)) all = presence;
  }
  return has_failed ? Presence::kLookupFailed : all;
}

// A key that this host does not have is not asked for elsewhere: most are chunks of new prompts.
void AllHostsTier::prefetch_presence(std::vector<ChunkKey> keys, const LookupOptions& options) {
  if (awaits_epoch_) return;
  const Tier& own = *parts_.front().tier;
  std::vector<ChunkKey> possible;
  possible.reserve(keys.size());
  for (const ChunkKey& key : keys) {
    const Presence presence = own.contains(key);
    if (presence != Presence::kAbsent && presence != Presence::kLookupFailed) possible.push_back(key);
  }
  for (std::size_t part = 1; part < parts_.size(); ++part)
    parts_[part].tier->prefetch_presence(possible, options);
  parts_.front().tier->prefetch_presence(std::move(keys), options);
}

void AllHostsTier::forget_ops() {
  cancel_held();  // an op belongs to the epoch in which it was submitted
  missing_.clear();
  postponed_.clear();
}

// After all parts were reset: each host begins an epoch of this engine alone.
void AllHostsTier::end_wait_by_reset() {
  reset_ended_wait_ |= awaits_epoch_;
  awaits_epoch_ = epochs_differ_ = false;
}

void AllHostsTier::begin_reset(std::uint64_t startup_id) {
  forget_ops();
  for (const PartOfTier& part : parts_) part.tier->begin_reset(startup_id);
  end_wait_by_reset();
}

Status AllHostsTier::reset(std::uint64_t startup_id) {
  // One id for all hosts, so that engines that start later find equal epochs.
  if (startup_id == 0) startup_id = EpochRegistry::new_id();
  forget_ops();
  std::vector<Status> ended(parts_.size());
  for_all_at_once([&](std::size_t part) { ended[part] = parts_[part].tier->reset(startup_id); });
  end_wait_by_reset();
  return *std::max_element(ended.begin(), ended.end(), [](const Status& a, const Status& b) {
    return weight_of(a.kind()) < weight_of(b.kind());
  });
}

TierStats AllHostsTier::stats() const {
  // Bytes, ops and failures add up. A chunk needs its part on each host: the number of chunks and the
  // abilities are those of the host with the least, queues and ages those of the host with the most.
  TierStats all = parts_.front().tier->stats();
  for (std::size_t part = 1; part < parts_.size(); ++part) {
    const TierStats stats = parts_[part].tier->stats();
    all.bytes += stats.bytes;
    all.capacity_bytes += stats.capacity_bytes;
    all.chunks = std::min(all.chunks, stats.chunks);
    all.evicted_bytes += stats.evicted_bytes;
    all.tenant_bytes.resize(std::max(all.tenant_bytes.size(), stats.tenant_bytes.size()));
    for (std::size_t tenant = 0; tenant < stats.tenant_bytes.size(); ++tenant)
      all.tenant_bytes[tenant] += stats.tenant_bytes[tenant];
    all.direct_ops += stats.direct_ops;
    all.buffered_ops += stats.buffered_ops;
    all.queued_reads = std::max(all.queued_reads, stats.queued_reads);
    all.queued_writes = std::max(all.queued_writes, stats.queued_writes);
    all.oldest_read_seconds = std::max(all.oldest_read_seconds, stats.oldest_read_seconds);
    all.oldest_write_seconds = std::max(all.oldest_write_seconds, stats.oldest_write_seconds);
    all.names_complete = all.names_complete && stats.names_complete;
    all.scan_complete = all.scan_complete && stats.scan_complete;
    all.diverged = all.diverged || stats.diverged;
    all.rebuilds += stats.rebuilds;
    all.lost_bytes += stats.lost_bytes;
    all.breaker_trips += stats.breaker_trips;
    all.read_timeouts += stats.read_timeouts;
    all.write_timeouts += stats.write_timeouts;
    all.read_record_bytes += stats.read_record_bytes;
    all.written_record_bytes += stats.written_record_bytes;
    all.may_encode = all.may_encode || stats.may_encode;
    all.encodes = all.encodes || stats.encodes;
    all.encode_seconds += stats.encode_seconds;
    all.decode_seconds += stats.decode_seconds;
    all.encoded_raw_bytes += stats.encoded_raw_bytes;
    all.encoded_stored_bytes += stats.encoded_stored_bytes;
    all.largest_key_error = std::max(all.largest_key_error, stats.largest_key_error);
    all.largest_value_error = std::max(all.largest_value_error, stats.largest_value_error);
  }
  all.queued_writes += static_cast<std::uint32_t>(held_.size());
  const TierAvailability now = availability();
  all.readable = now.readable;
  all.writable = now.writable;
  all.is_shared = now.is_shared;
  return all;
}

TierAvailability AllHostsTier::availability() const {
  TierAvailability all{!awaits_epoch_, !awaits_epoch_, true};
  for (const PartOfTier& part : parts_) {
    const TierAvailability one = part.tier->availability();
    all.readable = all.readable && one.readable;
    all.writable = all.writable && one.writable;
    all.is_shared = all.is_shared && one.is_shared;
  }
  return all;
}

std::vector<TierPart> AllHostsTier::parts() const {
  constexpr std::uint64_t kSample = std::uint64_t{1} << 30;
  std::vector<TierPart> parts = counts_;
  for (std::size_t part = 0; part < parts.size(); ++part) {
    const Tier& tier = *parts_[part].tier;
    TierStats& stats = parts[part].stats;
    stats = tier.stats();
    // A host that reads its epoch again has none meanwhile.
    parts[part].epoch_differs = epochs_differ_ && (stats.epoch_id != 0 || had_epoch_[part]);
    // The tier uses none of its stores, including those that respond.
    stats.readable = stats.readable && !epochs_differ_;
    stats.writable = stats.writable && !epochs_differ_;
    const double seconds = tier.estimate_read_seconds(kSample) - tier.estimate_read_seconds(0);
    if (seconds > 0) parts[part].read_bytes_per_second = static_cast<double>(kSample) / seconds;
  }
  return parts;
}

void AllHostsTier::close() {
  if (std::exchange(closed_, true)) return;
  cancel_held();
  // Before another host's close() waits: meanwhile this host would store parts that the other one does not.
  ops_.for_each([this](OpId id, const InFlight&) {
    try {
      (void)parts_.front().tier->cancel(id);
    } catch (const std::bad_alloc&) {  // its close() cancels the op
    }
  });
  const auto close_part = [this](std::size_t part) { parts_[part].tier->close(); };
  try {
    for_all_at_once(close_part);
  } catch (const std::exception&) {  // out of memory: one by one
    for (std::size_t part = parts_.size(); part-- > 0;) close_part(part);
  }
}

double AllHostsTier::estimate_read_seconds(std::uint64_t bytes) const {
  double slowest = 0;
  for (const PartOfTier& part : parts_) {
    const auto own = static_cast<std::uint64_t>(part.share * static_cast<double>(bytes));
    slowest = std::max(slowest, part.tier->estimate_read_seconds(own));
  }
  return slowest;
}

}  // namespace

std::unique_ptr<Tier> make_all_hosts_tier(std::vector<PartOfTier> parts, const AllHostsOptions& options) {
  return std::make_unique<AllHostsTier>(std::move(parts), options);
}

}  // namespace kv_offload
