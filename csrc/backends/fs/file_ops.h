// SPDX-License-Identifier: Apache-2.0
// FileOps: every file system call of the fs tier, so that tests can inject failures, blocking and short
// transfers.
//
// Results follow liburing: >= 0, or a negative errno. The POSIX implementation never retries EINTR (callers
// do) and keeps no state. Any thread.
#pragma once

#include <fcntl.h>
#include <sys/uio.h>

#include <cstdint>
#include <string>
#include <vector>

namespace kv_offload {

// Flags that open one of our directories; they never follow a symbolic link.
inline constexpr int kOpenDirectory = O_RDONLY | O_DIRECTORY | O_NOFOLLOW;

struct FileInfo {
  std::uint64_t size = 0;
  std::uint64_t disk_bytes = 0;  // as `du` counts: st_blocks * 512
  std::uint64_t inode = 0;
  std::uint64_t device = 0;
  std::int64_t mtime_nanos = 0;
  std::uint32_t mode = 0;
  std::uint32_t owner = 0;
  std::uint32_t links = 0;
  // Returns the bytes that a file counts against the bound: charged_bytes() for a regular file, else its
  // blocks.
  std::uint64_t charge() const;
  bool is_regular() const;
  bool is_directory() const;
  bool is_symlink() const;
};

// Returns the bytes that one of our files counts against the bound: its blocks, but at least its size in
// whole pages. ZFS reports the blocks of a new file only seconds after the write, and compressing file
// systems report fewer.
std::uint64_t charged_bytes(std::uint64_t disk_bytes, std::uint64_t size);

struct DirEntry {
  std::string name;
  unsigned char type = 0;  // DT_*
};

struct SpaceInfo {
  std::uint64_t free_bytes = 0;  // available to this user (f_bavail)
  // True if a killed process ends only after its direct reads have ended. Elsewhere the kernel may still
  // write into the process's memory afterwards: an NFS client does when its server answers.
  bool ends_reads_first = false;
};

class FileOps {
 public:
  virtual ~FileOps() = default;
  // `directory` may be AT_FDCWD. O_CLOEXEC is added.
  virtual int open(int directory, const std::string& path, int flags, unsigned mode) = 0;
  virtual void close(int fd) = 0;
  // dup3(): `fd` now refers to the open file of `by`, in all threads. `by` stays open.
  virtual int replace(int fd, int by) = 0;
  virtual std::int64_t preadv(int fd, const iovec* parts, int count, std::int64_t offset) = 0;
  virtual std::int64_t pwritev(int fd, const iovec* parts, int count, std::int64_t offset) = 0;
  // renameat2(). keep_existing: returns -EEXIST instead of replacing the target; -EINVAL where unsupported.
  virtual int move(int from_directory, const std::string& from, int to_directory, const std::string& to,
                   bool keep_existing) = 0;
  int rename(int directory, const std::string& from, const std::string& to, bool keep_existing) {
    return move(directory, from, directory, to, keep_existing);
  }
  virtual int unlink(int directory, const std::string& path) = 0;
  virtual int rmdir(int directory, const std::string& path) = 0;
  virtual int mkdir(int directory, const std::string& path, unsigned mode) = 0;
  virtual int fsync(int fd, bool data_only) = 0;
  virtual int fstat(int fd, FileInfo* info) = 0;
  // Does not follow symbolic links.
  virtual int stat(int directory, const std::string& path, FileInfo* info) = 0;
  virtual int set_mtime(int directory, const std::string& path, std::int64_t nanos) = 0;
  virtual int statvfs(int fd, SpaceInfo* info) = 0;
  virtual int flock(int fd, int operation) = 0;
  // Makes later lookups in this directory see its current names, including changes by other hosts. A network
  // file system client caches for up to a minute which names exist and which do not.
  virtual int refresh(int directory, const std::string& path) = 0;
  // Appends all names except "." and "..".
  virtual int list(int fd, std::vector<DirEntry>* entries) = 0;
};

// Stateless; valid for the life of the process.
FileOps& posix_file_ops();

// Owns a descriptor.
class Fd {
 public:
  Fd() = default;
  Fd(FileOps& ops, int fd) : ops_(&ops), fd_(fd) {}
  Fd(Fd&& other) noexcept : ops_(other.ops_), fd_(other.fd_) { other.fd_ = -1; }
  Fd& operator=(Fd&& other) noexcept {
    if (this != &other) {
      reset();
      ops_ = other.ops_;
      fd_ = other.fd_;
      other.fd_ = -1;
    }
    return *this;
  }
  ~Fd() { reset(); }
  int get() const { return fd_; }
  explicit operator bool() const { return fd_ >= 0; }
  void reset() {
    if (fd_ >= 0) ops_->close(fd_);
    fd_ = -1;
  }

 private:
  FileOps* ops_ = nullptr;
  int fd_ = -1;
};

// open() with EINTR retried. On failure *error is the (positive) errno.
Fd open_fd(FileOps& ops, int directory, const std::string& path, int flags, unsigned mode, int* error);
// flock() with EINTR retried.
int lock_file(FileOps& ops, int fd, int operation);
// stat() that also finds recent changes of other hosts below `parent`, a directory in `directory`.
int stat_refreshed(FileOps& ops, int directory, const std::string& parent, const std::string& path,
                   FileInfo* info);
// True if the name certainly no longer refers to this open file. The link count alone does not show this: an
// NFS client keeps a removed open file under another name.
bool is_unlinked(FileOps& ops, int fd, int directory, const std::string& name);
// Reads a whole small file. Returns 0 or -errno; -EFBIG above kMostTextBytes.
inline constexpr std::size_t kMostTextBytes = std::size_t{1} << 20;
int read_text(FileOps& ops, int directory, const std::string& path, std::string* text);

}  // namespace kv_offload
