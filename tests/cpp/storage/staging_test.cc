#include "storage/staging.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include "base/aligned_buffer.h"
#include "storage/fs_fixture.h"

namespace kv_offload {
namespace {

using Way = FasterWay::Way;

// Uses `ways` `count` times; what each way takes a byte is given.
int staged_of(FasterWay& ways, int count, Nanos straight, Nanos staged) {
  int picked = 0;
  for (int i = 0; i < count; ++i) {
    const Way way = ways.pick();
    picked += way == Way::kStaged;
    ways.note(way, 1, way == Way::kStaged ? staged : straight);
  }
  return picked;
}

TEST(FasterWay, both_are_tried_before_one_is_chosen) {
  FasterWay ways;
  EXPECT_EQ(staged_of(ways, 2 * FasterWay::kFirstTries, Nanos(10), Nanos(1)), FasterWay::kFirstTries);
}

TEST(FasterWay, the_copy_is_made_where_it_pays_and_only_there) {
  constexpr int kCount = 6400;
  constexpr int kOthers = kCount / static_cast<int>(FasterWay::kTryOtherEvery);
  for (const auto& [staged, expected] :
       {std::pair{Nanos(50), kCount - kOthers}, std::pair{Nanos(90), kOthers},  // too little gained
        std::pair{Nanos(100), kOthers}, std::pair{Nanos(300), kOthers}}) {
    FasterWay ways;
    (void)staged_of(ways, 64, Nanos(100), staged);
    EXPECT_EQ(staged_of(ways, kCount, Nanos(100), staged), expected) << staged.count();
  }
}

TEST(FasterWay, a_machine_that_changes_is_noticed) {
  FasterWay ways;
  (void)staged_of(ways, 640, Nanos(100), Nanos(50));
  (void)staged_of(ways, 640, Nanos(100), Nanos(400));
  EXPECT_LE(staged_of(ways, 640, Nanos(100), Nanos(400)), 10);
}

TEST(Staging, both_ways_move_the_same_bytes) {
  const testing::TempDir directory;
  const SteadyClock clock;
  Staging staging(clock);  // the first transfers go both ways in turns
  const std::string path = directory.path() + "/record";
  const int fd = ::open(path.c_str(), O_RDWR | O_CREAT, 0600);
  ASSERT_GE(fd, 0);
  AlignedBuffer header(kRecordHeaderBytes), first(8192), second(3 * kPageBytes);
  const std::vector<Shard> shards = {first.span().first(5000), second.span()};
  for (unsigned round = 0; round < 2 * FasterWay::kFirstTries; ++round) {
    for (AlignedBuffer* part : {&header, &first, &second}) {
      std::memset(part->data(), static_cast<int>(1 + round), part->size());
    }
    ASSERT_TRUE(
        staging.transfer(posix_file_ops(), fd, header.span(), shards, Transfer::kWrite, true, path).is_ok());
    for (AlignedBuffer* part : {&header, &first, &second}) std::memset(part->data(), 0, part->size());
    ASSERT_TRUE(
        staging.transfer(posix_file_ops(), fd, header.span(), shards, Transfer::kRead, true, path).is_ok());
    for (AlignedBuffer* part : {&header, &first, &second}) {
      for (const std::byte byte : part->span()) ASSERT_EQ(byte, std::byte(1 + round)) << "round " << round;
    }
  }
  ::close(fd);
}

TEST(Staging, what_cannot_be_read_says_so_both_ways) {
  const testing::TempDir directory;
  const SteadyClock clock;
  Staging staging(clock);
  const std::string path = directory.path() + "/short";
  const int fd = ::open(path.c_str(), O_RDWR | O_CREAT, 0600);
  ASSERT_GE(fd, 0);
  AlignedBuffer header(kRecordHeaderBytes), row(8192);
  const std::vector<Shard> shards = {row.span()};
  for (int round = 0; round < 4; ++round) {
    const Status status =
        staging.transfer(posix_file_ops(), fd, header.span(), shards, Transfer::kRead, true, path);
    EXPECT_EQ(status.kind(), StatusKind::kCorrupt);
  }
  ::close(fd);
}

}  // namespace
}  // namespace kv_offload
