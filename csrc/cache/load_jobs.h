// LoadJobs: the copies from rows to the device: which run, and which may run side by
// side.
//
// Invariant: from begin() until its end was told (complete) AND its ticket is reported,
// a load pins each of its chunks: the first says that vLLM is done with it, the second
// that no rank reads its rows any more. vLLM tells which keys have ended, not which
// load; two loads may share keys, so a load is known again by all of its keys.
//
// Threads: one (the scheduler's).
#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <vector>

#include "base/clock.h"
#include "cache/chunk_groups.h"
#include "cache/cost_model.h"
#include "cache/host_chunks.h"
#include "cache/tickets.h"
#include "cache/write_back.h"
#include "metrics/metrics.h"

namespace kv_offload {

class LoadJobs {
 public:
  // What it works with; all of it outlives this.
  struct Context {
    const ChunkGroups& groups;
    HostChunks& chunks;
    WriteBack& write_back;
    Tickets& tickets;
    CostModel& costs;
    Metrics& metrics;
    const Clock& clock;
  };
  // What the request that loads says of itself.
  struct Load {
    std::uint32_t request = 0;  // number
    std::int8_t priority = 0;
    std::uint32_t first_end = 0, last_end = 0;  // its span, in tokens; 0 = not known
    double waited_seconds = 0;                  // before the load could begin
    Nanos began{0};
  };
  struct Begun {
    RowTransfer transfer;
    RequestReport::Places hit_tokens{};  // by where the bytes came from
  };

  LoadJobs(const Context& context, const CacheOptions& options);

  // Throws InvalidArgument when a key is not resident, is of no group or out of order;
  // then nothing has changed. REQUIRES: at least one key.
  Begun begin(std::span<const ChunkKey> keys, const Load& load);
  // vLLM is done with the load of these keys, in any order. Unknown ones are of before
  // a reset.
  void complete(std::span<const ChunkKey> keys);
  // Lets go of what was completed and is reported by now.
  void poll();
  // No load is known any more. The rows of those that ranks may still copy are in
  // quarantine, and still hold others back.
  void forget();
  // vLLM reports the end of no load begun so far. Their chunks stay, pinned until the ranks have reported.
  void abandon();

  // Whether a load of a request of this span has to wait until others have ended.
  bool must_hold_back(std::uint32_t last_end) const;

 private:
  struct Job {
    Ticket ticket = kNoTicket;
    std::uint64_t cache_blocks = 0;  // that its request needs, for all of its prompt
    std::vector<Slot> slots;
    // What it is worth, told when it ends.
    Nanos began{0};
    double waited_seconds = 0, compute_seconds = 0, bytes = 0;
  };
  struct ForgottenJob {  // while it ran: vLLM does not say when it ends
    Ticket ticket;
    std::uint64_t cache_blocks;
  };

  bool is_reported(Ticket ticket) const { return tickets_.is_reported(ticket, TicketKind::kLoad); }
  std::uint64_t cache_blocks_of(std::uint32_t last_end) const;
  bool release(const Job& job);  // false: a rank may still read its rows
  void note_outcome(const Job& job);
  void forget(const Job& job);  // puts its rows into quarantine

  const ChunkGroups& groups_;
  HostChunks& chunks_;
  WriteBack& write_back_;
  Tickets& tickets_;
  CostModel& costs_;
  Metrics& metrics_;
  const Clock& clock_;
  const std::uint32_t cache_blocks_, blocks_per_chunk_;  // see CacheOptions
  std::multimap<std::uint64_t, Job> running_;  // not completed; by a fingerprint of the keys, in any order
  std::vector<Job> completed_;                 // but not reported yet
  std::vector<ForgottenJob> forgotten_;
  std::uint64_t loading_blocks_ = 0;  // cache blocks of running_ and forgotten_
};

}  // namespace kv_offload
