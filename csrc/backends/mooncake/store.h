// SPDX-License-Identifier: Apache-2.0
// MooncakeStore: the synchronous half of the mooncake tier (tier.h documents the objects in the store).
#pragma once

#include <atomic>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "backends/mooncake/client.h"
#include "backends/mooncake/tier.h"
#include "base/thread_annotations.h"
#include "record/record_form.h"
#include "tier/epoch_registry.h"
#include "tier/existence_check_policy.h"
#include "tier/record_store.h"

namespace kv_offload::mooncake {

class MooncakeStore final : public RecordStore {
 public:
  explicit MooncakeStore(const MooncakeTierOptions& options);

  Status write(const TierOp& op, const EpochPtr& epoch, std::uint64_t* moved) override;
  Status read(const TierOp& op, const EpochPtr& epoch, std::uint64_t* moved) override;
  Status locate(std::span<const ChunkKey> keys, KeyOrder order, const EpochPtr& epoch,
                std::vector<bool>* present) override;
  Status remove(const ChunkKey& key, const EpochPtr& epoch) override;
  std::size_t keys_per_locate(KeyOrder) const override { return 512; }
  void maintain() override;
  Status begin_epoch() override;
  bool can_reset() const override { return !options_.read_only; }
  EpochPtr epoch() const override { return epochs_.current(); }
  std::string epoch_problem() const override;
  void forget(std::uint64_t startup_id) override { epochs_.forget(startup_id); }
  void refresh_epoch() override { epochs_.refresh(); }
  void stop() override {
    stopped_ = true;
    client_.stop();
  }
  void close() override { client_.close(); }
  void figures(TierStats* stats) const override;

 private:
  using ChannelPtr = std::unique_ptr<Channel>;

  Deadline deadline() const { return std::chrono::steady_clock::now() + options_.op_timeout; }
  std::string key_of(const ChunkKey& key, const EpochPtr& epoch) const;
  // Like Client::call. Drops the channel and sets *channel to null if Mooncake may still use its memory.
  // Mooncake's negative codes are returned in *answer.
  Status call(ChannelPtr* channel, Verb verb, std::span<const std::string> names, std::uint64_t object_bytes,
              Deadline until, Answer* answer);
  Status check_exists(const std::string& key, Deadline until, bool* exists);
  // Removes the damaged object under the key, unless another record replaced it. False: it may still be
  // there.
  bool remove_damaged(const std::string& key, const IncomingRecord& record, Deadline until,
                      std::span<const std::byte> header_page, ChannelPtr channel);
  bool take_damaged_key(const std::string& key) EXCLUDES(mutex_);
  // Reads the name from the epoch object. *found is empty: there is no object, or its content is not a name
  // (*invalid).
  Status read_startup_epoch(Deadline until, std::string* found, bool* invalid);
  // kPut keeps an existing object. kSet replaces any, because Mooncake has no conditional write: also a name
  // that a reset has published meanwhile. So kSet needs a name that was never published before.
  Status write_startup_epoch(Verb verb, const std::string& name, Deadline until);
  // Returns the startup epoch from the store. If there is none, publishes `name`, unless a reset has ended
  // it. *found is empty: the store has none and this process must not publish one.
  Status fetch_startup_epoch(const std::string& name, std::string* found);
  // The same after the start. *known: see EpochRegistry::name_if_missing.
  Status refetch_startup_epoch(std::string* known, std::string* found);

  const MooncakeTierOptions options_;
  const std::string prefix_, startup_epoch_key_;
  Client client_;
  RecordForm form_;
  ExistenceCheckPolicy existence_check_;
  std::atomic<bool> stopped_{false};
  // Bit g % 64: the last record read from group g was shorter than a raw one. Reading an object of known
  // length takes less CPU time (kv_offload/tiers/mooncake/records.py).
  std::atomic<std::uint64_t> encoded_{0};
  EpochRegistry epochs_;
  Mutex mutex_;
  std::set<std::string> damaged_keys_
      GUARDED_BY(mutex_);  // could not be removed: the next write replaces them
};

}  // namespace kv_offload::mooncake
