// SPDX-License-Identifier: Apache-2.0
#include "backends/fs/root.h"

#include <fcntl.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <utility>

#include "backends/fs/fs_epoch.h"
#include "backends/fs/layout.h"
#include "backends/fs/reclaim.h"
#include "backends/fs/record_file.h"
#include "backends/fs/space_ledger.h"
#include "backends/fs/verify.h"
#include "backends/fs/walk.h"

namespace kv_offload {
namespace {

Fd open_directory(int at, const std::string& path, Status* status = nullptr) {
  int error = 0;
  Fd fd = open_fd(posix_file_ops(), at, path, kOpenDirectory, 0, &error);
  // A server may have removed it since it was listed.
  if (status != nullptr && !fd && error != ENOENT) *status = Status::from_errno(error, "open directory");
  return fd;
}

std::uint64_t count_temporaries(int at, const std::string& name) {
  const Fd fd = open_directory(at, name);
  std::vector<DirEntry> entries;
  if (!fd || posix_file_ops().list(fd.get(), &entries) < 0) return 0;
  std::uint64_t count = 0;
  for (const DirEntry& entry : entries) {
    if (layout::is_temporary(entry.name)) {
      ++count;
    } else if (!layout::parse_record(entry.name)) {
      count += count_temporaries(fd.get(), entry.name);
    }
  }
  return count;
}

std::vector<std::string> namespaces_of(int root, const std::optional<std::string>& only,
                                       const std::string& path) {
  std::vector<std::string> names;
  if (const Status listed = list_namespaces(posix_file_ops(), root, &names); !listed)
    throw_resource("{} cannot be listed: {}", path, listed.message());
  if (!only) return names;
  if (std::find(names.begin(), names.end(), *only) == names.end()) {
    throw_invalid("namespace '{}' not found in {}; `stat` lists the existing ones", *only, path);
  }
  return {*only};
}

// Frees (or counts) what resets left behind and no process can hit any more.
std::uint64_t reclaim_ended_epochs(FileOps& ops, int root, const std::string& name, bool dry_run,
                                   const OnRemoved& on_removed) {
  const std::atomic<bool> stop{false};
  const Fd directory = open_directory(root, name);
  if (!directory) return 0;
  return dry_run ? count_unused_epochs(ops, directory.get())
                 : reclaim_unused_epochs(ops, directory.get(), std::nullopt, stop, on_removed);
}

}  // namespace

struct FsRoot::Impl {
  std::string path;
  Fd root;

  std::unique_ptr<SpaceLedger> space() const {
    return std::make_unique<SpaceLedger>(posix_file_ops(), root.get(), path);
  }
};

struct FsRoot::Cursor::Impl {
  std::string root_path;
  Fd root;
  std::vector<std::string> names;  // remaining, the next one last
  std::string name;
  Fd namespace_directory;
  std::vector<std::uint64_t> epochs;  // remaining, the next one last
  std::uint64_t epoch = 0;
  bool all_epochs = false;
  Fd directory;                       // of the epoch
  std::vector<std::uint32_t> leaves;  // remaining
  std::vector<FoundRecord> records;   // of one leaf, remaining
  OnUnreadable on_unreadable;         // null: ignored

  std::string epoch_path() const {
    return fmt::format("{}/{}/{}", root_path, name, layout::epoch_directory_name(epoch));
  }
  void check(const std::string& path, const Status& status) const {
    if (!status && on_unreadable) on_unreadable(path, status);
  }

  bool next_epoch() {
    FileOps& ops = posix_file_ops();
    Status status;
    while (epochs.empty()) {
      if (names.empty()) return false;
      name = std::move(names.back());
      names.pop_back();
      namespace_directory = open_directory(root.get(), name, &status);
      if (namespace_directory) {
        status = list_epochs(ops, namespace_directory.get(), &epochs);
        if (status && !all_epochs) epochs = live_epochs(ops, namespace_directory.get());
      }
      std::reverse(epochs.begin(), epochs.end());
      check(root_path + "/" + name, std::exchange(status, {}));
    }
    epoch = epochs.back();
    epochs.pop_back();
    directory = open_directory(namespace_directory.get(), layout::epoch_directory_name(epoch), &status);
    std::uint64_t ignored = 0;
    leaves.clear();
    if (directory) status = list_leaves(ops, directory.get(), &leaves, &ignored);
    std::sort(leaves.rbegin(), leaves.rend());
    check(epoch_path(), status);
    return true;
  }

  void next_leaf() {
    const std::uint32_t leaf = leaves.back();
    leaves.pop_back();
    LeafFound found;
    Unseen unseen;
    Status status =
        scan_leaf(posix_file_ops(), directory.get(), leaf, {.names_only = false, .unseen = &unseen}, &found);
    if (status && unseen.any()) status = Status::error(StatusKind::kIo, "a file in it cannot be inspected");
    records = std::move(found.records);
    check(epoch_path() + "/" + layout::leaf_path(leaf), status);
  }
};

FsRoot::Cursor::Cursor(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
FsRoot::Cursor::~Cursor() = default;
FsRoot::Cursor::Cursor(Cursor&&) noexcept = default;

std::optional<RecordInfo> FsRoot::Cursor::next() {
  Impl& at = *impl_;
  while (at.records.empty()) {
    if (at.leaves.empty()) {
      if (!at.next_epoch()) return std::nullopt;
      continue;
    }
    at.next_leaf();
  }
  const FoundRecord record = at.records.back();
  at.records.pop_back();
  return RecordInfo{at.name,
                    at.epoch,
                    record.key.hex(),
                    record.size,
                    record.file_bytes,
                    record.mtime_nanos,
                    at.epoch_path() + "/" + layout::record_path(record.key, record.file_bytes)};
}

FsRoot::FsRoot(std::string root_dir) : impl_(std::make_unique<Impl>()) {
  impl_->path = std::move(root_dir);
  int error = 0;
  impl_->root = open_fd(posix_file_ops(), AT_FDCWD, impl_->path, O_RDONLY | O_DIRECTORY, 0, &error);
  std::string text;
  if (impl_->root) {
    error = -read_text(posix_file_ops(), impl_->root.get(), std::string(layout::kRootFile), &text);
  }
  if (error == EACCES || error == EPERM || error == EIO || error == ESTALE || error == EMFILE ||
      error == ENFILE)
    throw_resource("{} cannot be read: {}", impl_->path, std::strerror(error));
  if (error != 0) {
    throw_invalid("{} is not a kv_offload root: {} (a root contains {})", impl_->path, std::strerror(error),
                  layout::kRootFile);
  }
  if (text != layout::kRootText) {
    throw_invalid("{} is a root of another format: {:?}", impl_->path, text.substr(0, 80));
  }
}

FsRoot::~FsRoot() = default;

RootInfo FsRoot::stat() {
  FileOps& ops = posix_file_ops();
  const std::atomic<bool> stop{false};
  RootInfo info;
  info.bytes = count_tree(ops, impl_->root.get(), ".", {}, stop);
  info.temporaries = count_temporaries(impl_->root.get(), ".");
  for (const std::string& name : namespaces_of(impl_->root.get(), std::nullopt, impl_->path)) {
    NamespaceInfo found;
    found.id = name;
    found.bytes = count_tree(ops, impl_->root.get(), name, {}, stop);
    Status opened;
    const Fd directory = open_directory(impl_->root.get(), name, &opened);
    if (!directory && opened) continue;  // removed meanwhile
    if (directory) {
      (void)read_text(ops, directory.get(), std::string(layout::kNamespaceFile), &found.json);
      found.open = namespace_is_open(ops, directory.get());
      std::vector<std::uint64_t> epochs;
      (void)list_epochs(ops, directory.get(), &epochs);
      found.epoch = epochs.empty() ? 0 : epochs.back();
    }
    Cursor cursor = records(name);
    cursor.impl_->on_unreadable = [&](const std::string& path, const Status& status) {
      info.unreadable.push_back({path, status.message()});
    };
    while (const auto record = cursor.next()) {
      ++found.records;
      const std::int64_t time = record->mtime_unix_nanos;
      found.oldest_unix_nanos = found.records == 1 ? time : std::min(found.oldest_unix_nanos, time);
      found.newest_unix_nanos = std::max(found.newest_unix_nanos, time);
    }
    info.records += found.records;
    info.namespaces.push_back(std::move(found));
  }
  return info;
}

bool FsRoot::is_open() {
  const std::vector<std::string> names = namespaces_of(impl_->root.get(), std::nullopt, impl_->path);
  return std::any_of(names.begin(), names.end(), [&](const std::string& name) {
    const Fd directory = open_directory(impl_->root.get(), name);
    return directory && namespace_is_open(posix_file_ops(), directory.get());
  });
}

FsRoot::Cursor FsRoot::records(const std::optional<std::string>& namespace_id, bool all_epochs, bool strict) {
  auto impl = std::make_unique<Cursor::Impl>();
  if (strict) {
    impl->on_unreadable = [](const std::string& path, const Status& status) {
      throw_resource("{} cannot be read: {}", path, status.message());
    };
  }
  impl->all_epochs = all_epochs;
  impl->root_path = impl_->path;
  impl->root = open_directory(impl_->root.get(), ".");
  impl->names = namespaces_of(impl_->root.get(), namespace_id, impl_->path);
  std::reverse(impl->names.begin(), impl->names.end());
  return Cursor(std::move(impl));
}

std::vector<DamagedRecord> FsRoot::verify(bool repair,
                                          const std::function<void(std::uint64_t, std::uint64_t)>& progress,
                                          const std::shared_ptr<const EncryptionKeys>& keys) {
  FileOps& ops = posix_file_ops();
  std::uint64_t all = 0, done = 0;
  for (Cursor cursor = records(std::nullopt); cursor.next();) ++all;
  const std::unique_ptr<SpaceLedger> space = repair ? impl_->space() : nullptr;
  std::vector<DamagedRecord> damaged;
  const auto found = [&](const std::string& path, const Status& status) {
    bool removed = false;
    FileInfo info;
    if (repair && status.kind() == StatusKind::kCorrupt && ops.stat(AT_FDCWD, path, &info) == 0) {
      removed = ops.unlink(AT_FDCWD, path) == 0;
      if (removed) space->remove(info.charge(), space->finished());
    }
    damaged.push_back({path, status.kind(), status.message(), removed});
  };
  Cursor cursor = records(std::nullopt);
  cursor.impl_->on_unreadable = found;
  while (const auto record = cursor.next()) {
    const Status status =
        verify_record_file(record->path, record->named_bytes, record->namespace_id, record->key, keys.get());
    // A missing record was evicted by a serving process.
    if (!status && status.kind() != StatusKind::kNotFound) found(record->path, status);
    if (progress) progress(++done, std::max(all, done));
  }
  for (const std::string& name : namespaces_of(impl_->root.get(), std::nullopt, impl_->path)) {
    for (const std::string& stray : stray_records(impl_->root.get(), name)) {
      found(impl_->path + "/" + stray,
            Status::error(StatusKind::kCorrupt, "misplaced or misnamed record; it is never read"));
    }
  }
  return damaged;
}

std::pair<std::uint64_t, std::uint64_t> FsRoot::purge(const std::optional<std::string>& namespace_id) {
  FileOps& ops = posix_file_ops();
  const std::atomic<bool> stop{false};
  const std::unique_ptr<SpaceLedger> space = impl_->space();
  std::uint64_t records_removed = 0, bytes = 0;
  std::string failure;  // the first one
  const auto fail = [&](const std::string& path, const std::string& message) {
    if (failure.empty()) failure = path + ": " + message;
  };
  for (const std::string& name : namespaces_of(impl_->root.get(), namespace_id, impl_->path)) {
    Cursor cursor = records(name, true);
    cursor.impl_->on_unreadable = [&](const std::string& path, const Status& status) {
      fail(path, status.message());
    };
    while (const auto record = cursor.next()) {
      const SpaceLedger::Finished before = space->finished();
      std::uint64_t freed = 0;
      const int rc = unlink_file(ops, AT_FDCWD, record->path, &freed);
      if (rc < 0 && rc != -EISDIR) fail(record->path, std::strerror(-rc));  // a directory is not a record
      if (freed == 0) continue;
      space->remove(freed, before);
      bytes += freed;
      ++records_removed;
    }
    bytes += reclaim_namespace(ops, impl_->root.get(), name, kAllBytes, true, stop,
                               [&](std::uint64_t freed) { space->remove(freed, space->finished()); });
  }
  if (!failure.empty())
    throw_resource("{} records were removed, but others could not be: {}", records_removed, failure);
  return {records_removed, bytes};
}

std::optional<std::uint64_t> FsRoot::startup_epoch(const std::string& namespace_id) {
  const auto raise = [&](int error) {
    throw_resource("{}/{} cannot be read: {}", impl_->path, namespace_id, std::strerror(error));
  };
  int error = 0;
  const Fd directory = open_fd(posix_file_ops(), impl_->root.get(), namespace_id, kOpenDirectory, 0, &error);
  if (!directory && error == ENOENT) return std::nullopt;
  if (!directory) raise(error);
  std::vector<DirEntry> entries;
  if (const Status status = list_directory(posix_file_ops(), directory.get(), &entries); !status) {
    raise(status.error_number());
  }
  std::uint64_t newest = 0, newest_by_reset = 0;
  for (const DirEntry& entry : entries) {
    if (const auto epoch = layout::parse_epoch(entry.name); epoch && may_be_directory(entry)) {
      newest = std::max(newest, *epoch);
    } else if (const auto mark = layout::parse_mark(entry.name);
               mark && entry.name == layout::mark_name(*mark, layout::Mark::kReset)) {
      newest_by_reset = std::max(newest_by_reset, *mark);
    }
  }
  // A mark of a higher number: a reset is making the next epoch now.
  if (newest == 0 || newest_by_reset >= newest) return std::nullopt;
  return newest;
}

std::uint64_t FsRoot::remove(const std::vector<std::string>& paths) {
  const std::unique_ptr<SpaceLedger> space = impl_->space();
  std::uint64_t removed = 0;
  std::string failure;  // the first one
  for (const std::string& path : paths) {
    const SpaceLedger::Finished before = space->finished();
    std::uint64_t bytes = 0;
    const int rc = unlink_file(posix_file_ops(), AT_FDCWD, path, &bytes);
    if (rc < 0 && failure.empty())
      failure = fmt::format("{} cannot be removed: {}", path, std::strerror(-rc));
    if (bytes == 0) continue;
    space->remove(bytes, before);
    ++removed;
  }
  if (!failure.empty()) throw_resource("{}", failure);
  return removed;
}

EvictReport FsRoot::evict(const EvictOptions& options, const std::function<void(std::uint64_t)>& on_removed) {
  FileOps& ops = posix_file_ops();
  const int root = impl_->root.get();
  const std::atomic<bool> stop{false};
  EvictReport report;
  report.bytes_before = count_tree(ops, root, ".", {}, stop);
  if (report.bytes_before <= options.target_bytes) return report;
  const std::uint64_t wanted = report.bytes_before - options.target_bytes;
  const std::unique_ptr<SpaceLedger> space = options.dry_run ? nullptr : impl_->space();
  std::uint64_t freed = 0;
  const OnRemoved report_removed = [&](std::uint64_t bytes) {
    space->remove(bytes, space->finished());
    freed += bytes;
    if (on_removed) on_removed(freed);
  };
  std::vector<std::string> live, dead;
  for (const std::string& name : namespaces_of(root, std::nullopt, impl_->path)) {
    if (report.dead_bytes < wanted)
      report.dead_bytes += reclaim_ended_epochs(ops, root, name, options.dry_run, report_removed);
    (is_dead(name, options.dead_before_unix_nanos) ? dead : live).push_back(name);
  }
  // By age, too: a server of a namespace that was considered dead may still start.
  if (report.dead_bytes < wanted && !dead.empty()) {
    report.dead_namespaces = dead;
    report.dead_bytes +=
        reclaim_oldest(ops, root, dead, wanted - report.dead_bytes, options.dry_run, report_removed).bytes;
  }
  // All their records were removed; this removes their directories.
  for (const std::string& name : dead) {
    if (report.dead_bytes >= wanted || options.dry_run) break;
    report.dead_bytes +=
        reclaim_namespace(ops, root, name, wanted - report.dead_bytes, false, stop, report_removed);
  }
  report.bytes_freed = report.dead_bytes;
  if (report.dead_bytes < wanted) {
    const Reclaimed oldest =
        reclaim_oldest(ops, root, live, wanted - report.dead_bytes, options.dry_run, report_removed);
    report.records = oldest.records;
    report.bytes_freed += oldest.bytes;
  }
  return report;
}

// True if no process has the namespace open and none used it for long: a restart takes a while too.
bool FsRoot::is_dead(const std::string& name, std::int64_t before_unix_nanos) {
  const Fd directory = open_directory(impl_->root.get(), name);
  if (!directory || namespace_is_open(posix_file_ops(), directory.get())) return false;
  FileInfo info;
  const std::string mark(layout::kOpenFile);
  if (posix_file_ops().stat(directory.get(), mark, &info) == 0 && info.mtime_nanos >= before_unix_nanos) {
    return false;
  }
  Cursor cursor = records(name);
  while (const auto record = cursor.next()) {
    if (record->mtime_unix_nanos >= before_unix_nanos) return false;
  }
  return true;
}

std::uint64_t directory_usage(const std::string& path) {
  int error = 0;
  const Fd directory = open_fd(posix_file_ops(), AT_FDCWD, path, O_RDONLY | O_DIRECTORY, 0, &error);
  if (!directory) return 0;
  if (const auto recorded = recorded_usage(posix_file_ops(), directory.get())) return *recorded;
  return count_tree(posix_file_ops(), directory.get(), ".", {}, std::atomic<bool>{false});
}

}  // namespace kv_offload
