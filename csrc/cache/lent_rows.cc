// SPDX-License-Identifier: Apache-2.0
#include "cache/lent_rows.h"

#include <algorithm>
#include <optional>

#include "base/status.h"
#include "base/steps.h"

namespace kv_offload {
namespace {

constexpr double kClearSeconds = 1;

SharedRows make_table(HostRegion& region, const SharedRowsLayout& layout, std::string_view identity) {
  const std::span<std::byte> memory = region.memory_of_shared_rows(layout.bytes);
  if (!SharedRows::has_other_layout(memory, layout)) return {memory, layout, identity};
  std::optional<SharedRows> rows;
  if (!region.if_no_reader_lives([&] { rows.emplace(memory, layout, identity); })) {
    throw_resource(
        "another process still reads the memory of the previous server, whose rows had other sizes or "
        "another format. Start again in a few seconds. If that process is stopped, end it or remove "
        "{}/kv_offload-kept-*",
        region.options().shm_directory);
  }
  return *rows;
}

}  // namespace

LentRows::LentRows(HostRegion& region, const SharedRowsLayout& layout, std::string_view identity)
    : region_(region),
      row_pages_(static_cast<RowId>(layout.row_bytes / kPageBytes)),
      rows_(make_table(region, layout, identity)),
      withdrawn_(layout.capacity, false),
      withdrawn_row_(layout.capacity, kNoRow) {}

void LentRows::share() {
  try {
    region_.share();
  } catch (const ResourceError& error) {
    problem_ = error.what();
  }
}

bool LentRows::hold_back(RowId row) {
  const RowId index = row / row_pages_;
  if (withdrawn_.contains(index)) return false;
  withdrawn_.insert(index);
  withdrawn_row_[index] = row;
  ++waiting_;
  return false;
}

void LentRows::poll(double now, bool is_waiting, const std::function<void(RowId)>& free) {
  if (waiting_ == 0 && !is_waiting) return;
  clear_dead_readers(now);
  for (std::size_t left = std::min(waiting_, kRowsPerPoll); left > 0; --left) {
    count_steps(1);
    std::size_t i = withdrawn_.first(next_withdrawn_);
    if (i == BitTree::kNone) i = withdrawn_.first();
    next_withdrawn_ = i + 1;
    if (rows_.is_pinned(withdrawn_row_[i])) continue;
    withdrawn_.erase(i);
    --waiting_;
    free(withdrawn_row_[i]);
  }
}

void LentRows::clear_dead_readers(double now) {
  if (next_pins_ == 0) {
    if (now - began_at_ < kClearSeconds) return;
    began_at_ = now;
    alive_ = 0;
  }
  const std::uint32_t first = next_pins_, count = std::min(kPinsPerPoll, rows_.capacity() - first);
  count_steps(count);
  clear_dead_readers(first, count);
  next_pins_ = first + count == rows_.capacity() ? 0 : first + count;
}

void LentRows::for_each_pinned(const std::function<void(RowId, std::uint32_t)>& visit) {
  clear_dead_readers(0, rows_.capacity());
  rows_.for_each_pinned(visit);
}

void LentRows::clear_dead_readers(std::uint32_t first, std::uint32_t count) {
  const std::uint64_t readers = rows_.readers(first, count) & ~alive_;
  for (unsigned reader = 0; reader < kMostReaders; ++reader) {
    if ((readers >> reader & 1) == 0) continue;
    // A new process may take the number between two calls, so each call asks again.
    if (!region_.if_reader_is_dead(reader, [&] { rows_.clear_pins(reader, first, count); }))
      alive_ |= std::uint64_t{1} << reader;
  }
}

void LentRows::close() {
  if (closed_) return;
  closed_ = true;
  rows_.close();
  region_.stop_sharing();
}

}  // namespace kv_offload
