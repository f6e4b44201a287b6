// SPDX-License-Identifier: Apache-2.0
// PeerRecords: finds the records that other processes write into our epoch. The ledger page shows at no
// extra cost that another process wrote; then the changed directories are listed.
//
// Invariant: a record that another process has reported as written is known here after one poll that started
// later. Larger roots are looked at less often, to use at most one twentieth of a thread.
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
#include "base/clock.h"

namespace kv_offload {

class PeerRecords {
 public:
  // All arguments must outlive this object. A poll returns soon once `stop` is true.
  PeerRecords(const OpenRoot& root, RecordIndex& records, const Clock& clock, const std::atomic<bool>& stop)
      : ops_(root.ops), records_(records), clock_(clock), stop_(stop) {}

  // writes: the number of writes by other processes, from the page (SpaceFigures::writes_by_others).
  void poll(std::uint64_t writes);

 private:
  // State of a leaf directory when it was last listed.
  struct Listed {
    std::int64_t mtime = std::numeric_limits<std::int64_t>::min();
    Nanos changed{0};      // when this mtime was first seen
    bool settled = false;  // listed again so late that a later change must have another mtime
  };
  bool adopt_changed_leaves();

  FileOps& ops_;
  RecordIndex& records_;
  const Clock& clock_;
  const std::atomic<bool>& stop_;
  std::uint64_t writes_seen_ = 0;
  std::vector<Listed> leaves_;
  std::uint64_t epoch_ = 0;  // the epoch of leaves_
  bool unsettled_ = false;
  Nanos next_poll_{0};
};

}  // namespace kv_offload
