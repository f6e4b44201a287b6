// SPDX-License-Identifier: Apache-2.0
// PlannedReads and FreeRow: what a plan holds until its reads are submitted. If memory runs out before, no
// row is lost and no chunk waits for a read that never comes. Threads: one (the scheduler's).
#pragma once

#include <cstddef>
#include <vector>

#include "base/clock.h"
#include "base/types.h"
#include "cache/host_chunks.h"
#include "cache/tier_io.h"

namespace kv_offload {

// Chunks that will be read. Those that no read brings become absent again.
class PlannedReads {
 public:
  // `most`: chunks that may be added; add() allocates nothing.
  PlannedReads(HostChunks& chunks, TierIo& ops, std::size_t most) : chunks_(chunks), ops_(ops) {
    reads_.reserve(most);
  }
  ~PlannedReads() {
    for (const TierIo::Read& read : reads_) {
      if (!is_submitted_ && !ops_.is_read(read.slot)) chunks_.discard(read.slot);
    }
  }
  PlannedReads(const PlannedReads&) = delete;
  PlannedReads& operator=(const PlannedReads&) = delete;
  // `read.slot` is a chunk in state kFetching.
  void add(const TierIo::Read& read) { reads_.push_back(read); }
  std::size_t size() const { return reads_.size(); }
  void discard_last() {
    chunks_.discard(reads_.back().slot);
    reads_.pop_back();
  }
  // Submits the reads and returns them. `deadline`, `probe`: as for TierIo::read().
  const std::vector<TierIo::Read>& submit(Nanos deadline, bool probe) {
    ops_.read(reads_, deadline, probe);
    is_submitted_ = true;
    return reads_;
  }

 private:
  HostChunks& chunks_;
  TierIo& ops_;
  std::vector<TierIo::Read> reads_;
  bool is_submitted_ = false;
};

// Frees a row unless it is kept for a chunk.
class FreeRow {
 public:
  FreeRow(HostChunks& chunks, RowId row) : chunks_(chunks), row_(row) {}
  ~FreeRow() {
    if (row_ != kNoRow) chunks_.free(row_);
  }
  FreeRow(const FreeRow&) = delete;
  FreeRow& operator=(const FreeRow&) = delete;
  void keep() { row_ = kNoRow; }

 private:
  HostChunks& chunks_;
  RowId row_;
};

}  // namespace kv_offload
