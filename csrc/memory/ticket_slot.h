// SPDX-License-Identifier: Apache-2.0
// One slot of a ticket ring: a worker writes the results of successive tickets into it while the scheduler
// reads. Private to memory/ and its tests.
//
// `ticket` is 0 while failed_groups changes to the next ticket's value. So a reader that finds its ticket
// both before and after reading failed_groups has read the matching value. (release/acquire on failed_groups
// orders the second read of `ticket` after the first: a reader that sees the new failed_groups also sees the
// 0.)
#pragma once

#include <atomic>
#include <cstdint>

#include "memory/host_region.h"

namespace kv_offload {

// Word: std::atomic<std::uint64_t>, or a test's stepping replacement.
template <typename Word>
struct TicketSlot {
  Word ticket;
  Word failed_groups;

  // REQUIRES: one writer.
  void report(Ticket mine, std::uint64_t failed) {
    // A job overtaken by a whole ring counts as failed; the later result stays.
    if (ticket.load(std::memory_order_relaxed) >= mine) return;
    ticket.store(kNoTicket, std::memory_order_relaxed);
    failed_groups.store(failed, std::memory_order_release);
    ticket.store(mine, std::memory_order_release);
  }

  // kPending until reported; all bits set if a later ticket took the slot.
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
