// SPDX-License-Identifier: Apache-2.0
// A tier kind that is a dictionary in memory: the smallest RecordStore, for the tests that all kinds share.
// MemoryServer stands for a remote server. Stores open and close, several may use it at once, and it keeps
// its records. It drops records by itself, and fails or hangs as a test configures it.
#pragma once

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <new>
#include <optional>
#include <set>
#include <utility>
#include <vector>

#include "record/record_form.h"
#include "tier/record_store.h"

namespace kv_offload::testing {

class MemoryServer {
 public:
  enum class Verb : std::uint8_t { kRead, kWrite, kLocate, kEpoch, kMaintain };
  using Name = std::pair<std::uint64_t, ChunkKey>;  // epoch, key

  // ---- store requests; each may wait or fail as configured
  Status put(const Name& name, std::vector<std::byte> record) {
    if (Status status = before(Verb::kWrite); !status) return status;
    const std::lock_guard lock(mutex_);
    records_[name] = std::move(record);
    return Status::ok();
  }
  Status get(const Name& name, std::optional<std::vector<std::byte>>* record) {
    if (Status status = before(Verb::kRead); !status) return status;
    const std::lock_guard lock(mutex_);
    const auto found = records_.find(name);
    if (found != records_.end()) *record = found->second;
    return Status::ok();
  }
  Status exist(std::uint64_t epoch, std::span<const ChunkKey> keys, std::vector<bool>* present) {
    if (Status status = before(Verb::kLocate); !status) return status;
    const std::lock_guard lock(mutex_);
    asked_.emplace_back(keys.begin(), keys.end());
    for (std::size_t i = 0; i < keys.size(); ++i) (*present)[i] = records_.contains({epoch, keys[i]});
    return Status::ok();
  }
  // Removes the record unless it has been replaced.
  void remove(const Name& name, const std::vector<std::byte>& record) {
    const std::lock_guard lock(mutex_);
    const auto found = records_.find(name);
    if (found != records_.end() && found->second == record) records_.erase(found);
  }
  // Makes an epoch for a store that was reset. Others never start with it.
  Status next_epoch(std::uint64_t* epoch) {
    if (Status status = before(Verb::kEpoch); !status) return status;
    const std::lock_guard lock(mutex_);
    *epoch = ++epoch_;
    made_by_reset_ = true;
    return Status::ok();
  }
  // Returns the epoch for a store that starts.
  std::uint64_t start() {
    const std::lock_guard lock(mutex_);
    if (std::exchange(made_by_reset_, false)) ++epoch_;
    return epoch_;
  }
  std::uint64_t epoch() const {
    const std::lock_guard lock(mutex_);
    return epoch_;
  }

  // ---- test controls
  std::atomic<bool> ends_at_gaps{false};  // lookups of a prompt end at its first missing chunk
  void lose(const ChunkKey& key) {
    const std::lock_guard lock(mutex_);
    std::erase_if(records_, [&](const auto& entry) { return entry.first.second == key; });
  }
  void damage(const ChunkKey& key) {
    const std::lock_guard lock(mutex_);
    for (auto& [name, record] : records_) {
      if (name.second == key) record.back() ^= std::byte{1};
    }
  }
  void fail(Verb verb, StatusKind kind, int error_number = 0) {  // kOk: no longer
    const std::lock_guard lock(mutex_);
    fails_[verb] = {kind, error_number};
  }
  // Makes calls of this verb throw, which no real store may do.
  void throw_in(Verb verb, bool throws = true) {
    const std::lock_guard lock(mutex_);
    throws_[verb] = throws;
  }
  // Blocks calls of this verb until release().
  void block(Verb verb) {
    const std::lock_guard lock(mutex_);
    blocked_.insert(verb);
  }
  void release() {
    const std::lock_guard lock(mutex_);
    blocked_.clear();
    changed_.notify_all();
  }
  void wait_for_blocked(int threads = 1) {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return waiting_ >= threads; });
  }
  int blocked_threads() const {
    const std::lock_guard lock(mutex_);
    return waiting_;
  }
  std::vector<std::vector<ChunkKey>> asked() const {  // keys by locate call
    const std::lock_guard lock(mutex_);
    return asked_;
  }
  void on_maintained() {
    (void)before(Verb::kMaintain);
    const std::lock_guard lock(mutex_);
    ++maintained_;
  }
  int maintained() const {  // number of calls, over all its stores
    const std::lock_guard lock(mutex_);
    return maintained_;
  }
  int thrown() const {
    const std::lock_guard lock(mutex_);
    return thrown_;
  }
  std::size_t size() const {
    const std::lock_guard lock(mutex_);
    return records_.size();
  }
  std::uint64_t bytes() const {
    const std::lock_guard lock(mutex_);
    std::uint64_t bytes = 0;
    for (const auto& [name, record] : records_) bytes += record.size();
    return bytes;
  }

 private:
  Status before(Verb verb) {
    std::unique_lock lock(mutex_);
    if (blocked_.contains(verb)) {
      ++waiting_;
      changed_.notify_all();
      changed_.wait(lock, [&] { return !blocked_.contains(verb); });
      --waiting_;
    }
    if (throws_[verb]) {
      ++thrown_;
      throw std::bad_alloc();
    }
    const auto [kind, error_number] = fails_[verb];
    if (kind == StatusKind::kOk) return Status::ok();
    return Status::error(kind, "injected failure", error_number);
  }

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::map<Name, std::vector<std::byte>> records_;
  std::vector<std::vector<ChunkKey>> asked_;
  std::set<Verb> blocked_;
  int waiting_ = 0, maintained_ = 0;
  std::uint64_t epoch_ = 1;
  bool made_by_reset_ = false;
  std::map<Verb, std::pair<StatusKind, int>> fails_;
  std::map<Verb, bool> throws_;
  int thrown_ = 0;
};

class MemoryStore final : public RecordStore {
 public:
  MemoryStore(std::shared_ptr<MemoryServer> server, const NamespaceId& namespace_id,
              std::size_t keys_per_locate = 64, bool read_only = false, const RecordFormOptions& form = {})
      : server_(std::move(server)),
        namespace_id_(namespace_id),
        keys_per_locate_(keys_per_locate),
        read_only_(read_only),
        form_(form),
        epoch_(std::make_shared<Number>(server_->start())) {}

  Status write(const TierOp& op, const EpochPtr& epoch, std::uint64_t* moved) override {
    OutgoingRecord outgoing(form_, namespace_id_, op);
    if (Status status = outgoing.encode(); !status) return status;
    if (Status status = outgoing.finish(); !status) return status;
    std::vector<std::byte> record;
    for (const auto& piece : outgoing.pieces()) record.insert(record.end(), piece.begin(), piece.end());
    Status status = server_->put({number(epoch), op.key}, std::move(record));
    if (status) *moved = outgoing.written();
    return status;
  }

  Status read(const TierOp& op, const EpochPtr& epoch, std::uint64_t* moved) override {
    const MemoryServer::Name name{number(epoch), op.key};
    std::optional<std::vector<std::byte>> record;
    if (Status status = server_->get(name, &record); !status) return status;
    if (!record) return Status::error(StatusKind::kNotFound, "no record of this key");
    IncomingRecord incoming(form_, namespace_id_, op);
    Status status = incoming.check_length(record->size());
    if (status) {
      std::span<const std::byte> from(*record);
      for (const auto& place : incoming.pieces()) {
        const std::size_t part = std::min(from.size(), place.size());
        std::copy_n(from.begin(), part, place.begin());
        from = from.subspan(part);
      }
      status = incoming.open(record->size());
    }
    if (status) *moved = incoming.payload_bytes();
    if (status.kind() == StatusKind::kCorrupt) server_->remove(name, *record);
    return status;
  }

  Status locate(std::span<const ChunkKey> keys, KeyOrder order, const EpochPtr& epoch,
                std::vector<bool>* present) override {
    const Status status = server_->exist(number(epoch), keys, present);
    const auto gap = std::find(present->begin(), present->end(), false);
    if (status && order == KeyOrder::kPrefix && server_->ends_at_gaps && gap != present->end())
      present->erase(gap + 1, present->end());
    return status;
  }
  std::size_t keys_per_locate(KeyOrder) const override { return keys_per_locate_; }

  void maintain() override { server_->on_maintained(); }
  Status begin_epoch() override {
    if (epoch()) return Status::ok();
    std::uint64_t number = 0;
    if (Status status = server_->next_epoch(&number); !status) return status;
    const std::lock_guard lock(mutex_);
    if (!epoch_) epoch_ = std::make_shared<Number>(number);  // upkeep and a reset may both begin an epoch
    return Status::ok();
  }
  bool can_reset() const override { return !read_only_; }
  EpochPtr epoch() const override {
    const std::lock_guard lock(mutex_);
    return epoch_;
  }
  void forget(std::uint64_t) override {
    const std::lock_guard lock(mutex_);
    epoch_.reset();
  }
  void close() override {}
  void figures(TierStats* stats) const override {
    stats->bytes = server_->bytes();
    stats->chunks = server_->size();
    stats->names_complete = stats->scan_complete = true;
  }

 private:
  struct Number final : Epoch {
    explicit Number(std::uint64_t value) : value(value) {}
    const std::uint64_t value;
  };
  static std::uint64_t number(const EpochPtr& epoch) { return static_cast<const Number&>(*epoch).value; }

  const std::shared_ptr<MemoryServer> server_;
  const NamespaceId namespace_id_;
  const std::size_t keys_per_locate_;
  const bool read_only_;
  RecordForm form_;
  mutable std::mutex mutex_;
  EpochPtr epoch_;
};

}  // namespace kv_offload::testing
