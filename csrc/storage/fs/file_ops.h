// FileOps: every call the fs tier makes to the file system, so that tests can
// give one that fails, blocks or transfers short.
//
// Results are liburing's: >= 0, or a negative errno. The POSIX one retries
// EINTR nowhere (callers do) and keeps no state. Any thread.
#pragma once

#include <fcntl.h>
#include <sys/uio.h>

#include <cstdint>
#include <string>
#include <vector>

namespace kv_offload {

// Flags that open a directory of ours: never one behind a link.
inline constexpr int kOpenDirectory = O_RDONLY | O_DIRECTORY | O_NOFOLLOW;

struct FileInfo {
  std::uint64_t size = 0;
  std::uint64_t disk_bytes = 0;  // what `du` counts: st_blocks * 512
  std::uint64_t inode = 0;
  std::uint64_t device = 0;
  std::int64_t mtime_nanos = 0;
  std::uint32_t mode = 0;
  std::uint32_t owner = 0;
  std::uint32_t links = 0;
  // Bytes that a file of ours counts against the bound (charged_bytes()); anything else counts its blocks.
  std::uint64_t charge() const;
  bool is_regular() const;
  bool is_directory() const;
  bool is_symlink() const;
};

// Bytes that one of our files counts against the bound: its blocks, but at least its size in whole pages. ZFS
// reports the blocks of a new file only seconds after the write, and file systems that compress report fewer.
std::uint64_t charged_bytes(std::uint64_t disk_bytes, std::uint64_t size);

struct DirEntry {
  std::string name;
  unsigned char type = 0;  // DT_*
};

struct SpaceInfo {
  std::uint64_t free_bytes = 0;  // for us (f_bavail)
  // A process that is killed is gone only when its direct reads have ended. Elsewhere the
  // kernel may go on to write into their memory: an NFS client does when its server answers.
  bool ends_reads_first = false;
};

class FileOps {
 public:
  virtual ~FileOps() = default;
  // `directory` may be AT_FDCWD. O_CLOEXEC is added.
  virtual int open(int directory, const std::string& path, int flags, unsigned mode) = 0;
  virtual void close(int fd) = 0;
  // dup3(): from now on `fd` is the open file of `by`, in all threads. `by` stays open.
  virtual int replace(int fd, int by) = 0;
  virtual std::int64_t preadv(int fd, const iovec* parts, int count, std::int64_t offset) = 0;
  virtual std::int64_t pwritev(int fd, const iovec* parts, int count, std::int64_t offset) = 0;
  // keep_existing: -EEXIST instead of replacing; -EINVAL where unsupported.
  virtual int rename(int directory, const std::string& from, const std::string& to, bool keep_existing) = 0;
  virtual int unlink(int directory, const std::string& path) = 0;
  virtual int rmdir(int directory, const std::string& path) = 0;
  virtual int mkdir(int directory, const std::string& path, unsigned mode) = 0;
  virtual int fsync(int fd, bool data_only) = 0;
  virtual int fstat(int fd, FileInfo* info) = 0;
  virtual int stat(int directory, const std::string& path, FileInfo* info) = 0;  // not following
  virtual int set_mtime(int directory, const std::string& path, std::int64_t nanos) = 0;
  virtual int statvfs(int fd, SpaceInfo* info) = 0;
  virtual int flock(int fd, int operation) = 0;
  // From here on names in this directory are seen as they are now, whoever made or removed them. A client of
  // a network file system remembers for up to a minute which names there are, and which there are not.
  virtual int refresh(int directory, const std::string& path) = 0;
  // All names but "." and "..", appended.
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

// open() with EINTR retried; on failure the errno is in *error (positive).
Fd open_fd(FileOps& ops, int directory, const std::string& path, int flags, unsigned mode, int* error);
// flock() with EINTR retried.
int lock_file(FileOps& ops, int fd, int operation);
// stat() that also finds what another host has made of late below `parent`, a directory in `directory`.
int stat_anew(FileOps& ops, int directory, const std::string& parent, const std::string& path,
              FileInfo* info);
// It is certain that the name does not lead to this open file any more. The number of links alone does not
// tell: a client of NFS keeps a file that it has open under another name.
bool lost_its_name(FileOps& ops, int fd, int directory, const std::string& name);
// A whole small file; -errno or 0, -EFBIG when it is none.
inline constexpr std::size_t kMostTextBytes = std::size_t{1} << 20;
int read_text(FileOps& ops, int directory, const std::string& path, std::string* text);

}  // namespace kv_offload
