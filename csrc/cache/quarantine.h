// SPDX-License-Identifier: Apache-2.0
// Quarantine: rows without an owner that may still be touched: a rank copies under an unreported ticket, or a
// tier op still runs. A row is freed when its last hold ends.
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

  // Holds the row until the ticket is reported. A row may have several holds.
  void hold(Ticket ticket, TicketKind kind, RowId row);
  // Holds the row until release(row).
  void hold(RowId row) { ++holds_[row]; }
  void release(RowId row);
  bool holds(RowId row) const { return holds_.contains(row); }
  // Ends the holds of tickets that have been reported.
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
