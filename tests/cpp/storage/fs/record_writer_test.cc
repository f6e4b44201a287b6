// What a write leaves behind when it is ended by something that throws.
#include <gtest/gtest.h>

#include <new>

#include "faulty_file_ops.h"
#include "fixture.h"
#include "storage/fs/store.h"

namespace kv_offload {
namespace {

using namespace testing;

TEST(RecordWriterTest, a_write_that_throws_leaves_no_temporary_and_no_bytes) {
  const TempDir dir;
  const std::string root = dir.path() + "/root";
  FsTierOptions options = options_for(root);
  options.fsync = FsyncMode::kData;
  FaultyFileOps ops;
  FakeClock clock;
  FsStore store(options, ops, clock);
  Row row({16384});
  std::uint64_t moved = 0;
  TierOp op;
  op.kind = OpKind::kWrite;
  op.key = key_of(1);
  op.shards = row.shards();
  ops.set_rule([](Call call) -> int {
    if (call == Call::kFsync) throw std::bad_alloc();
    return 0;
  });
  EXPECT_THROW((void)store.write(op, store.epoch(), &moved), std::bad_alloc);
  ops.clear();
  EXPECT_TRUE(temporaries_in(root).empty());
  TierStats stats;
  store.figures(&stats);
  EXPECT_EQ(stats.bytes, du(root));
  EXPECT_EQ(stats.chunks, 0u);
  EXPECT_TRUE(store.write(op, store.epoch(), &moved));
  store.close();
}

}  // namespace
}  // namespace kv_offload
