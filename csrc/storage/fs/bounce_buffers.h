// BounceBuffers: a record's bytes go between the device and the row itself, or by way of a bounce buffer of
// huge pages. A device takes a list of physically contiguous pieces: 2 MiB in 4 KiB pages are 512 of them, in
// a huge page one. Behind a virtual disk that is the difference between one and three GB/s, and /dev/shm
// gives no huge pages unless it is mounted so; on a local NVMe disk the copy is wasted. So both paths are
// tried, and the faster one is used.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/clock.h"
#include "base/thread_annotations.h"
#include "storage/fs/record_file.h"
#include "storage/huge_buffer.h"

namespace kv_offload {

// Which of two paths takes less time a byte, learnt while both are used. Not
// thread-safe.
class FasterPath {
 public:
  enum class Path : std::uint8_t { kInPlace, kBounced };
  // Several in a row: those that are under way at once share the device, and a
  // slow one slows the fast ones.
  static constexpr unsigned kTries = 4;
  // First each is tried, then from time to time the one that is not used.
  static constexpr unsigned kTryOtherEvery = 256;
  // A copy costs memory bandwidth that others want: it must win by this much.
  static constexpr double kBouncedMustTake = 0.85;

  Path pick();
  void note(Path path, std::uint64_t bytes, Nanos took);

 private:
  struct Seen {  // older ones fade
    double bytes = 0, nanos = 0;
  };
  Seen seen_[2];
  std::uint64_t picked_ = 0;
};

// Invariant: a buffer is one op's, or free. Memory: at most a buffer of a record's size for each thread that
// is inside at once. Threads: any; mutex_ guards the choice and the free buffers, and is not held during a
// transfer.
class BounceBuffers {
 public:
  // Smaller records are moved in place: their time does not depend on their bytes.
  static constexpr std::uint64_t kMinBytes = std::uint64_t{128} << 10;
  // Larger ones are written in place.
  static constexpr std::uint64_t kMaxWriteBytes = std::uint64_t{16} << 20;
  // Read, copied and summed before the next is read: while it is in the CPU's cache.
  static constexpr std::uint64_t kReadBytes = std::uint64_t{2} << 20;

  explicit BounceBuffers(const Clock& clock);
  ~BounceBuffers();

  // Copied, then summed, before the next: while it is in the nearest cache that it fits.
  static constexpr std::size_t kSumBytes = std::size_t{256} << 10;

  // A record of these shards, whose pads are zero; the header's checksum is put in here.
  Status write(FileOps& ops, int fd, RecordHeader header, std::span<const Shard> shards, bool direct,
               const std::string& path);
  // A record of these shards that lies in pieces of our own: nothing is chosen.
  Status write_whole(FileOps& ops, int fd, std::span<const std::span<const std::byte>> pieces, bool direct,
                     const std::string& path);
  // Takes what was read from where it is to its place, which may be the same; part by part, in order.
  using Arrived = std::function<Status(const std::byte* from, std::span<std::byte> to)>;
  // The first `bytes` of a record into these places, in file order; the header page is the first.
  Status read(FileOps& ops, int fd, std::span<const std::span<std::byte>> places, std::uint64_t bytes,
              bool direct, const std::string& path, const Arrived& arrived);

  // Transfers begun, with O_DIRECT and without. Running totals.
  std::uint64_t direct_ops() const { return direct_ops_.load(std::memory_order_relaxed); }
  std::uint64_t buffered_ops() const { return buffered_ops_.load(std::memory_order_relaxed); }

 private:
  // The buffer to go through; null: in place. choose: false where there is no choice.
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
  std::vector<std::unique_ptr<HugeBuffer>> free_[2] GUARDED_BY(mutex_);  // the same
};

}  // namespace kv_offload
