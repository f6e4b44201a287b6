// SPDX-License-Identifier: Apache-2.0
// FileOps that forwards all calls, except those that a test makes fail, block or shorten.
#pragma once

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <condition_variable>
#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "backends/fs/file_ops.h"

namespace kv_offload::testing {

enum class Call {
  kOpen,
  kPreadv,
  kPwritev,
  kRename,
  kUnlink,
  kRmdir,
  kMkdir,
  kFsync,
  kFstat,
  kStat,
  kSetMtime,
  kStatvfs,
  kFlock,
  kRefresh,
  kList
};

inline const char* name_of(Call call) {
  static const char* const kNames[] = {"open",      "preadv",  "pwritev", "rename",  "unlink",
                                       "rmdir",     "mkdir",   "fsync",   "fstat",   "stat",
                                       "set_mtime", "statvfs", "flock",   "refresh", "list"};
  return kNames[static_cast<int>(call)];
}

class FaultyFileOps : public FileOps {
 public:
  explicit FaultyFileOps(FileOps& real = posix_file_ops()) : real_(real) {}
  // Returns the number of calls of this thread.
  int calls_here() {
    const std::lock_guard lock(mutex_);
    return calls_[std::this_thread::get_id()];
  }
  // Called before every call. 0 forwards the call; any other (negative) value is its result.
  using Rule = std::function<int(Call)>;
  void set_rule(Rule rule) {
    const std::lock_guard lock(mutex_);
    rule_ = std::move(rule);
  }
  void clear() { set_rule({}); }
  // Makes every call of this kind fail.
  void fail_all(Call kind, int error) {
    set_rule([=](Call call) { return call == kind ? -error : 0; });
  }
  // Limits transfers of more than a page to this many bytes; 0: no limit.
  void limit_transfers(std::size_t bytes) {
    const std::lock_guard lock(mutex_);
    limit_ = bytes;
  }
  // Blocks calls of this kind until release(). Transfers block only from this size on: a root's own files are
  // read in units of a page at most.
  void block(Call kind, std::size_t at_least = 0) {
    const std::lock_guard lock(mutex_);
    blocked_ = kind;
    blocked_bytes_ = at_least;
    blocking_ = true;
  }
  // Blocks all calls until release(), like a mount that hangs.
  void freeze() {
    const std::lock_guard lock(mutex_);
    blocking_ = all_ = true;
  }
  void release() {
    const std::lock_guard lock(mutex_);
    blocking_ = all_ = false;
    changed_.notify_all();
  }
  void wait_for_blocked(int count) {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return waiting_ >= count; });
  }
  void wait_for_blocked_in(Call kind) {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return waiting_in_[kind] > 0; });
  }
  int open(int directory, const std::string& path, int flags, unsigned mode) override {
    const int fault = before(Call::kOpen);
    const int fd = fault != 0 ? fault : real_.open(directory, path, flags, mode);
    const std::lock_guard lock(mutex_);
    open_ += fd >= 0;
    most_open_ = std::max(most_open_, open_);
    return fd;
  }
  void close(int fd) override {
    real_.close(fd);
    const std::lock_guard lock(mutex_);
    --open_;
    changed_.notify_all();
  }
  int replace(int fd, int by) override { return real_.replace(fd, by); }
  // The largest number of descriptors that were open at once.
  int most_open() {
    const std::lock_guard lock(mutex_);
    return most_open_;
  }
  // Waits until the last user of these ops has closed its descriptors.
  void wait_for_all_closed() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return open_ == 0; });
  }
  std::int64_t preadv(int fd, const iovec* parts, int count, std::int64_t offset) override {
    return transfer(Call::kPreadv, parts, count,
                    [&](const iovec* p, int n) { return real_.preadv(fd, p, n, offset); });
  }
  std::int64_t pwritev(int fd, const iovec* parts, int count, std::int64_t offset) override {
    return transfer(Call::kPwritev, parts, count,
                    [&](const iovec* p, int n) { return real_.pwritev(fd, p, n, offset); });
  }
  int move(int from_directory, const std::string& from, int to_directory, const std::string& to,
           bool keep_existing) override {
    const int fault = before(Call::kRename);
    return fault != 0 ? fault : real_.move(from_directory, from, to_directory, to, keep_existing);
  }
  int unlink(int directory, const std::string& path) override {
    const int fault = before(Call::kUnlink);
    return fault != 0 ? fault : real_.unlink(directory, path);
  }
  int rmdir(int directory, const std::string& path) override {
    const int fault = before(Call::kRmdir);
    return fault != 0 ? fault : real_.rmdir(directory, path);
  }
  int mkdir(int directory, const std::string& path, unsigned mode) override {
    const int fault = before(Call::kMkdir);
    return fault != 0 ? fault : real_.mkdir(directory, path, mode);
  }
  int fsync(int fd, bool data_only) override {
    const int fault = before(Call::kFsync);
    return fault != 0 ? fault : real_.fsync(fd, data_only);
  }
  int fstat(int fd, FileInfo* info) override {
    const int fault = before(Call::kFstat);
    return fault != 0 ? fault : real_.fstat(fd, info);
  }
  int stat(int directory, const std::string& path, FileInfo* info) override {
    const int fault = before(Call::kStat);
    return fault != 0 ? fault : real_.stat(directory, path, info);
  }
  int set_mtime(int directory, const std::string& path, std::int64_t nanos) override {
    const int fault = before(Call::kSetMtime);
    return fault != 0 ? fault : real_.set_mtime(directory, path, nanos);
  }
  int statvfs(int fd, SpaceInfo* info) override {
    const int fault = before(Call::kStatvfs);
    return fault != 0 ? fault : real_.statvfs(fd, info);
  }
  int flock(int fd, int operation) override {
    const int fault = before(Call::kFlock);
    return fault != 0 ? fault : real_.flock(fd, operation);
  }
  int refresh(int directory, const std::string& path) override {
    const int fault = before(Call::kRefresh);
    return fault != 0 ? fault : real_.refresh(directory, path);
  }
  int list(int fd, std::vector<DirEntry>* entries) override {
    const int fault = before(Call::kList);
    return fault != 0 ? fault : real_.list(fd, entries);
  }

 private:
  int before(Call call, std::size_t bytes = 0) {
    std::unique_lock lock(mutex_);
    ++calls_[std::this_thread::get_id()];
    if (blocking_ && (all_ || (call == blocked_ && bytes >= blocked_bytes_))) {
      ++waiting_;
      ++waiting_in_[call];
      changed_.notify_all();
      changed_.wait(lock, [&] { return !blocking_; });
      --waiting_;
      --waiting_in_[call];
      changed_.notify_all();
    }
    return rule_ ? rule_(call) : 0;
  }

  template <typename Real>
  std::int64_t transfer(Call call, const iovec* parts, int count, Real real) {
    std::size_t limit, total = 0;
    for (int i = 0; i < count; ++i) total += parts[i].iov_len;
    const int fault = before(call, total);
    if (fault != 0) return fault;
    {
      const std::lock_guard lock(mutex_);
      limit = limit_;
    }
    if (limit == 0 || total <= 4096) return real(parts, count);
    std::vector<iovec> fewer;
    for (int i = 0; i < count && limit > 0; ++i) {
      fewer.push_back({parts[i].iov_base, std::min(parts[i].iov_len, limit)});
      limit -= fewer.back().iov_len;
    }
    return real(fewer.data(), static_cast<int>(fewer.size()));
  }

  FileOps& real_;
  std::mutex mutex_;
  std::condition_variable changed_;
  Rule rule_;
  std::size_t limit_ = 0;
  Call blocked_ = Call::kOpen;
  std::size_t blocked_bytes_ = 0;
  bool blocking_ = false, all_ = false;
  std::map<std::thread::id, int> calls_;
  int waiting_ = 0;
  std::map<Call, int> waiting_in_;
  int open_ = 0, most_open_ = 0;
};

// Errors of a call that fails during a write. EDQUOT and EMFILE take the same code paths as ENOSPC and EIO,
// so only --long tests them.
inline std::vector<int> write_errors() {
#ifdef KV_OFFLOAD_FEWER_ERRORS
  return {EIO, ENOSPC};
#else
  return {EIO, ENOSPC, EDQUOT, EMFILE};
#endif
}

// While it lives, or until the ops are cleared, counts all calls and makes the n-th (from 0) fail.
class OneFault {
 public:
  static constexpr int kNever = -1;
  OneFault(FaultyFileOps& ops, int n, int error = 0) : ops_(ops) {
    ops.set_rule([this, n, error](Call call) {
      if (calls_.fetch_add(1) != n) return 0;
      broken_ = static_cast<int>(call);
      return -error;
    });
  }
  ~OneFault() { ops_.clear(); }
  OneFault(const OneFault&) = delete;
  OneFault& operator=(const OneFault&) = delete;
  int calls() const { return calls_; }
  const char* call() const { return broken_ < 0 ? "?" : name_of(static_cast<Call>(broken_.load())); }

 private:
  FaultyFileOps& ops_;
  std::atomic<int> calls_{0}, broken_{-1};
};

}  // namespace kv_offload::testing
