// SPDX-License-Identifier: Apache-2.0
// FileOps of one process among several in a test. It can die (its locks are released, and it cleans nothing
// up), run on another host, or use a mount whose locks do not reach other hosts.
#pragma once

#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <mutex>
#include <set>
#include <string>

#include "backends/fs/file_ops.h"

namespace kv_offload::testing {

class ProcessOps final : public FileOps {
 public:
  explicit ProcessOps(FileOps& real = posix_file_ops()) : real_(real) {}
  ~ProcessOps() override {
    if (!boot_id_.empty()) ::unlink(boot_id_.c_str());
  }
  // From here on, every call fails.
  void die() {
    const std::lock_guard lock(mutex_);
    dead_ = true;
    for (const int fd : open_) real_.close(fd);
    open_.clear();
  }
  void on_host(const std::string& boot_id) {
    char name[] = "/tmp/kv_offload_boot_XXXXXX";
    const int fd = ::mkstemp(name);
    if (fd < 0 || ::write(fd, boot_id.data(), boot_id.size()) < 0) std::abort();
    ::close(fd);
    boot_id_ = name;
  }
  void ignore_locks() { ignore_locks_ = true; }

  int open(int directory, const std::string& path, int flags, unsigned mode) override {
    const std::lock_guard lock(mutex_);
    if (dead_) return -EIO;
    const bool boot = path == "/proc/sys/kernel/random/boot_id" && !boot_id_.empty();
    const int fd = real_.open(directory, boot ? boot_id_ : path, flags, mode);
    if (fd >= 0) open_.insert(fd);
    return fd;
  }
  void close(int fd) override {
    const std::lock_guard lock(mutex_);
    if (open_.erase(fd) > 0) real_.close(fd);
  }
  int replace(int fd, int by) override { return dead() ? -EIO : real_.replace(fd, by); }
  std::int64_t preadv(int fd, const iovec* parts, int count, std::int64_t offset) override {
    return dead() ? -EIO : real_.preadv(fd, parts, count, offset);
  }
  std::int64_t pwritev(int fd, const iovec* parts, int count, std::int64_t offset) override {
    return dead() ? -EIO : real_.pwritev(fd, parts, count, offset);
  }
  int move(int from_directory, const std::string& from, int to_directory, const std::string& to,
           bool keep_existing) override {
    return dead() ? -EIO : real_.move(from_directory, from, to_directory, to, keep_existing);
  }
  int unlink(int directory, const std::string& path) override {
    return dead() ? -EIO : real_.unlink(directory, path);
  }
  int rmdir(int directory, const std::string& path) override {
    return dead() ? -EIO : real_.rmdir(directory, path);
  }
  int mkdir(int directory, const std::string& path, unsigned mode) override {
    return dead() ? -EIO : real_.mkdir(directory, path, mode);
  }
  int fsync(int fd, bool data_only) override { return dead() ? -EIO : real_.fsync(fd, data_only); }
  int fstat(int fd, FileInfo* info) override { return dead() ? -EIO : real_.fstat(fd, info); }
  int stat(int directory, const std::string& path, FileInfo* info) override {
    return dead() ? -EIO : real_.stat(directory, path, info);
  }
  int set_mtime(int directory, const std::string& path, std::int64_t nanos) override {
    return dead() ? -EIO : real_.set_mtime(directory, path, nanos);
  }
  int statvfs(int fd, SpaceInfo* info) override { return dead() ? -EIO : real_.statvfs(fd, info); }
  int flock(int fd, int operation) override {
    if (ignore_locks_) return 0;
    return dead() ? -EIO : real_.flock(fd, operation);
  }
  int refresh(int directory, const std::string& path) override {
    return dead() ? -EIO : real_.refresh(directory, path);
  }
  int list(int fd, std::vector<DirEntry>* entries) override {
    return dead() ? -EIO : real_.list(fd, entries);
  }

 private:
  bool dead() {
    const std::lock_guard lock(mutex_);
    return dead_;
  }
  FileOps& real_;
  std::mutex mutex_;
  bool dead_ = false;
  std::string boot_id_;
  bool ignore_locks_ = false;
  std::set<int> open_;
};

}  // namespace kv_offload::testing
