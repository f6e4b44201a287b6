// SPDX-License-Identifier: Apache-2.0
#include "cache/lent_rows.h"

#include "base/status.h"

namespace kv_offload {
namespace {

constexpr double kClearSeconds = 1;

}  // namespace

LentRows::LentRows(HostRegion& region, const SharedRowsLayout& layout, std::string_view identity)
    : region_(region),
      row_pages_(static_cast<RowId>(layout.row_bytes / kPageBytes)),
      rows_(region.memory_of_shared_rows(layout.bytes), layout, identity),
      withdrawn_(layout.capacity, false),
      withdrawn_row_(layout.capacity, kNoRow) {
  try {
    region_.share();
  } catch (const ResourceError& error) {
    problem_ = error.what();
  }
}

bool LentRows::withdraw(RowId row) {
  if (rows_.withdraw(row)) return true;
  const RowId index = row / row_pages_;
  if (withdrawn_.contains(index)) return false;
  withdrawn_.insert(index);
  withdrawn_row_[index] = row;
  ++waiting_;
  return false;
}

void LentRows::poll(double now, bool is_waiting, const std::function<void(RowId)>& free) {
  if (waiting_ == 0 && !is_waiting) return;
  if (now - cleared_at_ >= kClearSeconds) {
    cleared_at_ = now;
    clear_dead_readers();
  }
  for (std::size_t i = withdrawn_.first(); i != BitTree::kNone; i = withdrawn_.first(i + 1)) {
    if (rows_.is_pinned(withdrawn_row_[i])) continue;
    withdrawn_.erase(i);
    --waiting_;
    free(withdrawn_row_[i]);
  }
}

void LentRows::clear_dead_readers() {
  const std::uint64_t readers = rows_.readers();
  for (unsigned reader = 0; reader < kMostReaders; ++reader) {
    if ((readers >> reader & 1) != 0) region_.if_reader_is_dead(reader, [&] { rows_.clear_pins(reader); });
  }
}

void LentRows::close() {
  if (closed_) return;
  closed_ = true;
  rows_.close();
  region_.stop_sharing();
}

}  // namespace kv_offload
