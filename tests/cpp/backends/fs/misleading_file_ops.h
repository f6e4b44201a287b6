// SPDX-License-Identifier: Apache-2.0
// File systems with misleading metadata. Blocks are reported late (ZFS), never, or in another amount than the
// size. Times are coarse or in the future. The disk is full although the bound is not reached.
#pragma once

#include <atomic>
#include <cerrno>
#include <functional>
#include <map>
#include <mutex>
#include <utility>

#include "base/clock.h"
#include "faulty_file_ops.h"

namespace kv_offload::testing {

// Regular files show no blocks until `lag` after their size was first seen, and then size * factor.
class LateBlocks : public FaultyFileOps {
 public:
  LateBlocks(const Clock& clock, Nanos lag, std::uint64_t factor = 1)
      : clock_(clock), lag_(lag), factor_(factor) {}

  int fstat(int fd, FileInfo* info) override { return seen(FaultyFileOps::fstat(fd, info), info); }
  int stat(int directory, const std::string& path, FileInfo* info) override {
    return seen(FaultyFileOps::stat(directory, path, info), info);
  }

 private:
  int seen(int rc, FileInfo* info) {
    if (rc != 0 || !info->is_regular() || info->size == 0) return rc;
    const std::lock_guard lock(mutex_);
    auto& [size, since] = first_[info->inode];
    if (size != info->size) {
      size = info->size;
      since = clock_.now();
    }
    info->disk_bytes = clock_.now() - since >= lag_ ? (info->size + 511) / 512 * 512 * factor_ : 0;
    return rc;
  }
  const Clock& clock_;
  const Nanos lag_;
  const std::uint64_t factor_;
  std::mutex mutex_;
  std::map<std::uint64_t, std::pair<std::uint64_t, Nanos>> first_;  // by inode: size, first seen when
};

// A directory takes one page, plus one page for each name of its maximum, like ext4 with long names.
class GrowingDirectories : public FaultyFileOps {
 public:
  int fstat(int fd, FileInfo* info) override { return grown(FaultyFileOps::fstat(fd, info), fd, info); }
  int stat(int directory, const std::string& path, FileInfo* info) override {
    const int rc = FaultyFileOps::stat(directory, path, info);
    if (rc != 0 || !info->is_directory()) return rc;
    int error = 0;
    const Fd fd = open_fd(posix_file_ops(), directory, path, kOpenDirectory, 0, &error);
    return grown(rc, fd.get(), info);
  }

 private:
  int grown(int rc, int fd, FileInfo* info) {
    if (rc != 0 || !info->is_directory()) return rc;
    std::vector<DirEntry> names;
    (void)posix_file_ops().list(fd, &names);
    const std::lock_guard lock(mutex_);
    std::uint64_t& most = most_[info->inode];
    most = std::max<std::uint64_t>(most, names.size());
    info->disk_bytes = kPageBytes * (1 + most);
    return rc;
  }
  std::mutex mutex_;
  std::map<std::uint64_t, std::uint64_t> most_;  // names, by inode
};

// Transforms all times with `shown`.
class ChangedTimes : public FaultyFileOps {
 public:
  using Shown = std::function<std::int64_t(std::int64_t nanos, const FileInfo& info)>;
  explicit ChangedTimes(Shown shown) : shown_(std::move(shown)) {}
  int fstat(int fd, FileInfo* info) override {
    const int rc = FaultyFileOps::fstat(fd, info);
    if (rc == 0) info->mtime_nanos = shown_(info->mtime_nanos, *info);
    return rc;
  }
  int stat(int directory, const std::string& path, FileInfo* info) override {
    const int rc = FaultyFileOps::stat(directory, path, info);
    if (rc == 0) info->mtime_nanos = shown_(info->mtime_nanos, *info);
    return rc;
  }

 private:
  const Shown shown_;
};

// Has room for this many bytes in files of more than a page; a write beyond that fails with `error`.
class SmallDisk : public FaultyFileOps {
 public:
  explicit SmallDisk(std::uint64_t room, int error = ENOSPC) : room_(room), error_(error) {}
  void set_room(std::uint64_t room) { room_.store(room); }
  std::uint64_t room() const { return room_.load(); }

  std::int64_t pwritev(int fd, const iovec* parts, int count, std::int64_t offset) override {
    std::uint64_t end = static_cast<std::uint64_t>(offset);
    for (int i = 0; i < count; ++i) end += parts[i].iov_len;
    FileInfo info;
    if (end > kPageBytes && posix_file_ops().fstat(fd, &info) == 0 && end > info.size) {
      const std::lock_guard lock(mutex_);
      const std::uint64_t grown = end - info.size;
      if (used_ + grown > room_.load()) return -error_;
      used_ += grown;
    }
    return FaultyFileOps::pwritev(fd, parts, count, offset);
  }
  int unlink(int directory, const std::string& path) override {
    FileInfo info;
    const bool known = posix_file_ops().stat(directory, path, &info) == 0 && info.size > kPageBytes;
    const int rc = FaultyFileOps::unlink(directory, path);
    const std::lock_guard lock(mutex_);
    if (rc == 0 && known) used_ -= std::min(used_, info.size);
    return rc;
  }

 private:
  std::atomic<std::uint64_t> room_;
  const int error_;
  std::mutex mutex_;
  std::uint64_t used_ = 0;
};

// A file system that copies on write: an overwrite needs as much room as new bytes, for the ledger too. Full
// from fill() on, except for bytes that are freed.
class CopyOnWriteDisk : public FaultyFileOps {
 public:
  // taken: another program uses removed bytes at once.
  void fill(bool taken = false) {
    const std::lock_guard lock(mutex_);
    room_ = 0;
    taken_ = taken;
  }
  void empty() {
    const std::lock_guard lock(mutex_);
    room_ = kAll;
  }

  std::int64_t pwritev(int fd, const iovec* parts, int count, std::int64_t offset) override {
    std::uint64_t bytes = 0;
    for (int i = 0; i < count; ++i) bytes += parts[i].iov_len;
    const auto end = static_cast<std::uint64_t>(offset) + bytes;
    FileInfo info;
    if (posix_file_ops().fstat(fd, &info) != 0) return -EIO;
    {
      const std::lock_guard lock(mutex_);
      if (bytes > room_) return -ENOSPC;
      if (room_ != kAll && end > info.size) room_ -= end - info.size;
    }
    return FaultyFileOps::pwritev(fd, parts, count, offset);
  }
  int statvfs(int fd, SpaceInfo* info) override {
    const int rc = FaultyFileOps::statvfs(fd, info);
    const std::lock_guard lock(mutex_);
    if (rc == 0 && room_ != kAll) info->free_bytes = room_;
    return rc;
  }
  int unlink(int directory, const std::string& path) override {
    FileInfo info;
    const bool known = posix_file_ops().stat(directory, path, &info) == 0;
    const int rc = FaultyFileOps::unlink(directory, path);
    const std::lock_guard lock(mutex_);
    if (rc == 0 && known && room_ != kAll && !taken_) room_ += info.size;
    return rc;
  }

 private:
  static constexpr std::uint64_t kAll = ~std::uint64_t{0};
  std::mutex mutex_;
  std::uint64_t room_ = kAll;
  bool taken_ = false;
};

}  // namespace kv_offload::testing
