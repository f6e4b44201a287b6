#include "storage/io_pool.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <iterator>
#include <list>
#include <optional>
#include <thread>

#include "base/thread.h"
#include "base/thread_annotations.h"

namespace kv_offload {
namespace {

struct Queued {
  IoPool::Op op;
  Nanos submitted{0};
};
struct Running {
  std::uint64_t number = 0;
  Lane lane = Lane::kRead;
  Nanos submitted{0}, started{0};
  std::optional<Lane> thread;  // whose it is; none: driven by hand
};
using Queue = std::list<Queued>;  // what goes from one to another needs no memory for it

// What waits in one lane.
struct LaneQueue {
  Queue urgent, others;
  unsigned urgent_in_a_row = 0;  // while others waited

  bool empty() const { return urgent.empty() && others.empty(); }
  std::size_t size() const { return urgent.size() + others.size(); }
  void push_first_of(Queue* from) {
    Queue& queue = from->front().op.urgent ? urgent : others;
    queue.splice(queue.end(), *from, from->begin());
  }
  Queued pop() {
    const bool others_turn =
        !others.empty() && (urgent.empty() || urgent_in_a_row >= IoPool::kUrgentPerOther);
    urgent_in_a_row = others_turn || others.empty() ? 0 : urgent_in_a_row + 1;
    Queue& queue = others_turn ? others : urgent;
    Queued next = std::move(queue.front());
    queue.pop_front();
    return next;
  }
  Nanos oldest(Nanos now) const {
    for (const Queue* queue : {&urgent, &others}) {
      if (!queue->empty()) now = std::min(now, queue->front().submitted);
    }
    return now;
  }
};

// Off its queue, but not run yet.
struct Begun {
  Queued next;
  Nanos started{0};
  std::uint64_t number = 0;  // of its entry in `running`; 0: it came too late to run
};

std::size_t index(Lane lane) { return static_cast<std::size_t>(lane); }

void finish(const Queued& queued, const Status& status, Nanos now) {
  queued.op.done(status, 0, to_seconds(now - queued.submitted));
}

}  // namespace

// Shared by the pool and its threads, so that a thread that was let go while
// stuck finds it alive.
struct IoPool::State {
  // Made before it is needed: an op that comes too late may find no memory.
  const Status too_late =
      Status::error(StatusKind::kExpired, "the deadline passed before the op was started");
  const Clock* clock = nullptr;
  Nanos close_wait{0};
  mutable Mutex mutex;
  CondVar reads, writes, left;  // for read threads: reads are queued; for write threads: so is what they take
  std::array<LaneQueue, 2> queues GUARDED_BY(mutex);
  std::vector<Running> running GUARDED_BY(mutex);
  std::vector<std::thread> threads GUARDED_BY(mutex);
  Nanos next_deadline GUARDED_BY(mutex) = Nanos::max();
  std::uint64_t next_number GUARDED_BY(mutex) = 1;
  unsigned reads_since_write GUARDED_BY(mutex) = 0;
  unsigned free_readers GUARDED_BY(mutex) = 0;             // read threads that run no op
  std::array<unsigned, 2> started GUARDED_BY(mutex) = {};  // threads, by their lane
  unsigned live GUARDED_BY(mutex) = 0;
  bool closing GUARDED_BY(mutex) = false;
  bool abandoned GUARDED_BY(mutex) = false;

  std::array<Queue*, 4> all_queues() REQUIRES(mutex) {
    return {&queues[0].urgent, &queues[0].others, &queues[1].urgent, &queues[1].others};
  }

  // Queued reads beyond those that free read threads are about to take.
  std::size_t reads_left_over() const REQUIRES(mutex) {
    const std::size_t queued = queues[index(Lane::kRead)].size();
    return queued - std::min<std::size_t>(queued, free_readers);
  }

  std::optional<Lane> next_lane(Lane own) const REQUIRES(mutex) {
    if (own == Lane::kRead) {
      return queues[index(own)].empty() ? std::nullopt : std::optional(own);
    }
    const bool reads = reads_left_over() > 0;
    const bool writes = !queues[index(Lane::kWrite)].empty();
    if (writes && (!reads || reads_since_write >= kReadsPerWrite)) return Lane::kWrite;
    if (reads) return Lane::kRead;
    return std::nullopt;
  }

  // Wakes as many threads as can start something of what was added.
  void wake(std::size_t added_reads, std::size_t added_writes) REQUIRES(mutex) {
    for (std::size_t i = std::min<std::size_t>(added_reads, free_readers); i > 0; --i) reads.notify_one();
    for (std::size_t i = added_writes + std::min(added_reads, reads_left_over()); i > 0; --i)
      writes.notify_one();
  }

  Queued take(Lane lane) REQUIRES(mutex) {
    Queued next = queues[index(lane)].pop();
    if (lane == Lane::kWrite) {
      reads_since_write = 0;
    } else if (!queues[index(Lane::kWrite)].empty()) {
      ++reads_since_write;
    }
    return next;
  }

  void thread_body(Lane own) {
    // What a write thread does can wait: writes, and reads that would otherwise wait for a read thread.
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
    const IoPool::Op& op = begun.next.op;
    if (op.deadline.count() == 0 || begun.started < op.deadline) {
      begun.number = next_number++;
      running.push_back({begun.number, op.lane, begun.next.submitted, begun.started, thread});
    }
    return begun;
  }

  // Takes it by value: what the op holds is let go here, with no lock held.
  void perform(Begun begun) EXCLUDES(mutex) {
    const Nanos started = begun.started;
    if (begun.number == 0) return finish(begun.next, too_late, started);
    const Status status = begun.next.op.run();
    Nanos ended = started;
    {
      const MutexLock lock(mutex);
      if (!abandoned) ended = clock->now();  // once let go, the clock may be gone
      std::erase_if(running, [&](const Running& r) { return r.number == begun.number; });
    }
    begun.next.op.done(status, to_seconds(ended - started), to_seconds(started - begun.next.submitted));
  }

  void submit(std::vector<Op> ops) EXCLUDES(mutex) {
    Queue all;  // first what may throw: all or none
    for (Op& op : ops) all.push_back({std::move(op)});
    {
      const MutexLock lock(mutex);
      if (!closing) {
        const Nanos now = clock->now();
        std::array<std::size_t, 2> added{};
        while (!all.empty()) {
          Queued& next = all.front();
          const std::size_t lane = index(next.op.lane);
          ++added[lane];
          next.submitted = now;
          if (next.op.deadline.count() != 0) next_deadline = std::min(next_deadline, next.op.deadline);
          queues[lane].push_first_of(&all);
        }
        wake(added[index(Lane::kRead)], added[index(Lane::kWrite)]);
      }
    }
    for (const Queued& queued : all) queued.op.done(Status::error(StatusKind::kUnavailable, "closing"), 0, 0);
  }

  void fail(Queue failed, const Status& status) {
    const Nanos now = clock->now();
    for (const Queued& queued : failed) finish(queued, status, now);
  }
};

IoPool::IoPool(const IoPoolOptions& options) : state_(std::make_shared<State>()) {
  if (options.clock == nullptr) throw_invalid("an I/O pool needs a clock");
  state_->clock = options.clock;
  state_->close_wait = options.close_wait;
  state_->running.reserve(options.read_threads + options.write_threads);  // so that none fails to begin
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
    throw_resource("the system refused a thread for storage ({} read and {} write threads asked)",
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
    for (Queue* queue : state_->all_queues()) {
      const auto at = std::find_if(queue->begin(), queue->end(),
                                   [&](const Queued& queued) { return queued.op.tag == tag; });
      if (at == queue->end()) continue;
      found.splice(found.end(), *queue, at);
      break;
    }
  }
  const bool cancelled = !found.empty();
  state_->fail(std::move(found), status);
  return cancelled;
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
  Queue failed;
  {
    const MutexLock lock(state_->mutex);
    LaneQueue& queue = state_->queues[index(lane)];
    failed.splice(failed.end(), queue.urgent);
    failed.splice(failed.end(), queue.others);
    queue.urgent_in_a_row = 0;
  }
  state_->fail(std::move(failed), status);
}

void IoPool::expire() {
  const Nanos now = state_->clock->now();
  Queue late;
  {
    const MutexLock lock(state_->mutex);
    if (now < state_->next_deadline) return;
    state_->next_deadline = Nanos::max();
    for (Queue* queue : state_->all_queues()) {
      for (auto at = queue->begin(); at != queue->end();) {
        const auto next = std::next(at);
        const Nanos deadline = at->op.deadline;
        if (deadline.count() != 0 && now >= deadline) {
          late.splice(late.end(), *queue, at);
        } else if (deadline.count() != 0) {
          state_->next_deadline = std::min(state_->next_deadline, deadline);
        }
        at = next;
      }
    }
  }
  state_->fail(std::move(late), state_->too_late);
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
  const auto give_up = std::chrono::steady_clock::now() + state_->close_wait;
  bool all_left = false;
  {
    const MutexLock lock(state_->mutex);
    while (state_->live > 0) {
      const auto remaining = give_up - std::chrono::steady_clock::now();
      if (remaining <= remaining.zero()) break;
      state_->left.wait_for(state_->mutex, remaining);
    }
    all_left = state_->live == 0;
    state_->abandoned = !all_left;
  }
  for (std::thread& thread : threads) {
    if (all_left) {
      thread.join();
    } else {
      thread.detach();  // owns the state; see the header
    }
  }
  return all_left;
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

bool IoPool::is_held_up(Lane lane, Nanos until) const {
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
