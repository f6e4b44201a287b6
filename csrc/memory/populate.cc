// SPDX-License-Identifier: Apache-2.0
#include "memory/populate.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <system_error>
#include <thread>
#include <vector>

#include "base/thread_annotations.h"
#include "base/types.h"

namespace kv_offload {
namespace {

constexpr std::size_t kPieceBytes = std::size_t{32} << 20;
constexpr auto kProgressEvery = std::chrono::milliseconds(200);
#ifdef MADV_POPULATE_WRITE
constexpr int kPopulateRead = MADV_POPULATE_READ, kPopulateWrite = MADV_POPULATE_WRITE;
#else
constexpr int kPopulateRead = 22, kPopulateWrite = 23;  // Linux 5.14; libc headers define them later
#endif

class Populating {
 public:
  explicit Populating(const Population& population)
      : population_(population), total_(population.range.size()) {}

  // Body of each thread.
  void work() {
    while (true) {
      const std::size_t start = next_.fetch_add(kPieceBytes);
      if (start >= total_ || stop_.load()) break;
      const std::size_t bytes = std::min(kPieceBytes, total_ - start);
      const Status status = populate_piece(start, bytes);
      const MutexLock lock(mutex_);
      if (status.is_ok()) {
        done_ += bytes;
      } else {
        stop_ = true;
        if (first_failure_.is_ok()) first_failure_ = status;
      }
      changed_.notify_all();
    }
    const MutexLock lock(mutex_);
    --working_;
    changed_.notify_all();
  }

  void expect_worker() {
    const MutexLock lock(mutex_);
    ++working_;
  }

  Status watch(const std::function<void(std::uint64_t, std::uint64_t)>& progress) {
    std::uint64_t done = 0;
    bool finished = false;
    while (!finished) {
      {
        const MutexLock lock(mutex_);
        if (working_ > 0) changed_.wait_for(mutex_, kProgressEvery);
        finished = working_ == 0;
        done = done_;
      }
      try {
        if (progress) progress(done, total_);
      } catch (...) {  // thrown by the caller's function; the threads are joined during unwinding
        stop_ = true;
        throw;
      }
    }
    const MutexLock lock(mutex_);
    return first_failure_;
  }

 private:
  Status populate_piece(std::size_t start, std::size_t bytes) const {
    if (population_.available && !is_populated(start, bytes) && population_.available() < bytes) {
      return failed(start, ENOMEM, "no free memory is left");
    }
    std::byte* address = population_.range.data() + start;
    while (population_.advise(address, bytes, kPopulateWrite) != 0) {
      if (errno == EINTR || errno == EAGAIN) continue;
      if (errno == EINVAL) return allocate_and_touch(start, bytes);  // a kernel before 5.14
      return failed(start, errno, errno == EFAULT ? "the tmpfs is full" : "populate");
    }
    return Status::ok();
  }

  bool is_populated(std::size_t start, std::size_t bytes) const {
    const auto offset = static_cast<off_t>(population_.file_offset + start);
    return ::lseek(population_.fd, offset, SEEK_HOLE) >= offset + static_cast<off_t>(bytes);
  }

  // fallocate reports an error where a touch would raise SIGBUS.
  Status allocate_and_touch(std::size_t start, std::size_t bytes) const {
    const auto offset = static_cast<off_t>(population_.file_offset + start);
    while (::fallocate(population_.fd, 0, offset, static_cast<off_t>(bytes)) != 0) {
      if (errno != EINTR) return failed(start, errno, "fallocate");
    }
    for (std::size_t i = 0; i < bytes; i += kPageBytes) {
      // Writes to the page without changing it, even if another thread writes there.
      auto* word = reinterpret_cast<std::uint64_t*>(population_.range.data() + start + i);
      __atomic_fetch_or(word, std::uint64_t{0}, __ATOMIC_RELAXED);
    }
    return Status::ok();
  }

  Status failed(std::size_t start, int error_number, const char* what) const {
    const bool no_space = error_number == EFAULT || error_number == ENOMEM || error_number == ENOSPC;
    return Status::error(no_space ? StatusKind::kNoSpace : StatusKind::kIo,
                         fmt::format("{} after {} of {}", what, format_bytes(start), format_bytes(total_)),
                         error_number);
  }

  const Population& population_;
  const std::size_t total_;
  std::atomic<std::size_t> next_{0};
  std::atomic<bool> stop_{false};
  Mutex mutex_;
  CondVar changed_;
  int working_ GUARDED_BY(mutex_) = 0;
  std::uint64_t done_ GUARDED_BY(mutex_) = 0;
  Status first_failure_ GUARDED_BY(mutex_);
};

}  // namespace

Advise system_advise() {
  return [](void* address, std::size_t bytes, int advice) { return ::madvise(address, bytes, advice); };
}

bool enter_in_page_tables(std::span<std::byte> range) {
  while (::madvise(range.data(), range.size(), kPopulateRead) != 0) {
    if (errno != EINTR && errno != EAGAIN) return false;
  }
  return true;
}

Status populate(const Population& population, unsigned threads,
                const std::function<void(std::uint64_t, std::uint64_t)>& progress) {
  const std::size_t pieces = (population.range.size() + kPieceBytes - 1) / kPieceBytes;
  Populating populating(population);
  std::vector<std::jthread> workers;
  for (std::size_t i = 0; i < std::clamp<std::size_t>(threads, 1, std::max<std::size_t>(pieces, 1)); ++i) {
    populating.expect_worker();
    try {
      workers.emplace_back([&] { populating.work(); });
    } catch (const std::system_error&) {  // no more threads available: this one works
      populating.work();
      break;
    }
  }
  return populating.watch(progress);
}

}  // namespace kv_offload
