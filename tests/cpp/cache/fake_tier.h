// SPDX-License-Identifier: Apache-2.0
// An in-memory tier that the test drives. Ops wait until the test finishes them, and end with
// kOk or with the result that `verdict` returns. Records hold real bytes, so tests can compare
// what they read with what they wrote.
#pragma once

#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <new>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "base/types.h"
#include "cache/manual_tier.h"

namespace kv_offload {

class FakeTier final : public ManualTier {
 public:
  struct Record {
    std::uint32_t group = 0;
    std::vector<std::vector<std::byte>> shards;
    std::uint64_t used = 0;
    bool corrupt = false;  // a read of it ends kCorrupt and removes it
  };
  // Returns the result of an op; kOk by default.
  using Verdict = std::function<StatusKind(const TierOp&)>;

  explicit FakeTier(std::string name = "fs", const Clock* clock = nullptr)
      : name_(std::move(name)), clock_(clock) {}

  // ---- control by the test
  void finish(std::size_t n = kAll) override {
    for (; n > 0 && !(reads_.empty() && writes_.empty()); --n) {
      auto& queue = reads_.empty() ? writes_ : reads_;
      TierOp op = std::move(queue.front());
      queue.pop_front();
      perform(op);
    }
  }
  void start(OpKind kind) override {
    auto& queue = kind == OpKind::kRead ? reads_ : writes_;
    if (queue.empty()) return;
    started_.push_back(std::move(queue.front()));
    queue.pop_front();
  }
  void finish_started() override {
    for (TierOp& op : std::exchange(started_, {})) perform(op);
  }
  void remove(const ChunkKey& key, TierRemoval::Reason reason) {
    if (records.erase(key) > 0) removals_.push_back({key, reason});
  }
  bool holds(const ChunkKey& key) override { return records.contains(key); }
  void take_away(const ChunkKey& key) override { remove(key, TierRemoval::Reason::kVanished); }
  void damage(const ChunkKey& key) override { records.at(key).corrupt = true; }
  void fail(StatusKind kind) override {
    verdict = [kind](const TierOp& op) {
      return kind == StatusKind::kNoSpace && op.kind == OpKind::kRead ? StatusKind::kOk : kind;
    };
  }
  void fail_resets(bool fail) override { resets_fail_ = fail; }
  void heal() override { reset_pending_ = resets_fail_; }
  void switch_off() override { available = false; }
  bool was_reset() const { return was_reset_; }
  bool is_closed() const override { return closed_; }

  std::map<ChunkKey, Record> records;
  Verdict verdict;                 // called when an op is performed
  bool skip_verification = false;  // injected fault: corrupt records read as ok
  bool available = true;
  bool knows = true;           // false: contains() returns kUnknown
  bool asks = false;           // if !knows: contains() returns kLookupPending after prefetch_presence()
  bool is_sure = true;         // false: contains() returns kStaleMiss for missing records
  bool fails_lookups = false;  // true: contains() returns kLookupFailed for missing records
  bool answers = true;         // false: repeated lookups of absent keys stay unknown
  bool host_is_lost = false;   // every op ends with host_lost_error()
  bool reset_throws = false;
  std::set<ChunkKey> forgotten;
  std::set<ChunkKey> skipped;  // contains() returns kSkipped
  double read_seconds = 0;     // reported by estimate_read_seconds() and read completions
  std::size_t max_records = kAll;
  bool automatic = false;  // ops end at the next poll

  std::size_t started() const { return started_.size(); }
  // All ops that have not ended.
  template <typename Visit>
  void for_each_op(Visit visit) const {
    for (const auto* queue : {&reads_, &writes_, &started_}) {
      for (const TierOp& op : *queue) visit(op);
    }
  }
  // Number of resets before this op was submitted.
  std::uint64_t born(const TierOp& op) const { return born_.at(op.id); }
  const std::deque<TierOp>& reads() const override { return reads_; }
  const std::deque<TierOp>& writes() const override { return writes_; }
  std::vector<TierUse> told_used;
  std::function<void()> on_touch;                                      // called first by touch()
  std::vector<std::pair<std::vector<ChunkKey>, LookupOptions>> asked;  // arguments of prefetch_presence()

  // ---- Tier
  std::string_view name() const override { return name_; }
  void submit(std::vector<TierOp> ops) override {
    const OpId first = ops.front().id;
    try {
      for (TierOp& op : ops) {
        born_[op.id] = epoch_;
        if (closed_) {
          complete(op, Status::error(StatusKind::kUnavailable, "closed"));
        } else {
          (op.kind == OpKind::kRead ? reads_ : writes_).push_back(std::move(op));
        }
      }
    } catch (const std::bad_alloc&) {  // then it has accepted none of them
      for (auto* queue : {&reads_, &writes_}) {
        while (!queue->empty() && queue->back().id >= first) queue->pop_back();
      }
      throw;
    }
  }
  bool cancel(OpId id) override {
    for (auto* queue : {&reads_, &writes_}) {
      for (auto it = queue->begin(); it != queue->end(); ++it) {
        if (it->id != id) continue;
        complete(*it, Status::error(StatusKind::kCancelled, "cancelled"));
        queue->erase(it);
        return true;
      }
    }
    return false;
  }
  void poll(std::vector<Completion>* completions, std::vector<TierRemoval>* removals) override {
    if (automatic) finish();
    for (Completion& completion : completions_) completions->push_back(std::move(completion));
    completions_.clear();
    removals->insert(removals->end(), removals_.begin(), removals_.end());
    removals_.clear();
  }
  Presence contains(const ChunkKey& key) const override {
    if (!knows) return asks && !asked.empty() ? Presence::kLookupPending : Presence::kUnknown;
    if (forgotten.contains(key)) return Presence::kUnknown;
    if (skipped.contains(key)) return Presence::kSkipped;
    if (records.contains(key)) return Presence::kPresent;
    if (fails_lookups) return Presence::kLookupFailed;
    return is_sure ? Presence::kAbsent : Presence::kStaleMiss;
  }
  void forget_miss(const ChunkKey& key) override {
    skipped.erase(key);
    forgotten.insert(key);
  }
  void prefetch_presence(std::vector<ChunkKey> keys, const LookupOptions& options) override {
    for (const ChunkKey& key : keys) {
      if (answers) forgotten.erase(key);
    }
    asked.emplace_back(std::move(keys), options);
  }
  void touch(const ChunkKey& key) override {
    if (on_touch) on_touch();
    if (const auto record = records.find(key); record != records.end()) record->second.used = ++uses_;
  }
  void used(const TierUses& uses) override {
    for (const TierUse& use : *uses) told_used.push_back(use);
  }
  Status reset(std::uint64_t) override {
    if (reset_throws) throw std::bad_alloc();
    for (const auto& [key, record] : records) removals_.push_back({key, TierRemoval::Reason::kReset});
    records.clear();
    ++epoch_;
    was_reset_ = true;
    reset_pending_ = resets_fail_;
    return resets_fail_ ? Status::error(StatusKind::kIo, "reset") : Status::ok();
  }
  TierStats stats() const override {
    TierStats stats;
    stats.chunks = records.size();
    stats.queued_reads = static_cast<std::uint32_t>(reads_.size() + started_.size());
    stats.queued_writes = static_cast<std::uint32_t>(writes_.size());
    stats.readable = available;
    stats.writable = available && !reset_pending_;
    stats.is_shared = !was_reset_;
    stats.scan_complete = true;
    return stats;
  }
  void close() override {
    if (std::exchange(closed_, true)) return;
    while (!writes_.empty()) cancel(writes_.front().id);
    while (!reads_.empty()) cancel(reads_.front().id);
    finish_started();
  }
  double estimate_read_seconds(std::uint64_t) const override { return read_seconds; }

 private:
  void complete(const TierOp& op, Status status) {
    born_.erase(op.id);
    Completion completion;
    completion.id = op.id;
    completion.kind = op.kind;
    completion.key = op.key;
    completion.status = std::move(status);
    if (completion.status.is_ok()) {
      for (const Shard& shard : op.shards) completion.bytes += round_up(shard.size(), kPageBytes);
      if (op.kind == OpKind::kRead) completion.seconds = read_seconds;
    }
    completions_.push_back(std::move(completion));
  }
  void perform(TierOp& op) {
    const bool late = clock_ != nullptr && op.deadline.count() != 0 && clock_->now() > op.deadline;
    const StatusKind told = late ? StatusKind::kExpired : verdict ? verdict(op) : StatusKind::kOk;
    if (born_[op.id] != epoch_) return complete(op, Status::error(StatusKind::kCancelled, "reset"));
    if (host_is_lost) return complete(op, host_lost_error());
    if (op.kind == OpKind::kRead) {
      perform_read(op, told);
    } else {
      perform_write(op, told);
    }
  }
  void perform_read(TierOp& op, StatusKind told) {
    const auto found = records.find(op.key);
    if (found == records.end()) return complete(op, Status::error(StatusKind::kNotFound, "gone"));
    const bool corrupt = found->second.corrupt || told == StatusKind::kCorrupt;
    if (told != StatusKind::kOk || corrupt) {
      for (Shard& shard : op.shards) std::memset(shard.data(), 0xEE, shard.size());  // garbage on failure
    }
    if (corrupt && skip_verification) return complete(op, Status::ok());
    if (corrupt) {
      remove(op.key, TierRemoval::Reason::kCorrupt);
      return complete(op, Status::error(StatusKind::kCorrupt, "checksum"));
    }
    if (told != StatusKind::kOk) return complete(op, Status::error(told, "told to fail"));
    const Record& record = found->second;
    for (std::size_t i = 0; i < op.shards.size(); ++i) {
      std::memcpy(op.shards[i].data(), record.shards.at(i).data(), op.shards[i].size());
    }
    found->second.used = ++uses_;
    complete(op, Status::ok());
  }
  void perform_write(TierOp& op, StatusKind told) {
    if (reset_pending_) return complete(op, Status::error(StatusKind::kUnavailable, "reset"));
    if (told != StatusKind::kOk) return complete(op, Status::error(told, "told to fail"));
    Record record;
    record.group = op.group;
    record.used = ++uses_;
    for (const Shard& shard : op.shards) record.shards.emplace_back(shard.begin(), shard.end());
    records[op.key] = std::move(record);
    complete(op, Status::ok());
    while (records.size() > max_records) {
      auto oldest = records.begin();
      for (auto it = records.begin(); it != records.end(); ++it) {
        if (it->second.used < oldest->second.used) oldest = it;
      }
      remove(ChunkKey(oldest->first), TierRemoval::Reason::kEvicted);
    }
  }

  const std::string name_;
  const Clock* const clock_;
  std::deque<TierOp> reads_, writes_, started_;
  std::vector<Completion> completions_;
  std::vector<TierRemoval> removals_;
  std::uint64_t uses_ = 0;
  std::uint64_t epoch_ = 0;
  bool closed_ = false;
  bool resets_fail_ = false, reset_pending_ = false, was_reset_ = false;
  std::map<OpId, std::uint64_t> born_;  // number of resets at submission
};

}  // namespace kv_offload
