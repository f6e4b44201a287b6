// SPDX-License-Identifier: Apache-2.0
// S3Store: the synchronous half of the s3 tier (tier.h documents the objects in the bucket).
#pragma once

#include <atomic>
#include <string>
#include <unordered_set>
#include <vector>

#include "backends/s3/client.h"
#include "backends/s3/tier.h"
#include "base/thread_annotations.h"
#include "tier/epoch_registry.h"
#include "tier/existence_check_policy.h"
#include "tier/record_store.h"

namespace kv_offload::s3 {

class S3Store final : public RecordStore {
 public:
  explicit S3Store(const S3TierOptions& options);

  Status write(const TierOp& op, const EpochPtr& epoch, std::uint64_t* moved) override;
  Status read(const TierOp& op, const EpochPtr& epoch, std::uint64_t* moved) override;
  // For a prefix: sequential requests, twice the logarithm of its length, up to the first missing key.
  // Otherwise one request per key.
  Status locate(std::span<const ChunkKey> keys, KeyOrder order, const EpochPtr& epoch,
                std::vector<bool>* present) override;
  Status remove(const ChunkKey& key, const EpochPtr& epoch) override;
  // Keys that are not a prefix are looked up concurrently: each needs a separate request.
  std::size_t keys_per_locate(KeyOrder order) const override { return order == KeyOrder::kPrefix ? 4096 : 1; }
  void maintain() override;
  Status begin_epoch() override;
  bool can_reset() const override { return !options_.read_only; }
  EpochPtr epoch() const override { return epochs_.current(); }
  std::string epoch_problem() const override;
  void forget(std::uint64_t startup_id) override { epochs_.forget(startup_id); }
  void refresh_epoch() override { epochs_.refresh(); }
  void stop() override;
  void close() override { client_.close(); }
  void figures(TierStats* stats) const override;

 private:
  Deadline deadline() const { return std::chrono::steady_clock::now() + options_.op_timeout; }
  std::string key_of(const ChunkKey& key, const EpochPtr& epoch) const;
  Status check_exists(const std::string& key, Deadline until, bool* exists);
  bool take_damaged_key(const std::string& key) EXCLUDES(mutex_);
  // Removes the object with this ETag. False: it may still be there.
  bool remove_damaged(const std::string& key, const std::string& etag, Deadline until);
  // Returns the startup epoch from the bucket. If there is none, publishes `name`, unless a reset has ended
  // it. is_known: `name` was the startup epoch, and is only restored where no other process can be
  // overwritten. *found is empty: the bucket has none and this process must not publish one.
  Status fetch_startup_epoch(const std::string& name, bool is_known, std::string* found, bool* refused);
  // Replaces an epoch that our reset ended, and no other, by `name`; by a new name if the store does not
  // support If-Match in PUT.
  void replace_ended_epoch(const std::string& ended, const std::string& name);
  // Replaces the startup epoch if it is still `stored`. Ok: it was replaced, or is another one now.
  Status replace_startup_epoch(const std::string& stored, const std::string& name);
  Status read_startup_epoch(Deadline until, std::string* found, std::string* etag, bool* refused);
  Status put(const std::string& key, std::string_view text, const std::string& condition, Deadline until,
             Answer* answer);
  bool supports_conditions(Deadline until);
  Status check_replacement(Deadline until);

  const S3TierOptions options_;
  const std::string prefix_, startup_epoch_key_;
  Client client_;
  RecordForm form_;
  ExistenceCheckPolicy existence_check_;
  std::atomic<unsigned> maintained_{0};
  std::atomic<bool> stopped_{false};
  EpochRegistry epochs_;
  Mutex mutex_;
  // Names of damaged objects that could not be removed.
  std::unordered_set<std::string> damaged_keys_ GUARDED_BY(mutex_);
};

}  // namespace kv_offload::s3
