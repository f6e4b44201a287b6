// One place of a ticket ring: a worker writes the results of ticket after ticket
// into it while the scheduler reads. Private to memory/ and its tests.
//
// Before failed_groups of the next ticket is there, ticket is 0; so a reader that
// finds its ticket before and after it read failed_groups has read what belongs
// to it. (release/acquire on failed_groups keeps the second look after the first:
// who sees the new failed_groups sees the 0 as well.)
#pragma once

#include <atomic>
#include <cstdint>

#include "memory/host_region.h"

namespace kv_offload {

// Word: std::atomic<std::uint64_t>, or what a test steps through.
template <typename Word>
struct TicketSlot {
  Word ticket;
  Word failed_groups;

  // REQUIRES: one writer.
  void report(Ticket mine, std::uint64_t failed) {
    // A job overtaken by a whole ring counts as failed; its successor's stays.
    if (ticket.load(std::memory_order_relaxed) >= mine) return;
    ticket.store(kNoTicket, std::memory_order_relaxed);
    failed_groups.store(failed, std::memory_order_release);
    ticket.store(mine, std::memory_order_release);
  }

  // kPending until reported; all bits when a later ticket took the place.
  TicketResult result(Ticket wanted, std::uint64_t* failed) const {
    const Ticket before = ticket.load(std::memory_order_acquire);
    const std::uint64_t found = failed_groups.load(std::memory_order_acquire);
    const Ticket after = ticket.load(std::memory_order_relaxed);
    if (before < wanted) return TicketResult::kPending;
    *failed = before == wanted && after == wanted ? found : ~std::uint64_t{0};
    return TicketResult::kDone;
  }
};

}  // namespace kv_offload
