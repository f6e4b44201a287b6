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

// In a full root the end of a prompt does not take the place of the prompt's own beginning.
TEST(RecordWriterTest, what_would_take_the_place_of_its_own_prompt_is_declined_and_so_is_what_lies_behind) {
  const TempDir dir;
  const std::string root = dir.path() + "/root";
  FaultyFileOps ops;
  FakeClock clock;
  FsStore store(options_for(root, std::uint64_t{1} << 20), ops, clock);
  Row row({65536});
  std::uint64_t moved = 0;
  TierOp op;
  op.kind = OpKind::kWrite;
  op.shards = row.shards();
  const auto write = [&](std::uint32_t number, std::uint32_t request, bool may_decline) {
    op.key = key_of(number);
    op.about = {.parent = chunk_id(key_of(number - 1)), .depth = number, .request = request};
    op.may_decline = may_decline;
    return store.write(op, store.epoch(), &moved);
  };
  std::uint32_t number = 1;
  Status status;
  while ((status = write(number, 1, true))) ASSERT_LT(++number, 30u) << "the bound is never reached";
  EXPECT_EQ(status.kind(), StatusKind::kDeclined) << status.to_string();
  const auto held = [&] {
    TierStats stats;
    store.figures(&stats);
    return stats.chunks;
  };
  const std::uint64_t kept = held();
  EXPECT_EQ(kept, number - 1);
  EXPECT_TRUE(temporaries_in(root).empty());
  // Of another request: those before it go, if it must be.
  EXPECT_TRUE(write(100, 2, true));
  EXPECT_EQ(store.catalogue()->contains(key_of(1)), Presence::kAbsent);
  for (std::uint32_t used = 2; used < number; ++used) store.catalogue()->touch(key_of(used));
  EXPECT_EQ(write(number + 1, 1, true).kind(), StatusKind::kDeclined)
      << "the other's would go for it, but it lies behind one that is not there";
  EXPECT_TRUE(write(number + 1, 3, true)) << "a later request is not held to that";
  EXPECT_TRUE(write(number, 1, false)) << "not asked whether it is worth it";
  EXPECT_EQ(held(), kept);
  store.close();
}

}  // namespace
}  // namespace kv_offload
