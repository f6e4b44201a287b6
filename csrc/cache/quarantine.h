// SPDX-License-Identifier: Apache-2.0
// Quarantine: rows that may still be touched although their chunk is absent: a rank copies under an
// unreported ticket, or a tier op still runs. A row is freed when its last hold ends and no forgotten chunk
// owns it.
//
// No call allocates memory: rows must be held and freed when memory has run out. The table has an entry per
// row. Its pages are created on first use.
//
// Threads: one (the scheduler's).
#pragma once

#include <cstdint>
#include <functional>
#include <utility>

#include "base/types.h"
#include "base/zeroed_memory.h"
#include "memory/host_region.h"

namespace kv_offload {

class Quarantine {
 public:
  using Free = std::function<void(RowId)>;
  using IsReported = std::function<bool(Ticket)>;
  // `area_pages`: pages of an area; `row_pages`: of its smallest row.
  Quarantine(std::uint64_t area_pages, std::uint64_t row_pages, Free free)
      : row_pages_(row_pages), rows_(area_pages / row_pages + 1), free_(std::move(free)) {}

  // Holds a row without an owner until the ticket of its store is reported. REQUIRES: no other store holds
  // it.
  void hold(Ticket store, RowId row) noexcept;
  // Holds the row of a chunk until release(row), and until the chunk calls disown(row). A row may have
  // several holds.
  void hold_owned(RowId row) noexcept;
  void release(RowId row);
  // The owner is dropped. Frees the row unless it is held.
  void disown(RowId row);
  bool holds(RowId row) const { return at(row).holds > 0; }
  // Ends the holds of stores whose tickets have been reported. O(1) for each other ticket.
  void poll(const IsReported& is_reported);
  std::size_t rows() const { return held_; }

 private:
  // Links are row numbers plus one; 0 = none.
  using Link = std::uint32_t;
  struct Row {
    Ticket ticket;  // in the first row of a list: the store that holds its rows
    std::uint32_t holds;
    Link next;       // in the list of its store
    Link next_list;  // in the first row of a list
    bool is_owned;
  };

  Row& at(RowId row) { return rows_[row / row_pages_]; }
  const Row& at(RowId row) const { return rows_[row / row_pages_]; }
  void add_hold(Row& row) noexcept { held_ += row.holds++ == 0; }

  const std::uint64_t row_pages_;
  ZeroedTable<Row> rows_;
  const Free free_;
  Link first_list_ = 0, last_list_ = 0;
  std::size_t held_ = 0;
};

}  // namespace kv_offload
