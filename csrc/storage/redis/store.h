// RedisStore: the synchronous half of the redis tier (tier.h says what lies on the server).
#pragma once

#include <atomic>
#include <memory>
#include <string>
#include <vector>

#include "base/thread_annotations.h"
#include "storage/ask_first.h"
#include "storage/named_epochs.h"
#include "storage/record_store.h"
#include "storage/redis/cluster.h"
#include "storage/redis/tier.h"

namespace kv_offload::redis {

class RedisStore final : public RecordStore {
 public:
  explicit RedisStore(const RedisTierOptions& options);

  Status write(const TierOp& op, const EpochPtr& epoch, std::uint64_t* moved) override;
  Status read(const TierOp& op, const EpochPtr& epoch, std::uint64_t* moved) override;
  Status locate(std::span<const ChunkKey> keys, KeyOrder order, const EpochPtr& epoch,
                std::vector<bool>* present) override;
  std::size_t keys_per_locate(KeyOrder) const override { return 512; }
  void maintain() override;
  Status begin_epoch() override;
  bool can_reset() const override { return !options_.read_only; }
  EpochPtr epoch() const override { return epochs_.current(); }
  void forget() override { epochs_.forget(); }
  void stop() override { stopped_ = true; }
  void close() override { cluster_.close(); }
  void figures(TierStats* stats) const override EXCLUDES(mutex_);

 private:
  Deadline deadline() const;
  // A command whose second word is a key, at the node that has it.
  Status call(OpKind kind, const Connection::Words& words, Deadline until, Reply* reply);
  std::string key_of(const ChunkKey& key, const EpochPtr& epoch) const;
  // What lies under the key and is wrong, unless another took its place: a value of another type, of a length
  // that no record of the op has, or with this header.
  void remove_wrong(const std::string& key, const IncomingRecord& record, Deadline until,
                    std::span<const std::byte> header_page);
  // The epoch of those who start, which the server has or now gets from us. Empty: it has none, and we may
  // not give it one.
  Status ask_for_start(std::string* found, bool* refused);
  Status look_for_start(Deadline until, Reply* start, bool* refused);
  Status put_start(const std::string& name, bool if_none, bool* done);
  void tell_again(const std::string& ended, const std::string& name);
  void look_at_memory() EXCLUDES(mutex_);

  const RedisTierOptions options_;
  const std::string prefix_, start_key_;
  Cluster cluster_;
  RecordForm form_;
  AskFirst ask_first_;
  std::atomic<unsigned> maintained_{0};
  std::atomic<bool> stopped_{false};
  NamedEpochs epochs_;
  mutable Mutex mutex_;
  std::uint64_t used_bytes_ GUARDED_BY(mutex_) = 0, max_bytes_ GUARDED_BY(mutex_) = 0;  // of all nodes
};

}  // namespace kv_offload::redis
