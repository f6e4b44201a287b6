// SPDX-License-Identifier: Apache-2.0
// Recency: writes the time of last use into the file times, so that the eviction order survives a restart and
// other processes see it.
//
// Threads: write_if_due() on upkeep threads, write() on any. Best effort: a lost time costs a record its
// place in the eviction order, nothing else. No lock.
#pragma once

#include "backends/fs/open_root.h"
#include "backends/fs/record_index.h"
#include "base/clock.h"

namespace kv_offload {

class Recency {
 public:
  // All arguments must outlive this object.
  Recency(const OpenRoot& root, RecordIndex& records, const Clock& clock)
      : root_(root), ops_(root.ops), records_(records), clock_(clock), last_write_(clock.now()) {}

  void write();
  void write_if_due();  // about once a minute

 private:
  std::int64_t now_of_files() const;

  const OpenRoot& root_;
  FileOps& ops_;
  RecordIndex& records_;
  const Clock& clock_;
  Nanos last_write_;
};

}  // namespace kv_offload
