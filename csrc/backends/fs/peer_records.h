// SPDX-License-Identifier: Apache-2.0
// PeerRecords: finds the records that other processes write into our epoch, and with
// ThreadPoolTierOptions::watch_removals forgets the records that they remove. The ledger page shows at no
// extra cost that another process changed something; then the changed directories are listed. The listing
// decides, so nothing is lost if a process with a slot on the page is killed between the removal of a file
// and its change of the page: the end of such a process is a change too. If a process without a slot (a
// command) is killed there, its removal is found after the next change by any process.
//
// Invariant: a record that another process has reported as written is known here after one poll that started
// later, and one that was reported as removed is not. Larger roots are looked at less often, to use at most
// one twentieth of a thread.
//
// Threads: upkeep thread only. No lock.
#pragma once

#include <atomic>
#include <cstdint>
#include <limits>
#include <memory>
#include <optional>
#include <vector>

#include "backends/fs/open_root.h"
#include "backends/fs/record_index.h"
#include "backends/fs/space_ledger.h"
#include "base/clock.h"

namespace kv_offload {

class PeerRecords {
 public:
  // All arguments must outlive this object. A poll returns soon once `stop` is true.
  PeerRecords(const OpenRoot& root, RecordIndex& records, bool watch_removals, const Clock& clock,
              const std::atomic<bool>& stop)
      : ops_(root.ops),
        changes_(*root.changes),
        records_(records),
        watch_removals_(watch_removals),
        clock_(clock),
        stop_(stop) {}

  void poll(const SpaceFigures& figures);
  // Lists changed directories between two polls. changes: SpaceLedger::peek_changes_by_others().
  void watch(std::uint64_t changes);

 private:
  // State of a leaf directory when it was last listed.
  struct Listed {
    std::int64_t mtime = std::numeric_limits<std::int64_t>::min();
    Nanos changed{0};      // when this mtime was first seen
    bool settled = false;  // listed again so late that a later change must have another mtime
    bool present = false;  // the directory existed, or may have known records
  };
  void list_if_due(std::uint64_t changes, bool always);
  bool list_changed_leaves();
  void count_removals(std::uint64_t removals);
  void explain_missing();

  FileOps& ops_;
  OutsideChanges& changes_;
  RecordIndex& records_;
  const bool watch_removals_;
  const Clock& clock_;
  const std::atomic<bool>& stop_;
  std::uint64_t changes_seen_ = 0;
  std::vector<std::uint64_t> writers_seen_;
  std::vector<Listed> leaves_;
  std::uint64_t epoch_ = 0;  // the epoch of leaves_
  bool unsettled_ = false;   // the directories may hold changes that no listing has seen
  Nanos next_poll_{0};
  // Forgotten records that no removal on the page explains yet. Those that stay unexplained were removed by a
  // program that does not update the page (OutsideChanges).
  struct {
    std::uint64_t records = 0;
    Nanos since{0};
  } missing_;
  std::optional<std::uint64_t> removals_seen_;  // on the page, by others
  // Counted removals not yet matched to a forgotten record. The next listing finds their records, so those
  // that are left after it were of records that are unknown here. They must not explain a later removal.
  std::uint64_t removals_left_ = 0;
};

}  // namespace kv_offload
