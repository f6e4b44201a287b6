// SPDX-License-Identifier: Apache-2.0
#include "backends/fs/reclaim.h"

#include <fcntl.h>
#include <sys/file.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <limits>
#include <utility>

#include "backends/fs/fs_epoch.h"
#include "backends/fs/layout.h"
#include "backends/fs/walk.h"

namespace kv_offload {
namespace {

struct OpenEpoch {
  Fd directory;
  std::vector<std::uint32_t> leaves;
};

// Opens the epochs whose records some process may hit.
std::vector<OpenEpoch> open_live(FileOps& ops, int root, const std::vector<std::string>& names) {
  std::vector<OpenEpoch> live;
  int error = 0;
  for (const std::string& name : names) {
    const Fd space = open_fd(ops, root, name, kOpenDirectory, 0, &error);
    if (!space) continue;
    for (const std::uint64_t number : live_epochs(ops, space.get())) {
      OpenEpoch found;
      found.directory =
          open_fd(ops, space.get(), layout::epoch_directory_name(number), kOpenDirectory, 0, &error);
      std::uint64_t ignored = 0;
      if (found.directory && list_leaves(ops, found.directory.get(), &found.leaves, &ignored))
        live.push_back(std::move(found));
    }
  }
  return live;
}

struct Victim {
  ChunkKey key;
  std::uint64_t file_bytes = 0, charge = 0;
  std::int64_t mtime_nanos = 0;
  std::size_t epoch = 0;  // index
};
bool is_older(const Victim& a, const Victim& b) { return a.mtime_nanos < b.mtime_nanos; }

// Returns the least recently used records that together have `enough` bytes, but no more than `most` records,
// with the most recently used one first.
std::vector<Victim> list_victims(FileOps& ops, const std::vector<OpenEpoch>& live, std::uint64_t enough,
                                 std::size_t most) {
  std::vector<Victim> victims;  // a heap during the walk
  std::uint64_t sum = 0;
  for (std::size_t i = 0; i < live.size(); ++i) {
    for (const std::uint32_t leaf : live[i].leaves) {
      LeafFound found;
      (void)scan_leaf(ops, live[i].directory.get(), leaf, {}, &found);
      for (const FoundRecord& record : found.records) {
        victims.push_back({record.key, record.file_bytes, record.charge(), record.mtime_nanos, i});
        std::push_heap(victims.begin(), victims.end(), is_older);
        sum += record.charge();
        while (victims.size() > most || sum - victims.front().charge >= enough) {
          sum -= victims.front().charge;
          std::pop_heap(victims.begin(), victims.end(), is_older);
          victims.pop_back();
        }
      }
    }
  }
  std::sort(victims.rbegin(), victims.rend(), is_older);
  return victims;
}

// Returns false if it is missing, was used since it was listed, or cannot be removed.
bool remove_victim(FileOps& ops, const OpenEpoch& epoch, const Victim& victim) {
  const std::string path = layout::record_path(victim.key, victim.file_bytes);
  FileInfo info;
  return ops.stat(epoch.directory.get(), path, &info) == 0 && info.mtime_nanos <= victim.mtime_nanos &&
         ops.unlink(epoch.directory.get(), path) == 0;
}

}  // namespace

namespace {

// Removes directory/name and everything in it.
void remove_tree(FileOps& ops, int directory, const std::string& name, int levels,
                 const OnRemoved& on_removed) {
  int error = 0;
  FileInfo info;
  const Fd fd = open_fd(ops, directory, name, kOpenDirectory, 0, &error);
  std::vector<DirEntry> entries;
  if (fd && levels > 0 && list_directory(ops, fd.get(), &entries)) {
    for (const DirEntry& entry : entries) remove_tree(ops, fd.get(), entry.name, levels - 1, on_removed);
  }
  if (ops.stat(directory, name, &info) != 0) return;
  if ((info.is_directory() ? ops.rmdir(directory, name) : ops.unlink(directory, name)) == 0)
    on_removed(info.charge());
}

// A probe creates its namespace right after its root, on a busy disk within seconds.
constexpr std::chrono::hours kProbeStart{1};

// True if the temporary root of a probe is not in use.
bool is_old_probe(FileOps& ops, int directory, const std::string& name) {
  int error = 0;
  const Fd root = open_fd(ops, directory, name, kOpenDirectory, 0, &error);
  std::vector<std::string> namespaces;
  if (!root || !list_namespaces(ops, root.get(), &namespaces)) return false;
  if (namespaces.empty()) {
    FileInfo info;
    const std::chrono::nanoseconds now = std::chrono::system_clock::now().time_since_epoch();
    return ops.fstat(root.get(), &info) == 0 &&
           now - std::chrono::nanoseconds(info.mtime_nanos) > kProbeStart;
  }
  return std::none_of(namespaces.begin(), namespaces.end(), [&](const std::string& each) {
    const Fd opened = open_fd(ops, root.get(), each, kOpenDirectory, 0, &error);
    return opened && namespace_is_open(ops, opened.get());
  });
}

}  // namespace

void remove_old_probes(FileOps& ops, int directory, const OnRemoved& on_removed) {
  std::vector<DirEntry> entries;
  if (!list_directory(ops, directory, &entries)) return;
  const std::atomic<bool> stop{false};
  for (const DirEntry& entry : entries) {
    const std::string& name = entry.name;
    if (layout::is_probe_namespace(name)) {
      (void)reclaim_namespace(ops, directory, name, std::numeric_limits<std::uint64_t>::max(), false, stop,
                              on_removed);
    } else if (layout::is_raw_file(name)) {
      FileInfo info;
      if (ops.stat(directory, name, &info) == 0 && info.is_regular() && ops.unlink(directory, name) == 0)
        on_removed(info.charge());
    } else if (layout::is_probe_root(name) && is_old_probe(ops, directory, name)) {
      remove_tree(ops, directory, name, kDeepestTree, on_removed);
    }
  }
}

bool namespace_is_open(FileOps& ops, int namespace_directory) {
  int error = 0;
  const Fd mark =
      open_fd(ops, namespace_directory, std::string(layout::kOpenFile), O_RDWR | O_NOFOLLOW, 0, &error);
  return mark && lock_file(ops, mark.get(), LOCK_EX | LOCK_NB) != 0;
}

std::uint64_t reclaim_namespace(FileOps& ops, int root, const std::string& name, std::uint64_t enough,
                                bool even_open, const std::atomic<bool>& stop, const OnRemoved& on_removed) {
  int error = 0;
  const Fd directory = open_fd(ops, root, name, kOpenDirectory, 0, &error);
  if (!directory) return 0;
  const std::string mark_name(layout::kOpenFile);
  const Fd mark = open_fd(ops, directory.get(), mark_name, O_RDWR | O_NOFOLLOW, 0, &error);
  // Held during removal, so that no process opens the namespace meanwhile.
  const bool closed = !mark || lock_file(ops, mark.get(), LOCK_EX | LOCK_NB) == 0;
  if (!closed && !even_open) return 0;
  std::vector<std::uint64_t> epochs;
  if (!list_epochs(ops, directory.get(), &epochs)) return 0;
  std::uint64_t freed = 0;
  FileInfo info;
  // If an epoch stays (unreadable, not removable, or stopped), all later ones stay too, though empty. A
  // starting process uses the newest epoch, and would otherwise find records from before a reset.
  bool older_stays = false;
  for (const std::uint64_t number : epochs) {
    if (freed >= enough) break;
    freed +=
        reclaim_epoch(ops, directory.get(), number, enough - freed, closed && !older_stays, stop, on_removed);
    older_stays |= ops.stat(directory.get(), layout::epoch_directory_name(number), &info) != -ENOENT;
  }
  epochs.clear();
  if (!closed || !list_epochs(ops, directory.get(), &epochs) || !epochs.empty()) return freed;
  std::uint64_t last = remove_marks(ops, directory.get(), [](std::uint64_t) { return true; });
  for (const std::string& file : {std::string(layout::kNamespaceFile), mark_name}) {
    if (ops.stat(directory.get(), file, &info) == 0 && ops.unlink(directory.get(), file) == 0) {
      last += info.charge();
    }
  }
  if (ops.stat(root, name, &info) == 0 && ops.rmdir(root, name) == 0) last += info.disk_bytes;
  on_removed(last);
  return freed + last;
}

Reclaimed reclaim_oldest(FileOps& ops, int root, const std::vector<std::string>& names, std::uint64_t enough,
                         bool dry_run, const OnRemoved& on_removed) {
  constexpr std::size_t kMostListed = std::size_t{1} << 20;  // 64 MiB
  Reclaimed reclaimed;
  const std::vector<OpenEpoch> live = open_live(ops, root, names);
  while (reclaimed.bytes < enough) {
    const std::uint64_t bytes_before = reclaimed.bytes;
    const std::size_t most = dry_run ? std::numeric_limits<std::size_t>::max() : kMostListed;
    for (const Victim& victim : list_victims(ops, live, enough - reclaimed.bytes, most)) {
      if (!dry_run && !remove_victim(ops, live[victim.epoch], victim)) continue;
      reclaimed.bytes += victim.charge;
      ++reclaimed.records;
      if (!dry_run) on_removed(victim.charge);
    }
    if (dry_run || reclaimed.bytes == bytes_before) break;
  }
  return reclaimed;
}

}  // namespace kv_offload
