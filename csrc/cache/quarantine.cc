// SPDX-License-Identifier: Apache-2.0
#include "cache/quarantine.h"

namespace kv_offload {

void Quarantine::hold(Ticket ticket, TicketKind kind, RowId row) {
  tickets_.try_emplace(ticket, Held{kind, {}}).first->second.rows.push_back(row);
  hold(row);
}

void Quarantine::release(RowId row) {
  const auto held = holds_.find(row);
  if (held == holds_.end() || --held->second > 0) return;
  holds_.erase(held);
  free_(row);
}

void Quarantine::poll(const IsReported& is_reported) {
  std::erase_if(tickets_, [&](const auto& one) {
    const auto& [ticket, held] = one;
    if (!is_reported(ticket, held.kind)) return false;
    for (const RowId row : held.rows) release(row);
    return true;
  });
}

}  // namespace kv_offload
