// SPDX-License-Identifier: Apache-2.0
// RecordStore: the synchronous half of a tier, implemented once per kind of tier. ThreadPoolTier is the
// shared asynchronous half: threads, deadlines, breakers, completions, presence, speed.
//
// A store keeps records under keys, in epochs: a record that was written in one epoch is not found in
// another. All newly started processes share one epoch. forget() ends the current epoch. begin_epoch() begins
// one that was never used before: a directory with a higher number in a file system, a random name in each
// key on a server (epoch_registry.h). The new epoch belongs to this process alone, because its weights are no
// longer those that it was started with. Records in unused epochs are reclaimed in the background or age out.
//
// Threads: each method states the threads it may run on. Methods for I/O and upkeep threads may wait for the
// device. Methods for any thread never wait, because the scheduler calls them. A store may be left with a
// thread stuck in a call of the first kind. All ops in flight share ownership of the store, so nothing is
// freed while such a thread uses it.
//
// No method throws; failures are returned as a Status. (If a method throws anyway, its op fails with kIo; no
// thread ends and every op still gets its completion.) A constructor may throw.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/status.h"
#include "base/types.h"
#include "tier/presence.h"
#include "tier/tier.h"

namespace kv_offload {

class RecordStore {
 public:
  // The store's handle for one epoch, the time between two resets. Ops in flight share the epoch that they
  // were submitted in.
  struct Epoch {
    virtual ~Epoch() = default;
    virtual std::string label() const { return {}; }  // unique in the store; empty: the store gives none
  };
  using EpochPtr = std::shared_ptr<Epoch>;

  virtual ~RecordStore() = default;

  // ---- I/O threads, several at once. `epoch` is never null. Each call ends within a time bound, or is
  // stuck. kIo, kTimeout and kNoSpace with an errno count as device failures; several in a row open the
  // breaker. These do not count: kTimeout with EBUSY (another process was in the way), kIo with ENOENT
  // (another program removed something that the store recreates), and kUnavailable (a part of the store that
  // failed before is backing off, and the rest keeps working).
  //
  // Writes a record. Sets `moved` to the payload's bytes if the device moved them. A record that already
  // exists returns ok with 0, or with its bytes if the store cannot detect that it wrote nothing. Leaves a
  // whole record or none: no partial record is ever found under the key.
  virtual Status write(const TierOp& op, const EpochPtr& epoch, std::uint64_t* moved) = 0;
  // Ok: the shards hold the record's bytes, verified. kNotFound: there is no record. kCorrupt: the record is
  // proven wrong; it was removed, unless another one replaced it meanwhile or the removal failed. Any other
  // status is a device failure, and the record stays.
  virtual Status read(const TierOp& op, const EpochPtr& epoch, std::uint64_t* moved) = 0;
  // Removes the record of a key if other parts of its chunk are lost (hosts/all_hosts_tier.h). Ok: it was
  // removed, and is reported as evicted. kNotFound: there was none.
  virtual Status remove(const ChunkKey&, const EpochPtr&) {
    return Status::error(StatusKind::kUnavailable, "this kind of store removes no single records");
  }
  // Finds which keys have a record. Sets (*present)[i] for every key when ok. With KeyOrder::kPrefix, a store
  // may answer without checking each key: it assumes that keys before a present one are present (where that
  // is wrong, a read finds no record), and it may end at a missing one. Then it shortens *present to the keys
  // with an answer, at least one; the others are Presence::kSkipped.
  virtual Status locate(std::span<const ChunkKey> keys, KeyOrder order, const EpochPtr& epoch,
                        std::vector<bool>* present) = 0;
  // For a store of several parts: like locate(), but returns ok if at least one part answers. Sets
  // (*failed)[i] for keys of the other parts, whose lookups have failed. REQUIRES: *failed is false for every
  // key.
  virtual Status locate_in_parts(std::span<const ChunkKey> keys, KeyOrder order, const EpochPtr& epoch,
                                 std::vector<bool>* present, std::vector<bool>* /*failed*/) {
    return locate(keys, order, epoch, present);
  }
  // Returns how many keys one locate() call takes. More keys than that are looked up by several threads at
  // once.
  virtual std::size_t keys_per_locate(KeyOrder order) const = 0;

  // ---- upkeep threads
  //
  // Runs once, before the other upkeep calls: slow work that must not delay the start of a server.
  virtual void start() {}
  // Runs about once a second, even while the engine is idle. Runs once more after stop(), to save what would
  // be lost; a call that has not noticed stop() yet may be running concurrently.
  virtual void maintain() = 0;
  // Runs about 20 times a second if ThreadPoolTierOptions::watch_removals is set, never concurrently with
  // maintain(). Forgets records that other processes or the store's server removed. known:
  // ThreadPoolTier's PresenceCache; null if the store has a catalog. Failures are ignored: later calls try
  // again.
  virtual void watch(PresenceCache* known) { (void)known; }
  // Returns ok if there is an epoch, begun now or earlier. May run concurrently with maintain() and with
  // itself.
  virtual Status begin_epoch() = 0;
  // False for a store that others fill and that cannot distinguish older records from later ones. Such a
  // store has no epoch after forget(), and begin_epoch() is never called again.
  virtual bool can_reset() const { return true; }

  // ---- any thread; never waits
  virtual EpochPtr epoch() const = 0;  // null between forget() and the next begin_epoch()
  // `startup_id`: see Tier::reset.
  virtual void forget(std::uint64_t startup_id) = 0;
  // See Tier::refresh_epoch. maintain() reads the epoch again.
  virtual void refresh_epoch() {}
  virtual std::string epoch_problem() const { return {}; }  // see Tier::epoch_problem
  virtual void stop() {}                                    // makes slow calls give up soon
  // Releases locks and connections. No op can arrive after this call.
  virtual void close() = 0;
  virtual void figures(TierStats* stats) const = 0;
  // Returns the store's own exact catalog. Null: ThreadPoolTier keeps what it learns in a PresenceCache.
  virtual Catalog* catalog() { return nullptr; }
};

}  // namespace kv_offload
