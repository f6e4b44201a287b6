// SPDX-License-Identifier: Apache-2.0
#include "backends/fs/file_ops.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/statfs.h>
#include <sys/statvfs.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <iterator>
#include <limits>

#include "base/aligned_buffer.h"
#include "base/types.h"

namespace kv_offload {

bool FileInfo::is_regular() const { return S_ISREG(mode); }
bool FileInfo::is_directory() const { return S_ISDIR(mode); }
bool FileInfo::is_symlink() const { return S_ISLNK(mode); }
std::uint64_t FileInfo::charge() const { return is_regular() ? charged_bytes(disk_bytes, size) : disk_bytes; }

std::uint64_t charged_bytes(std::uint64_t disk_bytes, std::uint64_t size) {
  // Larger than any record: a sparse file that is not ours.
  constexpr std::uint64_t kMostBytes = std::uint64_t{1} << 38;
  return size > kMostBytes ? disk_bytes : std::max(disk_bytes, round_up(size, kPageBytes));
}

namespace {

template <typename T>
T or_errno(T result) {
  return result < 0 ? static_cast<T>(-errno) : result;
}

void fill(const struct ::stat& from, FileInfo* to) {
  to->size = static_cast<std::uint64_t>(from.st_size);
  to->disk_bytes = static_cast<std::uint64_t>(from.st_blocks) * 512;
  to->inode = from.st_ino;
  to->device = from.st_dev;
  // Some file systems store seconds whose nanoseconds overflow 64 bits.
  if (__builtin_mul_overflow(std::int64_t{from.st_mtim.tv_sec}, std::int64_t{1'000'000'000},
                             &to->mtime_nanos) ||
      __builtin_add_overflow(to->mtime_nanos, from.st_mtim.tv_nsec, &to->mtime_nanos)) {
    to->mtime_nanos = from.st_mtim.tv_sec < 0 ? std::numeric_limits<std::int64_t>::min()
                                              : std::numeric_limits<std::int64_t>::max();
  }
  to->mode = from.st_mode;
  to->owner = from.st_uid;
  to->links = static_cast<std::uint32_t>(from.st_nlink);
}

// File systems on local devices wait for a direct read even when the process is killed. Magic numbers from
// statfs(2). Other file systems (FUSE, network file systems) may not wait.
bool waits_for_reads(int fd) {
  constexpr std::int64_t kWaiting[] = {
      0xEF53 /* ext4 */,    0x58465342 /* XFS */,      0x9123683E /* Btrfs */, 0xF2F52010 /* F2FS */,
      0x2FC12FC1 /* ZFS */, 0xCA451A4E /* bcachefs */, 0x01021994 /* tmpfs */, 0x794C7630 /* overlay */,
  };
  struct ::statfs result;
  return ::fstatfs(fd, &result) == 0 &&
         std::find(std::begin(kWaiting), std::end(kWaiting),
                   std::int64_t{static_cast<std::uint32_t>(result.f_type)}) != std::end(kWaiting);
}

class PosixFileOps final : public FileOps {
 public:
  int open(int directory, const std::string& path, int flags, unsigned mode) override {
    return or_errno(::openat(directory, path.c_str(), flags | O_CLOEXEC, mode));
  }
  void close(int fd) override { ::close(fd); }
  int replace(int fd, int by) override {
    const int rc = or_errno(::dup3(by, fd, O_CLOEXEC));
    return rc < 0 ? rc : 0;
  }
  std::int64_t preadv(int fd, const iovec* parts, int count, std::int64_t offset) override {
    return or_errno(static_cast<std::int64_t>(::preadv(fd, parts, count, offset)));
  }
  std::int64_t pwritev(int fd, const iovec* parts, int count, std::int64_t offset) override {
    return or_errno(static_cast<std::int64_t>(::pwritev(fd, parts, count, offset)));
  }
  int move(int from_directory, const std::string& from, int to_directory, const std::string& to,
           bool keep_existing) override {
    return or_errno(::renameat2(from_directory, from.c_str(), to_directory, to.c_str(),
                                keep_existing ? unsigned{RENAME_NOREPLACE} : 0u));
  }
  int unlink(int directory, const std::string& path) override {
    return or_errno(::unlinkat(directory, path.c_str(), 0));
  }
  int rmdir(int directory, const std::string& path) override {
    return or_errno(::unlinkat(directory, path.c_str(), AT_REMOVEDIR));
  }
  int mkdir(int directory, const std::string& path, unsigned mode) override {
    return or_errno(::mkdirat(directory, path.c_str(), mode));
  }
  int fsync(int fd, bool data_only) override { return or_errno(data_only ? ::fdatasync(fd) : ::fsync(fd)); }
  int fstat(int fd, FileInfo* info) override {
    struct ::stat result;
    const int rc = or_errno(::fstat(fd, &result));
    if (rc == 0) fill(result, info);
    return rc;
  }
  int stat(int directory, const std::string& path, FileInfo* info) override {
    struct ::stat result;
    const int rc = or_errno(::fstatat(directory, path.c_str(), &result, AT_SYMLINK_NOFOLLOW));
    if (rc == 0) fill(result, info);
    return rc;
  }
  int set_mtime(int directory, const std::string& path, std::int64_t nanos) override {
    const timespec times[2] = {{0, UTIME_OMIT}, {nanos / 1'000'000'000, nanos % 1'000'000'000}};
    return or_errno(::utimensat(directory, path.c_str(), times, AT_SYMLINK_NOFOLLOW));
  }
  int statvfs(int fd, SpaceInfo* info) override {
    struct ::statvfs result;
    const int rc = or_errno(::fstatvfs(fd, &result));
    if (rc != 0) return rc;
    info->free_bytes = std::uint64_t{result.f_bavail} * result.f_frsize;
    info->ends_reads_first = waits_for_reads(fd);
    return 0;
  }
  int flock(int fd, int operation) override { return or_errno(::flock(fd, operation)); }
  int refresh(int directory, const std::string& path) override {
    struct ::statx ignored;
    constexpr int kFlags = AT_SYMLINK_NOFOLLOW | AT_STATX_FORCE_SYNC;
    const int rc = or_errno(::statx(directory, path.c_str(), kFlags, STATX_BASIC_STATS, &ignored));
    return rc == -ENOSYS || rc == -EPERM ? 0 : rc;  // statx() missing or filtered: stale at worst
  }
  int list(int fd, std::vector<DirEntry>* entries) override;
};

int PosixFileOps::list(int fd, std::vector<DirEntry>* entries) {
  if (::lseek(fd, 0, SEEK_SET) < 0) return -errno;
  alignas(8) char buffer[32768];
  for (;;) {
    const long bytes = ::syscall(SYS_getdents64, fd, buffer, sizeof(buffer));
    if (bytes < 0) return -errno;
    if (bytes == 0) return 0;
    for (long at = 0; at < bytes;) {
      // struct linux_dirent64: ino 8, off 8, reclen 2, type 1, name
      std::uint16_t length;
      std::memcpy(&length, buffer + at + 16, sizeof(length));
      const char* name = buffer + at + 19;
      if (std::strcmp(name, ".") != 0 && std::strcmp(name, "..") != 0) {
        entries->push_back({name, static_cast<unsigned char>(buffer[at + 18])});
      }
      at += length;
    }
  }
}

}  // namespace

FileOps& posix_file_ops() {
  static PosixFileOps ops;  // stateless, so safe to share
  return ops;
}

Fd open_fd(FileOps& ops, int directory, const std::string& path, int flags, unsigned mode, int* error) {
  int fd;
  do {
    fd = ops.open(directory, path, flags, mode);
  } while (fd == -EINTR);
  *error = fd < 0 ? -fd : 0;
  return {ops, fd < 0 ? -1 : fd};
}

int lock_file(FileOps& ops, int fd, int operation) {
  int rc;
  do {
    rc = ops.flock(fd, operation);
  } while (rc == -EINTR);
  return rc;
}

int stat_refreshed(FileOps& ops, int directory, const std::string& parent, const std::string& path,
                   FileInfo* info) {
  if (const int rc = ops.stat(directory, path, info); rc != -ENOENT) return rc;
  int rc = ops.refresh(directory, parent);
  if (rc == -ENOENT && (rc = ops.refresh(directory, ".")) == 0) rc = ops.refresh(directory, parent);
  return rc < 0 ? rc : ops.stat(directory, path, info);
}

bool is_unlinked(FileOps& ops, int fd, int directory, const std::string& name) {
  FileInfo held, named;
  if (const int rc = ops.fstat(fd, &held); rc < 0) return rc == -ESTALE;
  if (held.links == 0) return true;
  const int rc = ops.stat(directory, name, &named);
  return rc == -ENOENT || (rc == 0 && (named.inode != held.inode || named.device != held.device));
}

int read_text(FileOps& ops, int directory, const std::string& path, std::string* text) {
  int error = 0;
  const Fd fd = open_fd(ops, directory, path, O_RDONLY | O_NOFOLLOW | O_NONBLOCK, 0, &error);
  if (!fd) return -error;
  text->clear();
  char buffer[4096];
  for (;;) {
    const iovec part{buffer, sizeof(buffer)};
    const std::int64_t bytes = ops.preadv(fd.get(), &part, 1, static_cast<std::int64_t>(text->size()));
    if (bytes == -EINTR) continue;
    if (bytes < 0) return static_cast<int>(bytes);
    if (bytes == 0) return 0;
    if (text->size() + static_cast<std::size_t>(bytes) > kMostTextBytes) return -EFBIG;
    text->append(buffer, static_cast<std::size_t>(bytes));
  }
}

}  // namespace kv_offload
