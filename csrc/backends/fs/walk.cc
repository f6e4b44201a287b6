// SPDX-License-Identifier: Apache-2.0
#include "backends/fs/walk.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/file.h>

#include <algorithm>
#include <cerrno>

#include "backends/fs/layout.h"

namespace kv_offload {
namespace {

std::uint64_t disk_bytes_of(FileOps& ops, int directory, const std::string& name) {
  FileInfo info;
  return ops.stat(directory, name, &info) == 0 ? info.disk_bytes : 0;
}

// Returns the charge of one of our files, or of a directory.
std::uint64_t charge_of(FileOps& ops, int directory, const std::string& name) {
  FileInfo info;
  return ops.stat(directory, name, &info) == 0 ? info.charge() : 0;
}

// Lists directory/name; ENOENT (vanished) is an empty list.
Status list_at(FileOps& ops, int directory, const std::string& name, Fd* fd, std::vector<DirEntry>* entries) {
  int error = 0;
  *fd = open_fd(ops, directory, name, kOpenDirectory, 0, &error);
  if (!*fd && error == ENOENT && ops.refresh(directory, ".") == 0)  // or another host created it just now
    *fd = open_fd(ops, directory, name, kOpenDirectory, 0, &error);
  if (!*fd) return error == ENOENT ? Status::ok() : Status::from_errno(error, "open directory", name);
  const int rc = ops.list(fd->get(), entries);
  return rc < 0 && rc != -ENOENT ? Status::from_errno(-rc, "list", name) : Status::ok();
}

// Returns the bytes that a temporary, or the lock file of a process, counts.
std::uint64_t count_locked(FileOps& ops, int directory, const std::string& name, std::uint64_t writer,
                           const CountFor& count) {
  const std::uint64_t bytes = charge_of(ops, directory, name);
  const bool is_open = std::find(count.writers.begin(), count.writers.end(), writer) != count.writers.end();
  if (!is_open || writer == count.writer) {
    if (sweep_temporary(ops, directory, name)) return 0;
    return is_open ? 0 : bytes;
  }
  // A temporary of another process is under its reservation while it is locked. It is never removed here,
  // because locks may not reach from host to host.
  int error = 0;
  const Fd fd = open_fd(ops, directory, name, O_RDWR | O_NOFOLLOW | O_NONBLOCK, 0, &error);
  return fd && lock_file(ops, fd.get(), LOCK_EX | LOCK_NB) == 0 ? bytes : 0;
}

}  // namespace

void Unseen::add(int error) {
  switch (error) {
    case 0:
    // Vanished, not ours, or hidden by permissions for good: not an incomplete walk.
    case ENOENT:
    case ESTALE:
    case ENOTDIR:
    case ELOOP:
    case EACCES:
    case EPERM:
      return;
    // Passing shortages of this process.
    case EMFILE:
    case ENFILE:
    case ENOMEM:
      shortage.store(true);
      return;
    default:
      failed.store(true);
  }
}

bool may_be_directory(const DirEntry& entry) { return entry.type == DT_DIR || entry.type == DT_UNKNOWN; }

Status list_directory(FileOps& ops, int directory, std::vector<DirEntry>* entries) {
  (void)ops.refresh(directory, ".");  // on NFS, opening "." does not refresh
  Fd self;                            // own descriptor, because listing moves its position
  return list_at(ops, directory, ".", &self, entries);
}

bool sweep_temporary(FileOps& ops, int directory, const std::string& name) {
  int error = 0;
  const Fd fd = open_fd(ops, directory, name, O_RDWR | O_NOFOLLOW | O_NONBLOCK, 0, &error);
  if (!fd) return error == ENOENT;
  if (lock_file(ops, fd.get(), LOCK_EX | LOCK_NB) != 0) return false;
  return ops.unlink(directory, name) == 0;
}

Status scan_leaf(FileOps& ops, int epoch, std::uint32_t leaf, const LeafOptions& options, LeafFound* found) {
  Fd fd;
  std::vector<DirEntry> entries;
  if (Status status = list_at(ops, epoch, layout::leaf_path(leaf), &fd, &entries); !status) {
    if (options.unseen != nullptr) options.unseen->add(status.error_number());
    return status;
  }
  if (!fd) return Status::ok();
  FileInfo info;
  if (ops.fstat(fd.get(), &info) == 0) found->directory_bytes = info.disk_bytes;
  for (const DirEntry& entry : entries) {
    const auto record = layout::parse_record(entry.name);
    const bool in_place = record && layout::leaf_of(record->key) == leaf;
    if (options.names_only) {
      if (in_place) found->records.push_back({record->key, record->file_bytes, 0, 0});
      continue;
    }
    if (layout::is_temporary(entry.name)) {
      found->other_bytes +=
          options.count == nullptr
              ? disk_bytes_of(ops, fd.get(), entry.name)
              : count_locked(ops, fd.get(), entry.name, layout::writer_of(entry.name), *options.count);
      continue;
    }
    if (const int rc = ops.stat(fd.get(), entry.name, &info); rc != 0) {  // vanished
      if (options.unseen != nullptr) options.unseen->add(-rc);
      continue;
    }
    if (in_place) {
      found->records.push_back(
          {record->key, record->file_bytes, info.disk_bytes, info.mtime_nanos, info.size});
    } else {
      found->other_bytes += info.disk_bytes;
    }
  }
  return Status::ok();
}

Status list_leaves(FileOps& ops, int epoch, std::vector<std::uint32_t>* leaves, std::uint64_t* other_bytes) {
  std::vector<DirEntry> entries;
  if (Status status = list_directory(ops, epoch, &entries); !status) return status;
  for (const DirEntry& entry : entries) {
    const auto leaf = layout::parse_hex_byte(entry.name);
    if (leaf && may_be_directory(entry)) {
      leaves->push_back(*leaf);
    } else {
      *other_bytes += disk_bytes_of(ops, epoch, entry.name);
    }
  }
  return Status::ok();
}

std::uint64_t count_tree(FileOps& ops, int directory, const std::string& name, const LeafOptions& options,
                         const std::atomic<bool>& stop, int levels) {
  const auto is_seen = [&](int error) {
    if (options.unseen != nullptr) options.unseen->add(error);
    return error == 0;
  };
  FileInfo info;
  if (stop.load() || !is_seen(-ops.stat(directory, name, &info))) return 0;
  if (!info.is_directory()) {
    // A temporary may be under a reservation or garbage; only a record has a charge; all else counts its
    // blocks.
    if (options.count != nullptr && layout::is_temporary(name))
      return count_locked(ops, directory, name, layout::writer_of(name), *options.count);
    if (options.count == nullptr || !layout::parse_record(name)) return info.disk_bytes;
    return options.count->charges != nullptr ? options.count->charges->of(info.disk_bytes, info.size)
                                             : info.charge();
  }
  std::uint64_t bytes = info.disk_bytes;
  Fd fd;
  std::vector<DirEntry> entries;
  // A directory that cannot be listed counts by its own blocks only.
  if (levels == 0 || !is_seen(list_at(ops, directory, name, &fd, &entries).error_number()) || !fd)
    return bytes;
  for (const DirEntry& entry : entries)
    bytes += count_tree(ops, fd.get(), entry.name, options, stop, levels - 1);
  return bytes;
}

std::uint64_t reclaim_epoch(FileOps& ops, int namespace_directory, std::uint64_t number, std::uint64_t enough,
                            bool remove_directories, const std::atomic<bool>& stop,
                            const std::function<void(std::uint64_t)>& on_removed) {
  std::uint64_t freed = 0;
  const auto report_removed = [&](std::uint64_t bytes) {
    freed += bytes;
    if (bytes > 0) on_removed(bytes);
  };
  const auto remove_directory = [&](int at, const std::string& path) {
    if (!remove_directories) return false;
    const std::uint64_t bytes = charge_of(ops, at, path);
    if (ops.rmdir(at, path) != 0) return false;
    report_removed(bytes);
    return true;
  };
  const std::string name = layout::epoch_directory_name(number);
  int error = 0;
  const Fd epoch = open_fd(ops, namespace_directory, name, kOpenDirectory, 0, &error);
  if (!epoch) return 0;
  std::vector<DirEntry> leaves;
  if (ops.list(epoch.get(), &leaves) < 0) return 0;
  for (const DirEntry& leaf : leaves) {
    if (!layout::parse_hex_byte(leaf.name)) continue;
    Fd leaf_fd;
    std::vector<DirEntry> files;
    if (!list_at(ops, epoch.get(), leaf.name, &leaf_fd, &files) || !leaf_fd) continue;
    for (const DirEntry& file : files) {
      if (stop.load() || freed >= enough) return freed;
      const std::uint64_t bytes = charge_of(ops, leaf_fd.get(), file.name);
      const bool removed = layout::is_temporary(file.name) ? sweep_temporary(ops, leaf_fd.get(), file.name)
                                                           : layout::parse_record(file.name).has_value() &&
                                                                 ops.unlink(leaf_fd.get(), file.name) == 0;
      if (removed) report_removed(bytes);
    }
    if (stop.load() || freed >= enough) return freed;
    (void)remove_directory(epoch.get(), leaf.name);
  }
  // Then its marks, and only if the directory was removed. Otherwise a starting process would use an epoch
  // that a reset created, or a process that just opened it could lock a new mark.
  if (!remove_directory(namespace_directory, name)) return freed;
  for (const layout::Mark kind : {layout::Mark::kOpen, layout::Mark::kReset}) {
    const std::string mark = layout::mark_name(number, kind);
    const std::uint64_t bytes = charge_of(ops, namespace_directory, mark);
    if (ops.unlink(namespace_directory, mark) == 0) report_removed(bytes);
  }
  return freed;
}

Status list_namespaces(FileOps& ops, int root, std::vector<std::string>* names) {
  std::vector<DirEntry> entries;
  if (Status status = list_directory(ops, root, &entries); !status) return status;
  for (const DirEntry& entry : entries) {
    if (layout::is_namespace_name(entry.name) && may_be_directory(entry)) names->push_back(entry.name);
  }
  std::sort(names->begin(), names->end());
  return Status::ok();
}

}  // namespace kv_offload
