// SPDX-License-Identifier: Apache-2.0
// The work of a ThreadPoolTier's ops on its I/O threads: the layer between the pool and the store.
//
// TierRuntime is shared by the tier and every op, so that it outlives a detached thread.
#pragma once

#include <atomic>
#include <cstdint>
#include <exception>
#include <list>
#include <memory>
#include <new>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "base/steps.h"
#include "base/thread_annotations.h"
#include "tier/circuit_breaker.h"
#include "tier/io_pool.h"
#include "tier/presence.h"
#include "tier/record_store.h"
#include "tier/thread_pool_tier.h"

namespace kv_offload {

// Mean speed of recent reads; older reads fade out.
class ReadSpeed {
 public:
  void add(std::uint64_t bytes, double seconds) {
    constexpr double kFade = 0.9;
    bytes_ = bytes_ * kFade + static_cast<double>(bytes);
    seconds_ = seconds_ * kFade + seconds;
  }
  double bytes_per_second() const { return seconds_ > 0 ? bytes_ / seconds_ : 0; }

 private:
  double bytes_ = 0, seconds_ = 0;
};

// Runs a store call and turns exceptions into a Status. RecordStore promises not to throw; if a store throws
// anyway (out of memory), that op fails and no thread ends.
template <typename Work>
Status catch_exceptions(Work&& work) {
  try {
    return work();
  } catch (const std::bad_alloc&) {
    return Status::error(StatusKind::kIo, "out of memory");  // short: needs no memory itself
  } catch (const std::exception& error) {
    return Status::error(StatusKind::kIo, fmt::format("the store threw: {}", error.what()));
  } catch (...) {
    return Status::error(StatusKind::kIo, "the store threw");
  }
}

struct TierRuntime {
  TierRuntime(std::unique_ptr<RecordStore> record_store, const ThreadPoolTierOptions& options)
      : store(std::move(record_store)), compression(options.form.compression) {
    if (store->catalog() == nullptr)
      presence_cache.emplace(clock_of(options), options.absent_for, options.most_keys);
  }
  const std::unique_ptr<RecordStore> store;
  const std::shared_ptr<CompressionChoice> compression;   // null: records are never encoded
  std::optional<PresenceCache> presence_cache;            // none: the store keeps a catalog
  CircuitBreaker breakers[2];                             // by lane
  std::atomic<std::uint64_t> answers[2] = {};             // of the device, by lane
  std::atomic<bool> maintaining{false}, watching{false};  // queued or running
  std::atomic<int> resetting{0};                          // resets that begin the next epoch
  std::atomic<std::uint64_t> read_bytes_waiting{0};
  mutable Mutex mutex;
  std::list<Completion> completions GUARDED_BY(mutex);
  ReadSpeed speed GUARDED_BY(mutex);

  CircuitBreaker& breaker(Lane lane) { return breakers[static_cast<std::size_t>(lane)]; }
  void answered(Lane lane, const CircuitBreaker::Pass& pass) {
    answers[static_cast<std::size_t>(lane)].fetch_add(1);
    breaker(lane).succeeded(pass);
  }
  PresenceCache* known() { return presence_cache ? &*presence_cache : nullptr; }  // null: the store's catalog
  Catalog& catalog() { return presence_cache ? static_cast<Catalog&>(*presence_cache) : *store->catalog(); }

  // Moves the one completion in `ended` to the list. Allocates nothing.
  void complete(std::list<Completion> ended) EXCLUDES(mutex) {
    const Completion& completion = ended.front();
    (void)catch_exceptions([&] {
      if (compression && completion.status && completion.kind != OpKind::kRemove)
        compression->moved(completion.kind, completion.bytes, completion.seconds);
      return Status::ok();
    });
    const MutexLock lock(mutex);
    if (completion.kind == OpKind::kRead && completion.status && completion.seconds > 0) {
      speed.add(completion.bytes, completion.seconds);
    }
    completions.splice(completions.end(), ended);
  }
  // Appends all completions. Holds the lock for a constant time, because I/O threads that end an op wait for
  // it. If memory runs out, throws; completions that were not taken stay.
  void take_completions(std::vector<Completion>* taken) EXCLUDES(mutex) {
    std::list<Completion> ended;
    {
      const MutexLock lock(mutex);
      ended.swap(completions);
    }
    try {
      taken->reserve(taken->size() + ended.size());
    } catch (...) {
      const MutexLock lock(mutex);
      completions.splice(completions.begin(), ended);
      throw;
    }
    for (Completion& completion : ended) taken->push_back(std::move(completion));
    count_steps(ended.size());
  }
};

// The epoch (the time between two resets) in which an op or a lookup was submitted.
struct Submitted {
  explicit Submitted(TierRuntime& shared) : epoch(shared.store->epoch()) {
    if (shared.presence_cache) epoch_number = shared.presence_cache->epoch_number();
  }
  RecordStore::EpochPtr epoch;  // null: a reset was in progress
  PresenceCache::EpochNumber epoch_number = 0;
};

// An op with its breaker pass and its share of the waiting bytes of the tier. Releases both
// however it ends, even if memory runs out before it was queued. A lost probe pass would keep the lane off
// for good.
class OpInFlight {
 public:
  OpInFlight(std::shared_ptr<TierRuntime> shared, TierOp tier_op, Submitted in);
  ~OpInFlight();
  OpInFlight(const OpInFlight&) = delete;
  OpInFlight& operator=(const OpInFlight&) = delete;

  Lane lane() const { return op.kind == OpKind::kRead ? Lane::kRead : Lane::kWrite; }
  // Asks the breaker for a pass. False if the breaker refuses the op.
  bool admit(Nanos now);
  Status run();
  // Completes the op. Allocates nothing.
  void end(const Status& status, double seconds, double queued_seconds, const Clock& clock);

  const TierOp op;
  const Submitted submitted;
  std::uint64_t moved = 0;

 private:
  void report_to_breaker(const Status& status, const Clock& clock);
  void stop_waiting() { shared_->read_bytes_waiting.fetch_sub(std::exchange(waiting_bytes_, 0)); }

  const std::shared_ptr<TierRuntime> shared_;
  std::uint64_t waiting_bytes_;
  std::optional<CircuitBreaker::Pass> pass_;
  std::list<Completion> ended_ = std::list<Completion>(1);  // allocated early: end() cannot fail
};

// Copies a status; drops its message if there is no memory for it.
inline Status copy_of(const Status& status) noexcept {
  try {
    return status;
  } catch (const std::bad_alloc&) {
    return Status::error(status.kind(), {}, status.error_number());
  }
}

// Asks the store which of the keys it has. Throws as a store may.
Status run_locate(TierRuntime& shared, std::span<const ChunkKey> keys, KeyOrder order,
                  const Submitted& submitted);

Status breaker_open_error();  // the status of an op that the breaker refuses
// True if the status is a failure of the device. Reaching our own size bound is not.
bool device_failed(const Status& status);
// True if the device answered. A result without the device (no record, a reset meanwhile, our own size bound)
// does not prove that it works.
bool device_answered(const Status& status, std::uint64_t moved);

}  // namespace kv_offload
