// Evictor: the space for a record in a root that is full: what goes for it, and in which order.
//
// Invariant: what goes for a write becomes that write's reservation, so nobody else gets its bytes in
// between. A record is either known and on disk, or neither, or it could not be removed: then it stays known,
// as the last to go, and the errno is told. Records of a server that has the root open are evicted by that
// server, which we ask for space while we have less than our share (Shares). They are removed from here only
// if it does not answer, or if we have no record of our own to evict and the write must not be declined.
//
// Hazard: thousands of records in a row may be missing (`find -delete`, evictions by a server that shares
// them). A write that met many of them lets other threads in between, and fails after a bounded number; the
// count that follows forgets the rest.
//
// Threads: reserve() on any I/O thread; the rest on upkeep's. mutex_ admits one thread at a time, for two
// would remove twice as much; it is held across calls to the file system, and before the locks of
// KnownRecords, Shares and Space.
#pragma once

#include <atomic>
#include <cstdint>
#include <string>
#include <vector>

#include "base/clock.h"
#include "base/status.h"
#include "base/thread_annotations.h"
#include "storage/fs/draft.h"
#include "storage/fs/known_records.h"
#include "storage/fs/oldest_records.h"
#include "storage/fs/open_root.h"
#include "storage/fs/shares.h"
#include "storage/fs/space.h"

namespace kv_offload {

class Evictor {
 public:
  // What it works with; all of it outlives this.
  struct Context {
    const FsTierOptions& options;
    const OpenRoot& root;
    KnownRecords& records;
    const Clock& clock;
    const std::atomic<bool>& stop;  // calls give up soon
  };
  explicit Evictor(const Context& context);

  // Grows the reservation to `bytes`, removing what has to go. draft (or null) may get the file of an evicted
  // record. kNoSpace when nothing is left to go; with an errno when it cannot be removed. kIo with ENOENT
  // when missing records make the sum of the root doubtful. kDeclined for a draft that may be
  // declined (Draft::spared_request): the next victim is of its own request, or other servers were asked to
  // evict for it.
  Status reserve(std::uint64_t bytes, Draft* draft, Reservation* reservation) EXCLUDES(mutex_);
  // Removes the generations of our namespace that nobody uses.
  void reclaim_unused_generations();

  // What upkeep found in the ledger.
  void note(const SpaceFigures& figures) { shares_.note(figures); }
  // Others judge us by it also when we are stopped.
  void publish_held() { root_.space->publish_held(shares_.held()); }
  // Evicts for the sharers that ask for space, and asks them in turn.
  void trade() EXCLUDES(mutex_);
  // Nothing was left to evict though the root is full, or too many records were missing: the sum may be too
  // high.
  bool ran_dry() const { return ran_dry_.load(); }
  void forget_that_it_ran_dry() { ran_dry_.store(false); }
  std::uint64_t evicted_bytes() const { return evicted_bytes_.load(); }  // running total

 private:
  Status make_space(std::uint64_t bytes, Draft* draft, Reservation* reservation, int* missing_records)
      EXCLUDES(mutex_);
  Status sum_is_doubtful() const;
  // What one write, or one request of another server, has got from our records.
  struct Progress {
    std::uint64_t freed = 0;
    int failed = 0, missing = 0;  // records
  };
  // One record; kNotFound when there is none, kDeclined when it is of the draft's own request.
  Status evict_own(Draft* draft, Reservation* reservation, Progress* progress) REQUIRES(mutex_);
  int recycle(const std::string& path, Draft* draft, std::uint64_t* freed) REQUIRES(mutex_);
  std::uint64_t take_dead(std::uint64_t enough, Reservation* reservation) REQUIRES(mutex_);
  std::uint64_t take_from_others(std::uint64_t enough, bool any, Reservation* reservation) REQUIRES(mutex_);
  std::uint64_t remove_what_is_empty(const std::vector<OldestRecords::Source>& dead, const Gone& gone)
      REQUIRES(mutex_);
  std::vector<OldestRecords::Source> dead_generations();
  std::vector<OldestRecords::Source> other_generations();
  bool give_back(const SpaceRequest& request) EXCLUDES(mutex_);

  const FsTierOptions& options_;
  const OpenRoot& root_;
  FileOps& ops_;
  KnownRecords& records_;
  const Clock& clock_;
  const std::atomic<bool>& stop_;
  Shares shares_;
  Mutex mutex_;
  Nanos next_look_for_dead_ GUARDED_BY(mutex_){0};   // namespaces and generations
  Nanos next_look_at_others_ GUARDED_BY(mutex_){0};  // that do not answer
  OldestRecords dead_ GUARDED_BY(mutex_);
  OldestRecords others_ GUARDED_BY(mutex_);
  // Read by upkeep and by figures(), which wait for nobody who makes space.
  std::atomic<bool> ran_dry_{false};
  std::atomic<std::uint64_t> evicted_bytes_{0};
};

}  // namespace kv_offload
