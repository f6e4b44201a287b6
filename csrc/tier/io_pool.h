// SPDX-License-Identifier: Apache-2.0
// IoPool: threads that run ops in two lanes. Reads run first; writes never starve. Read threads run only
// reads. Write threads also run reads if more reads wait than there are free read threads, but they start one
// write for every kReadsPerWrite reads started meanwhile. Write threads have a background share of the CPU
// (base/thread.h).
//
// An op is a function that returns a Status; the pool knows nothing of files. Each op has a tag and a
// deadline. An op that has not started by its deadline ends kExpired without running (noticed by a thread
// that becomes free, or by expire()). cancel() ends a queued op kCancelled. Every submitted op ends exactly
// once in `done`. Ops of a lane start in order, urgent ones first, but one other op starts for every
// kUrgentPerNormal urgent ones.
//
// No call holds the pool's lock longer when more ops are queued: submit() and expire() move a bounded number
// at a time, and cancel() finds its op by the tag.
//
// TENANTS: ops that belong to several tenants start in weighted fair order (start-time fair queueing). Each
// tenant with queued ops gets a part of the started costs in proportion to its weight, however many ops the
// others have queued. A tenant that was idle begins at the present time: it gains nothing by waiting. The
// order of a lane, urgent ops first, is that within a tenant: urgent ops of one tenant start before other
// ops of another tenant only in the first one's turn. An urgent op costs as much as the lane's other ops cost
// in the same time, on average. It is charged the mean of urgent ops when it starts, and the difference when
// it ends.
//
// `run` must not throw. `done` runs on a pool thread (or on the caller's, for cancel, fail_queued, expire and
// close) without any lock of the pool, and must not throw or block.
//
// A thread stuck inside `run` blocks no call here. close() waits for it at most close_wait of real time and
// then detaches it. The thread owns what it still needs of the pool, runs `done` when it returns, and reads
// no clock.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "base/clock.h"
#include "base/status.h"
#include "policy/eviction_policy.h"

namespace kv_offload {

enum class Lane : std::uint8_t { kRead, kWrite };

struct IoPoolOptions {
  unsigned read_threads = 2;
  unsigned write_threads = 1;
  const Clock* clock = nullptr;  // required; must outlive the pool
  Nanos close_wait{std::chrono::seconds(10)};
};

class IoPool {
 public:
  static constexpr unsigned kReadsPerWrite = 8;
  static constexpr unsigned kUrgentPerNormal = 8;
  // A stuck urgent op counts as one of this time.
  static constexpr double kMostUrgentSeconds = 1;
  // Until ops have ended: of an urgent op, and of other ops for each unit of their cost.
  static constexpr double kFirstUrgentSeconds = 1e-3, kFirstSeconds = 1e-9;

  struct Op {
    std::uint64_t tag = 0;
    Nanos deadline{0};  // absolute; 0 = none
    Lane lane = Lane::kRead;
    bool urgent = false;
    TenantId tenant = 0;
    float weight = 1;  // of the tenant. Above 0
    // What the op takes of the tenant's part: bytes. Above 0. The pool sets it for urgent ops.
    double cost = 1;
    std::function<Status()> run;
    // Arguments: status, seconds running, seconds queued.
    std::function<void(const Status&, double, double)> done;
  };
  explicit IoPool(const IoPoolOptions& options);  // throws if a thread cannot start
  ~IoPool();                                      // calls close()

  // If memory runs out, throws; no op was submitted and none ends.
  void submit(std::vector<Op> ops);
  // Queues ops as submit() does, also from within an op. Refuses them once the pool is closed or destroyed.
  using Submitter = std::function<void(std::vector<Op>)>;
  Submitter submitter() const;
  bool cancel(std::uint64_t tag);
  // Ends every queued op with this status; running ops continue.
  void fail_queued(const Status& status);
  void fail_queued(Lane lane, const Status& status);
  // Ends queued ops whose deadline has passed, even while all threads are stuck.
  void expire();
  // Takes the next queued op of a lane, like a thread that becomes free: the op counts as running and cannot
  // be cancelled. Calling the returned function runs and ends the op on the calling thread. Returns an empty
  // function if no op is queued. For a pool without threads, driven by hand.
  std::function<void()> begin_next(Lane lane);
  // Refuses new ops (kUnavailable), cancels queued ops, waits for running ops, joins the threads. Returns
  // false if a stuck thread was detached. Idempotent.
  bool close();

  struct Depth {
    std::uint32_t queued = 0, running = 0;
    double oldest_seconds = 0;  // since submit, of ops queued or running
  };
  Depth depth(Lane lane) const;
  // Returns the number of running ops of a lane that started after `after` and before `until`.
  std::uint32_t running_since(Lane lane, Nanos after, Nanos until) const;
  // True if every thread that serves this lane is running an op that started before `until`. Always false
  // without threads.
  bool is_stalled(Lane lane, Nanos until) const;

 private:
  struct State;
  std::shared_ptr<State> state_;
};

}  // namespace kv_offload
