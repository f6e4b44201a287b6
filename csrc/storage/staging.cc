#include "storage/staging.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstring>

namespace kv_offload {
namespace {

constexpr std::size_t kHugePage = std::size_t{2} << 20;
constexpr double kWeightOfNew = 1.0 / 8;

}  // namespace

FasterWay::Way FasterWay::pick() {
  const std::uint64_t number = picked_++;
  if (number < 2 * kFirstTries) return number % 2 == 0 ? Way::kStraight : Way::kStaged;
  const Seen& straight = seen_[0];
  const Seen& staged = seen_[1];
  const bool staged_wins = staged.tries > 0 && straight.tries > 0 &&
                           staged.nanos_per_byte < kStagedMustTake * straight.nanos_per_byte;
  const bool other = number % kTryOtherEvery == 0;
  return staged_wins != other ? Way::kStaged : Way::kStraight;
}

void FasterWay::note(Way way, std::uint64_t bytes, Nanos took) {
  if (bytes == 0) return;
  Seen& seen = seen_[static_cast<std::size_t>(way)];
  const double sample = static_cast<double>(took.count()) / static_cast<double>(bytes);
  // The first tries weigh alike.
  const double weight = std::max(kWeightOfNew, 1.0 / ++seen.tries);
  seen.nanos_per_byte += weight * (sample - seen.nanos_per_byte);
}

// Memory of our own, in huge pages where the system has them.
class Staging::Buffer {
 public:
  explicit Buffer(std::size_t bytes) : size_(round_up(bytes, kHugePage)) {
    void* memory = ::mmap(nullptr, size_ + kHugePage, PROT_READ | PROT_WRITE,
                          MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) return;
    mapped_ = memory;
    data_ = reinterpret_cast<std::byte*>(round_up(reinterpret_cast<std::uintptr_t>(memory), kHugePage));
    (void)::madvise(data_, size_, MADV_HUGEPAGE);  // offered, not owed
  }
  ~Buffer() {
    if (mapped_ != nullptr) ::munmap(mapped_, size_ + kHugePage);
  }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  std::byte* data() const { return data_; }
  std::size_t size() const { return size_; }

 private:
  std::size_t size_;
  void* mapped_ = nullptr;
  std::byte* data_ = nullptr;
};

Staging::Staging(const Clock& clock) : clock_(clock) {}
Staging::~Staging() = default;

std::unique_ptr<Staging::Buffer> Staging::take(std::size_t bytes) {
  {
    const MutexLock lock(mutex_);
    if (!free_.empty()) {
      std::unique_ptr<Buffer> buffer = std::move(free_.back());
      free_.pop_back();
      if (buffer->size() >= bytes) return buffer;
    }
  }
  auto buffer = std::make_unique<Buffer>(bytes);
  return buffer->data() == nullptr ? nullptr : std::move(buffer);
}

void Staging::give_back(std::unique_ptr<Buffer> buffer) {
  const MutexLock lock(mutex_);
  free_.push_back(std::move(buffer));
}

Status Staging::transfer(FileOps& ops, int fd, std::span<std::byte> header_page,
                         std::span<const Shard> shards, Transfer direction, bool direct,
                         const std::string& path) {
  std::vector<iovec> parts = record_parts(header_page, shards);
  std::uint64_t bytes = 0;
  for (const iovec& part : parts) bytes += part.iov_len;
  // The page cache copies anyway.
  if (!direct || bytes > kMaxBytes) return transfer_all(ops, fd, std::move(parts), direction, direct, path);

  FasterWay::Way way;
  {
    const MutexLock lock(mutex_);
    way = ways_[static_cast<std::size_t>(direction)].pick();
  }
  std::unique_ptr<Buffer> buffer = way == FasterWay::Way::kStaged ? take(bytes) : nullptr;
  const Nanos began = clock_.now();
  Status status;
  if (buffer == nullptr) {
    way = FasterWay::Way::kStraight;
    status = transfer_all(ops, fd, std::move(parts), direction, direct, path);
  } else {
    std::byte* at = buffer->data();
    if (direction == Transfer::kWrite) {
      for (const iovec& part : parts)
        at = std::copy_n(static_cast<std::byte*>(part.iov_base), part.iov_len, at);
    }
    status = transfer_all(ops, fd, {{buffer->data(), bytes}}, direction, direct, path);
    if (status && direction == Transfer::kRead) {
      for (const iovec& part : parts) {
        std::memcpy(part.iov_base, at, part.iov_len);
        at += part.iov_len;
      }
    }
  }
  const Nanos took = clock_.now() - began;
  if (buffer != nullptr) give_back(std::move(buffer));
  if (status) {
    const MutexLock lock(mutex_);
    ways_[static_cast<std::size_t>(direction)].note(way, bytes, took);
  }
  return status;
}

}  // namespace kv_offload
