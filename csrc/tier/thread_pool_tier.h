// SPDX-License-Identifier: Apache-2.0
// ThreadPoolTier: the shared asynchronous half of tiers whose store blocks the calling thread (see
// record_store.h). It owns a pool of I/O threads, each op's deadline, completions, presence and the speed of
// recent reads. Reads and writes have a breaker each, because a full disk must not stop reads. Upkeep runs on
// a separate timer, so that it continues while the engine is idle.
#pragma once

#include <memory>
#include <string>

#include "record/record_form.h"
#include "tier/record_store.h"
#include "tier/tier.h"

namespace kv_offload {

class IoPool;

struct ThreadPoolTierOptions {
  std::string name;
  unsigned n_read_threads = 4;
  unsigned n_write_threads = 2;
  Nanos op_timeout{std::chrono::seconds(10)};  // an op that runs longer trips the breakers
  // How long close() waits, in real time, for a stuck thread. After that the thread is detached with
  // everything it needs (see tier.h).
  Nanos close_wait{std::chrono::seconds(10)};
  // For stores without a catalog of their own: the longest time until an absent key is worth another lookup
  // (PresenceCache), and how many keys are remembered (about 100 bytes each).
  Nanos absent_for{std::chrono::seconds(1)};
  std::size_t most_keys = std::size_t{1} << 19;
  RecordFormOptions form;  // for the store: how it writes
  // Looks for removals by other processes about 20 times a second (RecordStore::watch), for KV events.
  bool watch_removals = false;
  // Must outlive the tier and any detached thread. Null: a steady clock.
  const Clock* clock = nullptr;
  // For tests: no thread serves the ops; the test runs them one by one with the pool stored here
  // (IoPool::begin_next).
  IoPool** manual_pool = nullptr;
};

// Returns the clock that the tier uses.
const Clock& clock_of(const ThreadPoolTierOptions& options);

// Throws InvalidArgument (no threads). Call it before creating a store, while nothing has been created that
// would have to be cleaned up.
void check_options(const ThreadPoolTierOptions& options);

// Throws InvalidArgument, see check_options().
std::unique_ptr<Tier> make_thread_pool_tier(std::unique_ptr<RecordStore> store,
                                            const ThreadPoolTierOptions& options);

}  // namespace kv_offload
