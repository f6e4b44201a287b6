// ForeignRecords: the records that other processes write into our generation. The ledger's page tells for
// nothing that somebody wrote; then the directories that changed are listed.
//
// Invariant: a record that another has reported as written is known here after one look that began later, and
// larger roots are looked at less often: one twentieth of a thread.
//
// Threads: upkeep's alone. No lock.
#pragma once

#include <atomic>
#include <cstdint>
#include <limits>
#include <memory>
#include <vector>

#include "base/clock.h"
#include "storage/fs/known_records.h"
#include "storage/fs/open_root.h"

namespace kv_offload {

class ForeignRecords {
 public:
  // All of it outlives this. A look gives up soon when `stop` becomes true.
  ForeignRecords(const OpenRoot& root, KnownRecords& records, const Clock& clock,
                 const std::atomic<bool>& stop)
      : ops_(root.ops), records_(records), clock_(clock), stop_(stop) {}

  // writes: by others, as the page says (SpaceFigures::writes_by_others).
  void look(std::uint64_t writes);

 private:
  // How a leaf directory looked when it was listed last.
  struct Listed {
    std::int64_t mtime = std::numeric_limits<std::int64_t>::min();
    Nanos changed{0};      // when its time was first seen to be this
    bool settled = false;  // it was listed once more, so late that a later change has another time
  };
  bool adopt_changed_leaves();

  FileOps& ops_;
  KnownRecords& records_;
  const Clock& clock_;
  const std::atomic<bool>& stop_;
  std::uint64_t writes_seen_ = 0;
  std::vector<Listed> leaves_;
  std::uint64_t generation_ = 0;  // that they are of
  bool unsettled_ = false;
  Nanos next_look_{0};
};

}  // namespace kv_offload
