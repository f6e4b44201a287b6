// PooledTier: the asynchronous half of every tier whose store answers a thread that waits for it (see
// record_store.h). A pool of I/O threads, each op's deadline, one breaker for reads and one for writes (a
// full disk must not stop reads), completions, presence, the speed of late reads; and upkeep, on a timer of
// its own, so that it goes on while the engine is idle.
#pragma once

#include <memory>
#include <string>

#include "storage/record_form.h"
#include "storage/record_store.h"
#include "storage/tier.h"

namespace kv_offload {

class IoPool;

struct PooledTierOptions {
  std::string name;
  unsigned n_read_threads = 4;
  unsigned n_write_threads = 2;
  Nanos op_deadline{std::chrono::seconds(10)};  // an op older than this trips the breakers
  // How long close() waits, in real time, for a thread that is stuck. Later the
  // thread is let go with all it needs (see tier.h).
  Nanos close_wait{std::chrono::seconds(10)};
  // Of a store without a catalogue of its own: when a key that was absent is worth asking for again at the
  // latest (PresenceCache), and how many keys are remembered (about 100 bytes each).
  Nanos absent_for{std::chrono::seconds(1)};
  std::size_t most_keys = std::size_t{1} << 19;
  RecordFormOptions form;  // for the store: how it writes
  // Outlives the tier and any thread it had to let go. Null: a steady clock.
  const Clock* clock = nullptr;
  // For tests: no thread serves the ops; whom this is given to runs them, one by one (IoPool::begin_next).
  IoPool** driven_by_hand = nullptr;
};

// The clock that a tier goes by.
const Clock& clock_of(const PooledTierOptions& options);

// Throws InvalidArgument (no threads). For who makes a store: before it leaves anything anywhere.
void check_options(const PooledTierOptions& options);

// Throws InvalidArgument, as check_options().
std::unique_ptr<Tier> make_pooled_tier(std::unique_ptr<RecordStore> store, const PooledTierOptions& options);

}  // namespace kv_offload
