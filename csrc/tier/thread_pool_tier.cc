// SPDX-License-Identifier: Apache-2.0
#include "tier/thread_pool_tier.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <functional>
#include <optional>
#include <utility>

#include "base/thread_annotations.h"
#include "record/record.h"
#include "tier/io_pool.h"
#include "tier/presence_lookup.h"
#include "tier/ticker.h"
#include "tier/tier_runtime.h"

namespace kv_offload {
namespace {

constexpr Nanos kMaintainEvery{std::chrono::seconds(1)};
constexpr Nanos kWatchEvery{std::chrono::milliseconds(50)};

void upkeep(TierRuntime& shared) {
  RecordStore& store = *shared.store;
  // If a reset could not begin it. Two calls at once would publish two names (EpochRegistry::begin).
  if (!store.epoch() && store.can_reset() && !shared.resetting) (void)store.begin_epoch();
  store.maintain();
}

// A reset that begins the next epoch. Moved to the call that begins it, which may end after the reset.
class Resetting {
 public:
  explicit Resetting(std::shared_ptr<TierRuntime> shared) : shared_(std::move(shared)) {
    ++shared_->resetting;
  }
  Resetting(Resetting&&) noexcept = default;
  Resetting& operator=(Resetting&&) = delete;
  ~Resetting() { end(); }
  void end() {
    if (shared_ != nullptr) --std::exchange(shared_, nullptr)->resetting;
  }

 private:
  std::shared_ptr<TierRuntime> shared_;
};

class ThreadPoolTier final : public Tier {
 public:
  ThreadPoolTier(std::unique_ptr<RecordStore> store, const ThreadPoolTierOptions& options)
      : options_(options),
        clock_(clock_of(options)),
        shared_(std::make_shared<TierRuntime>(std::move(store), options)),
        next_upkeep_(clock_.now() + kMaintainEvery),
        pool_(options.manual_pool != nullptr ? IoPoolOptions{0, 0, &clock_, options.close_wait}
                                             : IoPoolOptions{options.n_read_threads, options.n_write_threads,
                                                             &clock_, options.close_wait}),
        presence_lookup_(shared_, options_, pool_.submitter()),
        upkeep_({1, 1, &clock_, options.close_wait}),
        ticker_(options.watch_removals ? kWatchEvery : kMaintainEvery, [this] {
          maintain_if_due();
          if (options_.watch_removals)
            run_alone(shared_->watching, [](TierRuntime& watched) { watched.store->watch(watched.known()); });
        }) {
    if (options.manual_pool != nullptr) *options.manual_pool = &pool_;
    submit_upkeep(Lane::kWrite, [](TierRuntime& started) { started.store->start(); });
    update_in_epoch();
  }
  ~ThreadPoolTier() override { close(); }

  std::string_view name() const override { return options_.name; }
  void submit(std::vector<TierOp> ops) override;
  bool cancel(OpId id) override { return pool_.cancel(id); }
  void poll(std::vector<Completion>* completions, std::vector<TierRemoval>* removals) override;
  bool has_removals() const override { return options_.watch_removals && shared_->catalog().has_removals(); }
  Presence contains(const ChunkKey& key) const override;
  void forget_miss(const ChunkKey& key) override { shared_->catalog().forget_miss(key); }
  void prefetch_presence(std::vector<ChunkKey> keys, const LookupOptions& options) override;
  void touch(const ChunkKey& key) override { shared_->catalog().touch(key); }
  void used(const TierUses& uses) override { shared_->catalog().used(uses); }
  Status reset(std::uint64_t startup_id) override { return reset_within(options_.op_timeout, startup_id); }
  void begin_reset(std::uint64_t startup_id) override { (void)reset_within(Nanos(0), startup_id); }
  bool can_reset() const override { return shared_->store->can_reset(); }
  void refresh_epoch() override;
  TierStats stats() const override;
  TierAvailability availability() const override;
  std::string epoch_problem() const override { return shared_->store->epoch_problem(); }
  std::string codec_reason() const override {
    return shared_->compression ? shared_->compression->reason() : std::string();
  }
  void close() override;
  double estimate_read_seconds(std::uint64_t bytes) const override;

 private:
  IoPool::Op make_op(std::shared_ptr<OpInFlight> in_flight) const;
  void submit_upkeep(Lane lane, std::function<void(TierRuntime&)> work);
  Status reset_within(Nanos wait, std::uint64_t startup_id);
  // Runs on upkeep's fast lane. Returns kTimeout if the work did not end in time (it keeps running).
  // `resetting` ends with the work.
  Status run_upkeep_and_wait(Nanos wait, std::function<Status(RecordStore&)> work,
                             std::optional<Resetting> resetting = std::nullopt);
  // The ticker's thread calls this too: an idle engine does not poll, and other processes rely on the upkeep.
  void maintain_if_due();
  // Submits upkeep unless its last run is still queued or running. running: a flag of shared_.
  void run_alone(std::atomic<bool>& running, void (*work)(TierRuntime&));
  bool takes(Lane lane) const;
  void update_in_epoch() { in_epoch_ = shared_->store->epoch() != nullptr; }
  void watch();  // trips the breakers when an op is stuck

  const ThreadPoolTierOptions options_;
  const Clock& clock_;
  const std::shared_ptr<TierRuntime> shared_;
  bool was_reset_ = false;
  // Updated by poll() and reset(). Asking the store for each key would take longer than the rest of
  // contains().
  bool in_epoch_ = false;
  // State of one lane, as of the last watch().
  struct Watched {
    Nanos tripped_at{0};  // ops that started before this time cannot trip a breaker again
    Nanos answered_at{0};
    std::uint64_t answers = 0;
    std::uint64_t timeouts = 0;
    bool stalled = false;  // every thread is stuck: none would start an op
  };
  Watched& watched(Lane lane) { return watched_[static_cast<std::size_t>(lane)]; }
  const Watched& watched(Lane lane) const { return watched_[static_cast<std::size_t>(lane)]; }
  Watched watched_[2];
  Nanos watched_at_{0};
  Nanos counted_until_{0};  // ops that started up to this time were found stuck or have ended
  bool closed_ = false;
  std::atomic<Nanos> next_upkeep_;
  // Last members: their threads end before the members that they use.
  IoPool pool_;
  PresenceLookup presence_lookup_;
  IoPool upkeep_;  // write lane: start and upkeep; read lane: work that must not wait for it
  Ticker ticker_;
};

void ThreadPoolTier::submit_upkeep(Lane lane, std::function<void(TierRuntime&)> work) {
  IoPool::Op op;
  op.lane = lane;
  op.run = [shared = shared_, work = std::move(work)] {
    return catch_exceptions([&] {
      work(*shared);
      return Status::ok();
    });
  };
  op.done = [](const Status&, double, double) {};
  std::vector<IoPool::Op> ops;
  ops.push_back(std::move(op));
  upkeep_.submit(std::move(ops));
}

IoPool::Op ThreadPoolTier::make_op(std::shared_ptr<OpInFlight> in_flight) const {
  IoPool::Op queued;
  queued.tag = in_flight->op.id;
  queued.lane = in_flight->lane();
  queued.deadline = in_flight->op.deadline;
  queued.tenant = in_flight->op.entry_info.tenant;
  std::size_t bytes = 1;
  for (const Shard& shard : in_flight->op.shards) bytes += shard.size();
  queued.cost = static_cast<double>(bytes);
  queued.weight = static_cast<float>(in_flight->op.weight);
  queued.run = [in_flight] { return catch_exceptions([&] { return in_flight->run(); }); };
  queued.done = [in_flight = std::move(in_flight), clock = &clock_](const Status& status, double seconds,
                                                                    double queued_seconds) {
    in_flight->end(status, seconds, queued_seconds, *clock);
  };
  return queued;
}

// If memory runs out, throws; no op was submitted and none completes.
void ThreadPoolTier::submit(std::vector<TierOp> ops) {
  for (const TierOp& op : ops) {
    if (op.kind != OpKind::kRemove && (op.shards.empty() || op.shards.size() > kMaxShards)) {
      throw_invalid("an op has {} shards; a record holds 1..{}", op.shards.size(), kMaxShards);
    }
  }
  watch();
  const Nanos now = clock_.now();
  const Status refused = breaker_open_error();
  // The epoch is captured here, not when a thread starts the op. A reset may happen in between, and a record
  // computed before the reset must not be found after it.
  const Submitted submitted(*shared_);
  std::vector<IoPool::Op> queued;
  std::vector<std::shared_ptr<OpInFlight>> rejected;
  queued.reserve(ops.size());
  rejected.reserve(ops.size());
  for (TierOp& op : ops) {
    auto in_flight = std::make_shared<OpInFlight>(shared_, std::move(op), submitted);
    IoPool::Op made = make_op(in_flight);
    if (closed_ || in_flight->admit(now)) {  // nothing from here on can fail
      queued.push_back(std::move(made));
    } else {
      rejected.push_back(std::move(in_flight));
    }
  }
  pool_.submit(std::move(queued));
  for (const auto& in_flight : rejected) in_flight->end(refused, 0, 0, clock_);
}

// A thread is stuck if its op has been running longer than op_timeout. That trips both lanes, except a lane
// in which the device has answered since.
void ThreadPoolTier::watch() {
  const Nanos now = clock_.now();
  const Nanos stuck_before = now - options_.op_timeout;
  bool stuck[2] = {};
  for (const Lane lane : {Lane::kRead, Lane::kWrite}) {
    Watched& seen = watched(lane);
    const std::uint64_t answers = shared_->answers[static_cast<std::size_t>(lane)].load();
    if (std::exchange(seen.answers, answers) != answers) seen.answered_at = watched_at_;  // or later
    seen.timeouts += pool_.running_since(lane, counted_until_, stuck_before);
    seen.stalled = pool_.is_stalled(lane, stuck_before);
    stuck[static_cast<std::size_t>(lane)] = pool_.running_since(lane, seen.tripped_at, stuck_before) > 0;
  }
  counted_until_ = std::max(counted_until_, stuck_before - Nanos{1});
  watched_at_ = now;
  for (const Lane lane : {Lane::kRead, Lane::kWrite}) {
    Watched& seen = watched(lane);
    const bool own = stuck[static_cast<std::size_t>(lane)];
    const bool trips = own || ((stuck[0] || stuck[1]) && seen.answered_at < stuck_before);
    if (trips) {
      seen.tripped_at = now;
      shared_->breaker(lane).trip(now);
      if (lane == Lane::kRead) presence_lookup_.cancel_all();
    }
    if (trips || seen.stalled) pool_.fail_queued(lane, breaker_open_error());
  }
}

void ThreadPoolTier::poll(std::vector<Completion>* completions, std::vector<TierRemoval>* removals) {
  watch();
  pool_.expire();
  if (!closed_) maintain_if_due();
  update_in_epoch();
  // Completions first: an op reports the removal of its record before its completion, so the removal is taken
  // in the same poll or earlier. A later one would seem to concern a record that was written since.
  shared_->take_completions(completions);
  // If memory runs out, the other removals stay for the next poll. The caller must get the completions.
  (void)catch_exceptions([&] {
    shared_->catalog().take_removals(removals);
    return Status::ok();
  });
}

bool ThreadPoolTier::takes(Lane lane) const {
  if (watched(lane).stalled) return false;
  const CircuitBreaker& breaker = shared_->breaker(lane);
  return breaker.closed() || breaker.offers(clock_.now());
}

Presence ThreadPoolTier::contains(const ChunkKey& key) const {
  const Presence presence = shared_->catalog().contains(key);
  if (presence == Presence::kPresent || presence == Presence::kAbsent) return presence;
  if (!closed_ && in_epoch_ && takes(Lane::kRead)) return presence;
  // The epoch that a reset is about to begin is empty.
  return was_reset_ && !in_epoch_ ? Presence::kAbsent : Presence::kLookupFailed;
}

void ThreadPoolTier::prefetch_presence(std::vector<ChunkKey> keys, const LookupOptions& options) {
  if (keys.empty() || closed_ || !in_epoch_ || !takes(Lane::kRead)) return;
  presence_lookup_.start(std::move(keys), options);
}

void ThreadPoolTier::maintain_if_due() {
  const Nanos now = clock_.now();
  if (now < next_upkeep_.load() || shared_->maintaining.load()) return;
  next_upkeep_.store(now + kMaintainEvery);
  run_alone(shared_->maintaining, upkeep);
}

void ThreadPoolTier::run_alone(std::atomic<bool>& running, void (*work)(TierRuntime&)) {
  if (running.exchange(true)) return;
  const Status queued = catch_exceptions([&] {
    submit_upkeep(Lane::kWrite, [&running, work](TierRuntime& shared) {
      (void)catch_exceptions([&] {
        work(shared);
        return Status::ok();
      });
      running.store(false);
    });
    return Status::ok();
  });
  if (!queued) running.store(false);  // otherwise it would never run again
}

Status ThreadPoolTier::run_upkeep_and_wait(Nanos wait, std::function<Status(RecordStore&)> work,
                                           std::optional<Resetting> resetting) {
  struct Answer {
    explicit Answer(std::optional<Resetting> begun) : resetting(std::move(begun)) {}
    std::optional<Resetting> resetting;  // the work's
    Mutex mutex;
    CondVar ready;
    bool done GUARDED_BY(mutex) = false;
    Status status GUARDED_BY(mutex);
  };
  auto answer = std::make_shared<Answer>(std::move(resetting));
  submit_upkeep(Lane::kRead, [answer, work = std::move(work)](TierRuntime& shared) {
    Status status = catch_exceptions([&] { return work(*shared.store); });
    if (answer->resetting) answer->resetting->end();
    const MutexLock lock(answer->mutex);
    answer->status = std::move(status);
    answer->done = true;
    answer->ready.notify_all();
  });
  const auto deadline = std::chrono::steady_clock::now() + wait;
  const MutexLock lock(answer->mutex);
  while (!answer->done) {
    const auto remaining = deadline - std::chrono::steady_clock::now();
    if (remaining <= remaining.zero()) return Status::error(StatusKind::kTimeout, "storage does not respond");
    answer->ready.wait_for(answer->mutex, remaining);
  }
  return answer->status;
}

Status ThreadPoolTier::reset_within(Nanos wait, std::uint64_t startup_id) {
  was_reset_ = true;
  Resetting resetting(shared_);  // before upkeep can find that there is no epoch
  shared_->store->forget(startup_id);
  in_epoch_ = false;
  if (shared_->presence_cache) shared_->presence_cache->reset();
  if (closed_) return Status::error(StatusKind::kUnavailable, "the tier is closed");
  if (!shared_->store->can_reset()) {
    return Status::error(StatusKind::kUnavailable,
                         "the tier cannot be reset: it is disabled until the next start");
  }
  // Waits, unlike everything else here: after a change of weights the caller must know that no older record
  // can be found again. A failure leaves the store without an epoch (it finds no records and accepts none)
  // until upkeep, or the call that timed out, has begun one.
  const Status status = run_upkeep_and_wait(
      wait, [](RecordStore& store) { return store.begin_epoch(); }, std::move(resetting));
  submit_upkeep(Lane::kWrite, upkeep);  // reclaims in the background
  update_in_epoch();
  return status;
}

void ThreadPoolTier::refresh_epoch() {
  shared_->store->refresh_epoch();
  in_epoch_ = false;
}

TierAvailability ThreadPoolTier::availability() const {
  const bool in_epoch = shared_->store->epoch() != nullptr;
  return {in_epoch && takes(Lane::kRead), in_epoch && takes(Lane::kWrite), !was_reset_};
}

TierStats ThreadPoolTier::stats() const {
  TierStats stats;
  shared_->store->figures(&stats);
  const IoPool::Depth reads = pool_.depth(Lane::kRead), writes = pool_.depth(Lane::kWrite);
  stats.queued_reads = reads.queued + reads.running;
  stats.queued_writes = writes.queued + writes.running;
  stats.oldest_read_seconds = reads.oldest_seconds;
  stats.oldest_write_seconds = writes.oldest_seconds;
  stats.read_timeouts = watched(Lane::kRead).timeouts;
  stats.write_timeouts = watched(Lane::kWrite).timeouts;
  const TierAvailability now = availability();
  stats.readable = now.readable;
  stats.writable = now.writable;
  stats.is_shared = now.is_shared;
  for (const CircuitBreaker& breaker : shared_->breakers) stats.breaker_trips += breaker.trips();
  stats.read_record_bytes = options_.form.traffic->read_bytes;
  stats.written_record_bytes = options_.form.traffic->written_bytes;
  if (const CompressionChoice* choice = shared_->compression.get()) {
    const CompressionStats codec = choice->stats();
    stats.may_encode = choice->setting() != Compress::kNone;
    stats.encodes = codec.on;
    stats.encode_seconds = codec.encode_seconds;
    stats.decode_seconds = codec.decode_seconds;
    stats.encoded_raw_bytes = codec.encoded_raw_bytes;
    stats.encoded_stored_bytes = codec.encoded_stored_bytes;
    stats.largest_key_error = codec.largest_key_error;
    stats.largest_value_error = codec.largest_value_error;
  }
  return stats;
}

void ThreadPoolTier::close() {
  if (std::exchange(closed_, true)) return;
  ticker_.stop();
  shared_->store->stop();
  // Last upkeep while threads still run. Skipped if the device is failing.
  if (shared_->breaker(Lane::kWrite).closed()) {
    (void)run_upkeep_and_wait(options_.close_wait, [](RecordStore& store) {
      store.maintain();
      return Status::ok();
    });
  }
  const bool left = pool_.close();
  if (upkeep_.close() && left) shared_->store->close();
}

double ThreadPoolTier::estimate_read_seconds(std::uint64_t bytes) const {
  double rate = 0;
  {
    const MutexLock lock(shared_->mutex);
    rate = shared_->speed.bytes_per_second();
  }
  if (rate <= 0) return 0;
  const double ahead =
      static_cast<double>(shared_->read_bytes_waiting.load()) / std::max(1u, options_.n_read_threads);
  return (ahead + static_cast<double>(bytes)) / rate;
}

}  // namespace

const Clock& clock_of(const ThreadPoolTierOptions& options) {
  static const SteadyClock steady;  // stateless; detached threads may read it
  return options.clock != nullptr ? *options.clock : static_cast<const Clock&>(steady);
}

void check_options(const ThreadPoolTierOptions& options) {
  if (options.n_read_threads == 0 || options.n_write_threads == 0) {
    throw_invalid("n_read_threads {} and n_write_threads {} were given; each must be at least 1",
                  options.n_read_threads, options.n_write_threads);
  }
}

std::unique_ptr<Tier> make_thread_pool_tier(std::unique_ptr<RecordStore> store,
                                            const ThreadPoolTierOptions& options) {
  check_options(options);
  return std::make_unique<ThreadPoolTier>(std::move(store), options);
}

}  // namespace kv_offload
