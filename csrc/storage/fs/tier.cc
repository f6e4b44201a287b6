#include "storage/fs/tier.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <iterator>
#include <optional>
#include <utility>

#include "base/thread_annotations.h"
#include "storage/breaker.h"
#include "storage/fs/layout.h"
#include "storage/fs/store.h"
#include "storage/io_pool.h"
#include "storage/ticker.h"

namespace kv_offload {
namespace {

constexpr Nanos kTickEvery{std::chrono::seconds(1)};
constexpr std::uint64_t kProbeTag = std::uint64_t{1} << 63;  // above every caller's id

Lane lane_of(OpKind kind) { return kind == OpKind::kRead ? Lane::kRead : Lane::kWrite; }

Status off() {
  return Status::error(StatusKind::kUnavailable,
                       "the tier is off for now: its device is stuck or keeps failing");
}

// Mean speed of late reads; older ones fade.
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

// What ops in flight touch besides the pool. Every op shares it, so that a
// thread that had to be let go finds it alive.
struct Shared {
  Shared(const FsTierOptions& options, FileOps& ops, const Clock& clock) : store(options, ops, clock) {}
  FsStore store;
  Breaker breakers[2];  // by lane: a full disk must not stop reads
  std::atomic<bool> ticking{false};
  std::atomic<std::uint64_t> read_bytes_waiting{0};
  mutable Mutex mutex;
  std::vector<Completion> completions GUARDED_BY(mutex);
  ReadSpeed speed GUARDED_BY(mutex);

  Breaker& breaker(Lane lane) { return breakers[static_cast<std::size_t>(lane)]; }

  void complete(Completion completion) EXCLUDES(mutex) {
    const MutexLock lock(mutex);
    if (completion.kind == OpKind::kRead && completion.status && completion.seconds > 0) {
      speed.add(completion.bytes, completion.seconds);
    }
    completions.push_back(std::move(completion));
  }
};

struct OpInFlight {
  TierOp op;
  std::shared_ptr<Generation> generation;  // it was submitted in; null: a reset was not over
  std::optional<Breaker::Pass> pass;       // none: the tier was closed
  std::uint64_t moved = 0;
};

Status run(Shared& shared, OpInFlight& in_flight) {
  switch (in_flight.op.kind) {
    case OpKind::kRead:
      return shared.store.read(in_flight.op, in_flight.generation, &in_flight.moved);
    case OpKind::kWrite:
      return shared.store.write(in_flight.op, in_flight.generation, &in_flight.moved);
  }
  return Status::error(StatusKind::kIo, "unknown op");
}

// Only what the device did counts: our own bound is no failure.
bool device_failed(const Status& status) {
  return status.kind() == StatusKind::kIo ||
         (status.kind() == StatusKind::kNoSpace && status.error_number() != 0);
}

// What ended without the device (no record, a reset meanwhile, our own bound) says nothing about it.
bool device_answered(const Status& status, std::uint64_t moved) {
  return moved > 0 || status.kind() == StatusKind::kCorrupt;
}

class FsTier final : public Tier {
 public:
  FsTier(const FsTierOptions& options, FileOps& ops, const Clock& clock)
      : options_(options),
        clock_(clock),
        shared_(std::make_shared<Shared>(options, ops, clock)),
        next_tick_(clock.now() + kTickEvery),
        pool_(
            options.driven_by_hand != nullptr
                ? IoPoolOptions{0, 0, &clock, options.close_wait}
                : IoPoolOptions{options.n_read_threads, options.n_write_threads, &clock, options.close_wait}),
        keeper_({1, 1, &clock, options.close_wait}),
        ticker_(kTickEvery, [this] { tick_when_due(); }) {
    if (options.driven_by_hand != nullptr) *options.driven_by_hand = &pool_;
    keep(Lane::kWrite, [](FsStore& store) { store.start(); });
  }
  ~FsTier() override { close(); }

  std::string_view name() const override { return options_.name; }
  void submit(std::vector<TierOp> ops) override;
  bool cancel(OpId id) override { return pool_.cancel(id); }
  void poll(std::vector<Completion>* completions, std::vector<TierRemoval>* removals) override;
  Presence contains(const ChunkKey& key) override;
  void touch(const ChunkKey& key) override { shared_->store.touch(key); }
  Status reset() override;
  TierStats stats() const override;
  void close() override;
  double estimate_read_seconds(std::uint64_t bytes) const override;

 private:
  IoPool::Op make_op(TierOp op, const std::shared_ptr<Generation>& generation,
                     std::optional<Breaker::Pass> pass);
  void keep(Lane lane, std::function<void(FsStore&)> work);
  // On the keeper's fast lane; kTimeout when it did not end in time (it goes on).
  Status keep_and_wait(Nanos wait, std::function<Status(FsStore&)> work);
  // An engine that is idle does not poll, and others count on us to go on: also on the ticker's thread.
  void tick_when_due();
  void watch();  // trips the breakers when an op is stuck

  const FsTierOptions options_;
  const Clock& clock_;
  const std::shared_ptr<Shared> shared_;
  Nanos tripped_at_{0};             // ops that started before trip no breaker again
  Nanos counted_until_{0};          // ops that started up to here were found stuck, or ended
  std::uint64_t timeouts_[2] = {};  // by lane
  bool closed_ = false;
  std::atomic<Nanos> next_tick_;
  // Last: their threads end before what they use.
  IoPool pool_;
  IoPool keeper_;  // write lane: scan and upkeep; read lane: what must not wait for it
  Ticker ticker_;
};

void FsTier::keep(Lane lane, std::function<void(FsStore&)> work) {
  IoPool::Op op;
  op.lane = lane;
  op.run = [shared = shared_, work = std::move(work)] {
    work(shared->store);
    return Status::ok();
  };
  op.done = [](const Status&, double, double) {};
  std::vector<IoPool::Op> ops;
  ops.push_back(std::move(op));
  keeper_.submit(std::move(ops));
}

IoPool::Op FsTier::make_op(TierOp op, const std::shared_ptr<Generation>& generation,
                           std::optional<Breaker::Pass> pass) {
  auto in_flight = std::make_shared<OpInFlight>();
  in_flight->op = std::move(op);
  in_flight->generation = generation;
  in_flight->pass = pass;
  const TierOp& kept = in_flight->op;
  const std::uint64_t waiting = kept.kind == OpKind::kRead ? padded_payload_bytes(kept.shards) : 0;
  shared_->read_bytes_waiting.fetch_add(waiting);
  IoPool::Op queued;
  queued.tag = kept.id;
  queued.lane = lane_of(kept.kind);
  queued.deadline = kept.deadline;
  queued.run = [shared = shared_, in_flight] { return run(*shared, *in_flight); };
  queued.done = [shared = shared_, in_flight, waiting, clock = &clock_](const Status& status, double seconds,
                                                                        double queued_seconds) {
    shared->read_bytes_waiting.fetch_sub(waiting);
    const TierOp& op = in_flight->op;
    if (in_flight->pass) {
      Breaker& breaker = shared->breaker(lane_of(op.kind));
      if (device_failed(status)) {
        breaker.failed(*in_flight->pass, clock->now());
      } else if (device_answered(status, in_flight->moved)) {
        breaker.succeeded(*in_flight->pass);
      } else {
        breaker.not_tried(*in_flight->pass);
      }
    }
    shared->complete({op.id, op.kind, op.key, status, in_flight->moved, seconds, queued_seconds});
  };
  return queued;
}

void FsTier::submit(std::vector<TierOp> ops) {
  for (const TierOp& op : ops) {
    if (op.shards.empty() || op.shards.size() > kMaxShards) {
      throw_invalid("an op of {} shards was given; a record has 1..{}", op.shards.size(), kMaxShards);
    }
  }
  watch();
  const Nanos now = clock_.now();
  // Not when a thread takes the op up: a reset may come in between, and what was computed before it must not
  // be found after it.
  const std::shared_ptr<Generation> generation = shared_->store.generation();
  std::vector<IoPool::Op> queued;
  queued.reserve(ops.size());
  for (TierOp& op : ops) {
    std::optional<Breaker::Pass> pass;
    if (!closed_) {
      pass = shared_->breaker(lane_of(op.kind)).admit(now);
      if (!pass) {
        shared_->complete({op.id, op.kind, op.key, off(), 0, 0, 0});
        continue;
      }
    }
    queued.push_back(make_op(std::move(op), generation, pass));
  }
  pool_.submit(std::move(queued));
}

// Threads are stuck when an op has been running for longer than op_deadline.
void FsTier::watch() {
  const Nanos now = clock_.now();
  const Nanos too_long_ago = now - options_.op_deadline;
  bool stuck = false;
  for (const Lane lane : {Lane::kRead, Lane::kWrite}) {
    timeouts_[static_cast<std::size_t>(lane)] += pool_.running_since(lane, counted_until_, too_long_ago);
    stuck |= pool_.running_since(lane, tripped_at_, too_long_ago) > 0;
  }
  counted_until_ = std::max(counted_until_, too_long_ago - Nanos{1});
  if (!stuck) return;
  tripped_at_ = now;
  for (Breaker& breaker : shared_->breakers) breaker.trip(now);
  pool_.fail_queued(off());
}

void FsTier::poll(std::vector<Completion>* completions, std::vector<TierRemoval>* removals) {
  watch();
  pool_.expire();
  if (!closed_) tick_when_due();
  shared_->store.take_removals(removals);
  const MutexLock lock(shared_->mutex);
  std::move(shared_->completions.begin(), shared_->completions.end(), std::back_inserter(*completions));
  shared_->completions.clear();
}

Presence FsTier::contains(const ChunkKey& key) {
  Breaker& breaker = shared_->breaker(Lane::kRead);
  if (!breaker.closed() && !breaker.offers(clock_.now())) {
    return shared_->store.offers(key) ? Presence::kPresent : Presence::kAbsent;
  }
  bool start_probe = false;
  const Presence presence = shared_->store.presence(key, &start_probe);
  if (start_probe) {
    IoPool::Op op;
    op.tag = kProbeTag;
    op.run = [shared = shared_, leaf = layout::leaf_of(key)] { return shared->store.probe(leaf); };
    op.done = [shared = shared_, leaf = layout::leaf_of(key)](const Status& status, double, double) {
      if (!status) shared->store.give_up_probe(leaf);
    };
    std::vector<IoPool::Op> ops;
    ops.push_back(std::move(op));
    pool_.submit(std::move(ops));
  }
  return presence;
}

void FsTier::tick_when_due() {
  const Nanos now = clock_.now();
  if (now < next_tick_.load() || shared_->ticking.exchange(true)) return;
  next_tick_.store(now + kTickEvery);
  keep(Lane::kWrite, [shared = shared_.get()](FsStore& store) {
    store.tick();
    shared->ticking.store(false);
  });
}

Status FsTier::keep_and_wait(Nanos wait, std::function<Status(FsStore&)> work) {
  struct Answer {
    Mutex mutex;
    CondVar ready;
    bool done GUARDED_BY(mutex) = false;
    Status status GUARDED_BY(mutex);
  };
  auto answer = std::make_shared<Answer>();
  keep(Lane::kRead, [answer, work = std::move(work)](FsStore& store) {
    Status status = work(store);
    const MutexLock lock(answer->mutex);
    answer->status = std::move(status);
    answer->done = true;
    answer->ready.notify_all();
  });
  const auto give_up = std::chrono::steady_clock::now() + wait;
  const MutexLock lock(answer->mutex);
  while (!answer->done) {
    const auto remaining = give_up - std::chrono::steady_clock::now();
    if (remaining <= remaining.zero()) return Status::error(StatusKind::kTimeout, "storage does not answer");
    answer->ready.wait_for(answer->mutex, remaining);
  }
  return answer->status;
}

Status FsTier::reset() {
  shared_->store.forget();
  if (closed_) return Status::error(StatusKind::kUnavailable, "the tier is closed");
  // Waits, unlike all else here: who changed the weights must know that nothing
  // older can come back. A failure leaves the tier without a generation (it finds
  // nothing and takes nothing) until a tick, or what timed out, has made one.
  Status status = keep_and_wait(options_.op_deadline, [](FsStore& store) { return store.make_generation(); });
  keep(Lane::kWrite, [](FsStore& store) { store.tick(); });  // reclaims, behind
  return status;
}

TierStats FsTier::stats() const {
  TierStats stats;
  shared_->store.figures(&stats);
  const IoPool::Depth reads = pool_.depth(Lane::kRead), writes = pool_.depth(Lane::kWrite);
  stats.queued_reads = reads.queued + reads.running;
  stats.queued_writes = writes.queued + writes.running;
  stats.oldest_read_seconds = reads.oldest_seconds;
  stats.oldest_write_seconds = writes.oldest_seconds;
  stats.read_timeouts = timeouts_[static_cast<std::size_t>(Lane::kRead)];
  stats.write_timeouts = timeouts_[static_cast<std::size_t>(Lane::kWrite)];
  const Nanos now = clock_.now();
  const auto takes = [&](Lane lane) {
    return shared_->breaker(lane).closed() || shared_->breaker(lane).offers(now);
  };
  stats.readable = takes(Lane::kRead);
  stats.writable = takes(Lane::kWrite) && shared_->store.generation() != nullptr;
  for (const Breaker& breaker : shared_->breakers) stats.breaker_trips += breaker.trips();
  return stats;
}

void FsTier::close() {
  if (std::exchange(closed_, true)) return;
  ticker_.stop();
  // Long walks give up; then recency is written back while threads still run.
  shared_->store.stop();
  if (shared_->breaker(Lane::kWrite).closed() && shared_->store.has_touches()) {
    (void)keep_and_wait(options_.close_wait, [](FsStore& store) {
      store.write_back_touches();
      return Status::ok();
    });
  }
  const bool left = pool_.close();
  if (keeper_.close() && left) shared_->store.release();
}

double FsTier::estimate_read_seconds(std::uint64_t bytes) const {
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

std::unique_ptr<Tier> make_fs_tier(const FsTierOptions& options) {
  static const SteadyClock steady;  // stateless; threads that were let go may read it
  if (options.n_read_threads == 0 || options.n_write_threads == 0) {
    throw_invalid("n_read_threads {} and n_write_threads {} were given; each must be at least 1",
                  options.n_read_threads, options.n_write_threads);
  }
  FileOps& ops = options.file_ops != nullptr ? *options.file_ops : posix_file_ops();
  const Clock& clock = options.clock != nullptr ? *options.clock : static_cast<const Clock&>(steady);
  return std::make_unique<FsTier>(options, ops, clock);
}

}  // namespace kv_offload
