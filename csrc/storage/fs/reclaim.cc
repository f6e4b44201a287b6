#include "storage/fs/reclaim.h"

#include <fcntl.h>
#include <sys/file.h>

#include <algorithm>
#include <cerrno>
#include <limits>
#include <utility>

#include "storage/fs/generation.h"
#include "storage/fs/layout.h"
#include "storage/fs/walk.h"

namespace kv_offload {
namespace {

struct OpenGeneration {
  Fd directory;
  std::vector<std::uint32_t> leaves;
};

// Those whose records somebody may hit.
std::vector<OpenGeneration> open_live(FileOps& ops, int root, const std::vector<std::string>& names) {
  std::vector<OpenGeneration> live;
  int error = 0;
  for (const std::string& name : names) {
    const Fd space = open_fd(ops, root, name, kOpenDirectory, 0, &error);
    if (!space) continue;
    for (const std::uint64_t number : live_generations(ops, space.get())) {
      OpenGeneration found;
      found.directory = open_fd(ops, space.get(), layout::generation_name(number), kOpenDirectory, 0, &error);
      std::uint64_t ignored = 0;
      if (found.directory && list_leaves(ops, found.directory.get(), &found.leaves, &ignored))
        live.push_back(std::move(found));
    }
  }
  return live;
}

// Records used at or before this time have to go for `enough` bytes.
std::int64_t newest_to_go(FileOps& ops, const std::vector<OpenGeneration>& live, std::uint64_t enough) {
  std::vector<std::pair<std::int64_t, std::uint64_t>> ages;  // mtime, bytes on disk
  for (const OpenGeneration& generation : live) {
    for (const std::uint32_t leaf : generation.leaves) {
      LeafFound found;
      (void)scan_leaf(ops, generation.directory.get(), leaf, {}, &found);
      for (const FoundRecord& record : found.records) ages.emplace_back(record.mtime_nanos, record.charge());
    }
  }
  std::sort(ages.begin(), ages.end());
  std::uint64_t sum = 0;
  for (const auto& [mtime, bytes] : ages) {
    sum += bytes;
    if (sum >= enough) return mtime;
  }
  return std::numeric_limits<std::int64_t>::max();
}

}  // namespace

bool namespace_is_open(FileOps& ops, int namespace_directory) {
  int error = 0;
  const Fd mark =
      open_fd(ops, namespace_directory, std::string(layout::kOpenFile), O_RDWR | O_NOFOLLOW, 0, &error);
  return mark && lock_file(ops, mark.get(), LOCK_EX | LOCK_NB) != 0;
}

std::uint64_t reclaim_namespace(FileOps& ops, int root, const std::string& name, std::uint64_t enough,
                                bool even_open, const std::atomic<bool>& stop, const Gone& gone) {
  int error = 0;
  const Fd directory = open_fd(ops, root, name, kOpenDirectory, 0, &error);
  if (!directory) return 0;
  const std::string mark_name(layout::kOpenFile);
  const Fd mark = open_fd(ops, directory.get(), mark_name, O_RDWR | O_NOFOLLOW, 0, &error);
  // Held while we remove, so that nobody opens it under our hands.
  const bool closed = !mark || lock_file(ops, mark.get(), LOCK_EX | LOCK_NB) == 0;
  if (!closed && !even_open) return 0;
  std::vector<std::uint64_t> generations;
  if (!list_generations(ops, directory.get(), &generations)) return 0;
  std::uint64_t freed = 0;
  FileInfo info;
  // Where one stays (it cannot be read or removed, or we are to stop) those after it stay too, though empty:
  // who starts uses the newest, and would find again what was recorded before a reset.
  bool older_stays = false;
  for (const std::uint64_t number : generations) {
    if (freed >= enough) break;
    freed +=
        reclaim_generation(ops, directory.get(), number, enough - freed, closed && !older_stays, stop, gone);
    older_stays |= ops.stat(directory.get(), layout::generation_name(number), &info) != -ENOENT;
  }
  generations.clear();
  if (!closed || !list_generations(ops, directory.get(), &generations) || !generations.empty()) return freed;
  std::uint64_t last = remove_marks(ops, directory.get(), [](std::uint64_t) { return true; });
  for (const std::string& file : {std::string(layout::kNamespaceFile), mark_name}) {
    if (ops.stat(directory.get(), file, &info) == 0 && ops.unlink(directory.get(), file) == 0) {
      last += info.charge();
    }
  }
  if (ops.stat(root, name, &info) == 0 && ops.rmdir(root, name) == 0) last += info.disk_bytes;
  gone(last);
  return freed + last;
}

Reclaimed reclaim_oldest(FileOps& ops, int root, const std::vector<std::string>& names, std::uint64_t enough,
                         bool dry_run, const Gone& gone) {
  Reclaimed reclaimed;
  if (enough == 0) return reclaimed;
  const std::vector<OpenGeneration> live = open_live(ops, root, names);
  const std::int64_t newest = newest_to_go(ops, live, enough);
  for (const OpenGeneration& generation : live) {
    for (const std::uint32_t leaf : generation.leaves) {
      LeafFound found;
      (void)scan_leaf(ops, generation.directory.get(), leaf, {}, &found);
      for (const FoundRecord& record : found.records) {
        if (record.mtime_nanos > newest || reclaimed.bytes >= enough) continue;
        const std::string path = layout::record_path(record.key, record.file_bytes);
        if (!dry_run && ops.unlink(generation.directory.get(), path) != 0) continue;
        reclaimed.bytes += record.charge();
        ++reclaimed.records;
        if (!dry_run) gone(record.charge());
      }
    }
  }
  return reclaimed;
}

}  // namespace kv_offload
