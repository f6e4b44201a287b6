// SPDX-License-Identifier: Apache-2.0
#include "backends/fs/peer_records.h"

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
  if (writers_seen_ != figures.writers) {
    writers_seen_ = figures.writers;
    members_changed_ = true;
  }
  list_changes(figures.changes_by_others, unsettled_ || members_changed_);
}

void PeerRecords::watch(std::uint64_t changes) { list_changes(changes, false); }

void PeerRecords::list_changes(std::uint64_t changes, bool always) {
  if (records_.extent() != RecordIndex::Extent::kOrder) return;
  const Nanos started = clock_.now();
  if ((changes == changes_seen_ && !always) || started < next_poll_) return;
  changes_seen_ = changes;
  members_changed_ = false;
  unsettled_ = !list_changed_leaves();
  next_poll_ = started + (clock_.now() - started) * 20;
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
    leaves_.assign(layout::kLeaves, {});
  bool all_settled = true;
  ListedNames names;
  FileInfo info;
  for (const std::uint32_t leaf : leaves) {
    if (stop_.load()) break;
    const int directory = own->directory.get();
    (void)ops_.refresh(directory, layout::leaf_path(leaf));
    if (const int rc = ops_.stat(directory, layout::leaf_path(leaf), &info); rc != 0) {
      all_settled &= rc == -ENOENT;
      continue;
    }
    Listed& listed = leaves_[leaf];
    const Nanos now = clock_.now();
    if (listed.mtime != info.mtime_nanos) listed = {info.mtime_nanos, now, false};
    if (listed.settled) continue;
    listed.settled = now - listed.changed >= kGrain;
    all_settled &= listed.settled;
    LeafFound found;
    if (scan_leaf(ops_, directory, leaf, {.names_only = true}, &found)) {
      names.add(leaf, found.records);
    } else {
      listed = {};
      all_settled = false;
    }
    if (records_.has_tenants()) {
      // First, so that no eviction takes a record for one of tenant 0 meanwhile.
      std::vector<FoundRecord> unknown = records_.unknown_of(found.records);
      read_tenants(ops_, *own, records_, unknown, stop_);
      records_.adopt_names(own, unknown, true, stop_);
    }
    records_.adopt_names(own, found.records, true, stop_);
  }
  // Other servers evicted most of them. If there are more than those can have evicted, the root is counted.
  changes_.add_missing(names.forget_missing(ops_, own, records_, stop_));
  return all_settled;
}

}  // namespace kv_offload
