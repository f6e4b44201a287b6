// SPDX-License-Identifier: Apache-2.0
#include "cache/neighbours.h"

#include <algorithm>
#include <utility>

#include "base/thread.h"
#include "cache/cache_types.h"

namespace kv_offload {
namespace {

constexpr Nanos kCheckInterval = std::chrono::seconds(1);        // of whether the neighbours live
constexpr unsigned kNumbers = RequestReport::kNeighbourNumbers;  // of shared regions

}  // namespace

Neighbours::Neighbours(HostRegion& region, const SharedRowsLayout& layout, std::string identity,
                       std::vector<std::uint64_t> row_bytes, Nanos interval)
    : region_(region),
      layout_(layout),
      identity_(std::move(identity)),
      row_bytes_(std::move(row_bytes)),
      interval_(interval),
      first_row_(region.neighbour_row(0, 0)),
      slot_rows_(region.neighbour_row(1, 0) - first_row_),
      neighbours_(region.neighbour_slots()) {
  search();
  take_in();
  if (interval_ > Nanos(0)) thread_ = std::thread([this] { run_thread(); });
}

Neighbours::~Neighbours() {
  {
    MutexLock lock(mutex_);
    closing_ = true;
    wake_.notify_all();
  }
  if (thread_.joinable()) thread_.join();
}

void Neighbours::run_thread() {
  begin_thread("kvo-neighbours", CpuShare::kFull);
  MutexLock lock(mutex_);
  while (!closing_) {
    wake_.wait_for(mutex_, interval_);
    if (closing_) return;
    mutex_.unlock();
    search();
    mutex_.lock();
  }
}

void Neighbours::search() {
  for (unsigned number = 0; number < kNumbers; ++number) {
    {
      MutexLock lock(mutex_);
      if (known_[number]) continue;
    }
    std::string problem;
    auto region = NeighbourRegion::attach(region_, number, layout_, identity_, &problem);
    MutexLock lock(mutex_);
    if (!problem.empty() && problem != refused_[number]) problems_.push_back(problem);
    refused_[number] = std::move(problem);
    if (!region) continue;
    known_[number] = true;
    found_.push_back(std::move(region));
  }
}

void Neighbours::take_in() {
  MutexLock lock(mutex_);
  while (!found_.empty()) {
    std::uint32_t slot = 0;
    while (slot < neighbours_.size() && (neighbours_[slot].region != nullptr || !region_.has_unmapped(slot)))
      ++slot;
    if (slot == neighbours_.size()) return;  // all are in use: later
    neighbours_[slot].region = std::move(found_.back());
    found_.pop_back();
    region_.request_neighbour(slot, neighbours_[slot].region->area());
  }
}

void Neighbours::poll(Nanos now) {
  if (interval_ == Nanos(0) && !stopped_) search();
  if (!stopped_) take_in();
  for (std::uint32_t slot = 0; slot < neighbours_.size(); ++slot) {
    Neighbour& neighbour = neighbours_[slot];
    if (neighbour.region && !neighbour.is_mapped) neighbour.is_mapped = region_.has_mapped(slot);
  }
  if (interval_ > Nanos(0) && checked_at_ && now - *checked_at_ < kCheckInterval) return;
  checked_at_ = now;
  leave_ended();
}

void Neighbours::leave_ended() {
  for (std::uint32_t slot = 0; slot < neighbours_.size(); ++slot) {
    Neighbour& neighbour = neighbours_[slot];
    if (!neighbour.region) continue;
    neighbour.has_ended = neighbour.has_ended || stopped_ || !neighbour.region->is_alive();
    if (!neighbour.has_ended || neighbour.held > 0) continue;
    region_.dismiss_neighbour(slot);
    const unsigned number = neighbour.region->number();
    neighbour = {};
    MutexLock lock(mutex_);
    known_[number] = false;
  }
}

std::optional<SharedRowsView::Found> Neighbours::find_in(const Neighbour& neighbour, const ChunkKey& key,
                                                         std::uint32_t group) const {
  if (!neighbour.region || !neighbour.is_mapped || neighbour.has_ended) return std::nullopt;
  const auto found = neighbour.region->find(key);
  if (!found || found->group != group) return std::nullopt;
  const std::uint64_t start = std::uint64_t{found->row} * kPageBytes;
  if (start > layout_.area_bytes || row_bytes_[group] > layout_.area_bytes - start) return std::nullopt;
  return found;
}

bool Neighbours::has(const ChunkKey& key, std::uint32_t group) const {
  if (stopped_) return false;
  return std::any_of(neighbours_.begin(), neighbours_.end(),
                     [&](const Neighbour& one) { return find_in(one, key, group).has_value(); });
}

std::optional<Neighbours::Borrowed> Neighbours::borrow(const ChunkKey& key, std::uint32_t group) {
  if (stopped_) return std::nullopt;
  for (std::uint32_t slot = 0; slot < neighbours_.size(); ++slot) {
    Neighbour& neighbour = neighbours_[slot];
    const auto found = find_in(neighbour, key, group);
    if (!found) continue;
    const RowId row = region_.neighbour_row(slot, found->row);
    // A row whose chunk was forgotten here may still be held, under another key than the found one only if
    // the table is damaged.
    if (holds_.contains(row) || 2 * neighbour.held >= layout_.capacity) continue;
    std::uint32_t& holds = holds_[row];
    if (!neighbour.region->pin(*found)) {
      holds_.erase(row);
      continue;
    }
    holds = 1;
    ++neighbour.held;
    return Borrowed{row, found->depth};
  }
  return std::nullopt;
}

void Neighbours::release(RowId row) noexcept {
  const auto found = holds_.find(row);
  if (--found->second > 0) return;
  holds_.erase(found);
  const std::uint32_t slot = slot_of(row);
  --neighbours_[slot].held;
  neighbours_[slot].region->unpin(row - region_.neighbour_row(slot, 0));
}

unsigned Neighbours::number_of(RowId row) const { return neighbours_[slot_of(row)].region->number(); }

void Neighbours::stop() { stopped_ = true; }

std::size_t Neighbours::usable() const {
  return static_cast<std::size_t>(std::count_if(neighbours_.begin(), neighbours_.end(), [](const auto& one) {
    return one.region != nullptr && one.is_mapped && !one.has_ended;
  }));
}

std::vector<std::string> Neighbours::take_problems() {
  MutexLock lock(mutex_);
  return std::exchange(problems_, {});
}

}  // namespace kv_offload
