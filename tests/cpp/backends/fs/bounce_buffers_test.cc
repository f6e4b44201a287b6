// SPDX-License-Identifier: Apache-2.0
#include "backends/fs/bounce_buffers.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include "backends/fs/fixture.h"
#include "base/aligned_buffer.h"

namespace kv_offload {
namespace {

using Path = FasterPath::Path;

// Uses `paths` `count` times, with the given time per byte of each path. Returns how often it bounced.
int bounced_of(FasterPath& paths, int count, Nanos in_place, Nanos bounced) {
  int picked = 0;
  for (int i = 0; i < count; ++i) {
    const Path path = paths.pick();
    picked += path == Path::kBounced;
    paths.record(path, 1, path == Path::kBounced ? bounced : in_place);
  }
  return picked;
}

TEST(FasterPathTest, both_paths_are_tried_before_one_is_chosen) {
  FasterPath paths;
  EXPECT_EQ(bounced_of(paths, 2 * FasterPath::kTries, Nanos(10), Nanos(1)), FasterPath::kTries);
}

TEST(FasterPathTest, the_bounced_path_is_chosen_only_where_it_is_faster) {
  constexpr int kCount = 6400;
  constexpr int kOthers =
      kCount / static_cast<int>(FasterPath::kOtherPathInterval) * static_cast<int>(FasterPath::kTries);
  for (const auto& [bounced, expected] :
       {std::pair{Nanos(50), kCount - kOthers}, std::pair{Nanos(90), kOthers},  // the gain is too small
        std::pair{Nanos(100), kOthers}, std::pair{Nanos(300), kOthers}}) {
    FasterPath paths;
    (void)bounced_of(paths, 64, Nanos(100), bounced);
    EXPECT_EQ(bounced_of(paths, kCount, Nanos(100), bounced), expected) << bounced.count();
  }
}

TEST(FasterPathTest, a_change_of_speed_is_noticed) {
  FasterPath paths;
  (void)bounced_of(paths, 640, Nanos(100), Nanos(50));
  (void)bounced_of(paths, 640, Nanos(100), Nanos(400));
  EXPECT_LE(bounced_of(paths, 640, Nanos(100), Nanos(400)), 3 * static_cast<int>(FasterPath::kTries));
}

// A record that takes several reads, and whose shards end in the middle of them.
class BounceBuffersTest : public ::testing::TestWithParam<bool> {
 protected:
  static constexpr std::size_t kFirst = BounceBuffers::kReadBytes + 5 * kPageBytes;
  static constexpr std::size_t kSecond = BounceBuffers::kReadBytes + kPageBytes;

  BounceBuffersTest() : fd_(::open(path_.c_str(), O_RDWR | O_CREAT | (GetParam() ? O_DIRECT : 0), 0600)) {}
  ~BounceBuffersTest() override { ::close(fd_); }
  Status write() {
    RecordHeader header;
    header.key = testing::key_of(1);
    for (const Shard& shard : shards_) header.shard_bytes.push_back(shard.size());
    header.payload_bytes = header.stored_bytes = kFirst + kSecond;
    return buffers_.write(posix_file_ops(), fd_, header, shards_, GetParam(), path_);
  }
  Status read(std::uint64_t* checksum) {
    PayloadChecksum sum;
    const std::vector<std::span<std::byte>> places{header_.span(), first_.span(), second_.span()};
    const Status status =
        buffers_.read(posix_file_ops(), fd_, places, kRecordHeaderBytes + kFirst + kSecond, GetParam(), path_,
                      [&](const std::byte* from, std::span<std::byte> to) {
                        if (from != to.data()) std::memcpy(to.data(), from, to.size());
                        if (to.data() != header_.data()) sum.add(to);
                        return Status::ok();
                      });
    *checksum = sum.value();
    return status;
  }
  std::vector<std::byte> payload() const {
    std::vector<std::byte> bytes(first_.span().begin(), first_.span().end());
    bytes.insert(bytes.end(), second_.span().begin(), second_.span().end());
    return bytes;
  }
  // Enough rounds to try both paths.
  static constexpr unsigned kRounds = 2 * FasterPath::kTries;

  const testing::TempDir directory_;
  const std::string path_ = directory_.path() + "/record";
  const SteadyClock clock_;
  BounceBuffers buffers_{clock_};
  AlignedBuffer header_{kRecordHeaderBytes}, first_{kFirst}, second_{kSecond};
  const std::vector<Shard> shards_ = {first_.span().first(kFirst - 3000), second_.span()};
  int fd_;
};

TEST_P(BounceBuffersTest, both_paths_move_the_same_bytes_and_compute_the_same_checksum) {
  ASSERT_GE(fd_, 0);
  for (unsigned round = 0; round < kRounds; ++round) {
    for (AlignedBuffer* part : {&first_, &second_}) {
      for (std::size_t i = 0; i < part->size(); ++i)
        part->data()[i] = static_cast<std::byte>(i * 31 + (i >> 12) + round + part->size());
    }
    zero_padding(shards_);
    std::vector<std::byte> expected = payload();
    ASSERT_TRUE(write());
    for (AlignedBuffer* part : {&header_, &first_, &second_}) std::memset(part->data(), 0xEE, part->size());
    std::uint64_t checksum = 0;
    ASSERT_TRUE(read(&checksum));
    ASSERT_TRUE(payload() == expected) << "round " << round;
    const Shard all{expected.data(), expected.size()};
    EXPECT_EQ(checksum, payload_checksum({&all, 1})) << "round " << round;
    RecordHeader header;
    ASSERT_TRUE(decode_header(header_.span(), &header)) << "round " << round;
    EXPECT_EQ(header.checksum, checksum) << "round " << round;
  }
}

TEST_P(BounceBuffersTest, a_read_error_is_reported_on_both_paths) {
  ASSERT_TRUE(write());
  ASSERT_EQ(::ftruncate(fd_, static_cast<off_t>(kFirst + kSecond)), 0);
  for (unsigned round = 0; round < kRounds; ++round) {
    std::uint64_t checksum = 0;
    EXPECT_EQ(read(&checksum).kind(), StatusKind::kCorrupt);
  }
}

INSTANTIATE_TEST_SUITE_P(direct, BounceBuffersTest, ::testing::Bool());

}  // namespace
}  // namespace kv_offload
