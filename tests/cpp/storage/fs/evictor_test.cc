// What goes for a write: none whose generation is over, and first what nobody can hit.
#include <gtest/gtest.h>

#include <new>

#include "faulty_file_ops.h"
#include "fixture.h"
#include "storage/fs/store.h"

namespace kv_offload {
namespace {

using namespace testing;

// It stands at the lock of the ledger when the reset comes; the other namespace has all that there is.
TEST(EvictorTest, nothing_is_evicted_for_a_write_that_a_reset_overtook) {
  const TempDir dir;
  const std::string root = dir.path() + "/root";
  FaultyFileOps ops;
  FakeClock clock;
  FsTierOptions other = options_for(root, std::uint64_t{1} << 20);
  other.namespace_id.fill(0x22);
  FsStore theirs(other, ops, clock);
  Row row({16384});
  std::uint64_t moved = 0;
  TierOp op;
  op.kind = OpKind::kWrite;
  op.shards = row.shards();
  for (std::uint32_t i = 0; i < 200; ++i) {
    op.key = key_of(i);
    ASSERT_TRUE(theirs.write(op, theirs.epoch(), &moved));
  }
  FsStore ours(options_for(root, std::uint64_t{1} << 20), ops, clock);
  ours.start();
  ours.maintain();
  const std::size_t before = records_in(root).size();
  const RecordStore::EpochPtr epoch = ours.epoch();
  op.key = key_of(1000);
  ops.set_rule([&](Call call) -> int {
    if (call == Call::kFlock && ours.epoch()) ours.forget();
    return 0;
  });
  EXPECT_EQ(ours.write(op, epoch, &moved).kind(), StatusKind::kCancelled);
  ops.clear();
  EXPECT_EQ(records_in(root).size(), before);
  ASSERT_TRUE(ours.begin_epoch());
  EXPECT_TRUE(ours.write(op, ours.epoch(), &moved)) << "the control";
  EXPECT_LE(records_in(root).size(), before);
  for (FsStore* store : {&ours, &theirs}) store->close();
}

// Before its records are known none of ours may go, for any of them may be the one to keep.
TEST(EvictorTest, who_starts_on_a_root_that_is_full_of_what_a_reset_left_writes_at_once) {
  const TempDir dir;
  const std::string root = dir.path() + "/root";
  FakeClock clock;
  const FsTierOptions options = options_for(root, std::uint64_t{1} << 20);
  Row row({16384});
  std::uint64_t moved = 0;
  TierOp op;
  op.kind = OpKind::kWrite;
  op.shards = row.shards();
  const auto fill = [&](bool reset) {
    FsStore before(options, posix_file_ops(), clock);
    before.start();
    for (std::uint32_t i = 0; i < 60; ++i) {
      op.key = key_of(i);
      ASSERT_TRUE(before.write(op, before.epoch(), &moved));
    }
    if (reset) {
      before.forget();
      ASSERT_TRUE(before.begin_epoch());
    }
    before.close();
  };
  fill(true);
  const std::size_t left = records_in(root).size();
  ASSERT_GT(left, 20u);
  {
    FsStore store(options, posix_file_ops(), clock);
    for (std::uint32_t i = 0; i < 10; ++i) {
      op.key = key_of(i);
      ASSERT_TRUE(store.write(op, store.epoch(), &moved)) << i;
      EXPECT_LE(du(root), options.max_bytes);
    }
    EXPECT_GT(records_in(root).size(), left / 2) << "only what is needed goes while a write waits";
    store.start();
    EXPECT_EQ(records_in(root).size(), 10u);
    store.close();
  }
  fill(false);
  FsStore store(options, posix_file_ops(), clock);
  op.key = key_of(1000);
  EXPECT_EQ(store.write(op, store.epoch(), &moved).kind(), StatusKind::kNoSpace) << "the control";
  store.close();
}

}  // namespace
}  // namespace kv_offload
