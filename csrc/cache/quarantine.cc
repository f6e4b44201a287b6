#include "cache/quarantine.h"

#include <algorithm>

namespace kv_offload {

void Quarantine::hold(Ticket ticket, TicketKind kind, RowId row) {
  const auto known = std::find_if(tickets_.rbegin(), tickets_.rend(),
                                  [&](const Held& held) { return held.ticket == ticket; });
  if (known != tickets_.rend()) {
    known->rows.push_back(row);
  } else {
    tickets_.push_back({ticket, kind, {row}});
  }
  hold(row);
}

void Quarantine::release(RowId row) {
  const auto held = holds_.find(row);
  if (held == holds_.end() || --held->second > 0) return;
  holds_.erase(held);
  free_(row);
}

void Quarantine::poll(const IsReported& is_reported) {
  std::erase_if(tickets_, [&](const Held& held) {
    if (!is_reported(held.ticket, held.kind)) return false;
    for (const RowId row : held.rows) release(row);
    return true;
  });
}

}  // namespace kv_offload
