// SPDX-License-Identifier: Apache-2.0
// PeerRecords: finds the records that other processes write into our epoch, and forgets those that they
// remove. The ledger page shows at no extra cost that another process changed something; then the changed
// directories are listed. The listing decides, so no removal is lost: a process that is killed between the
// removal of a file and its change of the page leaves the list of processes, which is looked at too.
//
// Invariant: a record that another process has reported as written or removed is known here, or no longer
// known, after one poll that started later. Larger roots are looked at less often, to use at most one
// twentieth of a thread.
//
// Threads: upkeep thread only. No lock.
#pragma once

#include <atomic>
#include <cstdint>
#include <limits>
#include <memory>
#include <vector>

#include "backends/fs/open_root.h"
#include "backends/fs/record_index.h"
#include "backends/fs/space_ledger.h"
#include "base/clock.h"

namespace kv_offload {

class PeerRecords {
 public:
  // All arguments must outlive this object. A poll returns soon once `stop` is true.
  PeerRecords(const OpenRoot& root, RecordIndex& records, const Clock& clock, const std::atomic<bool>& stop)
      : ops_(root.ops), changes_(*root.changes), records_(records), clock_(clock), stop_(stop) {}

  void poll(const SpaceFigures& figures);
  // The same between two polls, if the page shows changes by others that no poll has seen.
  // changes: SpaceFigures::changes_by_others.
  void watch(std::uint64_t changes);

 private:
  // State of a leaf directory when it was last listed.
  struct Listed {
    std::int64_t mtime = std::numeric_limits<std::int64_t>::min();
    Nanos changed{0};      // when this mtime was first seen
    bool settled = false;  // listed again so late that a later change must have another mtime
  };
  void list_changes(std::uint64_t changes, bool always);
  bool list_changed_leaves();

  FileOps& ops_;
  OutsideChanges& changes_;
  RecordIndex& records_;
  const Clock& clock_;
  const std::atomic<bool>& stop_;
  std::uint64_t changes_seen_ = 0;
  std::vector<std::uint64_t> writers_seen_;
  std::vector<Listed> leaves_;
  std::uint64_t epoch_ = 0;  // the epoch of leaves_
  bool unsettled_ = false;
  bool members_changed_ = false;  // since the last listing
  Nanos next_poll_{0};
};

}  // namespace kv_offload
