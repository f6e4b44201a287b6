// SPDX-License-Identifier: Apache-2.0
// DeviceLoads: the copies from rows to the device: which loads run, and which may run concurrently.
//
// Invariant: a load pins each of its chunks from begin() until complete() was called for it AND its ticket is
// reported. complete() means that vLLM is done with the load; the report means that no rank reads its rows
// any more. vLLM reports the keys that ended, not the load. Two loads may share keys, so a load is identified
// by all of its keys.
//
// If begin() throws, no load has begun. The calls that end loads allocate no memory, except for metrics after
// the load has ended: begin() reserves what they need.
//
// Threads: one (the scheduler's).
#pragma once

#include <cstdint>
#include <optional>
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

class DeviceLoads {
 public:
  // Dependencies; all of them outlive this.
  struct Context {
    const ChunkGroups& groups;
    HostChunks& chunks;
    WriteBack& write_back;
    Tickets& tickets;
    CostModel& costs;
    Metrics& metrics;
    const Clock& clock;
  };
  // Identifies a load of a request, for RequestReport::loads.
  struct LoadId {
    RequestHandle handle = 0;
    std::uint32_t request = 0;  // request number: the handle may be reused
    std::uint32_t index = 0;
  };
  // Properties of the request that loads.
  struct Load {
    LoadId id{};
    std::int8_t priority = 0;
    TenantId tenant = 0;
    std::uint32_t family = 0;                   // see HostChunks::claim
    double returns_at = 0;                      // of the request's session, in seconds; 0 = unknown
    std::uint32_t first_end = 0, last_end = 0;  // span in tokens; 0 = unknown
    double waited_seconds = 0;                  // wait before the load could begin
    Nanos began{0};
  };
  struct Begun {
    RowTransfer transfer;
    RequestReport::Places hit_tokens{};  // by source of the bytes
    decltype(RequestReport::neighbour_tokens) neighbour_tokens{};
  };

  DeviceLoads(const Context& context, const CacheOptions& options);

  // Throws InvalidArgument if a key is not resident, has an unknown group or is out of order; nothing has
  // changed then. REQUIRES: at least one key.
  Begun begin(std::span<const ChunkKey> keys, const Load& load);
  // Undoes begin(): no rank knows of the load.
  void withdraw(Ticket ticket);
  // vLLM is done with the load of these keys, given in any order. If several requests load the same keys,
  // with that of this request number, if it is one of them. Unknown loads are ignored: they began before a
  // reset.
  std::optional<LoadId> complete(std::span<const ChunkKey> keys, std::uint32_t request = 0);
  // Releases completed loads whose tickets have been reported.
  void poll();
  // Forgets all loads. Rows that ranks may still read are quarantined until poll() sees the report, and these
  // loads still hold back others.
  void forget() noexcept;
  // vLLM will not report the end of the loads begun so far. Their chunks stay, pinned until the ranks have
  // reported.
  void abandon();

  // True if the end of some load leaves rows that the requester may take.
  bool frees_rows(const Requester& by) const;
  // True if a load of a request that ends at `last_end` must wait until other loads have ended.
  bool must_wait(std::uint32_t last_end) const;

 private:
  struct Job {
    Ticket ticket = kNoTicket;
    std::uint64_t cache_blocks = 0;  // needed by the request for its whole prompt
    std::vector<Slot> slots;
    LoadId id{};
    // For the outcome that is recorded when the load ends.
    Nanos began{0};
    double waited_seconds = 0, compute_seconds = 0, bytes = 0;
  };
  struct AbandonedJob {  // vLLM does not report its end
    Ticket ticket;
    std::uint64_t cache_blocks;
    std::vector<RowId> rows;  // in quarantine
  };
  class Pins;

  bool is_reported(Ticket ticket) const { return tickets_.is_reported(ticket, TicketKind::kLoad); }
  std::uint64_t cache_blocks_of(std::uint32_t last_end) const;
  void make_room_for_one();      // in completed_ and abandoned_
  bool release(const Job& job);  // false: a rank may still read its rows
  void record_outcome(const Job& job);
  void forget(Job* job, std::uint64_t cache_blocks) noexcept;  // quarantines its rows

  const ChunkGroups& groups_;
  HostChunks& chunks_;
  WriteBack& write_back_;
  Tickets& tickets_;
  CostModel& costs_;
  Metrics& metrics_;
  const Clock& clock_;
  const std::uint32_t cache_blocks_, blocks_per_chunk_;  // see CacheOptions
  std::multimap<std::uint64_t, Job> running_;  // not completed; by a fingerprint of the keys, in any order
  // Both have room for all loads that end.
  std::vector<Job> completed_;  // completed but not reported yet
  std::vector<AbandonedJob> abandoned_;
  std::uint64_t loading_blocks_ = 0;  // cache blocks of running_ and abandoned_
};

}  // namespace kv_offload
