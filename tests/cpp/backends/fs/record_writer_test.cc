// SPDX-License-Identifier: Apache-2.0
// A write that ends with an exception, and writes that compete for one record.
#include <gtest/gtest.h>

#include <new>

#include "backends/fs/store.h"
#include "faulty_file_ops.h"
#include "fixture.h"
#include "tier/encoded_medium.h"

namespace kv_offload {
namespace {

using namespace testing;

TEST(RecordWriterTest, a_write_that_throws_leaves_no_temporary_file_and_no_bytes) {
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

// In a full root, the end of a prompt does not evict the prompt's own beginning.
TEST(RecordWriterTest, a_write_that_would_evict_its_own_prompt_is_declined_with_all_later_chunks) {
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
    op.entry_info = {.parent = chunk_id(key_of(number - 1)), .depth = number, .request = request};
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
  // A write of another request evicts records of the first request if it must.
  EXPECT_TRUE(write(100, 2, true));
  EXPECT_EQ(store.catalog()->contains(key_of(1)), Presence::kAbsent);
  for (std::uint32_t used = 2; used < number; ++used) store.catalog()->touch(key_of(used));
  EXPECT_EQ(write(number + 1, 1, true).kind(), StatusKind::kDeclined)
      << "it could evict a record of the other request, but its parent chunk is missing";
  EXPECT_TRUE(write(number + 1, 3, true)) << "a later request is not bound by that decision";
  EXPECT_TRUE(write(number, 1, false)) << "it must not be declined";
  EXPECT_EQ(held(), kept);
  store.close();
}

// Two processes on one root: one encodes its records, and the other may.
class WritersOfOneRecord : public ::testing::Test {
 protected:
  FsTierOptions options(bool encodes) const {
    FsTierOptions options = options_for(root_);
    if (encodes) options.form.compression = always_encoded();
    return options;
  }
  std::unique_ptr<FsStore> open(bool encodes) {
    auto store = std::make_unique<FsStore>(options(encodes), ops_, clock_);
    store->start();
    store->maintain();
    return store;
  }
  Status write(FsStore& store, std::uint32_t number) {
    row_.fill(number);
    op_.kind = OpKind::kWrite;
    op_.key = key_of(number);
    op_.shards = row_.shards();
    std::uint64_t moved = 0;
    return store.write(op_, store.epoch(), &moved);
  }
  Status read(FsStore& store, std::uint32_t number) {
    op_.kind = OpKind::kRead;
    op_.key = key_of(number);
    op_.shards = row_.shards();
    std::uint64_t moved = 0;
    const Status status = store.read(op_, store.epoch(), &moved);
    EXPECT_TRUE(!status || row_.holds(number));
    return status;
  }
  static std::uint64_t usage(FsStore& store) {
    TierStats stats;
    store.figures(&stats);
    return stats.bytes;
  }
  static constexpr std::uint64_t kRaw = 65536;
  const TempDir dir_;
  const std::string root_ = dir_.path() + "/root";
  FaultyFileOps ops_;
  FakeClock clock_;
  Row row_{{kRaw}};
  TierOp op_;
};

TEST_F(WritersOfOneRecord, the_smaller_record_stays_and_is_counted_once) {
  const auto one = open(true), other = open(false);
  for (std::uint32_t i = 0; i < 10; ++i) {
    ASSERT_TRUE(write(*one, i));
    const std::uint64_t stored = fs::file_size(path_of(root_, i));
    ASSERT_LT(stored, kRaw);
    ASSERT_TRUE(write(*other, i));
    EXPECT_EQ(fs::file_size(path_of(root_, i)), stored);
    EXPECT_TRUE(read(*other, i));
  }
  EXPECT_EQ(usage(*other), du(root_));
  EXPECT_TRUE(temporaries_in(root_).empty());
  for (FsStore* store : {one.get(), other.get()}) store->close();
}

TEST_F(WritersOfOneRecord, an_encoding_writer_leaves_a_raw_record) {
  const auto one = open(false), other = open(true);
  ASSERT_TRUE(write(*one, 1));
  ASSERT_TRUE(write(*other, 1));
  EXPECT_GT(fs::file_size(path_of(root_, 1)), kRaw);
  EXPECT_TRUE(read(*other, 1));
  EXPECT_EQ(usage(*other), du(root_));
  for (FsStore* store : {one.get(), other.get()}) store->close();
}

// As after a power cut without fsync. Its remaining bytes are subtracted when it is replaced.
TEST_F(WritersOfOneRecord, a_torn_record_is_replaced_by_a_complete_one) {
  const auto one = open(true);
  std::uint32_t number = 0;
  for (const bool encodes : {true, false}) {
    const auto other = open(encodes);
    for (const std::uint64_t torn : {std::uint64_t{0}, std::uint64_t{100}, 1 * kPageBytes, 2 * kPageBytes}) {
      ASSERT_TRUE(write(*one, ++number));
      const std::uint64_t before = usage(*one), whole = du(path_of(root_, number));
      ASSERT_GT(fs::file_size(path_of(root_, number)), torn);
      fs::resize_file(path_of(root_, number), torn);
      const std::uint64_t left = du(path_of(root_, number));
      ASSERT_LT(left, whole);
      ASSERT_TRUE(write(*other, number));
      EXPECT_TRUE(read(*other, number)) << torn;
      EXPECT_EQ(usage(*other), before - left + du(path_of(root_, number))) << torn;
    }
    other->close();
  }
  one->close();
}

// The other process removes the record between our check and our removal: it subtracts the bytes, and we must
// not.
TEST_F(WritersOfOneRecord, a_record_that_another_removes_meanwhile_is_not_subtracted_twice) {
  const auto one = open(true), other = open(false);
  ASSERT_TRUE(write(*one, 1));
  fs::resize_file(path_of(root_, 1), kPageBytes);
  const std::uint64_t before = usage(*one);
  const fs::path path = path_of(root_, 1);
  bool refused = false, removed = false;
  ops_.set_rule([&](Call call) {
    if (call == Call::kPreadv && refused && !removed) removed = fs::remove(path);  // the remover subtracts it
    refused |= call == Call::kRename;
    return 0;
  });
  ASSERT_TRUE(write(*other, 1));
  ops_.clear();
  EXPECT_TRUE(removed);
  EXPECT_EQ(usage(*other), before + du(path_of(root_, 1)));
  for (FsStore* store : {one.get(), other.get()}) store->close();
}

}  // namespace
}  // namespace kv_offload
