// SPDX-License-Identifier: Apache-2.0
#include "cache/neighbours.h"

#include <algorithm>
#include <utility>

#include "base/thread.h"
#include "cache/cache_types.h"

namespace kv_offload {
namespace {

constexpr unsigned kNumbers = RequestReport::kNeighbourNumbers;  // of shared regions
// A neighbour that workers cannot map is left after about a minute, and tried again after ten.
constexpr std::uint32_t kRefusedChecks = 60;
constexpr std::uint32_t kSkippedChecks = 600;

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
  filters_.reserve(neighbours_.size());
  search();
  {
    MutexLock lock(mutex_);
    take_in();
  }
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
  while (!closing_ && !is_over()) {
    wake_.wait_for(mutex_, interval_);
    if (closing_) return;
    mutex_.unlock();
    try {
      check();
    } catch (const std::exception&) {  // out of memory: the next check does what is left
    }
    mutex_.lock();
  }
}

bool Neighbours::is_over() const {
  return stopped_ && found_.empty() &&
         std::none_of(neighbours_.begin(), neighbours_.end(),
                      [](const Neighbour& one) { return one.region != nullptr; });
}

void Neighbours::check() {
  search();
  leave_ended(find_ended());
}

void Neighbours::search() {
  for (unsigned number = 0; number < kNumbers; ++number) {
    {
      MutexLock lock(mutex_);
      if (stopped_) return;
      Number& one = numbers_[number];
      if (one.is_known) continue;
      if (one.skipped_checks > 0) {
        --one.skipped_checks;
        continue;
      }
    }
    std::string problem;
    auto region = NeighbourRegion::attach(region_, number, layout_, identity_, &problem);
    MutexLock lock(mutex_);
    if (stopped_) return;
    Number& one = numbers_[number];
    if (!problem.empty() && problem != one.refused) problems_.push_back(problem);
    one.refused = std::move(problem);
    if (!region) continue;
    found_.push_back(std::move(region));
    one.is_known = true;
  }
}

// Without the lock, because is_alive() makes system calls. Only leave_ended() destroys regions.
std::vector<const NeighbourRegion*> Neighbours::find_ended() {
  std::vector<NeighbourRegion*> found;
  {
    MutexLock lock(mutex_);
    for (const auto& region : found_) found.push_back(region.get());
  }
  std::vector<const NeighbourRegion*> ended_found;
  for (NeighbourRegion* region : found) {
    if (!region->is_alive()) ended_found.push_back(region);
  }
  const std::size_t slots = region_.neighbour_slots();
  for (std::size_t slot = 0; slot < slots; ++slot) {
    NeighbourRegion* region = nullptr;
    {
      MutexLock lock(mutex_);
      region = neighbours_[slot].region.get();
    }
    if (region == nullptr || region->is_alive()) continue;
    MutexLock lock(mutex_);
    neighbours_[slot].has_ended = true;
  }
  return ended_found;
}

void Neighbours::leave_ended(const std::vector<const NeighbourRegion*>& ended_found) {
  std::vector<std::unique_ptr<NeighbourRegion>> ended;  // unmapped after the lock is released
  MutexLock lock(mutex_);
  ended.reserve(neighbours_.size() + found_.size());
  for (std::uint32_t slot = 0; slot < neighbours_.size(); ++slot) {
    Neighbour& neighbour = neighbours_[slot];
    if (!neighbour.region) continue;
    Number& number = numbers_[neighbour.region->number()];
    neighbour.refused_checks = region_.is_refused(slot) ? neighbour.refused_checks + 1 : 0;
    if (neighbour.refused_checks >= kRefusedChecks) {
      neighbour.has_ended = true;
      number.skipped_checks = kSkippedChecks;
      if (!number.is_reported) {
        problems_.push_back(fmt::format(
            "the host memory of neighbour {} is not used: a rank cannot map it, see its log. The next try is "
            "in about 10 minutes",
            neighbour.region->number()));
      }
      number.is_reported = true;
    }
    if (!neighbour.has_ended && !stopped_) continue;
    if (neighbour.held_bytes > 0 || neighbour.is_filter_read) continue;  // in use: left in a later call
    region_.dismiss_neighbour(slot);
    number.is_known = false;
    ended.push_back(std::move(neighbour.region));
    neighbour = {};
  }
  while (used_slots_ > 0 && !neighbours_[used_slots_ - 1].region) --used_slots_;
  for (auto& region : found_) {
    if (!stopped_ && std::ranges::find(ended_found, region.get()) == ended_found.end()) continue;
    numbers_[region->number()].is_known = false;
    ended.push_back(std::move(region));
  }
  std::erase(found_, nullptr);
}

void Neighbours::take_in() {
  while (!found_.empty()) {
    std::uint32_t slot = 0;
    while (slot < neighbours_.size() && (neighbours_[slot].region != nullptr || !region_.has_unmapped(slot)))
      ++slot;
    if (slot == neighbours_.size()) return;  // all are in use: later
    neighbours_[slot].region = std::move(found_.back());
    found_.pop_back();
    used_slots_ = std::max<std::size_t>(used_slots_, slot + 1);
    region_.request_neighbour(slot, neighbours_[slot].region->area());
  }
}

void Neighbours::poll() {
  if (interval_ == Nanos(0)) {
    leave_filters();
    check();
  }
  MutexLock lock(mutex_);
  forget_filters();
  if (!stopped_) take_in();
  for (std::uint32_t slot = 0; slot < used_slots_; ++slot) {
    Neighbour& neighbour = neighbours_[slot];
    if (!neighbour.region) continue;
    neighbour.is_mapped = region_.has_mapped(slot);
    if (neighbour.is_mapped) numbers_[neighbour.region->number()].is_reported = false;
  }
}

// A neighbour that has ended is not read again, so the background thread can unmap it after the next
// poll().
void Neighbours::read_filters() {
  MutexLock lock(mutex_);
  reads_filters_ = true;
  if (stopped_) return;
  for (Neighbour& neighbour : used()) {
    if (!is_usable(neighbour)) continue;
    filters_.push_back(neighbour.region->filter());
    neighbour.is_filter_read = true;
  }
}

void Neighbours::forget_filters() {
  reads_filters_ = false;
  filters_.clear();
  for (Neighbour& neighbour : used()) neighbour.is_filter_read = false;
}

void Neighbours::leave_filters() {
  if (!reads_filters_) return;
  MutexLock lock(mutex_);
  forget_filters();
}

std::optional<SharedRowsView::Found> Neighbours::find_in(const Neighbour& neighbour, const ChunkKey& key,
                                                         std::uint32_t group) const {
  if (!is_usable(neighbour)) return std::nullopt;
  const auto found = neighbour.region->find(key);
  if (!found || found->group != group) return std::nullopt;
  const std::uint64_t start = std::uint64_t{found->row} * kPageBytes;
  if (start > layout_.area_bytes || row_bytes_[group] > layout_.area_bytes - start) return std::nullopt;
  return found;
}

bool Neighbours::use(const ChunkKey& key, std::uint32_t group) {
  MutexLock lock(mutex_);
  if (stopped_) return false;
  for (const Neighbour& neighbour : used()) {
    const auto found = find_in(neighbour, key, group);
    if (!found) continue;
    neighbour.region->mark_used(found->row);
    return true;
  }
  return false;
}

std::optional<Neighbours::Borrowed> Neighbours::borrow(const ChunkKey& key, std::uint32_t group) {
  MutexLock lock(mutex_);
  if (stopped_) return std::nullopt;
  for (std::uint32_t slot = 0; slot < used_slots_; ++slot) {
    Neighbour& neighbour = neighbours_[slot];
    const auto found = find_in(neighbour, key, group);
    if (!found) continue;
    const RowId row = region_.neighbour_row(slot, found->row);
    // A row whose chunk was forgotten here may still be held, under another key than the found one only if
    // the table is damaged.
    if (holds_.contains(row)) continue;
    if (neighbour.held_bytes + row_bytes_[group] > layout_.area_bytes / 2) continue;
    Hold& hold = holds_[row];
    if (!neighbour.region->pin(*found)) {
      holds_.erase(row);
      continue;
    }
    hold = {1, row_bytes_[group]};
    neighbour.held_bytes += hold.bytes;
    return Borrowed{row, found->depth};
  }
  return std::nullopt;
}

void Neighbours::hold(RowId row) noexcept {
  MutexLock lock(mutex_);
  ++holds_.find(row)->second.holds;
}

void Neighbours::release(RowId row) noexcept {
  MutexLock lock(mutex_);
  const auto found = holds_.find(row);
  if (--found->second.holds > 0) return;
  Neighbour& neighbour = neighbours_[slot_of(row)];
  neighbour.held_bytes -= found->second.bytes;
  neighbour.region->unpin(row - region_.neighbour_row(slot_of(row), 0));
  holds_.erase(found);
}

unsigned Neighbours::number_of(RowId row) const {
  MutexLock lock(mutex_);
  return neighbours_[slot_of(row)].region->number();
}

void Neighbours::stop() {
  MutexLock lock(mutex_);
  stopped_ = true;
  forget_filters();
  wake_.notify_all();
}

std::size_t Neighbours::size() const {
  MutexLock lock(mutex_);
  if (stopped_) return 0;
  return static_cast<std::size_t>(std::ranges::count_if(neighbours_, is_usable));
}

void Neighbours::add_problem(std::string problem) {
  MutexLock lock(mutex_);
  problems_.push_back(std::move(problem));
}

std::vector<std::string> Neighbours::take_problems() {
  MutexLock lock(mutex_);
  return std::exchange(problems_, {});
}

}  // namespace kv_offload
