// Tickets: the numbers of jobs, and what the ranks reported under them. A number is
// given once, ascending over stores and loads alike, which is what the region's ring of
// results needs.
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
  // Every rank that got the job has reported: none touches its rows any more. Of a
  // replicated cache one rank stores, but all ranks load.
  bool is_reported(Ticket ticket, TicketKind kind) const {
    std::uint64_t failed_groups = 0;
    return region_.result(ticket, &failed_groups, kind) == TicketResult::kDone;
  }
  // Of a store: kDone with the groups (bits) whose bytes must never become a hit.
  TicketResult store_result(Ticket ticket, std::uint64_t* failed_groups) const {
    return region_.result(ticket, failed_groups, TicketKind::kStore);
  }

 private:
  const HostRegion& region_;
  Ticket last_ = kNoTicket;
};

}  // namespace kv_offload
