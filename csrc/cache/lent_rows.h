// SPDX-License-Identifier: Apache-2.0
// LentRows: the own rows that neighbours may read, and those that may not be reused yet because a neighbour
// reads them.
//
// No call allocates memory, except for the constructor.
//
// Threads: one (the scheduler's).
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>

#include "base/types.h"
#include "memory/bit_tree.h"
#include "memory/host_region.h"
#include "memory/shared_rows.h"

namespace kv_offload {

class LentRows {
 public:
  // Publishes the table of `region` and lets neighbours find it. If they cannot, problem() says why. Throws
  // ResourceError (no memory). The region must outlive this.
  LentRows(HostRegion& region, const SharedRowsLayout& layout, std::string_view identity);

  // The row's bytes are complete.
  void publish(const SharedRows::Row& row) { rows_.publish(row); }
  // Call before a row is reused. False: a neighbour reads it; poll() reports when it does not any more.
  bool withdraw(RowId row);
  bool is_read(RowId row) const { return rows_.is_pinned(row); }
  // True if a neighbour has used the row since the last call.
  bool take_use(RowId row) { return rows_.take_use(row); }
  // Calls free(row) for each withdrawn row that no neighbour reads any more. Clears the pins of dead
  // neighbours once a second, if any row is waiting for a neighbour (`is_waiting`, or a withdrawn one).
  void poll(double now, bool is_waiting, const std::function<void(RowId)>& free);
  // Nothing is served any more: the weights may have changed. Withdrawn rows stay so.
  void close();
  std::size_t waiting() const { return waiting_; }
  const std::string& problem() const { return problem_; }

 private:
  void clear_dead_readers();

  HostRegion& region_;
  const RowId row_pages_;
  SharedRows rows_;
  BitTree withdrawn_;                 // by index of the row
  std::vector<RowId> withdrawn_row_;  // where it starts
  std::size_t waiting_ = 0;
  double cleared_at_ = 0;
  bool closed_ = false;
  std::string problem_;
};

}  // namespace kv_offload
