// SPDX-License-Identifier: Apache-2.0
// A read that ends with an exception.
#include <gtest/gtest.h>

#include <new>

#include "backends/fs/store.h"
#include "faulty_file_ops.h"
#include "fixture.h"

namespace kv_offload {
namespace {

using namespace testing;

TEST(RecordReaderTest, a_read_that_throws_keeps_no_record_from_eviction) {
  const TempDir dir;
  const std::string root = dir.path() + "/root";
  FaultyFileOps ops;
  FakeClock clock;
  FsStore store(options_for(root, std::uint64_t{1} << 20), ops, clock);
  Row row({16384});
  std::uint64_t moved = 0;
  TierOp op;
  op.shards = row.shards();
  const auto write = [&](std::uint32_t number) {
    op.kind = OpKind::kWrite;
    op.key = key_of(number);
    return store.write(op, store.epoch(), &moved);
  };
  ASSERT_TRUE(write(1));
  ops.set_rule([](Call call) -> int {
    if (call == Call::kPreadv) throw std::bad_alloc();
    return 0;
  });
  op.kind = OpKind::kRead;
  EXPECT_THROW((void)store.read(op, store.epoch(), &moved), std::bad_alloc);
  ops.clear();
  for (std::uint32_t i = 2; i < 200; ++i) ASSERT_TRUE(write(i));
  EXPECT_TRUE(path_of(root, 1).empty()) << "the least recently used of all";
  store.close();
}

}  // namespace
}  // namespace kv_offload
