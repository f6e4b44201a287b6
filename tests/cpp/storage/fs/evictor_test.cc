// What goes for a write whose generation is over.
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

}  // namespace
}  // namespace kv_offload
