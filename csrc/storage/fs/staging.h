// Staging: a record's bytes go to and from the device either straight from the
// row, or by way of a buffer of huge pages. A device takes a list of physically
// contiguous pieces: 2 MiB in 4 KiB pages are 512 of them, in a huge page one.
// Behind a virtual disk that is the difference between one and three GB/s, and
// /dev/shm gives no huge pages unless it is mounted so; on a local NVMe disk the
// copy is in vain. So both ways are tried, and the faster one is used.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/clock.h"
#include "base/thread_annotations.h"
#include "storage/fs/record_file.h"

namespace kv_offload {

// Which of two ways takes less time a byte, learnt while both are used. Not
// thread-safe.
class FasterWay {
 public:
  enum class Way : std::uint8_t { kStraight, kStaged };
  // Several in a row: those that are under way at once share the device, and a
  // slow one slows the fast ones.
  static constexpr unsigned kTries = 4;
  // First each is tried, then from time to time the one that is not used.
  static constexpr unsigned kTryOtherEvery = 256;
  // A copy costs memory bandwidth that others want: it must win by this much.
  static constexpr double kStagedMustTake = 0.85;

  Way pick();
  void note(Way way, std::uint64_t bytes, Nanos took);

 private:
  struct Seen {  // older ones fade
    double bytes = 0, nanos = 0;
  };
  Seen seen_[2];
  std::uint64_t picked_ = 0;
};

// Any thread. Memory: at most a buffer of a record's size for each thread that
// is inside at once.
class Staging {
 public:
  // Smaller records go straight: what they take is not in their bytes.
  static constexpr std::uint64_t kMinBytes = std::uint64_t{128} << 10;
  // Larger ones are written straight.
  static constexpr std::uint64_t kMaxWriteBytes = std::uint64_t{16} << 20;
  // Read, copied and summed before the next is read: while it is in the CPU's cache.
  static constexpr std::uint64_t kReadBytes = std::uint64_t{2} << 20;

  explicit Staging(const Clock& clock);
  ~Staging();

  // Copied, then summed, before the next: while it is in the nearest cache that it fits.
  static constexpr std::size_t kSumBytes = std::size_t{256} << 10;

  // A record of these shards, whose pads are zero; the header's checksum is put in here.
  Status write(FileOps& ops, int fd, RecordHeader header, std::span<const Shard> shards, bool direct,
               const std::string& path);
  // As transfer_all of record_parts(header_page, shards), and the checksum over the padded
  // shards as they were read.
  Status read(FileOps& ops, int fd, std::span<std::byte> header_page, std::span<const Shard> shards,
              bool direct, const std::string& path, std::uint64_t* payload_checksum);

 private:
  class Buffer;
  // The buffer to go through; null: go straight. choose: false where there is no choice.
  std::unique_ptr<Buffer> begin(Transfer direction, bool choose, std::uint64_t bytes) EXCLUDES(mutex_);
  void end(Transfer direction, bool chosen, std::unique_ptr<Buffer> buffer, const Status& status,
           std::uint64_t bytes, Nanos took) EXCLUDES(mutex_);
  FasterWay& way(Transfer direction) REQUIRES(mutex_) { return ways_[static_cast<std::size_t>(direction)]; }

  const Clock& clock_;
  Mutex mutex_;
  FasterWay ways_[2] GUARDED_BY(mutex_);                             // by direction
  std::vector<std::unique_ptr<Buffer>> free_[2] GUARDED_BY(mutex_);  // the same
};

}  // namespace kv_offload
