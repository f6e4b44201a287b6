// SPDX-License-Identifier: Apache-2.0
// RedisStore: the synchronous half of the redis tier (tier.h documents the keys on the server).
#pragma once

#include <atomic>
#include <memory>
#include <string>
#include <unordered_set>
#include <vector>

#include "backends/redis/cluster.h"
#include "backends/redis/removal_watch.h"
#include "backends/redis/tier.h"
#include "base/thread_annotations.h"
#include "tier/epoch_registry.h"
#include "tier/existence_check_policy.h"
#include "tier/record_store.h"

namespace kv_offload::redis {

class RedisStore final : public RecordStore {
 public:
  explicit RedisStore(const RedisTierOptions& options);

  Status write(const TierOp& op, const EpochPtr& epoch, std::uint64_t* moved) override;
  Status read(const TierOp& op, const EpochPtr& epoch, std::uint64_t* moved) override;
  Status locate(std::span<const ChunkKey> keys, KeyOrder order, const EpochPtr& epoch,
                std::vector<bool>* present) override {
    std::vector<bool> failed(keys.size());
    return locate_in_parts(keys, order, epoch, present, &failed);
  }
  Status locate_in_parts(std::span<const ChunkKey> keys, KeyOrder order, const EpochPtr& epoch,
                         std::vector<bool>* present, std::vector<bool>* failed) override;
  Status remove(const ChunkKey& key, const EpochPtr& epoch) override;
  std::size_t keys_per_locate(KeyOrder) const override { return 512; }
  void maintain() override;
  void watch(PresenceCache* known) override;
  Status begin_epoch() override;
  bool can_reset() const override { return !options_.read_only; }
  EpochPtr epoch() const override { return epochs_.current(); }
  std::string epoch_problem() const override;
  void forget(std::uint64_t startup_id) override { epochs_.forget(startup_id); }
  void refresh_epoch() override { epochs_.refresh(); }
  void stop() override { stopped_ = true; }
  void close() override {
    removal_watch_.close();
    cluster_.close();
  }
  void figures(TierStats* stats) const override EXCLUDES(mutex_);

 private:
  Deadline deadline() const;
  // Runs a command whose second word is a key, on the node that owns the key.
  Status call(OpKind kind, const Connection::Command& words, Deadline until, Reply* reply);
  std::string key_of(const ChunkKey& key, const EpochPtr& epoch) const;
  std::string records_prefix(const EpochPtr& epoch) const;
  // Returns kNoSpace if the server would have to evict other values for all writes in progress.
  Status check_room(Connection& connection, std::uint64_t bytes, Deadline until);
  // Removes a bad value under the key, unless another record replaced it. A value is bad if it has another
  // type, a length that no record of this op can have, or this header. Returns false if it may still exist.
  bool remove_damaged(const std::string& key, const IncomingRecord& record, Deadline until,
                      std::span<const std::byte> header_page);
  bool take_damaged_key(const std::string& key) EXCLUDES(mutex_);
  // Returns the startup epoch from the server; publishes `if_none` if the server has none. *found is empty:
  // the server has none and this process must not publish one (read_only).
  Status fetch_startup_epoch(const std::string& if_none, std::string* found, bool* refused);
  // Fetches the startup epoch after the start: the known one is restored.
  // *known: the startup epoch before; empty: unknown.
  Status refetch_startup_epoch(std::string* known, std::string* found);
  Status read_startup_epoch(Deadline until, Reply* start, bool* refused);
  Status write_startup_epoch(const std::string& name, bool if_none, bool* done, bool* refused);
  void replace_ended_epoch(const std::string& ended, const std::string& name);
  // Replaces the startup epoch if it is still `stored`. Ok: it was replaced, or is another one now.
  Status replace_startup_epoch(const std::string& stored, const std::string& name);
  void update_memory_figures() EXCLUDES(mutex_);

  const RedisTierOptions options_;
  const std::string prefix_, startup_epoch_key_;
  Cluster cluster_;
  RemovalWatch removal_watch_;
  RecordForm form_;
  ExistenceCheckPolicy existence_check_;
  std::atomic<unsigned> maintained_{0};
  std::atomic<bool> stopped_{false};
  std::atomic<std::uint64_t> writing_{0};  // memory for writes in progress; only without may_evict
  EpochRegistry epochs_;
  mutable Mutex mutex_;
  std::uint64_t used_bytes_ GUARDED_BY(mutex_) = 0, max_bytes_ GUARDED_BY(mutex_) = 0;  // of all nodes
  // Keys with a bad value that could not be removed: the next write replaces it.
  std::unordered_set<std::string> damaged_keys_ GUARDED_BY(mutex_);
};

}  // namespace kv_offload::redis
