// RedisStore: the synchronous half of the redis tier (tier.h says what lies on the server).
#pragma once

#include <atomic>
#include <memory>
#include <string>
#include <vector>

#include "base/thread_annotations.h"
#include "storage/named_epochs.h"
#include "storage/record_store.h"
#include "storage/redis/connection.h"
#include "storage/redis/tier.h"

namespace kv_offload::redis {

// Idle connections, at most one for each thread that ever needed one at once. Any thread.
class Connections {
 public:
  explicit Connections(const Server& server) : server_(server), tls_(make_tls_context(server)) {}
  // An idle one that is still good, or a new one.
  Status take(Deadline deadline, std::unique_ptr<Connection>* connection, bool* refused) EXCLUDES(mutex_);
  void give_back(std::unique_ptr<Connection> connection) EXCLUDES(mutex_);
  void close() EXCLUDES(mutex_);  // those that are in use are closed when they come back

 private:
  const Server server_;
  const std::shared_ptr<TlsContext> tls_;
  Mutex mutex_;
  bool closed_ GUARDED_BY(mutex_) = false;
  std::vector<std::unique_ptr<Connection>> idle_ GUARDED_BY(mutex_);
};

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
  void close() override { connections_.close(); }
  void figures(TierStats* stats) const override EXCLUDES(mutex_);

 private:
  class Borrowed;  // a connection, for one call

  Deadline deadline() const { return std::chrono::steady_clock::now() + options_.op_deadline; }
  std::string key_of(const ChunkKey& key, const EpochPtr& epoch) const;
  // Whatever is wrong with what lies under the key, unless another took its place.
  void remove_wrong(const std::string& key, std::uint64_t right_length, Deadline until,
                    std::span<const std::byte> header_page);
  // The epoch of those who start, which the server has or now gets from us. Empty: it has none, and we may
  // not give it one.
  Status ask_for_start(std::string* found, bool* refused);
  Status put_start(Connection& connection, const std::string& name, bool if_none, bool* done);
  void look_at_memory() EXCLUDES(mutex_);

  const RedisTierOptions options_;
  const std::string prefix_, start_key_;
  Connections connections_;
  std::atomic<unsigned> maintained_{0};
  std::atomic<bool> stopped_{false};
  NamedEpochs epochs_;
  mutable Mutex mutex_;
  std::uint64_t used_bytes_ GUARDED_BY(mutex_) = 0, max_bytes_ GUARDED_BY(mutex_) = 0;  // of the server
};

}  // namespace kv_offload::redis
