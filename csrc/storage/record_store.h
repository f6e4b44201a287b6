// RecordStore: all that a kind of tier implements; the synchronous half of a tier. PooledTier is the other
// half, written once: threads, deadlines, breakers, completions, presence, speed.
//
// A store keeps records under keys, in epochs: what was written in one is not found in another. Who starts
// shares one with all who start. forget() ends it, begin_epoch() begins another, above all that anybody used
// before (for a file system a directory, for a server a number in each key): for this process alone, whose
// weights are no longer those that it was started with. What lies in epochs that nobody uses is reclaimed
// behind or ages out.
//
// Threads: each method says on whose it runs. Those of I/O threads and of upkeep may wait for the device;
// those of any thread never do, for the scheduler is among them. A store may be left with a thread stuck in a
// call of the first kind: it is shared by all ops in flight, so nothing is freed under them.
//
// No method throws: what cannot be done is a Status. (One that throws all the same fails its op, as kIo; it
// leaves no thread ended and no op without a completion.) A constructor may throw.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "base/status.h"
#include "base/types.h"
#include "storage/presence.h"
#include "storage/tier.h"

namespace kv_offload {

class RecordStore {
 public:
  // What a store calls the time between two resets. Ops in flight share the one that they were submitted in.
  struct Epoch {
    virtual ~Epoch() = default;
  };
  using EpochPtr = std::shared_ptr<Epoch>;

  virtual ~RecordStore() = default;

  // ---- I/O threads, several at once. `epoch` is never null. Each ends within a time of its own, or is
  // stuck. kIo, kTimeout, and kNoSpace with an errno speak against the device, and rest it after some in a
  // row; kTimeout with EBUSY does not: it says that another process was in the way. Nor does kIo with ENOENT:
  // another program removed something that the store makes again. Nor does kUnavailable: a
  // part of the store that failed before is left alone for now, and the rest goes on. `moved` becomes the
  // payload's bytes when the device moved them; a record that is there already is ok with 0,
  // or with its bytes where a store does not tell that it took none. Leaves a whole record or none: nothing
  // else is ever found under the key.
  virtual Status write(const TierOp& op, const EpochPtr& epoch, std::uint64_t* moved) = 0;
  // Ok: the shards hold the record's bytes, verified. kNotFound: there is none. kCorrupt: there is one that
  // is proven wrong; it was removed, unless another took its place meanwhile. All else: the device's failure,
  // and the record is left alone.
  virtual Status read(const TierOp& op, const EpochPtr& epoch, std::uint64_t* moved) = 0;
  // Which of the keys have a record. (*present)[i] is set for every key when ok. Of a prefix a store may
  // answer without looking at each: what lies before one that is there is there, what lies behind one that is
  // missing is not. (Where that is wrong, a read finds nothing, and what was overlooked is computed again.)
  // Of a store of several parts it is enough that one answers: what lies on the others is not there for now.
  virtual Status locate(std::span<const ChunkKey> keys, KeyOrder order, const EpochPtr& epoch,
                        std::vector<bool>* present) = 0;
  // How many keys are given to one locate(); more than that are asked for by several threads at once.
  virtual std::size_t keys_per_locate(KeyOrder order) const = 0;

  // ---- upkeep's threads
  // Once, first: what takes long and need not keep a server from starting.
  virtual void start() {}
  // About once a second, also while the engine is idle; and once more after stop(), for what would be lost,
  // maybe beside a call that has not noticed yet.
  virtual void maintain() = 0;
  // Ok when there is an epoch, made now or before. May run beside maintain() and beside itself.
  virtual Status begin_epoch() = 0;
  // False of a store that others fill and that cannot tell what they wrote before from what comes after:
  // after forget() there is no epoch any more, and begin_epoch() is never asked for one.
  virtual bool can_reset() const { return true; }

  // ---- any thread, never wait
  virtual EpochPtr epoch() const = 0;  // null between forget() and the next begin_epoch()
  virtual void forget() = 0;
  virtual void stop() {}  // calls that take long give up soon
  // No op can come any more: locks and connections are given back.
  virtual void close() = 0;
  virtual void figures(TierStats* stats) const = 0;
  // The store's own, exact one; null: PooledTier keeps what it learns (PresenceCache).
  virtual Catalogue* catalogue() { return nullptr; }
};

}  // namespace kv_offload
