// What a test does with a tier, whichever it is: lets ops begin and end one by one,
// takes records away, damages them, makes calls fail. FakeTier is one; SteppedStore
// (the real fs tier on a directory) is the other; the cache's tests run over both.
#pragma once

#include <deque>
#include <string>
#include <vector>

#include "storage/tier.h"

namespace kv_offload {

class TierHand : public Tier {
 public:
  static constexpr std::size_t kAll = static_cast<std::size_t>(-1);

  // Ends the next n ops, reads first.
  virtual void finish(std::size_t n = kAll) = 0;
  // The next op begins: it can no longer be cancelled, and ends with finish_started.
  virtual void start(OpKind kind) = 0;
  virtual void finish_started() = 0;
  // Ops that have not begun, in order.
  virtual const std::deque<TierOp>& reads() const = 0;
  virtual const std::deque<TierOp>& writes() const = 0;

  virtual bool holds(const ChunkKey& key) = 0;
  // Somebody else takes the record away. With no read queued the tier knows at once, else with its next read.
  virtual void take_away(const ChunkKey& key) = 0;
  virtual void damage(const ChunkKey& key) = 0;
  // Ops end like this from now on: kIo, kNoSpace (writes only), kOk.
  virtual void fail(StatusKind kind) = 0;
  virtual void fail_resets(bool fail) = 0;
  // What resets left undone is made up for, as far as it can be by now.
  virtual void heal() = 0;
  // The breaker trips: no op is taken for a while. REQUIRES: nothing is queued.
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
