// SPDX-License-Identifier: Apache-2.0
// LentRows: the own rows that neighbours may read, and those that may not be reused yet because a neighbour
// reads them.
//
// No call allocates memory, except for the constructor. The cost of a call does not depend on the number of
// rows: poll() continues where the last one stopped.
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
  // Makes the table of `region`; neighbours do not find it yet. Throws ResourceError (no memory; a live
  // process still reads the table of an earlier owner with other row sizes or another format). The region
  // must outlive this.
  LentRows(HostRegion& region, const SharedRowsLayout& layout, std::string_view identity);
  // Lets neighbours find the table. If they cannot, problem() says why.
  void share();
  // Visits the rows that live neighbours read since the time of an earlier owner: see SharedRows. Clears the
  // pins of dead ones.
  void for_each_pinned(const std::function<void(RowId, std::uint32_t)>& visit);

  std::uint64_t table_id() const { return rows_.id(); }

  // publish() of this row follows soon.
  void prefetch(RowId row, const ChunkKey& key) const { rows_.prefetch(row, key); }
  // The row's bytes are complete.
  void publish(RowId row, const ChunkKey& key, std::uint32_t depth, std::uint8_t group) {
    rows_.publish(row, key, depth, group);
  }
  // Call before a row is reused. False: a neighbour reads it; poll() reports the end of that read.
  bool withdraw(RowId row) { return rows_.withdraw(row) || hold_back(row); }
  bool is_read(RowId row) const { return rows_.is_pinned(row); }
  // True if no neighbour reads the row or has used it since the last take_use().
  bool is_idle(RowId row) const { return rows_.is_idle(row); }
  // True if a neighbour has used the row since the last call.
  bool take_use(RowId row) { return rows_.take_use(row); }
  // Visits at most kRowsPerPoll withdrawn rows, and calls free(row) for those that no neighbour reads any
  // more. While any row waits for a neighbour (`is_waiting`, or a withdrawn one), clears the pins of dead
  // neighbours, of kPinsPerPoll rows at most; a pass over all rows begins at most once a second.
  void poll(double now, bool is_waiting, const std::function<void(RowId)>& free);
  static constexpr std::size_t kRowsPerPoll = 256;
  static constexpr std::uint32_t kPinsPerPoll = 4096;
  // Nothing is served any more: the weights may have changed. Withdrawn rows stay so.
  void close();
  std::size_t waiting() const { return waiting_; }
  const std::string& problem() const { return problem_; }

 private:
  // Waits for the end of a read of this withdrawn row. Returns false.
  bool hold_back(RowId row);
  void clear_dead_readers(double now);
  // On the rows with the indices [first, first + count). Skips the readers in `alive_`.
  void clear_dead_readers(std::uint32_t first, std::uint32_t count);

  HostRegion& region_;
  const RowId row_pages_;
  SharedRows rows_;
  BitTree withdrawn_;                 // by index of the row
  std::vector<RowId> withdrawn_row_;  // where it starts
  std::size_t waiting_ = 0;
  std::size_t next_withdrawn_ = 0;  // the next one to visit, or a number before it
  // ---- of the pass that clears pins
  double began_at_ = 0;
  std::uint32_t next_pins_ = 0;
  std::uint64_t alive_ = 0;  // readers that were found alive
  bool closed_ = false;
  std::string problem_;
};

}  // namespace kv_offload
