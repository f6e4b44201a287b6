#include "storage/fs/open.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <functional>
#include <random>

#include "base/aligned_buffer.h"
#include "storage/fs/layout.h"
#include "storage/fs/record_file.h"
#include "storage/fs/temporary.h"
#include "storage/fs/walk.h"

namespace kv_offload {
namespace {

constexpr std::uint64_t kSmallestBound = std::uint64_t{1} << 20;

[[noreturn]] void fail(const std::string& path, std::string_view verb, int error) {
  throw_resource("cannot {} {}: {}; set root_dir to a directory that this user (uid {}) can write", verb,
                 path, std::strerror(error), ::geteuid());
}

// Best effort where nobody asked for durability; not all file systems can.
void sync_directory(FileOps& ops, int at, const std::string& path) {
  int error = 0;
  const Fd fd = open_fd(ops, at, path, O_RDONLY | O_DIRECTORY, 0, &error);
  if (fd) (void)ops.fsync(fd.get(), false);
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
    // Some file systems say EACCES or EROFS for a directory that exists.
    if (rc < 0 && rc != -EEXIST && ops.stat(AT_FDCWD, made, &info) != 0) fail(made, "make directory", -rc);
    if (rc == 0) sync_directory(ops, AT_FDCWD, made + "/..");
  }
  FileInfo info;
  if (const int rc = ops.stat(AT_FDCWD, path, &info); rc < 0) fail(path, "look at", -rc);
  if (info.is_symlink())
    throw_resource("root_dir {} is a symbolic link; give the directory it points to", path);
  if (!info.is_directory()) throw_resource("root_dir {} is not a directory", path);
  if (info.owner != ::geteuid()) {
    throw_resource(
        "root_dir {} belongs to uid {}, this process is uid {}; give a directory of its own, such as {}/kv",
        path, info.owner, ::geteuid(), path);
  }
  if ((info.mode & (S_IWGRP | S_IWOTH)) != 0) {
    throw_resource(
        "root_dir {} can be written by other users (mode {:o}); chmod 700 it, or give a directory inside, "
        "such as {}/kv",
        path, info.mode & 07777, path);
  }
  int error = 0;
  Fd root = open_fd(ops, AT_FDCWD, path, kOpenDirectory, 0, &error);
  if (!root) fail(path, "open", error);
  return root;
}

// What a power failure leaves of a file whose data was not on the disk yet: a
// part of it, or zeros in its place.
bool is_torn(const std::string& found, const std::string& whole) {
  if (found == whole || found.size() > whole.size()) return false;
  for (std::size_t i = 0; i < found.size(); ++i) {
    if (found[i] != whole[i] && found[i] != '\0') return false;
  }
  return true;
}

std::size_t bytes_that_differ(const std::string& a, const std::string& b) {
  std::size_t count = a.size() > b.size() ? a.size() - b.size() : b.size() - a.size();
  for (std::size_t i = 0; i < std::min(a.size(), b.size()); ++i) count += a[i] != b[i];
  return count;
}

bool one_bit_differs(const std::string& a, const std::string& b) {
  if (a.size() != b.size() || bytes_that_differ(a, b) != 1) return false;
  const auto at = std::mismatch(a.begin(), a.end(), b.begin());
  const unsigned bits = static_cast<unsigned char>(*at.first) ^ static_cast<unsigned char>(*at.second);
  return (bits & (bits - 1)) == 0;
}

// Not what another version says: that is a statement too, or ours with another number. The ledger beside it,
// which changes with the format, tells ours with a damaged number from theirs.
bool is_damaged_root_file(const std::string& found, bool ledger_is_ours) {
  constexpr std::size_t kMostDamaged = 2;  // bytes
  const std::string ours(layout::kRootText);
  if (found == ours) return false;
  if (is_torn(found, ours)) return true;
  if (found.size() == ours.size() && bytes_that_differ(found, ours) <= kMostDamaged) {
    const auto at =
        static_cast<std::size_t>(std::mismatch(ours.begin(), ours.end(), found.begin()).first - ours.begin());
    const auto is_digit = [](char c) { return c >= '0' && c <= '9'; };
    return ledger_is_ours || !(is_digit(ours[at]) && is_digit(found[at]));
  }
  const std::size_t end = found.find_last_not_of(" \n");
  const bool statement = end != found.npos && found.front() == '{' && found[end] == '}';
  return ledger_is_ours && !statement;
}

using Damaged = std::function<bool(const std::string& found)>;

// Writes the file if it is not there, or damaged; then it holds some opener's whole text. *made (or null)
// becomes the file when it was not there before.
std::string write_once(const FsTierOptions& options, FileOps& ops, int directory, const std::string& where,
                       const std::string& name, const std::string& text, std::uint64_t writer,
                       const Damaged& damaged, Fd* made) {
  std::string found;
  int rc = read_text(ops, directory, name, &found);
  const bool torn = rc == 0 && damaged(found);
  if (torn && options.warn)
    options.warn(fmt::format("{}/{} was damaged and is written anew; look at the device", where, name));
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
    // No such mode here (NFS): both openers then write the same text, or differ and one is refused below.
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

std::string around(const std::string& text, std::size_t at) {
  const std::size_t start = at < 24 ? 0 : at - 24;
  return text.substr(start, 64);
}

void check_same(const std::string& path, const std::string& found, const std::string& given) {
  if (found == given) return;
  const auto [a, b] = std::mismatch(found.begin(), found.end(), given.begin(), given.end());
  const auto at = static_cast<std::size_t>(a - found.begin());
  throw_invalid(
      "{} describes another namespace under the same id: there '...{}...', given '...{}...' (byte {}); "
      "remove that "
      "directory or use another root_dir",
      path, around(found, at), around(given, static_cast<std::size_t>(b - given.begin())), at);
}

// The lock is taken on the file that is there by name: a reclaimer may have
// removed the directory between our opening and our lock.
void open_namespace(const FsTierOptions& options, FileOps& ops, OpenRoot* open) {
  const std::string path = open->namespace_path();
  int error = 0;
  for (int attempt = 0; attempt < 100; ++attempt) {
    const int rc = ops.mkdir(open->directory.get(), open->namespace_name, 0700);
    if (rc < 0 && rc != -EEXIST) fail(path, "make directory", -rc);
    open->namespace_directory =
        open_fd(ops, open->directory.get(), open->namespace_name, kOpenDirectory, 0, &error);
    if (!open->namespace_directory && error == ENOENT) continue;
    if (!open->namespace_directory) fail(path, "open", error);
    if (rc == 0) sync_directory(ops, open->directory.get(), ".");
    const int directory = open->namespace_directory.get();
    FileInfo mine, named;
    if (const int known = ops.fstat(directory, &mine); known < 0) fail(path, "look at", -known);
    if (mine.owner != ::geteuid()) {
      throw_resource("{} belongs to uid {}, this process is uid {}; remove it or use another root_dir", path,
                     mine.owner, ::geteuid());
    }
    open->open_lock =
        open_fd(ops, directory, std::string(layout::kOpenFile), O_RDWR | O_CREAT | O_NOFOLLOW, 0600, &error);
    if (!open->open_lock && error == ENOENT) continue;
    if (!open->open_lock) fail(path + "/open", "open", error);
    if (const int locked = lock_file(ops, open->open_lock.get(), LOCK_SH); locked < 0) {
      throw_resource("cannot lock {}/open: {}; the file system of root_dir must support file locks", path,
                     std::strerror(-locked));
    }
    if (ops.fstat(open->open_lock.get(), &mine) != 0 ||
        ops.stat(directory, std::string(layout::kOpenFile), &named) != 0 || mine.inode != named.inode) {
      continue;
    }
    const std::string name(layout::kNamespaceFile);
    Fd made;
    const auto damaged = [&](const std::string& found) {
      return is_torn(found, options.namespace_json) || one_bit_differs(found, options.namespace_json);
    };
    check_same(
        path + "/" + name,
        write_once(options, ops, directory, path, name, options.namespace_json, open->writer, damaged, &made),
        options.namespace_json);
    if (rc == 0) open->count(open->namespace_directory);
    if (made) open->count(made);
    return;
  }
  fail(path, "open", EBUSY);
}

bool takes_direct(FileOps& ops, const OpenRoot& open, DirectMode mode) {
  if (mode == DirectMode::kOff) return false;
  Fd fd;
  std::string path;
  int rc =
      create_temporary(ops, open.namespace_directory.get(), "", O_RDWR | O_DIRECT, open.writer, &fd, &path);
  std::int64_t moved = rc;
  if (rc == 0) {
    const AlignedBuffer page(kPageBytes);
    const iovec part{page.data(), page.size()};
    moved = ops.pwritev(fd.get(), &part, 1, 0);
    if (moved >= 0) moved = ops.preadv(fd.get(), &part, 1, 0);
    (void)ops.unlink(open.namespace_directory.get(), path);
  }
  if (moved == static_cast<std::int64_t>(kPageBytes)) return true;
  if (mode == DirectMode::kOn) {
    throw_resource("the file system of {} refuses O_DIRECT ({}); set o_direct to auto or off", open.path,
                   moved < 0 ? std::strerror(static_cast<int>(-moved)) : "short transfer");
  }
  return false;
}

SpaceInfo space_of(FileOps& ops, const OpenRoot& open) {
  SpaceInfo space;
  if (const int rc = ops.statvfs(open.directory.get(), &space); rc < 0)
    fail(open.path, "ask for free space of", -rc);
  return space;
}

void check_space(const OpenRoot& open, const SpaceInfo& space) {
  // What is there already can be evicted.
  const std::uint64_t available = space.free_bytes + open.space->total();
  constexpr std::uint64_t kSmallestRecord = 17 * kPageBytes;
  if (available < kSmallestRecord) {
    throw_resource("{} has {} free; even a small record needs {}; free some space or set root_dir elsewhere",
                   open.path, format_bytes(available), format_bytes(kSmallestRecord));
  }
}

// A root that holds nothing but this new namespace is counted on the spot, so
// that the first write is granted.
bool count_new_root(const FsTierOptions& options, FileOps& ops, const OpenRoot& open,
                    const Generation& generation) {
  SpaceFigures figures;
  const Nanos now = options.clock != nullptr ? options.clock->now() : SteadyClock().now();
  if (!open.space->look(now, &figures) || !figures.alone) return false;
  std::vector<std::string> names;
  if (!list_namespaces(ops, open.directory.get(), &names) || names.size() > 1) return false;
  std::vector<std::uint64_t> generations;
  std::vector<DirEntry> entries;
  if (!list_generations(ops, open.namespace_directory.get(), &generations) || generations.size() > 1)
    return false;
  if (ops.list(generation.directory.get(), &entries) < 0 || !entries.empty()) return false;
  std::uint64_t number = 0;
  if (!open.space->begin_count(&number)) return false;
  const std::atomic<bool> stop{false};
  const CountFor count{open.writer, figures.writers};
  const std::uint64_t bytes = count_tree(ops, open.directory.get(), ".", {.count = &count}, stop);
  return open.space->finish_count(number, bytes).is_ok();
}

}  // namespace

void OpenRoot::count(const Fd& made) const {
  if (FileInfo info; ops.fstat(made.get(), &info) == 0) space->add(info.disk_bytes);
}

int OpenRoot::remove_file(int at, const std::string& name) const {
  const Space::Finished before = space->finished();
  std::uint64_t freed = 0;
  const int rc = unlink_file(ops, at, name, &freed);
  space->remove(freed, before);
  return rc;
}

std::function<void(std::uint64_t)> OpenRoot::each_removed() const {
  return [&to = *space, before = space->finished()](std::uint64_t bytes) mutable {
    to.remove(bytes, before);
    before = to.finished();
  };
}

void OpenRoot::close() {
  space->close();
  open_lock.reset();
}

OpenRoot open_root(const FsTierOptions& options, FileOps& ops, std::shared_ptr<Generation>* generation) {
  OpenRoot open(ops);
  open.path = options.root_dir;
  open.namespace_name = layout::namespace_name(options.namespace_id);
  std::random_device random;
  open.writer = std::uint64_t{random()} << 32 | random() | 1;
  open.directory = open_root_directory(options, ops);
  const std::string name(layout::kRootFile);
  std::string ledger;
  const bool ledger_is_ours =
      read_text(ops, open.directory.get(), std::string(layout::kLedgerFile), &ledger) == 0 &&
      SpacePage::is_of_this_format(ledger.data(), ledger.size());
  const std::string text = write_once(
      options, ops, open.directory.get(), open.path, name, std::string(layout::kRootText), open.writer,
      [&](const std::string& found) { return is_damaged_root_file(found, ledger_is_ours); }, nullptr);
  if (text != layout::kRootText) {
    throw_invalid("{}/{} is of another format: '{}', this version writes '{}'; use another root_dir",
                  open.path, name, text.substr(0, 80),
                  layout::kRootText.substr(0, layout::kRootText.size() - 1));
  }
  // A little below max_bytes, so that directories and small files of namespaces and resets fit without
  // asking.
  constexpr std::uint64_t kMetadataBytes = 16 * kPageBytes;
  open.space =
      std::make_unique<Space>(ops, open.directory.get(), open.path, options.max_bytes - kMetadataBytes,
                              open.writer, sharer(open.namespace_name, 0));
  open_namespace(options, ops, &open);
  const std::string path = open.namespace_path();
  if (const int rc = open_newest_generation(ops, open.namespace_directory.get(), path, generation); rc < 0)
    fail(path, "open the newest generation of", -rc);
  const Generation& own = **generation;
  open.space->share_as(sharer(open.namespace_name, own.number));
  if (own.made) open.count(own.directory);
  if (own.made && own.number > 1 && options.warn) {
    options.warn(fmt::format(
        "{} was reset: what was recorded before, and by the process that was reset after it, is not used",
        path));
  }
  open.direct = takes_direct(ops, open, options.o_direct);
  const SpaceInfo space = space_of(ops, open);
  open.reads_direct = open.direct && (!options.memory_outlives || space.ends_reads_first);
  check_space(open, space);
  open.fresh = count_new_root(options, ops, open, own);
  return open;
}

}  // namespace kv_offload
