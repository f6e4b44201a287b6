// SPDX-License-Identifier: Apache-2.0
// The bound and the lookups on file systems with misleading metadata.
#include <fmt/ranges.h>
#include <gtest/gtest.h>

#include "backends/fs/store.h"
#include "fixture.h"
#include "misleading_file_ops.h"

namespace kv_offload {
namespace {

using namespace testing;

constexpr std::uint64_t kMetadataBound = std::uint64_t{4} << 20;
constexpr std::uint64_t kMetadataPayload = 65536, kMetadataRecord = kMetadataPayload + 4096;

class FsMisleading : public ::testing::Test {
 protected:
  std::unique_ptr<FsStore> open(FileOps& ops, std::uint64_t bound = kMetadataBound) {
    FsTierOptions options = options_for(root_, bound);
    options.warn = [this](const std::string& line) { lines_.push_back(line); };
    auto store = std::make_unique<FsStore>(options, ops, clock_);
    store->start();
    store->maintain();
    return store;
  }
  Status write(FsStore& store, std::uint32_t number) {
    TierOp op;
    op.kind = OpKind::kWrite;
    op.key = key_of(number);
    op.shards = row_.shards();
    std::uint64_t moved = 0;
    return store.write(op, store.epoch(), &moved);
  }
  void tick(FsStore& store, Nanos by = std::chrono::seconds(1)) {
    clock_.advance(by);
    store.maintain();
  }
  static TierStats stats_of(const FsStore& store) {
    TierStats stats;
    store.figures(&stats);
    return stats;
  }
  TempDir dir_;
  std::string root_ = dir_.path() + "/root";
  FakeClock clock_;
  Row row_{{kMetadataPayload}};
  std::vector<std::string> lines_;
};

TEST_F(FsMisleading, the_bound_holds_where_blocks_are_reported_late_or_never) {
  for (const Nanos lag : {Nanos(std::chrono::seconds(5)), Nanos(std::chrono::hours(10000))}) {
    fs::remove_all(root_);
    LateBlocks ops(clock_, lag);
    const auto store = open(ops);
    for (std::uint32_t i = 0; i < 4 * kMetadataBound / kMetadataRecord; ++i) {
      ASSERT_TRUE(write(*store, i)) << i;
      ASSERT_LE(du(root_), kMetadataBound);
      if (i % 10 == 9) tick(*store);
    }
    EXPECT_GT(du(root_), kMetadataBound * 9 / 10) << "the tier lost capacity";
    for (int i = 0; i < 30; ++i) tick(*store);
    EXPECT_GE(stats_of(*store).bytes + kMetadataRecord, du(root_));
    EXPECT_LE(stats_of(*store).bytes, du(root_) + kMetadataRecord);
    store->close();
  }
}

// Copies, parity or large allocation units: twice the size, and reported late.
TEST_F(FsMisleading, the_bound_holds_after_late_blocks_exceeded_the_size) {
  LateBlocks ops(clock_, std::chrono::seconds(5), 2);
  const auto store = open(ops);
  for (std::uint32_t i = 0; i < 4; ++i) ASSERT_TRUE(write(*store, i));
  for (int i = 0; i < 30; ++i) tick(*store);  // without writes, the blocks settle and are counted
  const auto records = [&] { return records_in(root_).size(); };
  for (std::uint32_t i = 4; i < 200; ++i) {
    ASSERT_TRUE(write(*store, i)) << i;
    ASSERT_LE(records() * 2 * kMetadataRecord, kMetadataBound) << "after " << i << " records";
    if (i % 10 == 9) tick(*store);
  }
  EXPECT_GT(records() * 2 * kMetadataRecord, kMetadataBound * 8 / 10) << "the tier lost capacity";
  store->close();
}

// XFS allocates beyond a file's end, and returns that space later.
TEST_F(FsMisleading, blocks_that_are_returned_later_are_used_again) {
  class Ahead : public LateBlocks {
   public:
    using LateBlocks::LateBlocks;
    int fstat(int fd, FileInfo* info) override {
      const int rc = LateBlocks::fstat(fd, info);
      if (rc == 0 && info->is_regular() && info->disk_bytes == 0 && info->size > kPageBytes)
        info->disk_bytes = 2 * info->size;
      return rc;
    }
  };
  Ahead ops(clock_, std::chrono::seconds(2));
  const auto store = open(ops);
  for (std::uint32_t i = 0; i < 200; ++i) {
    ASSERT_TRUE(write(*store, i));
    if (i % 4 == 3) tick(*store);
  }
  for (int i = 0; i < 30; ++i) tick(*store);
  EXPECT_LE(stats_of(*store).bytes, du(root_) + kMetadataRecord);
  store->close();
}

TEST_F(FsMisleading, a_disk_that_is_full_below_the_bound_keeps_the_newest_records) {
  for (const int error : {ENOSPC, EDQUOT}) {
    fs::remove_all(root_);
    lines_.clear();
    SmallDisk disk(kMetadataBound / 2, error);
    const auto store = open(disk);
    std::uint32_t failed = 0;
    for (std::uint32_t i = 0; i < 200; ++i) failed += !write(*store, i).is_ok();
    EXPECT_EQ(failed, 0u);
    std::uint32_t last = 0;
    for (std::uint32_t i = 180; i < 200; ++i) last += !path_of(root_, i).empty();
    EXPECT_EQ(last, 20u);
    EXPECT_TRUE(path_of(root_, 0).empty());
    store->maintain();
    ASSERT_EQ(lines_.size(), 1u) << fmt::format("{}", fmt::join(lines_, "\n"));
    EXPECT_NE(lines_[0].find("is full"), std::string::npos);
    // Space becomes available again.
    disk.set_room(4 * kMetadataBound);
    for (int i = 0; i < 200; ++i) tick(*store);
    for (std::uint32_t i = 1000; i < 1100; ++i) ASSERT_TRUE(write(*store, i));
    EXPECT_GT(du(root_), kMetadataBound * 9 / 10);
    EXPECT_LE(du(root_), kMetadataBound);
    store->close();
  }
}

TEST_F(FsMisleading, a_disk_that_stays_full_costs_a_few_records_and_not_the_whole_cache) {
  SmallDisk disk(kMetadataBound / 2);
  const auto store = open(disk);
  for (std::uint32_t i = 0; i < 20; ++i) ASSERT_TRUE(write(*store, i));
  disk.set_room(0);
  disk.set_rule([](Call call) { return call == Call::kRename ? -ENOSPC : 0; });
  for (std::uint32_t i = 100; i < 150; ++i) {
    const Status status = write(*store, i);
    EXPECT_EQ(status.kind(), StatusKind::kNoSpace) << status.to_string();
    EXPECT_EQ(status.error_number(), ENOSPC);
  }
  // The first write evicts in its second attempt. The next write evicts in both attempts, since the bound is
  // lowered, and is the second write to fail. Space for a record and its directories takes two records.
  constexpr std::size_t kAttemptsThatEvict = 1 + 2, kRecordsAnAttempt = 2;
  EXPECT_GE(records_in(root_).size(), 20 - kAttemptsThatEvict * kRecordsAnAttempt);
  EXPECT_TRUE(temporaries_in(root_).empty());
  disk.clear();
  disk.set_room(kMetadataBound);
  for (int i = 0; i < 60; ++i) tick(*store);
  EXPECT_TRUE(write(*store, 200));
  EXPECT_EQ(stats_of(*store).bytes, du(root_));
  store->close();
}

TEST_F(FsMisleading, a_copy_on_write_disk_that_is_full_to_the_last_block_evicts) {
  CopyOnWriteDisk disk;
  auto store = open(disk);
  for (std::uint32_t i = 0; i < 20; ++i) ASSERT_TRUE(write(*store, i));
  disk.fill();
  for (std::uint32_t i = 100; i < 150; ++i) {
    const Status status = write(*store, i);
    ASSERT_TRUE(status) << i << ": " << status.to_string();
  }
  // Space for a record and its directories takes two records; the ledger is written with what remains.
  EXPECT_GE(records_in(root_).size(), 18u);
  EXPECT_GE(stats_of(*store).bytes, du(root_));
  disk.empty();
  tick(*store);
  EXPECT_EQ(stats_of(*store).bytes, du(root_));
  store->close();
  disk.fill();
  store = open(disk);
  for (std::uint32_t i = 200; i < 250; ++i) {
    const Status status = write(*store, i);
    ASSERT_TRUE(status) << "after a start, " << i << ": " << status.to_string();
  }
  EXPECT_GE(records_in(root_).size(), 16u);
  store->close();
}

TEST_F(FsMisleading, a_copy_on_write_disk_that_stays_full_costs_a_few_records_and_not_the_whole_cache) {
  CopyOnWriteDisk disk;
  const auto store = open(disk);
  for (std::uint32_t i = 0; i < 20; ++i) ASSERT_TRUE(write(*store, i));
  disk.fill(true);
  for (std::uint32_t i = 100; i < 150; ++i) {
    const Status status = write(*store, i);
    EXPECT_EQ(status.kind(), StatusKind::kNoSpace) << status.to_string();
    EXPECT_EQ(status.error_number(), ENOSPC);
  }
  // Two writes evict, in two attempts each.
  constexpr std::size_t kAttemptsThatEvict = 2 * 2, kRecordsAnAttempt = 2;
  EXPECT_LT(records_in(root_).size(), 20u);
  EXPECT_GE(records_in(root_).size(), 20 - kAttemptsThatEvict * kRecordsAnAttempt);
  EXPECT_TRUE(temporaries_in(root_).empty());
  const std::size_t left = records_in(root_).size();
  for (int i = 0; i < 60; ++i) tick(*store);
  EXPECT_FALSE(write(*store, 150));
  EXPECT_LT(records_in(root_).size(), left) << "eviction is tried again, although no poll reads the ledger";
  disk.empty();
  for (int i = 0; i < 60; ++i) tick(*store);
  EXPECT_TRUE(write(*store, 200));
  EXPECT_EQ(stats_of(*store).bytes, du(root_));
  store->close();
}

// Each server adds the growth to the ledger, so the total is too high, but no other program removed anything.
TEST_F(FsMisleading, a_directory_that_grows_under_two_servers_is_not_reported_as_lost_records) {
  GrowingDirectories ops;
  const auto one = open(ops), other = open(ops);
  std::uint32_t number = 0;
  const std::uint32_t leaf = layout::leaf_of(key_of(0));
  for (int i = 0; i < 8; ++i) {
    for (int n = 0; n < 20; ++number) {
      if (layout::leaf_of(key_of(number)) != leaf) continue;
      ASSERT_TRUE(write(n++ % 2 == 0 ? *one : *other, number)) << number;
    }
    tick(*one, std::chrono::minutes(1));  // counts that a suspicion triggers are made with pauses
    other->maintain();
  }
  ASSERT_GT(stats_of(*one).evicted_bytes, 0u);
  EXPECT_TRUE(lines_.empty()) << lines_.back();
  EXPECT_EQ(stats_of(*one).lost_bytes + stats_of(*other).lost_bytes, 0u);
  for (FsStore* store : {one.get(), other.get()}) store->close();
}

// One directory's time is in the future: records that others write elsewhere are found anyway.
TEST_F(FsMisleading, records_of_others_are_found_where_times_are_coarse_or_in_the_future) {
  for (const bool future : {false, true}) {
    fs::remove_all(root_);
    std::atomic<bool> shift{future};
    std::atomic<std::uint64_t> ahead{0};
    ChangedTimes ops([&](std::int64_t nanos, const FileInfo& info) {
      constexpr std::int64_t kGrain = 2'000'000'000,
                             kCentury = std::int64_t{100} * 365 * 86400 * 1'000'000'000;
      if (!shift) return nanos / kGrain * kGrain;
      if (info.is_directory()) {
        std::uint64_t none = 0;
        ahead.compare_exchange_strong(none, info.inode);
      }
      return info.inode == ahead ? kCentury : nanos;
    });
    const auto reader = open(ops);
    const auto writer = open(posix_file_ops());
    ASSERT_TRUE(write(*writer, 0));
    ahead.store(0);  // the directory of this record is scanned first
    FileInfo leaf;
    ASSERT_EQ(posix_file_ops().stat(AT_FDCWD, path_of(root_, 0).parent_path().string(), &leaf), 0);
    ahead.store(leaf.inode);
    tick(*reader);
    for (std::uint32_t i = 1; i < 30; ++i) {
      ASSERT_TRUE(write(*writer, i));
      tick(*reader);
      ASSERT_EQ(stats_of(*reader).chunks, i + 1) << (future ? "future" : "coarse");
    }
    for (FsStore* store : {reader.get(), writer.get()}) store->close();
  }
}

// The clock of a file server is ahead of ours, so a file that was only written looks newer than a used one.
TEST_F(FsMisleading, the_order_of_use_survives_a_restart_where_the_file_system_clock_is_ahead) {
  constexpr std::int64_t kAhead = std::int64_t{7200} * 1'000'000'000;
  const auto now = [] {
    return std::chrono::duration_cast<Nanos>(std::chrono::system_clock::now().time_since_epoch()).count();
  };
  const auto start = now();
  // The server's own stamps are ahead. A time set with set_mtime() is kept as set, and is already ahead.
  ChangedTimes ops([&](std::int64_t nanos, const FileInfo&) {
    return nanos < start + kAhead / 2 && nanos > start - kAhead / 2 ? nanos + kAhead : nanos;
  });
  class NoShift : public FaultyFileOps {
   public:
    using FaultyFileOps::FaultyFileOps;
    std::vector<std::int64_t> set;
    int set_mtime(int directory, const std::string& path, std::int64_t nanos) override {
      set.push_back(nanos);
      return FaultyFileOps::set_mtime(directory, path, nanos);
    }
  } recorded(ops);
  const auto store = open(recorded);
  for (std::uint32_t i = 0; i < 5; ++i) ASSERT_TRUE(write(*store, i));
  store->catalog()->touch(key_of(0));
  tick(*store, std::chrono::minutes(2));
  ASSERT_FALSE(recorded.set.empty());
  EXPECT_GT(recorded.set.back(), start + kAhead - std::int64_t{60} * 1'000'000'000);
  store->close();
}

TEST_F(FsMisleading, absurd_sizes_in_names_are_ignored) {
  const auto store = open(posix_file_ops());
  ASSERT_TRUE(write(*store, 1));
  const std::string leaf = path_of(root_, 1).parent_path().string();
  for (const char* size : {"9223372036854775808", "18446744073709547520", "274877911040"}) {
    for (const std::uint32_t number : {1u, 2u}) {
      ChunkKey key = key_of(number);
      const std::string directory =
          fs::path(leaf).parent_path().string() + "/" + layout::leaf_path(layout::leaf_of(key));
      fs::create_directories(directory);
      std::ofstream(directory + "/" + key.hex() + "." + size + ".rec") << "x";
    }
  }
  store->close();
  const auto next = open(posix_file_ops());
  EXPECT_EQ(stats_of(*next).chunks, 1u);
  EXPECT_EQ(stats_of(*next).bytes, du(root_));
  next->close();
}

}  // namespace
}  // namespace kv_offload
