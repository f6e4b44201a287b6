// SPDX-License-Identifier: Apache-2.0
// One host's view of a directory that several hosts mount over NFS, in the worst case: no cached state
// expires by time. A change by another host becomes visible where Linux's client asks the server:
//
//   names     are cached, missing ones too, until the directory is opened by its name or
//             refreshed; opening it as "." does not count, nor does a listing
//   files     keep their state from each open on; one that another host removed is ESTALE
//   removal   of a file that this host has open renames it (.nfsN) until it is closed
//   rename    does not support "keep the existing file" (EINVAL)
//   locks     reach all hosts, for files only; LOCK_EX needs a writable descriptor
//
// cut_off(): no call returns until heal(), and meanwhile the server gives the locks to others.
#pragma once

#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include <cerrno>
#include <condition_variable>
#include <map>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "backends/fs/file_ops.h"

namespace kv_offload::testing {

// The server's state: how often the names of each directory changed.
class NfsServer {
 public:
  std::uint64_t version(const std::string& directory) {
    const std::lock_guard lock(mutex_);
    return versions_[directory];
  }
  void changed(const std::string& directory) {
    const std::lock_guard lock(mutex_);
    ++versions_[directory];
  }

 private:
  std::mutex mutex_;
  std::map<std::string, std::uint64_t> versions_;
};

class NfsHost final : public FileOps {
 public:
  explicit NfsHost(NfsServer& server, FileOps& real = posix_file_ops()) : server_(server), real_(real) {}

  void cut_off() {
    const std::lock_guard lock(mutex_);
    cut_ = true;
    for (const auto& [fd, file] : open_) (void)::flock(fd, LOCK_UN);
  }
  void heal() {
    const std::lock_guard lock(mutex_);
    cut_ = false;
    healed_.notify_all();
  }
  // Shifts this host's clock in the times that it writes.
  void set_clock_ahead(std::int64_t nanos) { ahead_ = nanos; }

  int open(int directory, const std::string& path, int flags, unsigned mode) override {
    Calling call(*this);
    const std::string full = full_path(directory, path);
    if (!is_below(full)) return remember(real_.open(directory, path, flags, mode));
    FileInfo before;
    if (path.find('/') != std::string::npos && look_up(parent_of(full), &before) == -ENOENT) return -ENOENT;
    const bool creates = (flags & O_CREAT) != 0;
    const bool there = creates && real_.stat(directory, path, &before) == 0;
    if (!creates && path != "." && look_up(full, &before) == -ENOENT) return -ENOENT;
    const int fd = remember(real_.open(directory, path, flags, mode));
    if (fd == -ENOENT || fd == -EEXIST || creates) names_.erase(full);
    if (fd >= 0 && creates && !there) server_.changed(parent_of(full));
    if (fd >= 0 && path != ".") see(full);
    return fd;
  }
  void close(int fd) override {
    Calling call(*this);
    const auto at = open_.find(fd);
    const File file = at == open_.end() ? File{} : at->second;
    if (at != open_.end()) open_.erase(at);
    real_.close(fd);
    if (!file.kept_as.empty() && !is_open(file)) (void)::unlink(file.kept_as.c_str());
  }
  int replace(int fd, int by) override {
    Calling call(*this);
    const int rc = real_.replace(fd, by);
    if (rc == 0) open_[fd] = open_[by];
    return rc;
  }
  std::int64_t preadv(int fd, const iovec* parts, int count, std::int64_t offset) override {
    Calling call(*this);
    return is_stale(fd) ? -ESTALE : real_.preadv(fd, parts, count, offset);
  }
  std::int64_t pwritev(int fd, const iovec* parts, int count, std::int64_t offset) override {
    Calling call(*this);
    return real_.pwritev(fd, parts, count, offset);  // also to a stale file: the cache accepts it
  }
  int move(int from_directory, const std::string& from, int to_directory, const std::string& to,
           bool keep_existing) override {
    Calling call(*this);
    if (keep_existing) return -EINVAL;
    const std::string source = full_path(from_directory, from), target = full_path(to_directory, to);
    keep_if_open(target);
    const int rc = real_.move(from_directory, from, to_directory, to, false);
    for (const std::string& path : {source, target}) {
      names_.erase(path);
      if (rc == 0) server_.changed(parent_of(path));
    }
    return rc;
  }
  int unlink(int directory, const std::string& path) override {
    Calling call(*this);
    const std::string full = full_path(directory, path);
    const int rc = keep_if_open(full) ? 0 : real_.unlink(directory, path);
    names_.erase(full);
    if (rc == 0) server_.changed(parent_of(full));
    return rc;
  }
  int rmdir(int directory, const std::string& path) override {
    Calling call(*this);
    return changed(full_path(directory, path), real_.rmdir(directory, path));
  }
  int mkdir(int directory, const std::string& path, unsigned mode) override {
    Calling call(*this);
    return changed(full_path(directory, path), real_.mkdir(directory, path, mode));
  }
  int fsync(int fd, bool data_only) override {
    Calling call(*this);
    return real_.fsync(fd, data_only);
  }
  int fstat(int fd, FileInfo* info) override {
    Calling call(*this);
    const int rc = real_.fstat(fd, info);
    return rc == 0 && info->links == 0 && info->is_regular() ? -ESTALE : rc;
  }
  int stat(int directory, const std::string& path, FileInfo* info) override {
    Calling call(*this);
    const std::string full = full_path(directory, path);
    return path == "." || !is_below(full) ? real_.stat(directory, path, info) : look_up(full, info);
  }
  int set_mtime(int directory, const std::string& path, std::int64_t nanos) override {
    Calling call(*this);
    return real_.set_mtime(directory, path, nanos + ahead_);
  }
  int statvfs(int fd, SpaceInfo* info) override {
    Calling call(*this);
    return real_.statvfs(fd, info);
  }
  int flock(int fd, int operation) override {
    Calling call(*this);
    const int mode = ::fcntl(fd, F_GETFL) & O_ACCMODE;
    if ((operation & LOCK_EX) != 0 && mode == O_RDONLY) return -EBADF;
    if ((operation & LOCK_SH) != 0 && mode == O_WRONLY) return -EBADF;
    if (is_stale(fd) && (operation & LOCK_UN) == 0) return -ESTALE;
    return real_.flock(fd, operation);
  }
  int refresh(int directory, const std::string& path) override {
    Calling call(*this);
    const std::string full = full_path(directory, path);
    FileInfo info;
    if (path != "." && look_up(full, &info) == -ENOENT) return -ENOENT;
    names_.erase(full);
    const int rc = real_.stat(directory, path, &info);
    if (rc == 0) see(full);
    return rc;
  }
  int list(int fd, std::vector<DirEntry>* entries) override {
    Calling call(*this);
    const std::string path = full_path(fd, ".");
    Listing& listing = listings_[path];
    const std::uint64_t version = seen_version(path);
    if (!listing.known || listing.version != version) {
      listing.entries.clear();
      if (const int rc = real_.list(fd, &listing.entries); rc < 0) return rc;
      listing.known = true;
      listing.version = version;
    }
    entries->insert(entries->end(), listing.entries.begin(), listing.entries.end());
    return 0;
  }

 private:
  struct File {
    std::uint64_t inode = 0;
    std::string kept_as;  // name of a file that was removed here while open
  };
  struct Name {
    std::uint64_t version = 0;  // of its directory, as last seen
    int result = 0;
    FileInfo info;
  };
  struct Listing {
    bool known = false;
    std::uint64_t version = 0;
    std::vector<DirEntry> entries;
  };
  // Each call waits while the host is cut off, and then has exclusive access to its state.
  struct Calling {
    explicit Calling(NfsHost& host) : lock(host.mutex_) {
      host.healed_.wait(lock, [&] { return !host.cut_; });
    }
    std::unique_lock<std::mutex> lock;
  };

  static std::string parent_of(const std::string& path) { return path.substr(0, path.rfind('/')); }
  static bool is_below(const std::string& path) { return !path.starts_with("/proc/"); }
  static std::string full_path(int directory, const std::string& path) {
    if (directory == AT_FDCWD) return path;
    char target[4096];
    const ssize_t length =
        ::readlink(("/proc/self/fd/" + std::to_string(directory)).c_str(), target, sizeof(target));
    const std::string base(target, length < 0 ? 0 : static_cast<std::size_t>(length));
    return path == "." ? base : base + "/" + path;
  }
  std::uint64_t seen_version(const std::string& directory) {
    return seen_.try_emplace(directory, server_.version(directory)).first->second;
  }
  void see(const std::string& directory) { seen_[directory] = server_.version(directory); }
  int look_up(const std::string& full, FileInfo* info) {
    const std::uint64_t version = seen_version(parent_of(full));
    const auto at = names_.find(full);
    if (at != names_.end() && at->second.version == version) {
      *info = at->second.info;
      return at->second.result;
    }
    // A directory that is cached as missing hides its content.
    if (const auto above = names_.find(parent_of(full));
        above != names_.end() && above->second.result == -ENOENT &&
        above->second.version == seen_version(parent_of(parent_of(full)))) {
      return -ENOENT;
    }
    Name& name = names_[full];
    name.version = version;
    name.result = real_.stat(AT_FDCWD, full, &name.info);
    *info = name.info;
    return name.result;
  }
  int changed(const std::string& full, int rc) {
    names_.erase(full);
    if (rc == 0) server_.changed(parent_of(full));
    return rc;
  }
  int remember(int fd) {
    FileInfo info;
    if (fd >= 0 && real_.fstat(fd, &info) == 0) open_[fd] = {info.inode, {}};
    return fd;
  }
  bool is_open(const File& file) const {
    for (const auto& [fd, other] : open_) {
      if (other.inode == file.inode) return true;
    }
    return false;
  }
  bool is_stale(int fd) {
    FileInfo info;
    return real_.fstat(fd, &info) == 0 && info.is_regular() && info.links == 0;
  }
  bool keep_if_open(const std::string& full) {
    FileInfo info;
    if (real_.stat(AT_FDCWD, full, &info) != 0 || !info.is_regular() || !is_open({info.inode, {}}))
      return false;
    const std::string kept = parent_of(full) + "/.nfs" + std::to_string(++last_kept_);
    if (::rename(full.c_str(), kept.c_str()) != 0) return false;
    for (auto& [fd, file] : open_) {
      if (file.inode == info.inode) file.kept_as = kept;
    }
    return true;
  }

  NfsServer& server_;
  FileOps& real_;
  std::mutex mutex_;
  std::condition_variable healed_;
  bool cut_ = false;
  std::int64_t ahead_ = 0;
  std::uint64_t last_kept_ = 0;
  std::map<int, File> open_;
  std::map<std::string, std::uint64_t> seen_;
  std::map<std::string, Name> names_;
  std::map<std::string, Listing> listings_;
};

}  // namespace kv_offload::testing
