// Evictor: the space for a record in a root that is full: what goes for it, and in which order.
//
// Invariant: what goes for a write becomes that write's reservation, so nobody else gets its bytes in
// between. A record is either known and on disk, or neither, or it could not be removed: then it stays known,
// as the last to go, and the errno is told. What another process has open is taken only when nothing else is
// left, or while we have less than our share.
//
// Threads: reserve() on any I/O thread; the rest on upkeep's. mutex_ admits one thread at a time, for two
// would remove twice as much; it is held across calls to the file system, and before the locks of
// KnownRecords and Space. shares_mutex_ is innermost, and never held across a call.
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
#include "storage/fs/open.h"
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
  // record. kNoSpace when nothing is left to go; with an errno when it cannot be removed. kDeclined when the
  // next to go is of the draft's own request (Draft::spared_request).
  Status reserve(std::uint64_t bytes, Draft* draft, Reservation* reservation) EXCLUDES(mutex_);
  // Removes the generations of our namespace that nobody uses.
  void reclaim_unused_generations();

  // Who has the root open (space.h), as upkeep sees it.
  void share_with(std::vector<std::uint64_t> sharers) EXCLUDES(shares_mutex_);
  // Nothing was left to evict though the root is full: the sum may be too high.
  bool ran_dry() const { return ran_dry_.load(); }
  void forget_that_it_ran_dry() { ran_dry_.store(false); }
  std::uint64_t evicted_bytes() const { return evicted_bytes_.load(); }  // running total

 private:
  Status make_space(std::uint64_t bytes, Draft* draft, Reservation* reservation) EXCLUDES(mutex_);
  bool is_below_share() const EXCLUDES(shares_mutex_);
  // One record; kNotFound when there is none, kDeclined when it is of the draft's own request.
  Status evict_own(Draft* draft, Reservation* reservation, std::uint64_t* freed) REQUIRES(mutex_);
  int recycle(const std::string& path, Draft* draft, std::uint64_t* freed) REQUIRES(mutex_);
  std::uint64_t reclaim_dead(std::uint64_t enough) REQUIRES(mutex_);
  std::uint64_t reclaim_others(std::uint64_t enough, bool even_open) REQUIRES(mutex_);
  std::uint64_t reclaim_generations(std::uint64_t enough, bool even_open);

  const FsTierOptions& options_;
  const OpenRoot& root_;
  FileOps& ops_;
  KnownRecords& records_;
  const Clock& clock_;
  const std::atomic<bool>& stop_;
  Mutex mutex_;
  Nanos next_look_for_dead_ GUARDED_BY(mutex_){0};  // namespaces and generations
  mutable Mutex shares_mutex_;
  std::vector<std::uint64_t> sharers_ GUARDED_BY(shares_mutex_);
  // Read by upkeep and by figures(), which wait for nobody who makes space.
  std::atomic<bool> ran_dry_{false};
  std::atomic<std::uint64_t> evicted_bytes_{0};
};

}  // namespace kv_offload
