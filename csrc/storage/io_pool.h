// IoPool: threads that run ops in two lanes. Reads go first; writes never
// starve: read threads take reads only; write threads take reads too when more
// wait than there are free read threads, but start one write for every
// kReadsPerWrite reads started meanwhile. Write threads have a background share
// of the CPU (base/thread.h).
// An op is a function that ends in a Status; the pool knows nothing of files.
// Each op has a tag and a deadline: one that has not started by then ends
// kExpired without running (noticed by a thread that comes free, or by
// expire()). cancel() ends a queued op kCancelled. Every submitted op ends
// exactly once in `done`. Ops of a lane are started in order; urgent ones before others, of which one is
// started for every kUrgentPerOther of them.
//
// No call holds the pool's lock for longer with more ops in it: submit() and expire() move a bounded number
// at a time, cancel() finds its op by the tag.
//
// `run` must not throw. `done` runs on the pool's thread (or the caller's, for cancel, fail_queued,
// expire and close) without any lock of the pool, and must not throw or block.
//
// A thread stuck inside `run` blocks no call here. close() waits for it at most
// close_wait of real time and then lets the thread go: the thread owns what it
// still needs of the pool, runs `done` when it comes back, and reads no clock.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "base/clock.h"
#include "base/status.h"

namespace kv_offload {

enum class Lane : std::uint8_t { kRead, kWrite };

struct IoPoolOptions {
  unsigned read_threads = 2;
  unsigned write_threads = 1;
  const Clock* clock = nullptr;  // required; outlives the pool
  Nanos close_wait{std::chrono::seconds(10)};
};

class IoPool {
 public:
  static constexpr unsigned kReadsPerWrite = 8;
  static constexpr unsigned kUrgentPerOther = 8;

  struct Op {
    std::uint64_t tag = 0;
    Lane lane = Lane::kRead;
    Nanos deadline{0};  // absolute; 0 = none
    bool urgent = false;
    std::function<Status()> run;
    // status, seconds running, seconds queued
    std::function<void(const Status&, double, double)> done;
  };
  explicit IoPool(const IoPoolOptions& options);  // throws when a thread cannot start
  ~IoPool();                                      // close()

  // If memory runs out: it throws, and none of them was submitted or ends.
  void submit(std::vector<Op> ops);
  // Queues as submit() does, also from within an op; once the pool is closed, or gone, it refuses.
  using Submitter = std::function<void(std::vector<Op>)>;
  Submitter submitter() const;
  bool cancel(std::uint64_t tag);
  // Ends every queued op with this status; what runs goes on.
  void fail_queued(const Status& status);
  void fail_queued(Lane lane, const Status& status);
  // Ends queued ops whose deadline has passed, even while all threads are stuck.
  void expire();
  // Takes the next queued op of a lane, as a thread does that comes free: it runs from now on and cannot be
  // cancelled. Calling the result does its work and ends it, on the thread that calls. Empty: none is queued.
  // For a pool without threads, which is driven by hand.
  std::function<void()> begin_next(Lane lane);
  // Refuse new (kUnavailable), cancel what is queued, wait for what runs, join.
  // False when a thread was stuck and let go. Idempotent.
  bool close();

  struct Depth {
    std::uint32_t queued = 0, running = 0;
    double oldest_seconds = 0;  // since submit, of ops queued or running
  };
  Depth depth(Lane lane) const;
  // Ops of a lane that run, and started after `after` and before `until`.
  std::uint32_t running_since(Lane lane, Nanos after, Nanos until) const;
  // Every thread that takes ops of this lane runs one that it started before `until`. Never without threads.
  bool is_held_up(Lane lane, Nanos until) const;

 private:
  struct State;
  std::shared_ptr<State> state_;
};

}  // namespace kv_offload
