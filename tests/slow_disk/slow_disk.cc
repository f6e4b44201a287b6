// SPDX-License-Identifier: Apache-2.0
// A FUSE mount with configurable disk faults:
//
//   slow_disk DIRECTORY MOUNTPOINT [locks]
//
// mounts DIRECTORY at MOUNTPOINT and prints "mounted". Each line of standard input
// is "SETTING NUMBER". The reply to each line is the counts so far
// ("ok read_bytes=..."):
//
//   read_bytes_per_second, write_bytes_per_second   0: unlimited
//   latency_ms                                      added to every read and write
//   frozen                                          1: no call returns until 0
//   read_errors, write_errors                       1: every read or write fails with EIO
//   remembers_names                                 1: caches names like an NFS client, see below
//   counts                                          changes no setting
//
// Two mounts of one DIRECTORY act as two hosts that share it. With "locks", file locks
// are shared by both mounts and, as on NFS, rename flags are rejected, so every rename
// replaces its target. Without it, locks are local to one mount, as with the mount
// option local_lock.
// With remembers_names, the mount caches missing names until a process looks up or
// lists their directory. With "locks", the kernel caches existing names. Neither
// cache expires.
//
// A change also applies to calls that are already waiting. At the end of the input,
// the program releases all calls, unmounts and exits, so it never outlives the
// process that started it.
#define FUSE_USE_VERSION 312
#include <fuse.h>

#include <dirent.h>
#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <iostream>
#include <map>
#include <mutex>
#include <set>
#include <sstream>
#include <string>
#include <thread>

namespace {

using Clock = std::chrono::steady_clock;

class Disk {
 public:
  enum Direction { kRead, kWrite };

  // Returns false if the setting is unknown.
  bool set(const std::string& name, std::uint64_t value) {
    const std::lock_guard lock(mutex_);
    const auto setting = settings_.find(name);
    if (setting == settings_.end()) return name == "counts";
    setting->second = value;
    ++changes_;
    free_at_[kRead] = free_at_[kWrite] = Clock::now();
    changed_.notify_all();
    return true;
  }

  std::string counts() {
    const std::lock_guard lock(mutex_);
    std::ostringstream text;
    text << "ok read_bytes=" << bytes_[kRead] << " write_bytes=" << bytes_[kWrite]
         << " read_errors=" << errors_[kRead] << " write_errors=" << errors_[kWrite] << " held=" << held_;
    return text.str();
  }

  // True if the name is cached as missing. Otherwise the caller looks the name up and calls on_missing() if
  // it does not exist.
  bool is_missing(const std::string& path) {
    const std::lock_guard lock(mutex_);
    return settings_.at("remembers_names") != 0 && missing_.contains(path);
  }
  void on_missing(const std::string& path) {
    const std::lock_guard lock(mutex_);
    missing_.insert(path);
  }
  // on_made(): this mount created or opened the name, or renamed a file to it. look_anew(): a process looked
  // up or listed the directory.
  void on_made(const std::string& path) {
    const std::lock_guard lock(mutex_);
    missing_.erase(path);
  }
  void look_anew(const std::string& directory) {
    const std::lock_guard lock(mutex_);
    const std::string below = directory == "/" ? directory : directory + "/";
    std::erase_if(missing_, [&](const std::string& path) {
      return path.starts_with(below) && path.find('/', below.size()) == std::string::npos;
    });
  }

  // Waits while the disk is frozen. Every call starts here, except releases, and reads and writes, which call
  // transfer().
  void arrive() {
    std::unique_lock lock(mutex_);
    wait_while_frozen(lock);
  }

  // Waits for the simulated transfer of `bytes`. Returns false if the transfer must fail.
  bool transfer(Direction direction, std::size_t bytes) {
    std::unique_lock lock(mutex_);
    wait_while_frozen(lock);
    const bool reads = direction == kRead;
    const std::uint64_t rate = settings_.at(reads ? "read_bytes_per_second" : "write_bytes_per_second");
    const std::uint64_t change = changes_;
    // Transfers run one after another, as on a real device; their latencies overlap.
    Clock::time_point done = Clock::now();
    if (rate > 0) {
      const std::chrono::duration<double> seconds(static_cast<double>(bytes) / static_cast<double>(rate));
      free_at_[direction] =
          std::max(free_at_[direction], done) + std::chrono::duration_cast<Clock::duration>(seconds);
      done = free_at_[direction];
    }
    done += std::chrono::milliseconds(settings_.at("latency_ms"));
    ++held_;
    changed_.wait_until(lock, done, [&] { return changes_ != change; });
    --held_;
    wait_while_frozen(lock);
    if (settings_.at(reads ? "read_errors" : "write_errors") != 0) {
      ++errors_[direction];
      return false;
    }
    bytes_[direction] += bytes;
    return true;
  }

 private:
  void wait_while_frozen(std::unique_lock<std::mutex>& lock) {
    ++held_;
    changed_.wait(lock, [&] { return settings_.at("frozen") == 0; });
    --held_;
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::map<std::string, std::uint64_t> settings_{
      {"read_bytes_per_second", 0}, {"write_bytes_per_second", 0}, {"latency_ms", 0},     {"frozen", 0},
      {"read_errors", 0},           {"write_errors", 0},           {"remembers_names", 0}};
  std::set<std::string> missing_;
  std::uint64_t changes_ = 0;
  Clock::time_point free_at_[2]{};
  std::uint64_t bytes_[2]{}, errors_[2]{}, held_ = 0;
};

Disk disk;
int base = -1;  // the mirrored directory
bool locks_reach_others = false;

const char* relative(const char* path) { return path[1] == '\0' ? "." : path + 1; }
int or_errno(long result) { return result < 0 ? -errno : static_cast<int>(result); }
int handle(const fuse_file_info* info) { return static_cast<int>(info->fh); }

void* on_start(fuse_conn_info*, fuse_config* config) {
  // The kernel caches no attributes or missing names, so each of these calls reaches the disk. With shared
  // locks the kernel caches existing names without expiry.
  constexpr double kForever = 1e6;
  config->use_ino = 1;
  config->hard_remove = 1;
  config->attr_timeout = config->negative_timeout = 0;
  config->entry_timeout = locks_reach_others ? kForever : 0;
  return nullptr;
}

int on_getattr(const char* path, struct stat* result, fuse_file_info* info) {
  disk.arrive();
  if (info != nullptr) return or_errno(fstat(handle(info), result));
  if (disk.is_missing(path)) return -ENOENT;
  const int rc = or_errno(fstatat(base, relative(path), result, AT_SYMLINK_NOFOLLOW));
  if (rc == -ENOENT) disk.on_missing(path);
  if (rc == 0 && S_ISDIR(result->st_mode)) disk.look_anew(path);
  return rc;
}

int on_open(const char* path, fuse_file_info* info, int flags, mode_t mode) {
  disk.arrive();
  // O_DIRECT is dropped: FUSE's buffers do not have the alignment of the caller's buffers.
  const int file = openat(base, relative(path), (flags & ~(O_DIRECT | O_NOFOLLOW)) | O_CLOEXEC, mode);
  if (file < 0) return -errno;
  disk.on_made(path);
  info->fh = static_cast<std::uint64_t>(file);
  info->direct_io = 1;
  return 0;
}
int on_open(const char* path, fuse_file_info* info) { return on_open(path, info, info->flags, 0); }
int on_create(const char* path, mode_t mode, fuse_file_info* info) {
  return on_open(path, info, info->flags | O_CREAT, mode);
}

int on_release(const char*, fuse_file_info* info) { return or_errno(close(handle(info))); }

int on_read(const char*, char* data, std::size_t bytes, off_t offset, fuse_file_info* info) {
  if (!disk.transfer(Disk::kRead, bytes)) return -EIO;
  return or_errno(pread(handle(info), data, bytes, offset));
}

int on_write(const char*, const char* data, std::size_t bytes, off_t offset, fuse_file_info* info) {
  if (!disk.transfer(Disk::kWrite, bytes)) return -EIO;
  return or_errno(pwrite(handle(info), data, bytes, offset));
}

int on_truncate(const char* path, off_t bytes, fuse_file_info* info) {
  disk.arrive();
  if (info != nullptr) return or_errno(ftruncate(handle(info), bytes));
  const int file = openat(base, relative(path), O_WRONLY | O_CLOEXEC);
  if (file < 0) return -errno;
  const int result = or_errno(ftruncate(file, bytes));
  close(file);
  return result;
}

int on_fsync(const char*, int data_only, fuse_file_info* info) {
  disk.arrive();
  return or_errno(data_only != 0 ? fdatasync(handle(info)) : fsync(handle(info)));
}

int on_rename(const char* from, const char* to, unsigned flags) {
  disk.arrive();
  if (locks_reach_others && flags != 0) return -EINVAL;
  disk.on_made(to);
  return or_errno(renameat2(base, relative(from), base, relative(to), flags));
}

int on_unlink(const char* path) {
  disk.arrive();
  return or_errno(unlinkat(base, relative(path), 0));
}
int on_rmdir(const char* path) {
  disk.arrive();
  return or_errno(unlinkat(base, relative(path), AT_REMOVEDIR));
}
int on_mkdir(const char* path, mode_t mode) {
  disk.arrive();
  disk.on_made(path);  // also if another mount has created it: no lookup by name follows EEXIST
  return or_errno(mkdirat(base, relative(path), mode));
}
int on_chmod(const char* path, mode_t mode, fuse_file_info*) {
  disk.arrive();
  return or_errno(fchmodat(base, relative(path), mode, 0));
}
int on_utimens(const char* path, const timespec times[2], fuse_file_info*) {
  disk.arrive();
  return or_errno(utimensat(base, relative(path), times, AT_SYMLINK_NOFOLLOW));
}
int on_statfs(const char*, struct statvfs* result) {
  disk.arrive();
  return or_errno(fstatvfs(base, result));
}

int on_flock(const char*, fuse_file_info* info, int operation) {
  disk.arrive();
  return or_errno(flock(handle(info), operation));
}

int on_readdir(const char* path, void* buffer, fuse_fill_dir_t fill, off_t, fuse_file_info*,
               fuse_readdir_flags) {
  disk.arrive();
  disk.look_anew(path);
  const int directory = openat(base, relative(path), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (directory < 0) return -errno;
  DIR* entries = fdopendir(directory);
  while (const dirent* entry = readdir(entries)) {
    struct stat about {};
    about.st_ino = entry->d_ino;
    about.st_mode = static_cast<mode_t>(DTTOIF(entry->d_type));
    fill(buffer, entry->d_name, &about, 0, fuse_fill_dir_flags{});
  }
  closedir(entries);
  return 0;
}

void obey(fuse* mounted) {
  std::string line;
  while (std::getline(std::cin, line)) {
    std::istringstream words(line);
    std::string name;
    std::uint64_t value = 0;
    words >> name >> value;
    std::cout << (disk.set(name, value) ? disk.counts() : "unknown setting: " + name) << std::endl;
  }
  fuse_unmount(mounted);
  std::_Exit(0);  // closes the device, so waiting calls end with an error
}

}  // namespace

int main(int count, char** arguments) {
  locks_reach_others = count == 4 && std::strcmp(arguments[3], "locks") == 0;
  if (count != 3 && !locks_reach_others) {
    std::cerr << "usage: slow_disk DIRECTORY MOUNTPOINT [locks]\n";
    return 2;
  }
  umask(0);  // the kernel has already applied the caller's umask
  base = open(arguments[1], O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (base < 0) {
    std::perror(arguments[1]);
    return 2;
  }
  fuse_operations calls{};
  calls.init = on_start;
  calls.getattr = on_getattr;
  calls.open = on_open;
  calls.create = on_create;
  calls.release = on_release;
  calls.read = on_read;
  calls.write = on_write;
  calls.truncate = on_truncate;
  calls.fsync = on_fsync;
  calls.rename = on_rename;
  calls.unlink = on_unlink;
  calls.rmdir = on_rmdir;
  calls.mkdir = on_mkdir;
  calls.chmod = on_chmod;
  calls.utimens = on_utimens;
  calls.statfs = on_statfs;
  calls.readdir = on_readdir;
  if (locks_reach_others) calls.flock = on_flock;
  char* options[] = {arguments[0], nullptr};
  fuse_args given = FUSE_ARGS_INIT(1, options);
  fuse* mounted = fuse_new(&given, &calls, sizeof(calls), nullptr);
  if (mounted == nullptr || fuse_mount(mounted, arguments[2]) != 0) return 3;  // FUSE has printed the reason
  std::cout << "mounted" << std::endl;
  std::thread control(obey, mounted);
  fuse_loop_config* threads = fuse_loop_cfg_create();
  fuse_loop_cfg_set_max_threads(threads, 64);  // each frozen call occupies a thread
  fuse_loop_mt(mounted, threads);              // returns after an external unmount
  std::_Exit(0);
}
