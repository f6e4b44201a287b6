#include "cache/quarantine.h"

#include <algorithm>

namespace kv_offload {

void Quarantine::hold(Ticket ticket, RowId row) {
  const auto known = std::find_if(tickets_.rbegin(), tickets_.rend(),
                                  [&](const auto& entry) { return entry.first == ticket; });
  if (known != tickets_.rend()) {
    known->second.push_back(row);
  } else {
    tickets_.push_back({ticket, {row}});
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
  std::erase_if(tickets_, [&](const auto& entry) {
    if (!is_reported(entry.first)) return false;
    for (const RowId row : entry.second) release(row);
    return true;
  });
}

}  // namespace kv_offload
