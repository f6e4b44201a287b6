// SPDX-License-Identifier: Apache-2.0
#include "memory/shared_file.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <memory>
#include <thread>
#include <utility>

#include "base/status.h"
#include "base/xxh3.h"

namespace kv_offload {
namespace {

using namespace std::chrono_literals;

constexpr auto kLockTimeout = 10s;
constexpr auto kPause = 5ms;

class Descriptor {
 public:
  explicit Descriptor(int fd) : fd_(fd) {}
  ~Descriptor() {
    if (fd_ >= 0) ::close(fd_);
  }
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  int get() const { return fd_; }
  int release() { return std::exchange(fd_, -1); }

 private:
  int fd_;
};

bool name_refers_to(const std::string& path, int fd) {
  struct stat named {
  }, opened{};
  return ::lstat(path.c_str(), &named) == 0 && ::fstat(fd, &opened) == 0 && named.st_ino == opened.st_ino &&
         named.st_dev == opened.st_dev;
}

// A sweep holds the exclusive lock only briefly.
bool lock_shared_until(int fd, std::chrono::steady_clock::time_point deadline) {
  while (::flock(fd, LOCK_SH | LOCK_NB) != 0) {
    if (errno != EWOULDBLOCK && errno != EINTR) return false;
    if (std::chrono::steady_clock::now() > deadline) return false;
    std::this_thread::sleep_for(1ms);
  }
  return true;
}

bool is_own_file(int fd) {
  struct stat opened {};
  return ::fstat(fd, &opened) == 0 && S_ISREG(opened.st_mode) && opened.st_uid == ::geteuid();
}

std::string digest_of(std::string_view text) {
  const XXH128_hash_t digest = XXH3_128bits(text.data(), text.size());
  return fmt::format("{:016x}{:016x}", digest.high64, digest.low64);
}

std::string kept_path_of(const std::string& directory, std::string_view keep_for, unsigned number) {
  return fmt::format("{}/{}{}-{}", directory, kKeptNamePrefix, digest_of(keep_for), number);
}

void check_owner(const std::string& path, int fd) {
  if (!is_own_file(fd)) {
    throw_resource("{} exists but is not a file of user {}: remove it, or serve under another engine id",
                   path, ::geteuid());
  }
}

// Calls visit(name, path, fd) for the regular files of `directory` whose name starts with our prefix.
void for_each_own_file(const std::string& directory,
                       const std::function<void(std::string_view, const std::string&, int)>& visit) {
  const std::unique_ptr<DIR, int (*)(DIR*)> entries(::opendir(directory.c_str()), &::closedir);
  if (!entries) return;
  while (const dirent* entry = ::readdir(entries.get())) {
    const std::string_view name = entry->d_name;
    if (!name.starts_with(kSharedNamePrefix)) continue;
    const std::string path = fmt::format("{}/{}", directory, name);
    const Descriptor fd(::open(path.c_str(), O_RDONLY | O_NOFOLLOW | O_CLOEXEC | O_NONBLOCK));
    struct stat opened {};
    if (fd.get() < 0 || ::fstat(fd.get(), &opened) != 0 || !S_ISREG(opened.st_mode)) continue;
    visit(name, path, fd.get());
  }
}

}  // namespace

SharedFile::SharedFile(int fd, std::string path) : fd_(fd), owner_pid_(::getpid()), path_(std::move(path)) {}

SharedFile::SharedFile(SharedFile&& other) noexcept
    : fd_(std::exchange(other.fd_, -1)), owner_pid_(other.owner_pid_), path_(std::move(other.path_)) {}

SharedFile& SharedFile::operator=(SharedFile&& other) noexcept {
  if (this == &other) return *this;
  close_file();
  fd_ = std::exchange(other.fd_, -1);
  owner_pid_ = other.owner_pid_;
  path_ = std::move(other.path_);
  return *this;
}

SharedFile::~SharedFile() { close_file(); }

void SharedFile::close_file() {
  if (fd_ < 0) return;
  const bool last = owner_pid_ == ::getpid() && ::flock(fd_, LOCK_EX | LOCK_NB) == 0;
  if (last) unlink_name();
  ::close(fd_);
  fd_ = -1;
}

std::string SharedFile::path_of(const std::string& directory, std::string_view engine_id) {
  return fmt::format("{}/{}{}", directory, kSharedNamePrefix, digest_of(engine_id));
}

std::uint64_t SharedFile::size() const { return file_size(fd_); }

void SharedFile::unlink_name() {
  if (name_refers_to(path_, fd_)) ::unlink(path_.c_str());
}

SharedFile SharedFile::open_or_create(const std::string& path, std::uint64_t bytes,
                                      const std::function<void(int fd)>& fill_in) {
  const auto deadline = std::chrono::steady_clock::now() + kLockTimeout;
  do {
    if (SharedFile file = try_open(path); file.fd_ >= 0) return file;
    if (SharedFile file = try_create(path, bytes, fill_in); file.fd_ >= 0) return file;
  } while (std::chrono::steady_clock::now() < deadline);
  throw_resource("other processes kept removing or locking {} for {} s: is another program using it?", path,
                 std::chrono::seconds(kLockTimeout).count());
}

SharedFile SharedFile::wait_and_open(const std::string& path, std::chrono::nanoseconds timeout) {
  const auto deadline = std::chrono::steady_clock::now() + timeout;
  do {
    if (SharedFile file = try_open(path); file.fd_ >= 0) return file;
    std::this_thread::sleep_for(kPause);
  } while (std::chrono::steady_clock::now() < deadline);
  throw_resource(
      "the first rank of this host has not created {} after {} s: did it fail, or does it have other "
      "settings?",
      path, std::chrono::duration_cast<std::chrono::seconds>(timeout).count());
}

SharedFile SharedFile::adopt(const std::string& directory, std::string_view keep_for, const std::string& path,
                             const std::function<bool(int)>& take_over, std::chrono::nanoseconds timeout,
                             bool* is_held) {
  const auto deadline = std::chrono::steady_clock::now() + timeout;
  while (true) {
    bool any_held = false;
    for (unsigned number = 0; number < kMostKept; ++number) {
      const std::string kept = kept_path_of(directory, keep_for, number);
      SharedFile file = try_lock_kept(kept, &any_held);
      if (file.fd_ < 0) continue;
      if (!take_over(file.fd_)) {
        ::unlink(kept.c_str());  // the name refers to the file while it is locked
        continue;
      }
      if (::link(kept.c_str(), path.c_str()) != 0) return {};
      file.path_ = path;
      // The kernel may release the lock briefly when its kind changes. A process that gets it then finds the
      // second name and leaves the file, but a sweep removes that name.
      if (lock_shared_until(file.fd_, std::chrono::steady_clock::now() + kLockTimeout) &&
          name_refers_to(path, file.fd_)) {
        return file;
      }
      any_held = true;
    }
    if (is_held != nullptr) *is_held = any_held;
    if (!any_held || std::chrono::steady_clock::now() > deadline) return {};
    std::this_thread::sleep_for(kPause);
    (void)remove_unheld_files(directory, Unheld::kLeftovers);  // names left by processes that died
  }
}

// Locks a kept file exclusively. Returns no file if another process holds it or if it is not ours. Closing it
// does not remove it.
SharedFile SharedFile::try_lock_kept(const std::string& path, bool* held) {
  Descriptor fd(::open(path.c_str(), O_RDWR | O_NOFOLLOW | O_CLOEXEC | O_NONBLOCK));
  struct stat opened {};
  if (fd.get() < 0 || !is_own_file(fd.get())) return {};
  if (::flock(fd.get(), LOCK_EX | LOCK_NB) != 0) {
    *held = true;
    return {};
  }
  if (!name_refers_to(path, fd.get()) || ::fstat(fd.get(), &opened) != 0) return {};
  // An engine is adopting it, or died before keep(), or shared it. A sweep removes the names of dead engines.
  if (opened.st_nlink > 1) {
    *held = true;
    return {};
  }
  return SharedFile(fd.release(), "");
}

bool SharedFile::keep(const std::string& directory, std::string_view keep_for, bool before_share) {
  struct stat opened {};
  bool is_kept = ::fstat(fd_, &opened) == 0 && opened.st_nlink > 1;  // kept by the previous engine
  for (unsigned number = 0; number < kMostKept && !is_kept; ++number) {
    is_kept = ::link(path_.c_str(), kept_path_of(directory, keep_for, number).c_str()) == 0;
  }
  if (!before_share) unlink_name();
  return is_kept;
}

std::string SharedFile::shared_path_of(const std::string& directory, std::string_view share_for,
                                       unsigned number) {
  return fmt::format("{}/{}{}-{}", directory, kNeighbourNamePrefix, digest_of(share_for), number);
}

bool SharedFile::share(const std::string& directory, std::string_view share_for) {
  std::string shared;
  bool is_shared = false;
  for (unsigned number = 0; number < kMostShared && !is_shared; ++number) {
    shared = shared_path_of(directory, share_for, number);
    is_shared = ::link(path_.c_str(), shared.c_str()) == 0;
  }
  unlink_name();
  if (is_shared) path_ = shared;
  return is_shared;
}

int open_shared_file(const std::string& path, std::string* problem) {
  problem->clear();
  Descriptor fd(::open(path.c_str(), O_RDWR | O_NOFOLLOW | O_CLOEXEC | O_NONBLOCK));
  struct stat opened {};
  if (fd.get() < 0 && errno == ENOENT) return -1;
  if (fd.get() < 0) {
    *problem = fmt::format("cannot open it: {}", std::strerror(errno));
  } else if (!is_own_file(fd.get())) {
    *problem = fmt::format("it is not a file of user {}", ::geteuid());
  } else if (::fstat(fd.get(), &opened) != 0 || (opened.st_mode & 07077) != 0) {
    *problem = "other users may access it (its mode must be 0600)";
  }
  return fd.release();
}

// Returns no file if the name does not exist (any more).
SharedFile SharedFile::try_open(const std::string& path) {
  Descriptor fd(::open(path.c_str(), O_RDWR | O_NOFOLLOW | O_CLOEXEC | O_NONBLOCK));
  if (fd.get() < 0) {
    if (errno == ENOENT) return {};
    throw_resource("{} exists but cannot be opened: {}; remove it, or serve under another engine id", path,
                   std::strerror(errno));
  }
  check_owner(path, fd.get());
  if (!lock_shared_until(fd.get(), std::chrono::steady_clock::now() + kLockTimeout)) return {};
  if (!name_refers_to(path, fd.get())) return {};
  return SharedFile(fd.release(), path);
}

// Returns no file if another process was first.
SharedFile SharedFile::try_create(const std::string& path, std::uint64_t bytes,
                                  const std::function<void(int)>& fill_in) {
  // Threads of one process may race too: the address of a local makes their names unique.
  const int stack_marker = 0;
  const std::string own_name =
      fmt::format("{}.{}.{:x}", path, ::getpid(), reinterpret_cast<std::uintptr_t>(&stack_marker));
  Descriptor fd(::open(own_name.c_str(), O_RDWR | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600));
  if (fd.get() < 0) {
    if (errno == EEXIST) {  // left by an earlier process with our pid, which no longer runs
      ::unlink(own_name.c_str());
      return {};
    }
    throw_resource("cannot create a shared memory file in {}: {}; mount a writable tmpfs there",
                   path.substr(0, path.rfind('/')), std::strerror(errno));
  }
  SharedFile file(fd.release(), own_name);  // removes own_name on every return path
  if (::flock(file.fd_, LOCK_SH | LOCK_NB) != 0) return {};
  if (::ftruncate(file.fd_, static_cast<off_t>(bytes)) != 0) {
    throw_resource("cannot create a shared memory file of {} bytes in {}: {}; lower cpu_bytes_to_use", bytes,
                   path.substr(0, path.rfind('/')), std::strerror(errno));
  }
  fill_in(file.fd_);
  if (::link(own_name.c_str(), path.c_str()) != 0) {
    if (errno == EEXIST || errno == ENOENT) return {};
    throw_resource("cannot link {}: {}", path, std::strerror(errno));
  }
  ::unlink(own_name.c_str());
  file.path_ = path;
  return file;
}

std::uint64_t file_size(int fd) {
  struct stat opened {};
  return ::fstat(fd, &opened) == 0 ? static_cast<std::uint64_t>(opened.st_size) : 0;
}

std::uint64_t inode_of(int fd) {
  struct stat opened {};
  return ::fstat(fd, &opened) == 0 ? static_cast<std::uint64_t>(opened.st_ino) : 0;
}

std::uint64_t memory_taken(int fd) {
  struct stat opened {};
  return ::fstat(fd, &opened) == 0 ? static_cast<std::uint64_t>(opened.st_blocks) * 512 : 0;
}

std::vector<RegionFile> region_files(const std::string& shm_directory) {
  std::vector<RegionFile> found;
  std::vector<std::uint64_t> inodes;
  for_each_own_file(shm_directory, [&](std::string_view name, const std::string&, int fd) {
    if (!is_own_file(fd)) return;
    const bool is_held = ::flock(fd, LOCK_EX | LOCK_NB) != 0;
    const auto same = std::find(inodes.begin(), inodes.end(), inode_of(fd));
    if (same != inodes.end()) {
      if (name.starts_with(kKeptNamePrefix) != is_held) found[same - inodes.begin()].name = name;
      return;
    }
    inodes.push_back(inode_of(fd));
    found.push_back({std::string(name), memory_taken(fd), is_held});
  });
  return found;
}

std::vector<std::string> remove_unheld_files(const std::string& directory, Unheld which) {
  std::vector<std::string> removed;
  for_each_own_file(directory, [&](std::string_view name, const std::string& path, int fd) {
    if (name.starts_with(kKeptNamePrefix) != (which == Unheld::kKept)) return;
    if (which == Unheld::kKept && !is_own_file(fd)) return;  // root could, but it is another user's cache
    if (::flock(fd, LOCK_EX | LOCK_NB) != 0) return;
    if (name_refers_to(path, fd) && ::unlink(path.c_str()) == 0) removed.emplace_back(name);
  });
  return removed;
}

}  // namespace kv_offload
