// Quarantine: rows that nobody owns any more but that somebody may still touch:
// a rank copying under a ticket that is not reported, a tier's op that runs.
// A row is freed when the last of its holds ended.
//
// Threads: one (the scheduler's).
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <unordered_map>
#include <vector>

#include "base/types.h"
#include "memory/host_region.h"

namespace kv_offload {

class Quarantine {
 public:
  using Free = std::function<void(RowId)>;
  using IsReported = std::function<bool(Ticket, TicketKind)>;
  explicit Quarantine(Free free) : free_(std::move(free)) {}

  // Until the ticket is reported. A row may be held several times.
  void hold(Ticket ticket, TicketKind kind, RowId row);
  // Until release(row).
  void hold(RowId row) { ++holds_[row]; }
  void release(RowId row);
  bool holds(RowId row) const { return holds_.contains(row); }
  // Ends the holds of tickets that are reported by now.
  void poll(const IsReported& is_reported);
  std::size_t rows() const { return holds_.size(); }

 private:
  Free free_;
  std::unordered_map<RowId, std::uint32_t> holds_;
  struct Held {
    TicketKind kind;
    std::vector<RowId> rows;
  };
  std::map<Ticket, Held> tickets_;
};

}  // namespace kv_offload
