// SPDX-License-Identifier: Apache-2.0
// Tickets: job numbers, and what the ranks reported for them. A number is used once and ascends over stores
// and loads alike, as the region's result ring requires.
//
// Threads: one (the scheduler's).
#pragma once

#include <cstdint>

#include "base/types.h"
#include "memory/host_region.h"

namespace kv_offload {

class Tickets {
 public:
  // The region outlives this.
  explicit Tickets(const HostRegion& region) : region_(region) {}

  Ticket next() { return ++last_; }
  // Reports of some ranks arrive over a network, so they may follow vLLM's own completion.
  bool may_be_late() const { return region_.spans_hosts(); }
  // False while reports of some ranks cannot arrive: their host is lost. Nothing is loaded or stored then.
  bool hear_all_ranks() const { return !region_.is_cut_off(); }
  // True if every rank that got the job has reported; none touches its rows any more. In a replicated cache
  // one rank stores, but all ranks load.
  bool is_reported(Ticket ticket, TicketKind kind) const {
    std::uint64_t failed_groups = 0;
    return region_.result(ticket, &failed_groups, kind) == TicketResult::kDone;
  }
  // Returns kDone with the groups (as bits) whose bytes must never become a hit.
  TicketResult store_result(Ticket ticket, std::uint64_t* failed_groups) const {
    return region_.result(ticket, failed_groups, TicketKind::kStore);
  }

 private:
  const HostRegion& region_;
  Ticket last_ = kNoTicket;
};

}  // namespace kv_offload
