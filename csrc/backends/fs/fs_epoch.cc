// SPDX-License-Identifier: Apache-2.0
#include "backends/fs/fs_epoch.h"

#include <dirent.h>
#include <sys/file.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <utility>

#include "backends/fs/layout.h"
#include "backends/fs/walk.h"

namespace kv_offload {
namespace {

constexpr int kMarkFlags = O_RDWR | O_NOFOLLOW;

// Returns the marks, locked exclusively so that no process can start to use the epoch. Empty optional if a
// process uses it, or if that cannot be determined.
std::optional<std::vector<Fd>> hold_unused(FileOps& ops, int namespace_directory, std::uint64_t number) {
  std::vector<Fd> held;
  for (const layout::Mark kind : {layout::Mark::kOpen, layout::Mark::kReset}) {
    int error = 0;
    Fd mark = open_fd(ops, namespace_directory, layout::mark_name(number, kind), kMarkFlags, 0, &error);
    if (!mark && error == ENOENT) continue;
    if (!mark || lock_file(ops, mark.get(), LOCK_EX | LOCK_NB) != 0) return std::nullopt;
    held.push_back(std::move(mark));
  }
  return held;
}

// Calls `unused` for each epoch that no process can hit any more. all: the directory may be removed too.
using Unused = std::function<void(std::uint64_t number, bool all)>;
void each_unused(FileOps& ops, int namespace_directory, const std::vector<std::uint64_t>& numbers,
                 std::optional<std::uint64_t> own, const Unused& unused) {
  for (const std::uint64_t number : numbers) {
    const bool newest = number == numbers.back();
    if (number == own || (newest && !made_by_reset(ops, namespace_directory, number))) continue;
    if (const auto held = hold_unused(ops, namespace_directory, number)) unused(number, !newest);
  }
}

constexpr int kIdDigits = 16;

// Durable: an epoch that loses its id is not used again by an engine on several hosts.
int write_id(FileOps& ops, int mark, std::uint64_t id) {
  std::string text = fmt::format("{:0{}x}", id, kIdDigits);
  const iovec part{text.data(), text.size()};
  const std::int64_t written = ops.pwritev(mark, &part, 1, 0);
  if (written < 0) return static_cast<int>(written);
  return written < kIdDigits ? -EIO : ops.fsync(mark, false);
}

// Returns 0 for a mark without an id.
std::uint64_t read_id(FileOps& ops, int mark) {
  char text[kIdDigits];
  const iovec part{text, sizeof text};
  std::uint64_t id = 0;
  if (ops.preadv(mark, &part, 1, 0) != kIdDigits) return 0;
  const auto [end, error] = std::from_chars(text, text + kIdDigits, id, 16);
  return error == std::errc() && end == text + kIdDigits ? id : 0;
}

// Returns 0 if the epoch has no id, or if it cannot be read.
std::uint64_t id_of(FileOps& ops, int namespace_directory, std::uint64_t number) {
  int error = 0;
  const Fd mark = open_fd(ops, namespace_directory, layout::mark_name(number, layout::Mark::kOpen),
                          O_RDONLY | O_NOFOLLOW, 0, &error);
  return mark ? read_id(ops, mark.get()) : 0;
}

}  // namespace

bool made_by_reset(FileOps& ops, int namespace_directory, std::uint64_t number) {
  FileInfo info;
  return ops.stat(namespace_directory, layout::mark_name(number, layout::Mark::kReset), &info) != -ENOENT;
}

bool reset_made_any_from(FileOps& ops, int namespace_directory, std::uint64_t least) {
  std::vector<DirEntry> entries;
  if (!list_directory(ops, namespace_directory, &entries)) return true;
  return std::any_of(entries.begin(), entries.end(), [&](const DirEntry& entry) {
    const auto number = layout::parse_mark(entry.name);
    return number && *number >= least && entry.name == layout::mark_name(*number, layout::Mark::kReset);
  });
}

int keep_mark(FileOps& ops, int namespace_directory, const FsEpoch& epoch) {
  const std::string name =
      layout::mark_name(epoch.number, epoch.by_reset ? layout::Mark::kReset : layout::Mark::kOpen);
  if (!is_unlinked(ops, epoch.mark.get(), namespace_directory, name)) return 0;
  int error = 0;
  const Fd again = open_fd(ops, namespace_directory, name, kMarkFlags | O_CREAT, 0600, &error);
  if (!again) return -error;
  int rc = lock_file(ops, again.get(), LOCK_SH | LOCK_NB);
  if (rc >= 0 && epoch.id != 0) rc = write_id(ops, again.get(), epoch.id);
  return rc < 0 ? rc : ops.replace(epoch.mark.get(), again.get());
}

int open_epoch(FileOps& ops, int namespace_directory, const std::string& namespace_path, std::uint64_t number,
               EpochCreation make, std::uint64_t id, std::shared_ptr<FsEpoch>* epoch) {
  const std::string name = layout::epoch_directory_name(number);
  auto opened = std::make_shared<FsEpoch>();
  int error = 0;
  const auto kind = make == EpochCreation::kByReset ? layout::Mark::kReset : layout::Mark::kOpen;
  opened->mark =
      open_fd(ops, namespace_directory, layout::mark_name(number, kind), kMarkFlags | O_CREAT, 0600, &error);
  if (!opened->mark) return -error;
  FileInfo info;
  int rc = lock_file(ops, opened->mark.get(), LOCK_SH | LOCK_NB);
  if (rc == -EWOULDBLOCK) return -ENOENT;
  if (rc == 0) rc = ops.fstat(opened->mark.get(), &info);
  if (rc < 0) return rc;
  // Compares inodes, not link counts: on NFS a file that was removed while open still has a link.
  FileInfo named;
  (void)ops.refresh(namespace_directory, ".");
  if (ops.stat(namespace_directory, layout::mark_name(number, kind), &named) != 0 ||
      named.inode != info.inode)
    return -ENOENT;
  if (make != EpochCreation::kNone) {
    if (rc = ops.mkdir(namespace_directory, name, 0700); rc < 0) return rc;
    if (id != 0) rc = write_id(ops, opened->mark.get(), id);  // only the process that made the directory
    // Durable: after a power failure no older epoch may be found again.
    if (rc >= 0) rc = ops.fsync(namespace_directory, false);
  }
  if (rc == 0) opened->directory = open_fd(ops, namespace_directory, name, kOpenDirectory, 0, &error);
  if (!opened->directory) {
    // The mark stays: another process may be creating the same epoch.
    if (make != EpochCreation::kNone) (void)ops.rmdir(namespace_directory, name);
    return rc < 0 ? rc : -error;
  }
  opened->made = make != EpochCreation::kNone;
  opened->by_reset = kind == layout::Mark::kReset;
  opened->number = number;
  opened->id = read_id(ops, opened->mark.get());
  opened->path = namespace_path + "/" + name;
  *epoch = std::move(opened);
  return 0;
}

int open_newest_epoch(FileOps& ops, int namespace_directory, const std::string& namespace_path,
                      const EpochChoice& choice, std::shared_ptr<FsEpoch>* epoch) {
  // Other processes create and remove epochs at the same time: list them again after each lost race.
  for (int attempt = 0; attempt < 100; ++attempt) {
    std::vector<std::uint64_t> numbers;
    const Status status = list_epochs(ops, namespace_directory, &numbers);
    if (!status) return -status.error_number();
    const std::uint64_t newest = numbers.empty() ? 0 : numbers.back();
    // An epoch made by a reset is for the process that was reset only.
    const bool make = numbers.empty() || made_by_reset(ops, namespace_directory, newest) ||
                      (choice.is_new && id_of(ops, namespace_directory, newest) != choice.id);
    const int rc = open_epoch(ops, namespace_directory, namespace_path, make ? newest + 1 : newest,
                              make ? EpochCreation::kAtStart : EpochCreation::kNone, choice.id, epoch);
    if (rc != -ENOENT && rc != -EEXIST) return rc;
  }
  return -EBUSY;
}

Status list_epochs(FileOps& ops, int namespace_directory, std::vector<std::uint64_t>* epochs) {
  std::vector<DirEntry> entries;
  if (Status status = list_directory(ops, namespace_directory, &entries); !status) return status;
  for (const DirEntry& entry : entries) {
    const auto epoch = layout::parse_epoch(entry.name);
    if (epoch && may_be_directory(entry)) epochs->push_back(*epoch);
  }
  std::sort(epochs->begin(), epochs->end());
  return Status::ok();
}

bool epoch_is_open(FileOps& ops, int namespace_directory, std::uint64_t number) {
  return !hold_unused(ops, namespace_directory, number);
}

std::vector<std::uint64_t> live_epochs(FileOps& ops, int namespace_directory) {
  std::vector<std::uint64_t> numbers;
  (void)list_epochs(ops, namespace_directory, &numbers);
  std::erase_if(numbers, [&, newest = numbers.empty() ? 0 : numbers.back()](std::uint64_t number) {
    const bool for_new_processes = number == newest && !made_by_reset(ops, namespace_directory, number);
    return !for_new_processes && !epoch_is_open(ops, namespace_directory, number);
  });
  return numbers;
}

std::uint64_t reclaim_unused_epochs(FileOps& ops, int namespace_directory, std::optional<std::uint64_t> own,
                                    const std::atomic<bool>& stop,
                                    const std::function<void(std::uint64_t)>& on_removed) {
  std::vector<std::uint64_t> numbers;
  if (!list_epochs(ops, namespace_directory, &numbers) || numbers.empty()) return 0;
  std::uint64_t freed = 0;
  each_unused(ops, namespace_directory, numbers, own, [&](std::uint64_t number, bool all) {
    freed += reclaim_epoch(ops, namespace_directory, number, kAllBytes, all, stop, on_removed);
  });
  // Marks of epoch directories that were removed by hand. Only numbers below the newest are safe: a process
  // creates an epoch above the newest.
  std::vector<std::vector<Fd>> held;
  const std::uint64_t marks = remove_marks(ops, namespace_directory, [&](std::uint64_t number) {
    if (number >= numbers.back() || std::binary_search(numbers.begin(), numbers.end(), number)) return false;
    auto unused = hold_unused(ops, namespace_directory, number);
    if (!unused) return false;
    held.push_back(std::move(*unused));
    return true;
  });
  if (marks > 0) on_removed(marks);
  return freed + marks;
}

std::uint64_t count_unused_epochs(FileOps& ops, int namespace_directory) {
  const std::atomic<bool> stop{false};
  std::vector<std::uint64_t> numbers;
  if (!list_epochs(ops, namespace_directory, &numbers)) return 0;
  std::uint64_t bytes = 0;
  each_unused(ops, namespace_directory, numbers, std::nullopt, [&](std::uint64_t number, bool) {
    bytes += count_tree(ops, namespace_directory, layout::epoch_directory_name(number), {}, stop);
  });
  return bytes;
}

std::uint64_t remove_marks(FileOps& ops, int namespace_directory,
                           const std::function<bool(std::uint64_t)>& which) {
  std::vector<DirEntry> entries;
  if (!list_directory(ops, namespace_directory, &entries)) return 0;
  std::uint64_t bytes = 0;
  FileInfo info;
  for (const DirEntry& entry : entries) {
    const auto number = layout::parse_mark(entry.name);
    if (number && which(*number) && ops.stat(namespace_directory, entry.name, &info) == 0 &&
        ops.unlink(namespace_directory, entry.name) == 0) {
      bytes += info.charge();
    }
  }
  return bytes;
}

}  // namespace kv_offload
