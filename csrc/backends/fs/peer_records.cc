// SPDX-License-Identifier: Apache-2.0
#include "backends/fs/peer_records.h"

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

void PeerRecords::poll(std::uint64_t writes) {
  if (records_.extent() != RecordIndex::Extent::kOrder) return;
  const Nanos started = clock_.now();
  if ((writes == writes_seen_ && !unsettled_) || started < next_poll_) return;
  writes_seen_ = writes;
  unsettled_ = !adopt_changed_leaves();
  next_poll_ = started + (clock_.now() - started) * 20;
}

// Compares each directory's mtime with its previous value only: another host's clock may be ahead, or go
// back. Returns true if all directories are settled.
bool PeerRecords::adopt_changed_leaves() {
  const std::shared_ptr<FsEpoch> own = records_.epoch();
  std::vector<std::uint32_t> leaves;
  std::uint64_t ignored = 0;
  if (!own || !list_leaves(ops_, own->directory.get(), &leaves, &ignored)) return true;
  if (std::exchange(epoch_, own->number) != own->number || leaves_.empty())
    leaves_.assign(layout::kLeaves, {});
  bool all_settled = true;
  FileInfo info;
  for (const std::uint32_t leaf : leaves) {
    if (stop_.load()) break;
    const int directory = own->directory.get();
    (void)ops_.refresh(directory, layout::leaf_path(leaf));
    if (ops_.stat(directory, layout::leaf_path(leaf), &info) != 0) continue;
    Listed& listed = leaves_[leaf];
    const Nanos now = clock_.now();
    if (listed.mtime != info.mtime_nanos) listed = {info.mtime_nanos, now, false};
    if (listed.settled) continue;
    listed.settled = now - listed.changed >= kGrain;
    all_settled &= listed.settled;
    LeafFound found;
    (void)scan_leaf(ops_, directory, leaf, {.names_only = true}, &found);
    if (records_.has_tenants()) {
      // First, so that no eviction takes a record for one of tenant 0 meanwhile.
      std::vector<FoundRecord> unknown = records_.unknown_of(found.records);
      read_tenants(ops_, *own, records_, unknown, stop_);
      records_.adopt_names(own, unknown, true, stop_);
    }
    records_.adopt_names(own, found.records, true, stop_);
  }
  return all_settled;
}

}  // namespace kv_offload
