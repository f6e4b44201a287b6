// SPDX-License-Identifier: Apache-2.0
// A tier that a test controls: the test starts and ends ops one by one, removes or damages
// records, and makes calls fail. There are two implementations: FakeTier (in memory) and
// SteppedStore (the real fs tier on a directory). The cache tests run on both.
#pragma once

#include <deque>
#include <string>
#include <vector>

#include "tier/tier.h"

namespace kv_offload {

class ManualTier : public Tier {
 public:
  static constexpr std::size_t kAll = static_cast<std::size_t>(-1);

  // Ends the next n ops, reads first.
  virtual void finish(std::size_t n = kAll) = 0;
  // Starts the next op. It can no longer be cancelled, and ends in finish_started().
  virtual void start(OpKind kind) = 0;
  virtual void finish_started() = 0;
  // Ops that have not started, in submission order.
  virtual const std::deque<TierOp>& reads() const = 0;
  virtual const std::deque<TierOp>& writes() const = 0;

  virtual bool holds(const ChunkKey& key) = 0;
  // Removes the record as another process would. The tier notices at once if no read is queued,
  // otherwise with its next read.
  virtual void take_away(const ChunkKey& key) = 0;
  virtual void damage(const ChunkKey& key) = 0;
  // Sets the result of all later ops: kIo, kNoSpace (writes only) or kOk.
  virtual void fail(StatusKind kind) = 0;
  virtual void fail_resets(bool fail) = 0;
  // Completes failed resets, as far as that is possible now.
  virtual void heal() = 0;
  // Opens the circuit breaker: the tier accepts no ops for a while. REQUIRES: no op is queued.
  virtual void switch_off() = 0;
  virtual bool is_closed() const = 0;

  std::size_t queued_reads() const { return reads().size(); }
  std::size_t queued_writes() const { return writes().size(); }
  std::vector<ChunkKey> read_keys() const {
    std::vector<ChunkKey> keys;
    for (const TierOp& op : reads()) keys.push_back(op.key);
    return keys;
  }
};

}  // namespace kv_offload
