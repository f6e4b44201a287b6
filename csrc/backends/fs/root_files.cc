// SPDX-License-Identifier: Apache-2.0
#include "backends/fs/root_files.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <functional>
#include <thread>

#include "backends/fs/layout.h"
#include "backends/fs/temporary.h"

namespace kv_offload {
namespace {

constexpr std::uint64_t kSmallestBound = std::uint64_t{1} << 20;

// Best effort: durability was not requested, and not all file systems support it.
void sync_directory(FileOps& ops, int at, const std::string& path) {
  int error = 0;
  const Fd fd = open_fd(ops, at, path, O_RDONLY | O_DIRECTORY, 0, &error);
  if (fd) (void)ops.fsync(fd.get(), false);
}

// True if a power failure may have left this: a part of a file whose data was not on disk yet, or zeros in
// its place.
bool is_torn(const std::string& found, const std::string& whole) {
  if (found == whole || found.size() > whole.size()) return false;
  for (std::size_t i = 0; i < found.size(); ++i) {
    if (found[i] != whole[i] && found[i] != '\0') return false;
  }
  return true;
}

std::size_t count_differences(const std::string& a, const std::string& b) {
  std::size_t count = a.size() > b.size() ? a.size() - b.size() : b.size() - a.size();
  for (std::size_t i = 0; i < std::min(a.size(), b.size()); ++i) count += a[i] != b[i];
  return count;
}

// True if kv_offload.json is damaged. The file of another version is valid, and may differ from ours only in
// a number. The ledger next to it changes with the format, so it distinguishes our file with a damaged number
// from another version's.
bool is_damaged_root_file(const std::string& found, bool ledger_is_valid) {
  constexpr std::size_t kMostDamaged = 2;  // bytes
  const std::string expected(layout::kRootText);
  if (found == expected) return false;
  if (is_torn(found, expected)) return true;
  if (found.size() == expected.size() && count_differences(found, expected) <= kMostDamaged) {
    const auto at = static_cast<std::size_t>(
        std::mismatch(expected.begin(), expected.end(), found.begin()).first - expected.begin());
    const auto is_digit = [](char c) { return c >= '0' && c <= '9'; };
    return ledger_is_valid || !(is_digit(expected[at]) && is_digit(found[at]));
  }
  const std::size_t end = found.find_last_not_of(" \n");
  const bool statement = end != found.npos && found.front() == '{' && found[end] == '}';
  return ledger_is_valid && !statement;
}

using Damaged = std::function<bool(const std::string& found)>;

// Writes the file if it is missing or damaged; afterwards it holds the whole text of some opener. Returns the
// text found. *made (or null) becomes the file if it was missing before.
std::string write_once(const FsTierOptions& options, FileOps& ops, int directory, const std::string& where,
                       const std::string& name, const std::string& text, std::uint64_t writer,
                       const Damaged& damaged, Fd* made) {
  std::string found;
  int rc = read_text(ops, directory, name, &found);
  const bool torn = (rc == 0 || rc == -EFBIG) && damaged(found);
  if (torn && options.warn)
    options.warn(fmt::format("{}/{} was damaged and is written again; check the device", where, name));
  if (rc == -ENOENT || torn) {
    Fd fd;
    std::string temporary;
    rc = create_temporary(ops, directory, "", O_WRONLY, writer, &fd, &temporary);
    if (rc < 0) fail(where + "/" + name, "write", -rc);
    const iovec part{const_cast<char*>(text.data()), text.size()};
    const std::int64_t written = ops.pwritev(fd.get(), &part, 1, 0);
    rc = written < 0                                         ? static_cast<int>(written)
         : written != static_cast<std::int64_t>(text.size()) ? -ENOSPC
                                                             : 0;
    if (rc == 0) rc = ops.fsync(fd.get(), false);
    if (rc == 0) rc = ops.rename(directory, temporary, name, !torn);
    // The file system lacks RENAME_NOREPLACE (NFS). Both openers then write the same text, or the texts
    // differ and one opener is refused below.
    if (rc == -EINVAL) rc = ops.rename(directory, temporary, name, false);
    if (rc < 0) (void)ops.unlink(directory, temporary);
    if (rc < 0 && rc != -EEXIST) fail(where + "/" + name, "write", -rc);
    if (rc == 0 && !torn && made != nullptr) *made = std::move(fd);
    rc = read_text(ops, directory, name, &found);
  }
  if (rc < 0) fail(where + "/" + name, "read", -rc);
  sync_directory(ops, directory, ".");
  return found;
}

}  // namespace

[[noreturn]] void fail(const std::string& path, std::string_view verb, int error) {
  throw_resource("cannot {} {}: {}; set root_dir to a directory that this user (uid {}) can write", verb,
                 path, std::strerror(error), ::geteuid());
}

Fd open_root_directory(const FsTierOptions& options, FileOps& ops) {
  const std::string& path = options.root_dir;
  if (path.empty()) throw_invalid("root_dir is empty; name a directory on the disk to use");
  if (options.max_bytes < kSmallestBound) {
    throw_invalid("max_bytes of {} was given for {}; at least {} are needed", format_bytes(options.max_bytes),
                  path, format_bytes(kSmallestBound));
  }
  std::string made;
  for (const auto& part : std::filesystem::path(path)) {
    made = made.empty() ? part.string() : (std::filesystem::path(made) / part).string();
    const int rc = ops.mkdir(AT_FDCWD, made, 0700);
    FileInfo info;
    // Some file systems return EACCES or EROFS for an existing directory.
    if (rc < 0 && rc != -EEXIST && ops.stat(AT_FDCWD, made, &info) != 0) fail(made, "create directory", -rc);
    if (rc == 0) sync_directory(ops, AT_FDCWD, made + "/..");
  }
  FileInfo info;
  if (const int rc = ops.stat(AT_FDCWD, path, &info); rc < 0) fail(path, "inspect", -rc);
  if (info.is_symlink())
    throw_resource("root_dir {} is a symbolic link; give the directory it points to", path);
  if (!info.is_directory()) throw_resource("root_dir {} is not a directory", path);
  if (info.owner != ::geteuid()) {
    throw_resource(
        "root_dir {} belongs to uid {}, this process is uid {}; give it its own directory, such as {}/kv",
        path, info.owner, ::geteuid(), path);
  }
  if ((info.mode & (S_IWGRP | S_IWOTH)) != 0) {
    throw_resource(
        "root_dir {} can be written by other users (mode {:o}); chmod 700 it, or give a directory inside, "
        "such as {}/kv. In Kubernetes, fsGroup makes a volume group-writable at each start: set "
        "fsGroupChangePolicy: OnRootMismatch and use a directory inside the volume",
        path, info.mode & 07777, path);
  }
  int error = 0;
  Fd root = open_fd(ops, AT_FDCWD, path, kOpenDirectory, 0, &error);
  if (!root) fail(path, "open", error);
  return root;
}

void write_format(const FsTierOptions& options, FileOps& ops, const OpenRoot& open) {
  const std::string name(layout::kRootFile);
  std::string ledger;
  const bool ledger_is_valid =
      read_text(ops, open.directory.get(), std::string(layout::kLedgerFile), &ledger) == 0 &&
      LedgerPage::is_of_this_format(ledger.data(), ledger.size());
  const std::string text = write_once(
      options, ops, open.directory.get(), open.path, name, std::string(layout::kRootText), open.writer,
      [&](const std::string& found) { return is_damaged_root_file(found, ledger_is_valid); }, nullptr);
  if (text != layout::kRootText) {
    throw_invalid("{}/{} is of another format: {:?}; this version writes '{}'; use another root_dir",
                  open.path, name, text.substr(0, 80),
                  layout::kRootText.substr(0, layout::kRootText.size() - 1));
  }
}

namespace {

// Writes namespace.json if it is missing or differs. The id is a digest of the description, and each record
// names that id, so any other text under the id is damage. *made becomes the file if it was missing.
void describe_namespace(const FsTierOptions& options, FileOps& ops, const OpenRoot& open, int directory,
                        Fd* made) {
  const auto damaged = [&](const std::string& found) { return found != options.namespace_json; };
  (void)write_once(options, ops, directory, open.namespace_path(), std::string(layout::kNamespaceFile),
                   options.namespace_json, open.writer, damaged, made);
}

// Takes the shared lock. Returns 0 or -errno; -EWOULDBLOCK: a process kept the exclusive lock until
// `give_up`.
int lock_shared(FileOps& ops, int fd, std::chrono::steady_clock::time_point give_up) {
  constexpr std::chrono::milliseconds kPause{5};
  for (;;) {
    const int rc = lock_file(ops, fd, LOCK_SH | LOCK_NB);
    if (rc != -EWOULDBLOCK || std::chrono::steady_clock::now() >= give_up) return rc;
    std::this_thread::sleep_for(kPause);
  }
}

}  // namespace

// Locks the file that currently has the name: a reclaimer may have removed the directory between the open and
// the lock, so the loop tries again.
NamespaceFiles open_namespace(const FsTierOptions& options, FileOps& ops, const OpenRoot& open,
                              std::chrono::milliseconds lock_wait) {
  const auto give_up = std::chrono::steady_clock::now() + lock_wait;
  const std::string path = open.namespace_path();
  NamespaceFiles files;
  int error = 0;
  for (int attempt = 0; attempt < 100; ++attempt) {
    const int rc = ops.mkdir(open.directory.get(), open.namespace_name, 0700);
    if (rc < 0 && rc != -EEXIST) fail(path, "create directory", -rc);
    files.directory = open_fd(ops, open.directory.get(), open.namespace_name, kOpenDirectory, 0, &error);
    // A reclaimer removed the directory meanwhile.
    if (!files.directory && error == ENOENT) continue;
    if (!files.directory) fail(path, "open", error);
    if (rc == 0) sync_directory(ops, open.directory.get(), ".");
    const int directory = files.directory.get();
    FileInfo mine, named;
    if (const int known = ops.fstat(directory, &mine); known < 0) fail(path, "inspect", -known);
    // Another user could forge or read records.
    if (mine.owner != ::geteuid()) {
      throw_resource("{} belongs to uid {}, this process is uid {}; remove it or use another root_dir", path,
                     mine.owner, ::geteuid());
    }
    files.open_lock =
        open_fd(ops, directory, std::string(layout::kOpenFile), O_RDWR | O_CREAT | O_NOFOLLOW, 0600, &error);
    // The directory was removed after it was opened.
    if (!files.open_lock && error == ENOENT) continue;
    if (!files.open_lock) fail(path + "/open", "open", error);
    const int locked = lock_shared(ops, files.open_lock.get(), give_up);
    if (locked == -EWOULDBLOCK) {
      throw_resource(
          "{}/open is locked: another process removes the records of this namespace (kv-offload purge or "
          "evict, or a server that needs space), or was stopped while it did. `lslocks` names the process; "
          "wait until it ends, or end it, then start again",
          path);
    }
    if (locked < 0) {
      throw_resource("cannot lock {}/open: {}; the file system of root_dir must support file locks", path,
                     std::strerror(-locked));
    }
    // The locked file no longer has the name.
    if (ops.fstat(files.open_lock.get(), &mine) != 0 ||
        ops.stat(directory, std::string(layout::kOpenFile), &named) != 0 || mine.inode != named.inode) {
      continue;
    }
    Fd made;
    if (!options.namespace_json.empty()) describe_namespace(options, ops, open, directory, &made);
    // Only files created here are new bytes in the sum.
    if (rc == 0) open.count(files.directory);
    if (made) open.count(made);
    return files;
  }
  fail(path, "open", EBUSY);
}

}  // namespace kv_offload
