#include "storage/fs/foreign_records.h"

#include <algorithm>

#include "storage/fs/layout.h"
#include "storage/fs/walk.h"

namespace kv_offload {
namespace {
// A directory may change again within the grain of its time.
constexpr std::int64_t kGrainNanos = 1'000'000'000;
}  // namespace

void ForeignRecords::look(std::uint64_t writes) {
  if (records_.extent() != KnownRecords::Extent::kOrder) return;
  const Nanos started = clock_.now();
  if (writes == writes_seen_ || started < next_look_) return;
  writes_seen_ = writes;
  adopt_changed_leaves(newest_leaf_mtime_ - kGrainNanos);
  next_look_ = started + (clock_.now() - started) * 20;
}

// Adds the records of directories changed since.
void ForeignRecords::adopt_changed_leaves(std::int64_t since_mtime) {
  const std::shared_ptr<Generation> own = records_.generation();
  std::vector<std::uint32_t> leaves;
  std::uint64_t ignored = 0;
  if (!own || !list_leaves(ops_, own->directory.get(), &leaves, &ignored)) return;
  FileInfo info;
  for (const std::uint32_t leaf : leaves) {
    if (stop_.load()) break;
    const int directory = own->directory.get();
    (void)ops_.refresh(directory, layout::leaf_path(leaf));
    if (ops_.stat(directory, layout::leaf_path(leaf), &info) != 0 || info.mtime_nanos < since_mtime) continue;
    newest_leaf_mtime_ = std::max(newest_leaf_mtime_, info.mtime_nanos);
    LeafFound found;
    (void)scan_leaf(ops_, directory, leaf, {.names_only = true}, &found);
    records_.adopt_names(own, found.records, true, stop_);
  }
}

}  // namespace kv_offload
