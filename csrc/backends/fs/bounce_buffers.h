// SPDX-License-Identifier: Apache-2.0
// BounceBuffers: moves a record's bytes between the device and the host memory row, either directly or
// through a bounce buffer of huge pages. A device takes a list of physically contiguous pieces: 2 MiB are 512
// pieces in 4 KiB pages and one piece in a huge page. On a virtual disk this is the difference between 1 and
// 3 GB/s. /dev/shm provides huge pages only if it is mounted with that option. On a local NVMe disk the extra
// copy is wasted. So both paths are measured, and the faster one is used.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "backends/fs/record_file.h"
#include "base/clock.h"
#include "base/thread_annotations.h"
#include "record/huge_buffer.h"

namespace kv_offload {

// Picks the path that takes less time per byte, measured while both are used. Not thread-safe.
class FasterPath {
 public:
  enum class Path : std::uint8_t { kInPlace, kBounced };
  // Consecutive tries of one path. Concurrent transfers share the device, so a slow path slows down the fast
  // one.
  static constexpr unsigned kTries = 4;
  // At first each path is tried in turn. Then the path not in use gets kTries of every kOtherPathInterval
  // transfers.
  static constexpr unsigned kOtherPathInterval = 256;
  // A copy uses memory bandwidth that other work needs, so the bounced path must take at most this fraction
  // of the time.
  static constexpr double kMaxBouncedRatio = 0.85;

  Path pick();
  void record(Path path, std::uint64_t bytes, Nanos took);

 private:
  struct Seen {  // weighted sums; older transfers fade
    double bytes = 0, nanos = 0;
  };
  Seen seen_[2];
  std::uint64_t picked_ = 0;
};

// Invariant: a buffer either belongs to one op or is free. Memory: at most one buffer of a record's size per
// thread inside a transfer. Threads: any. mutex_ guards the path choice and the free buffers, and is not held
// during a transfer.
class BounceBuffers {
 public:
  // Smaller records are moved in place: their transfer time does not depend on their size.
  static constexpr std::uint64_t kMinBytes = std::uint64_t{128} << 10;
  // Larger records are written in place.
  static constexpr std::uint64_t kMaxWriteBytes = std::uint64_t{16} << 20;
  // Bytes read, copied and checksummed per step, so that they are still in the CPU cache.
  static constexpr std::uint64_t kReadBytes = std::uint64_t{2} << 20;

  explicit BounceBuffers(const Clock& clock);
  ~BounceBuffers();

  // Bytes copied and then checksummed per step, so that they are still in the nearest cache that holds them.
  static constexpr std::size_t kSumBytes = std::size_t{256} << 10;

  // Writes a record of these shards, whose padding is zero. Sets the checksum in the header.
  Status write(FileOps& ops, int fd, RecordHeader header, std::span<const Shard> shards, bool direct,
               const std::string& path);
  // Writes a record from pieces that this process owns. Always in place: no path is chosen.
  Status write_whole(FileOps& ops, int fd, std::span<const std::span<const std::byte>> pieces, bool direct,
                     const std::string& path);
  // Receives a part of a record: `from` is where the bytes were read to and `to` is their destination, which
  // may be the same memory. Called for each part, in order.
  using Arrived = std::function<Status(const std::byte* from, std::span<std::byte> to)>;
  // Reads the first `bytes` bytes of a record into `places`, in file order; the first place is the header
  // page.
  Status read(FileOps& ops, int fd, std::span<const std::span<std::byte>> places, std::uint64_t bytes,
              bool direct, const std::string& path, const Arrived& arrived);

  // Transfers started, with O_DIRECT and without. Running totals.
  std::uint64_t direct_ops() const { return direct_ops_.load(std::memory_order_relaxed); }
  std::uint64_t buffered_ops() const { return buffered_ops_.load(std::memory_order_relaxed); }

 private:
  // Returns the bounce buffer to use; null: in place. choose: false where only one path is possible.
  std::unique_ptr<HugeBuffer> begin(Transfer direction, bool choose, std::uint64_t bytes) EXCLUDES(mutex_);
  void end(Transfer direction, bool chosen, std::unique_ptr<HugeBuffer> buffer, const Status& status,
           std::uint64_t bytes, Nanos took) EXCLUDES(mutex_);
  FasterPath& path(Transfer direction) REQUIRES(mutex_) {
    return paths_[static_cast<std::size_t>(direction)];
  }

  void count(bool direct) { (direct ? direct_ops_ : buffered_ops_).fetch_add(1, std::memory_order_relaxed); }

  const Clock& clock_;
  std::atomic<std::uint64_t> direct_ops_{0}, buffered_ops_{0};
  Mutex mutex_;
  FasterPath paths_[2] GUARDED_BY(mutex_);                               // by direction
  std::vector<std::unique_ptr<HugeBuffer>> free_[2] GUARDED_BY(mutex_);  // by direction
};

}  // namespace kv_offload
