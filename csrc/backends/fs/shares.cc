// SPDX-License-Identifier: Apache-2.0
#include "backends/fs/shares.h"

#include <algorithm>
#include <utility>

namespace kv_offload {

std::uint64_t Shares::share() const {
  return root_.space->bound() / std::max<std::size_t>(figures_.sharers.size(), 1);
}

std::uint64_t Shares::quantum() const {
  return std::max(std::min(max_bytes_ / kParts, kMaxRequestBytes), kLeastWrites * largest_write_.load());
}

void Shares::on_write(std::uint64_t bytes) {
  if (bytes > largest_write_.load(std::memory_order_relaxed)) largest_write_.store(bytes);
}

void Shares::update_figures(const SpaceFigures& figures) {
  const Nanos now = clock_.now();
  const MutexLock lock(mutex_);
  // A claim lowers the wanted bytes; a new page has neither wanted bytes nor credit.
  if (figures.wanted < requested_ || figures.credit > 0) answered_ = now;
  figures_ = figures;
}

void Shares::ask() {
  const std::uint64_t enough = quantum();
  root_.space->publish_held(held());
  std::uint64_t wanted = 0, credit = 0;
  {
    const Nanos now = clock_.now();
    const bool below = is_below() && !sharers_above().empty();  // otherwise no sharer can give space
    const MutexLock lock(mutex_);
    // Asks slightly early, because some of the bound is kept for directories.
    const bool full = figures_.used + figures_.reserved + 2 * enough > root_.space->bound();
    wanted = below && full ? enough : 0;
    credit = figures_.credit;
    const bool same = wanted == 0 ? figures_.wanted == 0 && credit == 0
                                  : credit + figures_.wanted >= enough && credit <= enough;
    if (requested_ == 0) answered_ = now;
    requested_ = wanted > credit ? (same ? figures_.wanted : wanted - credit) : 0;
    if (same) return;
  }
  root_.space->ask(wanted);
}

bool Shares::is_below() const {
  const std::uint64_t own_held = held();
  const MutexLock lock(mutex_);
  return figures_.sharers.size() > 1 && own_held < share();
}

bool Shares::is_root_above(std::uint64_t bytes) const {
  const MutexLock lock(mutex_);
  return figures_.state == SpaceState::kCounted && figures_.used > bytes &&
         figures_.used - bytes > figures_.doubt;
}

bool Shares::has_request() const {
  const MutexLock lock(mutex_);
  return figures_.space_requested;
}

bool Shares::is_overdue() const {
  const Nanos now = clock_.now();
  const MutexLock lock(mutex_);
  return requested_ > 0 && now - answered_ > kRequestTimeout;
}

bool Shares::may_be_granted() const { return is_below() && !is_overdue() && !sharers_above().empty(); }

bool Shares::is_open(const std::string& namespace_name) const {
  const MutexLock lock(mutex_);
  return std::any_of(
      figures_.sharers.begin(), figures_.sharers.end(),
      [&](const SpaceFigures::Sharer& sharer) { return is_of_namespace(sharer.id, namespace_name); });
}

std::vector<std::uint64_t> Shares::sharers_above() const {
  const std::shared_ptr<FsEpoch> own = records_.epoch();
  const std::uint64_t own_id = sharer(root_.namespace_name, own ? own->number : 0);
  const std::uint64_t own_held = held();
  const MutexLock lock(mutex_);
  std::uint64_t most = 0;
  for (const SpaceFigures::Sharer& other : figures_.sharers) {
    if (other.id != own_id) most = std::max(most, other.held);
  }
  // A small difference is ignored: otherwise two servers would take from each other forever.
  const std::uint64_t above = most > share() ? share() : own_held + quantum();
  std::vector<std::uint64_t> others;
  for (const SpaceFigures::Sharer& other : figures_.sharers) {
    if (other.id != own_id && other.held > above) others.push_back(other.id);
  }
  return others;
}

}  // namespace kv_offload
