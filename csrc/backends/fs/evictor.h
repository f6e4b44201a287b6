// SPDX-License-Identifier: Apache-2.0
// Evictor: makes space for a record in a full root: which files are removed, and in which order.
//
// Invariant: the bytes freed for a write become the reservation of that write, so no other write gets them in
// between. A record is both known and on disk, or neither. If a record cannot be removed, it stays known as
// the last one to evict, and the errno is reported. Records of a server that has the root open are evicted by
// that server: this process asks it for space while it holds less than its share (Shares). This process
// removes such records itself only if that server does not answer, or if it has no own record to evict and
// the write must not be declined.
//
// Hazard: thousands of records in a row may be missing (`find -delete`, evictions by a server that shares
// them). A write that finds many of them missing lets other threads in between, and fails after a bounded
// number; the count that follows forgets the rest.
//
// Threads: reserve() on any I/O thread; all other calls on the upkeep thread. mutex_ admits one thread at a
// time, because two would evict twice as much. It is held across calls to the file system, and is taken
// before the locks of RecordIndex, Shares and SpaceLedger.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

#include "backends/fs/oldest_records.h"
#include "backends/fs/open_root.h"
#include "backends/fs/pending_record.h"
#include "backends/fs/record_index.h"
#include "backends/fs/shares.h"
#include "backends/fs/space_ledger.h"
#include "backends/fs/temporary.h"
#include "base/clock.h"
#include "base/status.h"
#include "base/thread_annotations.h"

namespace kv_offload {

class Evictor {
 public:
  // The most bytes that are evicted while mutex_ is held, in addition to the size of the record to write.
  static constexpr std::uint64_t kMostAtOnce = std::uint64_t{64} << 20;
  // The most bytes that one call of trim() evicts. A local file system removes them in about a second.
  static constexpr std::uint64_t kMostTrimmed = 16 * kMostAtOnce;
  // How long one call of trim(), or of trade() for one server, evicts by the policy. A network file system
  // removes fewer bytes in this time. Upkeep does nothing else meanwhile.
  static constexpr Nanos kLongestEviction{std::chrono::seconds(1)};

  // Dependencies; all must outlive this object.
  struct Context {
    const FsTierOptions& options;
    const OpenRoot& root;
    RecordIndex& records;
    const Clock& clock;
    const std::atomic<bool>& stop;  // when true, calls return soon
  };
  explicit Evictor(const Context& context);

  // Grows the reservation to `bytes` and evicts as needed. pending (or null) may receive the file of an
  // evicted record. Errors: kNoSpace if nothing is left to evict, with an errno if a record cannot be
  // removed, or if the file system has no room for the ledger although records were evicted. kUnavailable if
  // the root holds much more than the bound: trim() evicts the rest. kIo with ENOENT if missing records make
  // the sum of the root doubtful. kDeclined for a record that may be declined
  // (PendingRecord::spared_request): the next victim belongs to its own request, or other servers were asked
  // to evict for it. kDeclined for any record that could only replace records within the shares of other
  // tenants. Without FsTierOptions::may_evict, kNoSpace instead of an eviction.
  Status reserve(std::uint64_t bytes, PendingRecord* pending, Reservation* reservation) EXCLUDES(mutex_);
  // Removes the epochs of our namespace that no process uses.
  void reclaim_unused_epochs();

  // Reports the ledger figures that upkeep read.
  void update_figures(const SpaceFigures& figures) { shares_.update_figures(figures); }
  // Publishes how many bytes this process holds. Other sharers decide by it, even while this process is
  // stopped.
  void publish_held() { root_.space->publish_held(shares_.held()); }
  // Evicts for the sharers that ask for space, and then asks them for space if needed. Does nothing without
  // FsTierOptions::may_evict.
  void trade() EXCLUDES(mutex_);
  // Evicts while the root holds more than max_bytes: after a start with a smaller bound, or if another
  // program added files. After kMostTrimmed bytes or kLongestEviction, leaves the rest to the next call. Does
  // nothing without FsTierOptions::may_evict and may_trim, while this process is below its share and others
  // are above theirs, or while the file system has no room for the ledger.
  void trim() EXCLUDES(mutex_);
  // True if nothing was left to evict although the root is full, or if too many records were missing. The sum
  // may be too high then.
  bool exhausted() const { return exhausted_.load(); }
  void clear_exhausted() { exhausted_.store(false); }
  std::uint64_t evicted_bytes() const { return evicted_bytes_.load(); }  // running total

 private:
  Status make_space(std::uint64_t bytes, PendingRecord* pending, Reservation* reservation,
                    int* missing_records) EXCLUDES(mutex_);
  Status doubtful_sum_error() const;
  // Totals of one write, or of one request of another server, over our own records.
  struct Progress {
    std::uint64_t freed = 0;
    int failed = 0, missing = 0;  // records
  };
  // Evicts one of our records. kNotFound if none is left; kDeclined if the next victim belongs to the pending
  // record's own request.
  Status evict_own(PendingRecord* pending, Reservation* reservation, Progress* progress) REQUIRES(mutex_);
  bool may_recycle(const PendingRecord* pending) const;
  int recycle(const FileName& from, const std::string& prefix, PendingRecord* pending, std::uint64_t* freed)
      REQUIRES(mutex_);
  std::uint64_t evict_unused_epochs(std::uint64_t enough, PendingRecord* pending, Reservation* reservation)
      REQUIRES(mutex_);
  std::uint64_t evict_peer_records(std::uint64_t enough, bool any, Reservation* reservation) REQUIRES(mutex_);
  std::uint64_t remove_empty_epochs(const std::vector<OldestRecords::Source>& dead,
                                    const OnRemoved& on_removed) REQUIRES(mutex_);
  std::vector<OldestRecords::Source> unused_epochs();
  std::vector<OldestRecords::Source> other_epochs();
  bool evict_for_peer(const LedgerRequest& request) EXCLUDES(mutex_);
  std::uint64_t evict_by_policy(std::uint64_t bytes, Reservation* evicted) EXCLUDES(mutex_);

  const FsTierOptions& options_;
  const OpenRoot& root_;
  FileOps& ops_;
  RecordIndex& records_;
  const Clock& clock_;
  const std::atomic<bool>& stop_;
  Shares shares_;
  Mutex mutex_;
  Nanos next_unused_scan_ GUARDED_BY(mutex_){0};  // unused namespaces and epochs
  Nanos next_peer_scan_ GUARDED_BY(mutex_){0};    // sharers that do not answer
  OldestRecords unused_records_ GUARDED_BY(mutex_);
  OldestRecords peer_records_ GUARDED_BY(mutex_);
  // Atomic: upkeep and figures() read these without waiting for a thread that makes space.
  std::atomic<bool> exhausted_{false};
  std::atomic<std::uint64_t> evicted_bytes_{0};
};

}  // namespace kv_offload
