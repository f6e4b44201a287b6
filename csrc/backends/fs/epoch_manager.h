// SPDX-License-Identifier: Apache-2.0
// EpochManager: manages the epoch that this process uses from one reset to the next. It creates the next
// epoch when there is none, and detects that the current one was removed.
//
// Invariant: this process never uses an epoch that another process's reset created. After a reset of its own
// it uses none that existed before. An epoch that was created for starting processes is never used after a
// reset.
//
// Another process that shares the namespace may have been reset, which implies nothing about our weights. So
// this process keeps its epoch until it is reset itself. Records in a newer epoch belong to other weights
// than ours, and our records there would be wrong for the other process.
//
// If our epoch was removed without a reset, the replacement is one of: the epoch that a server sharing it has
// created since, the epoch of the same number put back from a snapshot, or a new one for starting processes.
// All of these hold records of the same weights. After a reset, or if others were reset and we were not, the
// replacement is a new epoch for this process only. The marks in the namespace show a reset that came after
// the last keep().
//
// Threads: begin() and keep() on upkeep threads, also concurrently; reset() on any thread, and it never
// waits. making_ admits one thread at a time that creates an epoch. It is held across calls to the file
// system, and is taken before the locks of RecordIndex and SpaceLedger.
#pragma once

#include <atomic>
#include <cstdint>
#include <string>
#include <vector>

#include "backends/fs/open_root.h"
#include "backends/fs/record_index.h"
#include "base/status.h"
#include "base/thread_annotations.h"

namespace kv_offload {

class EpochManager {
 public:
  // Both must outlive this object.
  EpochManager(const OpenRoot& root, RecordIndex& records) : root_(root), ops_(root.ops), records_(records) {}

  // Returns ok if there is an epoch, created now or earlier.
  Status begin() EXCLUDES(making_);
  // Creates another epoch if ours was removed, by hand or by a host that does not see our lock, and appends
  // that to *lost. Returns true if other epochs exist.
  bool keep(std::vector<std::string>* lost) EXCLUDES(making_);
  // Drops all records written so far.
  void reset() { records_.reset(); }

 private:
  int make_next(const RecordIndex::Next& next, const std::vector<std::uint64_t>& numbers,
                std::shared_ptr<FsEpoch>* made) REQUIRES(making_);

  const OpenRoot& root_;
  FileOps& ops_;
  RecordIndex& records_;
  Mutex making_;
  // The ID of the epoch that was removed. Its replacement gets the same ID, because it holds records of the
  // same weights.
  std::atomic<std::uint64_t> removed_id_{0};
};

}  // namespace kv_offload
