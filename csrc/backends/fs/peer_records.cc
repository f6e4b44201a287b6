// SPDX-License-Identifier: Apache-2.0
#include "backends/fs/peer_records.h"

#include <algorithm>
#include <cerrno>
#include <utility>

#include "backends/fs/layout.h"
#include "backends/fs/scanner.h"
#include "backends/fs/walk.h"

namespace kv_offload {
namespace {
// A directory may change again without a new mtime within the timestamp granularity, which is at most 2 s on
// existing file systems.
constexpr Nanos kGrain{std::chrono::seconds(3)};
}  // namespace

void PeerRecords::poll(const SpaceFigures& figures) {
  count_removals(figures.removals_by_others);
  const std::uint64_t removals = watch_removals_ ? figures.removals_by_others : 0;
  if (watch_removals_ && std::exchange(writers_seen_, figures.writers) != figures.writers) unsettled_ = true;
  list_if_due(figures.writes_by_others + removals, unsettled_);
}

void PeerRecords::watch(std::uint64_t changes) { list_if_due(changes, false); }

void PeerRecords::list_if_due(std::uint64_t changes, bool always) {
  if (changes == changes_seen_ && !always) return;
  const Nanos started = clock_.now();
  if (records_.extent() != RecordIndex::Extent::kOrder || started < next_poll_) {
    unsettled_ = true;
    return;
  }
  changes_seen_ = changes;
  unsettled_ = true;  // also if the listing throws
  unsettled_ = !list_changed_leaves();
  next_poll_ = started + (clock_.now() - started) * 20;
}

// Other servers change the page soon after they removed a file, so the page explains a missing record within
// one poll.
void PeerRecords::count_removals(std::uint64_t removals) {
  constexpr std::uint64_t kMostAtOnce = std::uint64_t{1} << 32;  // more: the numbers are of another page
  const std::uint64_t more = removals - removals_seen_.value_or(removals);
  removals_seen_ = removals;
  if (more > kMostAtOnce) {
    missing_.records = removals_left_ = 0;
    return;
  }
  removals_left_ += more;
  explain_missing();
  if (missing_.records == 0 || clock_.now() - missing_.since < kGrain) return;
  changes_.add_missing(std::exchange(missing_.records, 0));
}

void PeerRecords::explain_missing() {
  const std::uint64_t explained = std::min(missing_.records, removals_left_);
  missing_.records -= explained;
  removals_left_ -= explained;
}

// Compares each directory's mtime with its previous value only: another host's clock may be ahead, or go
// back. Returns true if all directories were listed and are settled.
bool PeerRecords::list_changed_leaves() {
  const std::shared_ptr<FsEpoch> own = records_.epoch();
  std::vector<std::uint32_t> leaves;
  std::uint64_t ignored = 0;
  if (!own) return true;
  if (!list_leaves(ops_, own->directory.get(), &leaves, &ignored)) return false;
  if (std::exchange(epoch_, own->number) != own->number || leaves_.empty())
    leaves_.assign(layout::kLeaves, {.present = true});  // the scan may have found records in any
  bool all_settled = true, any_listed = false;
  std::vector<bool> listed_now(layout::kLeaves, true);  // directories that vanished have no records
  for (const std::uint32_t leaf : leaves) listed_now[leaf] = false;
  for (std::uint32_t leaf = 0; leaf < layout::kLeaves; ++leaf) {
    if (listed_now[leaf] && std::exchange(leaves_[leaf], {}).present) any_listed = true;
  }
  std::vector<std::size_t> found_hashes;
  FileInfo info;
  for (const std::uint32_t leaf : leaves) {
    if (stop_.load()) return false;
    const int directory = own->directory.get();
    Listed& listed = leaves_[leaf];
    listed.present = true;
    (void)ops_.refresh(directory, layout::leaf_path(leaf));
    if (ops_.stat(directory, layout::leaf_path(leaf), &info) != 0) {
      listed.settled = all_settled = false;
      continue;
    }
    const Nanos now = clock_.now();
    if (listed.mtime != info.mtime_nanos) listed = {info.mtime_nanos, now, false, true};
    if (listed.settled) continue;
    LeafFound found;
    const bool complete = scan_leaf(ops_, directory, leaf, {.names_only = true}, &found).is_ok();
    if (complete) {
      any_listed = listed_now[leaf] = true;
      for (const FoundRecord& record : found.records) found_hashes.push_back(ChunkKey::Hash{}(record.key));
    }
    listed.settled = complete && now - listed.changed >= kGrain;
    all_settled &= listed.settled;
    if (records_.has_tenants()) {
      // First, so that no eviction takes a record for one of tenant 0 meanwhile.
      std::vector<FoundRecord> unknown = records_.unknown_of(found.records);
      read_tenants(ops_, *own, records_, unknown, stop_);
      records_.adopt_names(own, unknown, true, stop_);
    }
    records_.adopt_names(own, found.records, true, stop_);
  }
  if (watch_removals_ && any_listed) {
    std::vector<std::uint32_t> uncertain;
    const std::uint64_t forgotten =
        forget_missing(ops_, own, records_, std::move(found_hashes), listed_now, &uncertain, stop_);
    for (const std::uint32_t leaf : uncertain) {
      leaves_[leaf].settled = all_settled = false;
      leaves_[leaf].present = true;
    }
    if (forgotten > 0 && missing_.records == 0) missing_.since = clock_.now();
    missing_.records += forgotten;
    explain_missing();
  }
  removals_left_ = 0;
  return all_settled;
}

}  // namespace kv_offload
