// Records that other processes wrote into our namespace. The page of the space tells
// for nothing that somebody wrote; then the directories that changed are listed.
#include <fcntl.h>

#include <algorithm>

#include "storage/fs/layout.h"
#include "storage/fs/store.h"

namespace kv_offload {
namespace {
// A directory may change again within the grain of its time.
constexpr std::int64_t kGrainNanos = 1'000'000'000;
}  // namespace

void FsStore::look_for_foreign_records(const SpaceFigures& figures) {
  if (known_.load() != Known::kOrder) return;
  const Nanos started = clock_.now();
  if (figures.writes_by_others == foreign_writes_ || started < next_foreign_look_) return;
  foreign_writes_ = figures.writes_by_others;
  adopt_changed_leaves(newest_leaf_mtime_ - kGrainNanos);
  // Large roots are looked at less often: one twentieth of a thread.
  next_foreign_look_ = started + (clock_.now() - started) * 20;
}

// Adds the records of directories changed since.
void FsStore::adopt_changed_leaves(std::int64_t since_mtime) {
  const std::shared_ptr<Generation> own = generation();
  std::vector<std::uint32_t> leaves;
  std::uint64_t ignored = 0;
  if (!own || !list_leaves(ops_, own->directory.get(), &leaves, &ignored)) return;
  FileInfo info;
  for (const std::uint32_t leaf : leaves) {
    if (stop_.load()) break;
    const int directory = own->directory.get();
    if (ops_.stat(directory, layout::leaf_path(leaf), &info) != 0 || info.mtime_nanos < since_mtime) continue;
    newest_leaf_mtime_ = std::max(newest_leaf_mtime_, info.mtime_nanos);
    LeafFound found;
    (void)scan_leaf(ops_, directory, leaf, {.names_only = true}, &found);
    adopt_names(own, found.records, true);
  }
}

}  // namespace kv_offload
