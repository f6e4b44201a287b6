// SPDX-License-Identifier: Apache-2.0
// UsageScanner: checks about once a second what others changed in the root: which processes share it, what
// they wrote, and whether the sum of its bytes is in doubt. If so, it counts the root. It reports to the
// operator what another program did to the root, and tracks how much room the file system has.
//
// Invariant: no other thread waits for a count, unless the sum is unknown. A count that was outdated
// meanwhile (by a reset, or a new page) changes nothing, and its cause stays pending. If another process
// counts, this one waits while that count makes progress.
//
// Threads: upkeep thread only. No lock.
#pragma once

#include <atomic>
#include <cstdint>
#include <string>
#include <vector>

#include "backends/fs/evictor.h"
#include "backends/fs/open_root.h"
#include "backends/fs/peer_records.h"
#include "backends/fs/record_index.h"
#include "backends/fs/scanner.h"
#include "backends/fs/space_ledger.h"
#include "base/clock.h"

namespace kv_offload {

class UsageScanner {
 public:
  // Dependencies; all must outlive this object.
  struct Context {
    const FsTierOptions& options;
    const OpenRoot& root;
    RecordIndex& records;
    Evictor& evictor;
    Scanner& scanner;
    const Clock& clock;
    const std::atomic<bool>& stop;  // when true, calls return soon
  };
  explicit UsageScanner(const Context& context);

  // Called once, first: finds the existing records.
  void start();
  // lost: files that another program removed since the last poll, and that were created again.
  void poll(std::vector<std::string> lost = {});
  // Looks for changes of our records by other processes, between two polls.
  void watch();

 private:
  void update_sharers(const SpaceFigures& figures);
  void report_lost_files(std::vector<std::string> lost, const SpaceFigures& figures);
  void update_bound();
  bool is_due(const SpaceFigures& figures);
  bool is_suspicious(const SpaceFigures& figures) const;
  bool is_unsettled(const SpaceFigures& figures);
  bool peer_is_counting(const SpaceFigures& figures);
  void count(const SpaceFigures& figures);
  void explain(const SpaceFigures& figures, std::uint64_t missing, std::uint64_t surplus,
               std::uint64_t dropped);
  bool is_accepted(const Unseen& unseen);
  std::uint64_t count_others(std::uint64_t own_epoch, const CountFor& count, Unseen* unseen);

  static constexpr Nanos kFirstSuspicion{std::chrono::minutes(1)};

  const FsTierOptions& options_;
  const OpenRoot& root_;
  FileOps& ops_;
  RecordIndex& records_;
  Evictor& evictor_;
  Scanner& scanner_;
  const Clock& clock_;
  const std::atomic<bool>& stop_;
  PeerRecords peer_records_;
  Nanos next_count_{0};
  bool recount_needed_ = false;      // the last count failed or was incomplete
  unsigned failed_counts_ = 0;       // consecutive counts in which errors hid a part of the root
  std::uint64_t writes_before_ = 0;  // at the last poll
  // Another process that counts, and when it last made progress.
  struct {
    std::uint64_t writer = 0, version = 0;
    Nanos moved{0};
  } counting_peer_;
  bool warned_not_exclusive_ = false;
  bool was_counted_ = false;  // state at the last poll
  // Known records that were missing. While others evict, most of them were evicted by the others. Then the
  // root is counted less and less often, unless a count finds that something else removed them.
  struct {
    Nanos wait{kFirstSuspicion}, next{0}, next_line{0};
    std::uint64_t writes_by_others = 0;    // at the last count
    std::uint64_t bytes = 0, records = 0;  // found and not reported yet
  } suspicion_;
  // Records whose blocks differed from their size when they were written (Charges::unsettled()).
  struct {
    std::uint64_t seen = 0, counted = 0, settled = 0;
    Nanos grew{0};
  } unsettled_;
  // A file system that is full below max_bytes.
  struct {
    std::uint64_t times = 0;
    Nanos lowered{0};
    bool warned = false;
  } full_;
};

}  // namespace kv_offload
