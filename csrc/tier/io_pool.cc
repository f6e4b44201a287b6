// SPDX-License-Identifier: Apache-2.0
#include "tier/io_pool.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <map>
#include <optional>
#include <set>
#include <thread>
#include <utility>

#include "base/thread.h"
#include "base/thread_annotations.h"
#include "policy/fair_turns.h"

namespace kv_offload {
namespace {

// Ops added or removed per hold of the lock, so that a long prompt's batch does not delay the other threads.
constexpr std::size_t kOpsPerLock = 256;

struct Queued {
  IoPool::Op op;
  Nanos submitted{0};
};
struct Running {
  std::uint64_t number = 0;
  Lane lane = Lane::kRead;
  Nanos submitted{0}, started{0};
  std::optional<Lane> thread;  // lane of the thread that runs it; none: driven by hand
};
// See FairTurns; the number increases with each submission. The ops of a tenant that are not urgent have
// kNormal set, so they follow its urgent ones. Moving nodes between queues allocates nothing.
using Queue = std::map<std::uint64_t, Queued>;
constexpr std::uint64_t kNormal = std::uint64_t{1} << 55;

// The mean time of recent ops for each unit of their cost; older ops fade out.
class MeanTime {
 public:
  explicit MeanTime(double first) : seconds_(first) {}
  void add(double cost, double seconds) {
    constexpr double kFade = 0.95;
    const bool is_first = costs_ <= 0;
    costs_ = costs_ * kFade + cost;
    seconds_ = is_first ? seconds : seconds_ * kFade + seconds;
  }
  double seconds() const { return costs_ > 0 ? seconds_ / costs_ : seconds_; }

 private:
  double costs_ = 0, seconds_;  // sums, or before the first op its assumed time
};

// The turns of one lane.
struct LaneTurns {
  FairTurns tenants;
  std::array<unsigned, TenantShares::kMaxTenants> urgent_in_a_row{};  // of each tenant, while others waited
  MeanTime urgent{IoPool::kFirstUrgentSeconds}, normal{IoPool::kFirstSeconds};

  // In seconds: costs in units of other ops would be too large if these become slower.
  void start(IoPool::Op& op) {
    if (op.urgent) op.cost = urgent.seconds();
    tenants.charge(op.tenant, (op.urgent ? op.cost : op.cost * normal.seconds()) / op.weight);
  }
  void end(const IoPool::Op& op, double seconds) {
    if (seconds <= 0) return;
    if (!op.urgent) return normal.add(op.cost, seconds);
    seconds = std::min(seconds, IoPool::kMostUrgentSeconds);
    urgent.add(1, seconds);
    tenants.charge(op.tenant, (seconds - op.cost) / op.weight);
  }
};

// The waiting ops of one lane. Ops are indexed by tag and by deadline, so that no call searches the queue: it
// holds an op for each chunk of all prompts that are being read. Each call is O(log n) per op.
class LaneQueue {
 public:
  bool empty() const { return queue_.empty(); }
  std::size_t size() const { return queue_.size(); }

  // If memory runs out, throws; the object must then be discarded.
  void add(std::uint64_t number, IoPool::Op op, Nanos submitted) {
    number = FairTurns::key_of(op.tenant, op.urgent ? number : number | kNormal);
    by_tag_.emplace(op.tag, number);
    if (op.deadline.count() != 0) by_deadline_.emplace(op.deadline, number);
    queue_.emplace(number, Queued{std::move(op), submitted});
  }
  // Allocates nothing.
  void take_all_of(LaneQueue& from) {
    queue_.merge(from.queue_);
    by_tag_.merge(from.by_tag_);
    by_deadline_.merge(from.by_deadline_);
  }
  // Moves all ops to `other`. REQUIRES: `other` is empty. Constant time.
  void swap(LaneQueue& other) {
    std::swap(queue_, other.queue_);
    std::swap(by_tag_, other.by_tag_);
    std::swap(by_deadline_, other.by_deadline_);
  }
  void move_all_to(Queue* to) { to->merge(queue_); }
  // REQUIRES: not empty.
  Queue::node_type pop(LaneTurns& turns) {
    auto chosen = turns.tenants.next(queue_);
    const TenantId tenant = FairTurns::tenant_of(chosen->first);
    const auto normal = queue_.lower_bound(FairTurns::key_of(tenant, kNormal));
    const bool has_normal = normal != queue_.end() && FairTurns::tenant_of(normal->first) == tenant;
    unsigned& in_a_row = turns.urgent_in_a_row[tenant];
    if (has_normal && in_a_row >= IoPool::kUrgentPerNormal) chosen = normal;
    in_a_row = has_normal && chosen != normal ? in_a_row + 1 : 0;
    turns.start(chosen->second.op);
    return extract(chosen->first);
  }
  // Returns an op with this tag; empty if there is none.
  Queue::node_type take(std::uint64_t tag) {
    const auto found = by_tag_.lower_bound({tag, 0});
    if (found == by_tag_.end() || found->first != tag) return {};
    return extract(found->second);
  }
  // Returns the op with the earliest passed deadline; empty if no deadline has passed.
  Queue::node_type take_expired(Nanos now) {
    if (by_deadline_.empty() || now < by_deadline_.begin()->first) return {};
    return extract(by_deadline_.begin()->second);
  }
  Nanos oldest(Nanos now) const {
    for (auto at = queue_.begin(); at != queue_.end();) {  // of each tenant the first urgent and other op
      now = std::min(now, at->second.submitted);
      const std::uint64_t normal = FairTurns::key_of(FairTurns::tenant_of(at->first), kNormal);
      at = at->first < normal ? queue_.lower_bound(normal) : FairTurns::next_tenant(queue_, at);
    }
    return now;
  }

 private:
  Queue::node_type extract(std::uint64_t number) {
    Queue::node_type node = queue_.extract(number);
    const IoPool::Op& op = node.mapped().op;
    by_tag_.erase({op.tag, number});
    if (op.deadline.count() != 0) by_deadline_.erase({op.deadline, number});
    return node;
  }

  Queue queue_;
  // The tag or deadline, and the op's number.
  std::set<std::pair<std::uint64_t, std::uint64_t>> by_tag_;
  std::set<std::pair<Nanos, std::uint64_t>> by_deadline_;
};
using Lanes = std::array<LaneQueue, 2>;

// An op that was removed from its queue and has not run yet.
struct Begun {
  Queue::node_type node;
  Nanos started{0};
  std::uint64_t number = 0;  // of its entry in `running`; 0: its deadline had passed
};

std::size_t index(Lane lane) { return static_cast<std::size_t>(lane); }

void finish(const Queued& queued, const Status& status, Nanos now) {
  queued.op.done(status, 0, to_seconds(now - queued.submitted));
}

}  // namespace

// Shared by the pool and its threads, so that it outlives a detached thread.
struct IoPool::State {
  // Built in advance: there may be no memory when an op expires.
  const Status closed = Status::error(StatusKind::kUnavailable, "closing");
  const Status too_late =
      Status::error(StatusKind::kExpired, "the deadline passed before the op was started");
  const Clock* clock = nullptr;
  Nanos close_wait{0};
  mutable Mutex mutex;
  // `reads` wakes read threads for queued reads; `writes` wakes write threads for any op that they may take.
  CondVar reads, writes, left;
  Lanes queues GUARDED_BY(mutex);
  std::array<LaneTurns, 2> turns GUARDED_BY(mutex);
  std::atomic<std::uint64_t> last_queued{0};
  std::vector<Running> running GUARDED_BY(mutex);
  std::vector<std::thread> threads GUARDED_BY(mutex);
  std::uint64_t next_number GUARDED_BY(mutex) = 1;
  unsigned reads_since_write GUARDED_BY(mutex) = 0;
  unsigned free_readers GUARDED_BY(mutex) = 0;             // read threads that run no op
  std::array<unsigned, 2> started GUARDED_BY(mutex) = {};  // threads, by their lane
  unsigned live GUARDED_BY(mutex) = 0;
  bool closing GUARDED_BY(mutex) = false;
  bool abandoned GUARDED_BY(mutex) = false;

  // Returns the number of queued reads beyond those that free read threads are about to take.
  std::size_t unserved_reads() const REQUIRES(mutex) {
    const std::size_t queued = queues[index(Lane::kRead)].size();
    return queued - std::min<std::size_t>(queued, free_readers);
  }

  std::optional<Lane> next_lane(Lane own) const REQUIRES(mutex) {
    if (own == Lane::kRead) {
      return queues[index(own)].empty() ? std::nullopt : std::optional(own);
    }
    const bool reads = unserved_reads() > 0;
    const bool writes = !queues[index(Lane::kWrite)].empty();
    if (writes && (!reads || reads_since_write >= kReadsPerWrite)) return Lane::kWrite;
    if (reads) return Lane::kRead;
    return std::nullopt;
  }

  // Wakes as many threads as can start one of the added ops.
  void wake(std::size_t added_reads, std::size_t added_writes) REQUIRES(mutex) {
    for (std::size_t i = std::min<std::size_t>(added_reads, free_readers); i > 0; --i) reads.notify_one();
    for (std::size_t i = added_writes + std::min(added_reads, unserved_reads()); i > 0; --i)
      writes.notify_one();
  }

  Queue::node_type take(Lane lane) REQUIRES(mutex) {
    Queue::node_type next = queues[index(lane)].pop(turns[index(lane)]);
    if (lane == Lane::kWrite) {
      reads_since_write = 0;
    } else if (!queues[index(Lane::kWrite)].empty()) {
      ++reads_since_write;
    }
    return next;
  }

  void thread_body(Lane own) {
    // Write threads run in the background: writes can wait, and so can reads that no read thread is free for.
    const bool reader = own == Lane::kRead;
    begin_thread(reader ? "kvo-read" : "kvo-write", reader ? CpuShare::kFull : CpuShare::kBackground);
    mutex.lock();
    while (!closing) {
      const std::optional<Lane> lane = next_lane(own);
      if (!lane) {
        (reader ? reads : writes).wait(mutex);
        continue;
      }
      Begun begun = begin(*lane, own);
      if (reader) --free_readers;
      mutex.unlock();
      perform(std::move(begun));
      mutex.lock();
      if (reader) ++free_readers;
    }
    --live;
    left.notify_all();
    mutex.unlock();
  }

  Begun begin(Lane lane, std::optional<Lane> thread = std::nullopt) REQUIRES(mutex) {
    Begun begun{take(lane), clock->now()};
    const IoPool::Op& op = begun.node.mapped().op;
    if (op.deadline.count() == 0 || begun.started < op.deadline) {
      begun.number = next_number++;
      running.push_back({begun.number, op.lane, begun.node.mapped().submitted, begun.started, thread});
    }
    return begun;
  }

  // Takes the op by value so that its resources are released here, without a lock held.
  void perform(Begun begun) EXCLUDES(mutex) {
    const Nanos started = begun.started;
    const Queued& queued = begun.node.mapped();
    if (begun.number == 0) return finish(queued, too_late, started);
    const Status status = queued.op.run();
    Nanos ended = started;
    {
      const MutexLock lock(mutex);
      if (!abandoned) ended = clock->now();  // after a detach the clock may be destroyed
      // A read that found nothing says nothing about the speed of reads.
      if (status || queued.op.urgent)
        turns[index(queued.op.lane)].end(queued.op, to_seconds(ended - started));
      std::erase_if(running, [&](const Running& r) { return r.number == begun.number; });
    }
    queued.op.done(status, to_seconds(ended - started), to_seconds(started - queued.submitted));
  }

  void submit(std::vector<Op> ops) EXCLUDES(mutex) {
    std::optional<Nanos> now = time_of_submission();
    // Everything that may throw comes first: all ops are queued or none.
    std::vector<Lanes> batches((ops.size() + kOpsPerLock - 1) / kOpsPerLock);
    std::uint64_t number = last_queued.fetch_add(ops.size());
    for (std::size_t i = 0; i < ops.size(); ++i) {
      LaneQueue& queue = batches[i / kOpsPerLock][index(ops[i].lane)];
      queue.add(++number, std::move(ops[i]), now.value_or(Nanos{0}));
    }
    Queue refused;
    for (Lanes& batch : batches) {
      if (!now || !enqueue(batch)) {
        for (LaneQueue& queue : batch) queue.move_all_to(&refused);
      }
    }
    for (const auto& [key, queued] : refused) queued.op.done(closed, 0, 0);
  }

  // Returns nullopt once the pool is closing, because the clock may be destroyed.
  std::optional<Nanos> time_of_submission() EXCLUDES(mutex) {
    const MutexLock lock(mutex);
    return closing ? std::nullopt : std::optional(clock->now());
  }

  // Returns false if the pool is closing. Allocates nothing.
  bool enqueue(Lanes& batch) EXCLUDES(mutex) {
    const MutexLock lock(mutex);
    if (closing) return false;
    const std::size_t reads_added = batch[index(Lane::kRead)].size();
    const std::size_t writes_added = batch[index(Lane::kWrite)].size();
    for (std::size_t lane = 0; lane < queues.size(); ++lane) queues[lane].take_all_of(batch[lane]);
    wake(reads_added, writes_added);
    return true;
  }

  void fail(const Queue& failed, const Status& status) {
    const Nanos now = clock->now();
    for (const auto& [number, queued] : failed) finish(queued, status, now);
  }

  // Removes and returns a bounded number of ops whose deadline has passed.
  Queue take_expired(Nanos now) EXCLUDES(mutex) {
    Queue late;
    const MutexLock lock(mutex);
    for (LaneQueue& queue : queues) {
      while (late.size() < kOpsPerLock) {
        Queue::node_type node = queue.take_expired(now);
        if (!node) break;
        late.insert(std::move(node));
      }
    }
    return late;
  }
};

IoPool::IoPool(const IoPoolOptions& options) : state_(std::make_shared<State>()) {
  if (options.clock == nullptr) throw_invalid("an I/O pool needs a clock");
  state_->clock = options.clock;
  state_->close_wait = options.close_wait;
  // Reserved so that starting an op never fails.
  state_->running.reserve(options.read_threads + options.write_threads);
  const auto start = [&](unsigned count, Lane lane) {
    for (unsigned i = 0; i < count; ++i) {
      const MutexLock lock(state_->mutex);
      state_->threads.emplace_back([state = state_, lane] { state->thread_body(lane); });
      ++state_->live;
      ++state_->started[index(lane)];
      if (lane == Lane::kRead) ++state_->free_readers;
    }
  };
  try {
    start(options.read_threads, Lane::kRead);
    start(options.write_threads, Lane::kWrite);
  } catch (...) {
    close();
    throw_resource("the system refused to start a storage thread ({} read and {} write threads requested)",
                   options.read_threads, options.write_threads);
  }
}

IoPool::~IoPool() { close(); }

void IoPool::submit(std::vector<Op> ops) { state_->submit(std::move(ops)); }

IoPool::Submitter IoPool::submitter() const {
  return [state = state_](std::vector<Op> ops) { state->submit(std::move(ops)); };
}

bool IoPool::cancel(std::uint64_t tag) {
  const Status status = Status::error(StatusKind::kCancelled, "cancelled before it was started");
  Queue found;
  {
    const MutexLock lock(state_->mutex);
    for (LaneQueue& queue : state_->queues) {
      Queue::node_type node = queue.take(tag);
      if (!node) continue;
      found.insert(std::move(node));
      break;
    }
  }
  if (found.empty()) return false;
  state_->fail(found, status);
  return true;
}

std::function<void()> IoPool::begin_next(Lane lane) {
  const MutexLock lock(state_->mutex);
  if (state_->queues[index(lane)].empty()) return {};
  auto begun = std::make_shared<Begun>(state_->begin(lane));
  return [state = state_, begun] { state->perform(std::move(*begun)); };
}

void IoPool::fail_queued(const Status& status) {
  fail_queued(Lane::kRead, status);
  fail_queued(Lane::kWrite, status);
}

void IoPool::fail_queued(Lane lane, const Status& status) {
  LaneQueue queued;
  {
    const MutexLock lock(state_->mutex);
    state_->queues[index(lane)].swap(queued);
  }
  Queue failed;
  queued.move_all_to(&failed);
  state_->fail(failed, status);
}

void IoPool::expire() {
  const Nanos now = state_->clock->now();
  for (;;) {
    const Queue late = state_->take_expired(now);
    if (late.empty()) return;
    state_->fail(late, state_->too_late);
  }
}

bool IoPool::close() {
  std::vector<std::thread> threads;
  {
    const MutexLock lock(state_->mutex);
    state_->closing = true;
    threads.swap(state_->threads);
    state_->reads.notify_all();
    state_->writes.notify_all();
  }
  fail_queued(Status::error(StatusKind::kCancelled, "closing"));
  if (threads.empty()) return true;
  const auto close_deadline = std::chrono::steady_clock::now() + state_->close_wait;
  bool all_exited = false;
  {
    const MutexLock lock(state_->mutex);
    while (state_->live > 0) {
      const auto remaining = close_deadline - std::chrono::steady_clock::now();
      if (remaining <= remaining.zero()) break;
      state_->left.wait_for(state_->mutex, remaining);
    }
    all_exited = state_->live == 0;
    state_->abandoned = !all_exited;
  }
  for (std::thread& thread : threads) {
    if (all_exited) {
      thread.join();
    } else {
      thread.detach();  // owns the state; see the header
    }
  }
  return all_exited;
}

IoPool::Depth IoPool::depth(Lane lane) const {
  const Nanos now = state_->clock->now();
  Depth depth;
  Nanos oldest = now;
  const MutexLock lock(state_->mutex);
  const LaneQueue& queue = state_->queues[index(lane)];
  depth.queued = static_cast<std::uint32_t>(queue.size());
  oldest = queue.oldest(oldest);
  for (const Running& running : state_->running) {
    if (running.lane != lane) continue;
    ++depth.running;
    oldest = std::min(oldest, running.submitted);
  }
  depth.oldest_seconds = to_seconds(now - oldest);
  return depth;
}

bool IoPool::is_stalled(Lane lane, Nanos until) const {
  const auto takes = [lane](Lane thread) { return lane == Lane::kRead || thread == Lane::kWrite; };
  const MutexLock lock(state_->mutex);
  std::size_t free = 0;
  for (const Lane thread : {Lane::kRead, Lane::kWrite}) {
    if (takes(thread)) free += state_->started[index(thread)];
  }
  if (free == 0) return false;
  for (const Running& running : state_->running) {
    if (running.thread && takes(*running.thread) && running.started < until) --free;
  }
  return free == 0;
}

std::uint32_t IoPool::running_since(Lane lane, Nanos after, Nanos until) const {
  const MutexLock lock(state_->mutex);
  return static_cast<std::uint32_t>(
      std::count_if(state_->running.begin(), state_->running.end(), [&](const Running& running) {
        return running.lane == lane && running.started > after && running.started < until;
      }));
}

}  // namespace kv_offload
