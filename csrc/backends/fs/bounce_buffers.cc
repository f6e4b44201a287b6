// SPDX-License-Identifier: Apache-2.0
#include "backends/fs/bounce_buffers.h"

#include <algorithm>
#include <cstring>

#include "base/aligned_buffer.h"

namespace kv_offload {
namespace {

constexpr double kFade = 31.0 / 32;

// Copies the shards with their padding. Returns the checksum.
std::uint64_t copy_and_sum(std::span<const Shard> shards, std::byte* to) {
  PayloadChecksum checksum;
  for (const Shard& shard : shards) {
    const std::size_t padded = round_up(shard.size(), kPageBytes);
    for (std::size_t at = 0; at < padded; at += BounceBuffers::kSumBytes) {
      const std::size_t length = std::min(padded - at, BounceBuffers::kSumBytes);
      std::memcpy(to, shard.data() + at, length);
      checksum.add({to, length});
      to += length;
    }
  }
  return checksum.value();
}

}  // namespace

FasterPath::Path FasterPath::pick() {
  const std::uint64_t number = picked_++;
  if (number < std::uint64_t{2} * kTries) return number < kTries ? Path::kInPlace : Path::kBounced;
  const Seen& in_place = seen_[0];
  const Seen& bounced = seen_[1];
  const bool bounced_wins =
      bounced.bytes > 0 && in_place.bytes > 0 &&
      bounced.nanos * in_place.bytes < kMaxBouncedRatio * in_place.nanos * bounced.bytes;
  const bool other = number % kOtherPathInterval >= kOtherPathInterval - kTries;
  return bounced_wins != other ? Path::kBounced : Path::kInPlace;
}

void FasterPath::record(Path path, std::uint64_t bytes, Nanos took) {
  Seen& seen = seen_[static_cast<std::size_t>(path)];
  seen.bytes = seen.bytes * kFade + static_cast<double>(bytes);
  seen.nanos = seen.nanos * kFade + static_cast<double>(took.count());
}

BounceBuffers::BounceBuffers(const Clock& clock) : clock_(clock) {}
BounceBuffers::~BounceBuffers() = default;

std::unique_ptr<HugeBuffer> BounceBuffers::begin(Transfer direction, bool choose, std::uint64_t bytes) {
  if (!choose) return nullptr;
  {
    const MutexLock lock(mutex_);
    if (path(direction).pick() == FasterPath::Path::kInPlace) return nullptr;
    std::vector<std::unique_ptr<HugeBuffer>>& buffers = free_[static_cast<std::size_t>(direction)];
    if (!buffers.empty()) {
      std::unique_ptr<HugeBuffer> buffer = std::move(buffers.back());
      buffers.pop_back();
      if (buffer->size() >= bytes) return buffer;
    }
  }
  auto buffer = std::make_unique<HugeBuffer>(bytes);
  return buffer->data() == nullptr ? nullptr : std::move(buffer);
}

void BounceBuffers::end(Transfer direction, bool chosen, std::unique_ptr<HugeBuffer> buffer,
                        const Status& status, std::uint64_t bytes, Nanos took) {
  if (!chosen) return;
  const MutexLock lock(mutex_);
  if (status)
    path(direction).record(buffer ? FasterPath::Path::kBounced : FasterPath::Path::kInPlace, bytes, took);
  if (buffer) free_[static_cast<std::size_t>(direction)].push_back(std::move(buffer));
}

Status BounceBuffers::write(FileOps& ops, int fd, RecordHeader header, std::span<const Shard> shards,
                            bool direct, const std::string& path) {
  count(direct);
  const std::uint64_t bytes = kRecordHeaderBytes + padded_payload_bytes(shards);
  // Without O_DIRECT the page cache copies the bytes anyway.
  const bool choose = direct && bytes >= kMinBytes && bytes <= kMaxWriteBytes;
  std::unique_ptr<HugeBuffer> buffer = begin(Transfer::kWrite, choose, bytes);
  const Nanos began = clock_.now();
  AlignedBuffer page;
  std::vector<iovec> parts;
  if (buffer) {
    header.checksum = copy_and_sum(shards, buffer->data() + kRecordHeaderBytes);
    encode_header(header, {buffer->data(), kRecordHeaderBytes});
    parts = {{buffer->data(), bytes}};
  } else {
    page = AlignedBuffer(kRecordHeaderBytes);
    header.checksum = payload_checksum(shards);
    encode_header(header, page.span());
    parts = record_parts(page.span(), shards);
  }
  Status status = transfer_all(ops, fd, std::move(parts), Transfer::kWrite, direct, path);
  end(Transfer::kWrite, choose, std::move(buffer), status, bytes, clock_.now() - began);
  return status;
}

Status BounceBuffers::write_whole(FileOps& ops, int fd, std::span<const std::span<const std::byte>> pieces,
                                  bool direct, const std::string& path) {
  count(direct);
  std::vector<iovec> parts;
  for (const auto& piece : pieces)
    parts.push_back({const_cast<std::byte*>(piece.data()), piece.size()});  // iovec has no const
  return transfer_all(ops, fd, std::move(parts), Transfer::kWrite, direct, path);
}

Status BounceBuffers::read(FileOps& ops, int fd, std::span<const std::span<std::byte>> places,
                           std::uint64_t bytes, bool direct, const std::string& path,
                           const Arrived& arrived) {
  count(direct);
  std::vector<iovec> parts;
  for (const auto& place : places) {
    if (!place.empty()) parts.push_back({place.data(), place.size()});
  }
  const bool choose = direct && bytes >= kMinBytes;
  std::unique_ptr<HugeBuffer> buffer = begin(Transfer::kRead, choose, std::min(bytes, kReadBytes));
  const Nanos began = clock_.now();
  Status status;
  for (std::uint64_t offset = 0; status && offset < bytes; offset += kReadBytes) {
    const std::uint64_t length = std::min(bytes - offset, kReadBytes);
    const std::vector<iovec> front = take_front(&parts, length);
    status = transfer_all(ops, fd, buffer ? std::vector<iovec>{{buffer->data(), length}} : front,
                          Transfer::kRead, direct, path, static_cast<std::int64_t>(offset));
    std::size_t at = 0;
    for (const iovec& part : front) {
      if (!status) break;
      auto* to = static_cast<std::byte*>(part.iov_base);
      status = arrived(buffer ? buffer->data() + at : to, {to, part.iov_len});
      at += part.iov_len;
    }
  }
  end(Transfer::kRead, choose, std::move(buffer), status, bytes, clock_.now() - began);
  return status;
}

}  // namespace kv_offload
