// SPDX-License-Identifier: Apache-2.0
// Counts that end with an exception, or that a reset overtakes.
#include <fcntl.h>
#include <gtest/gtest.h>

#include <cerrno>
#include <new>
#include <string>
#include <utility>

#include "backends/fs/store.h"
#include "faulty_file_ops.h"
#include "fixture.h"

namespace kv_offload {
namespace {

using namespace testing;

TEST(UsageScannerTest, a_count_that_throws_is_repeated_and_unlocks_the_ledger) {
  const TempDir dir;
  const std::string root = dir.path() + "/root";
  const FsTierOptions options = options_for(root);
  {
    TierUser user(options);
    for (std::uint32_t i = 0; i < 64; ++i) ASSERT_TRUE(user.write(i));
  }
  FaultyFileOps ops;
  FakeClock clock;
  FsStore store(options, ops, clock);
  std::atomic<int> lists{0};
  ops.set_rule([&](Call call) -> int {  // in the middle, on one of several threads
    if (call == Call::kList && ++lists > 8) throw std::bad_alloc();
    return 0;
  });
  EXPECT_THROW(store.start(), std::bad_alloc);
  ops.clear();
  {
    const Fd directory(posix_file_ops(), ::open(root.c_str(), O_RDONLY | O_DIRECTORY));
    SpaceLedger another(posix_file_ops(), directory.get(), root, options.max_bytes, 77, 0);
    SpaceFigures figures;
    ASSERT_TRUE(another.poll(clock.now(), &figures));
    EXPECT_EQ(figures.counter, 0u);
    another.close();
  }
  store.maintain();
  TierStats stats;
  store.figures(&stats);
  EXPECT_EQ(stats.bytes, du(root));
  EXPECT_EQ(stats.chunks, 64u);
  EXPECT_TRUE(stats.scan_complete);
  store.close();
}

TEST(UsageScannerTest, a_count_that_a_reset_overtook_changes_nothing_and_is_repeated) {
  const TempDir dir;
  const std::string root = dir.path() + "/root";
  const FsTierOptions options = options_for(root);
  {
    TierUser user(options);
    for (std::uint32_t i = 0; i < 64; ++i) ASSERT_TRUE(user.write(i));
  }
  const std::uint64_t known = du(root);
  std::ofstream(root + "/foreign") << std::string(std::size_t{1} << 18, 'x');  // only a count finds it
  FaultyFileOps ops;
  FakeClock clock;
  FsStore store(options, ops, clock);
  std::atomic<int> lists{0};
  ops.set_rule([&](Call call) -> int {
    if (call == Call::kList && ++lists == 8) store.forget(0);
    return 0;
  });
  store.start();
  ops.clear();
  ASSERT_GE(lists, 8);
  TierStats stats;
  store.figures(&stats);
  // The count covered a part of the root, without our epoch. (Our own files, a few pages, were added later.)
  EXPECT_GE(stats.bytes, known);
  EXPECT_LT(stats.bytes, known + (std::uint64_t{1} << 17));
  ASSERT_TRUE(store.begin_epoch());
  clock.advance(std::chrono::hours(1));  // counts are made with pauses
  store.maintain();
  store.figures(&stats);
  EXPECT_EQ(stats.bytes, du(root));
  store.close();
}

// Makes the n-th listing of a count fail once.
class FsPartialCount : public ::testing::TestWithParam<int> {};

TEST_P(FsPartialCount, a_count_that_missed_a_directory_is_rejected_and_repeated) {
  const TempDir dir;
  const std::string root = dir.path() + "/root";
  const FsTierOptions options = options_for(root);
  {
    TierUser user(options);
    for (std::uint32_t i = 0; i < 64; ++i) ASSERT_TRUE(user.write(i));
  }
  int failed = 0;
  for (int n = 0; failed == n; ++n) {
    FaultyFileOps ops;
    FakeClock clock;
    FsStore store(options, ops, clock);
    std::atomic<int> lists{0};
    ops.set_rule(
        [&](Call call) -> int { return call == Call::kList && lists.fetch_add(1) == n ? -GetParam() : 0; });
    store.start();
    ops.clear();
    if (lists > n) ++failed;
    TierStats stats;
    store.figures(&stats);
    ASSERT_GE(stats.bytes, du(root)) << "list " << n;
    clock.advance(std::chrono::hours(1));  // counts are made with pauses
    store.maintain();
    store.figures(&stats);
    ASSERT_EQ(stats.bytes, du(root)) << "list " << n;
    ASSERT_EQ(stats.chunks, 64u) << "list " << n;
    ASSERT_TRUE(stats.scan_complete) << "list " << n;
    store.close();
  }
  EXPECT_GT(failed, 64);  // leaf directories, by name and by order, and the directories above them
}

INSTANTIATE_TEST_SUITE_P(errors, FsPartialCount, ::testing::Values(EMFILE, ENOMEM, EIO, ETIMEDOUT));

// Makes one leaf directory fail to open.
class UnreadableLeaf : public FaultyFileOps {
 public:
  explicit UnreadableLeaf(std::string leaf, int error) : leaf_(std::move(leaf)), error_(error) {}
  int open(int directory, const std::string& path, int flags, unsigned mode) override {
    return path == leaf_ ? -error_ : FaultyFileOps::open(directory, path, flags, mode);
  }

 private:
  const std::string leaf_;
  const int error_;
};

TEST(UsageScannerTest,
     an_unreadable_directory_stops_writes_for_a_few_counts_and_a_descriptor_shortage_for_all) {
  for (const int error : {EIO, EMFILE}) {
    const TempDir dir;
    const std::string root = dir.path() + "/root";
    const FsTierOptions options = options_for(root);
    {
      TierUser user(options);
      for (std::uint32_t i = 0; i < 64; ++i) ASSERT_TRUE(user.write(i));
    }
    fs::remove(root + "/ledger");  // no space is granted until the root was counted
    UnreadableLeaf ops(layout::leaf_path(layout::leaf_of(key_of(0))), error);
    FakeClock clock;
    FsStore store(options, ops, clock);
    store.start();
    Row row({16384});
    std::uint64_t moved = 0;
    TierOp op;
    op.kind = OpKind::kWrite;
    op.shards = row.shards();
    op.key = key_of(1000);
    EXPECT_EQ(store.write(op, store.epoch(), &moved).kind(), StatusKind::kNoSpace);
    for (int i = 0; i < 5; ++i) {
      clock.advance(std::chrono::hours(1));
      store.maintain();
    }
    EXPECT_EQ(store.write(op, store.epoch(), &moved).is_ok(), error == EIO);
    store.close();
  }
}

}  // namespace
}  // namespace kv_offload
