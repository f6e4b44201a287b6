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
#include "storage/record_file.h"

namespace kv_offload {

// Which of two ways takes less time a byte, learnt while both are used. Not
// thread-safe.
class FasterWay {
 public:
  enum class Way : std::uint8_t { kStraight, kStaged };
  static constexpr unsigned kFirstTries = 4;      // of each, in turns, before the figures count
  static constexpr unsigned kTryOtherEvery = 64;  // the one that is not used, from then on
  // A copy costs memory bandwidth that others want: it must win by this much.
  static constexpr double kStagedMustTake = 0.85;

  Way pick();
  void note(Way way, std::uint64_t bytes, Nanos took);

 private:
  struct Seen {
    unsigned tries = 0;
    double nanos_per_byte = 0;  // moving average
  };
  Seen seen_[2];
  std::uint64_t picked_ = 0;
};

// Any thread. Memory: at most a buffer of a record's size for each thread that
// is inside transfer() at once.
class Staging {
 public:
  static constexpr std::uint64_t kMaxBytes = std::uint64_t{16} << 20;  // larger records go straight

  explicit Staging(const Clock& clock);
  ~Staging();

  // As transfer_all of record_parts(header_page, shards).
  Status transfer(FileOps& ops, int fd, std::span<std::byte> header_page, std::span<const Shard> shards,
                  Transfer direction, bool direct, const std::string& path);

 private:
  class Buffer;
  std::unique_ptr<Buffer> take(std::size_t bytes);  // null: no memory
  void give_back(std::unique_ptr<Buffer> buffer);

  const Clock& clock_;
  Mutex mutex_;
  FasterWay ways_[2] GUARDED_BY(mutex_);  // by direction
  std::vector<std::unique_ptr<Buffer>> free_ GUARDED_BY(mutex_);
};

}  // namespace kv_offload
