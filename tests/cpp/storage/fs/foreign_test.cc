// Two processes on one root: what one records the other finds, without a restart.
#include <gtest/gtest.h>

#include "faulty_file_ops.h"
#include "fixture.h"
#include "storage/fs/root.h"
#include "storage/fs/store.h"
#include "with_threads.h"

namespace kv_offload {
namespace {

using namespace testing;

class FsForeignTest : public ::testing::Test {
 protected:
  // Asked once and again while it is not known, as a waiting request asks.
  bool finds(TierUser& user, std::uint32_t number) { return user.has(number); }
  bool finds_in_time(TierUser& user, std::uint32_t number) {
    return user.until([&] { return finds(user, number); });
  }
  TempDir dir_;
  std::string root_ = dir_.path() + "/root";
};

TEST_F(FsForeignTest, a_record_of_one_is_found_and_read_by_the_other) {
  TierUser one(options_for(root_)), other(options_for(root_));
  one.wait_for_scan();
  other.wait_for_scan();
  for (std::uint32_t i = 0; i < 4; ++i) EXPECT_TRUE(one.write(i));
  EXPECT_TRUE(other.write(10));
  for (std::uint32_t i = 0; i < 4; ++i) {
    EXPECT_TRUE(finds_in_time(other, i));
    EXPECT_TRUE(other.read(i));
  }
  EXPECT_TRUE(finds_in_time(one, 10));
  EXPECT_TRUE(one.read(10));
}

TEST_F(FsForeignTest, records_that_come_later_are_found_too) {
  TierUser one(options_for(root_)), other(options_for(root_));
  one.wait_for_scan();
  other.wait_for_scan();
  for (std::uint32_t i = 0; i < 3; ++i) {
    EXPECT_TRUE(one.write(i));
    EXPECT_TRUE(finds_in_time(other, i)) << i;
  }
  EXPECT_EQ(other.tier().stats().chunks, 3u);
}

TEST_F(FsForeignTest, what_the_other_evicts_is_a_miss_not_a_failure) {
  TierUser one(options_for(root_)), other(options_for(root_));
  one.wait_for_scan();
  other.wait_for_scan();
  EXPECT_TRUE(one.write(1));
  EXPECT_TRUE(finds_in_time(other, 1));
  ASSERT_TRUE(fs::remove(path_of(root_, 1)));
  EXPECT_EQ(other.read(1).kind(), StatusKind::kNotFound);
  EXPECT_FALSE(other.has(1));
}

TEST_F(FsForeignTest, namespaces_do_not_see_each_other) {
  FsTierOptions foreign = options_for(root_);
  foreign.namespace_id.fill(0x22);
  TierUser one(options_for(root_)), other(foreign);
  one.wait_for_scan();
  other.wait_for_scan();
  EXPECT_TRUE(one.write(1));
  EXPECT_TRUE(other.write(2));
  TierUser same(options_for(root_));
  EXPECT_TRUE(finds_in_time(same, 1));
  EXPECT_FALSE(other.has(1));
}

// Two stores driven by hand: upkeep looks only where a test says so.
class FsAskedByNameTest : public ::testing::Test {
 protected:
  FsAskedByNameTest() {
    for (FsStore* store : {&writer_, &asker_}) store->start();
    for (FsStore* store : {&writer_, &asker_}) store->maintain();  // each sees the other
  }
  ~FsAskedByNameTest() override {
    for (FsStore* store : {&writer_, &asker_}) store->close();
  }
  static void write(FsStore& store, std::uint32_t number) {
    Row row({8192});
    row.fill(number);
    TierOp op;
    op.kind = OpKind::kWrite;
    op.key = key_of(number);
    op.shards = row.shards();
    std::uint64_t moved = 0;
    ASSERT_TRUE(store.write(op, store.epoch(), &moved));
  }
  static Status read(FsStore& store, std::uint32_t number) {
    Row row({8192});
    TierOp op;
    op.kind = OpKind::kRead;
    op.key = key_of(number);
    op.shards = row.shards();
    std::uint64_t moved = 0;
    const Status status = store.read(op, store.epoch(), &moved);
    EXPECT_TRUE(!status || row.holds(number));
    return status;
  }
  static Presence known(FsStore& store, std::uint32_t number) {
    return store.catalogue()->contains(key_of(number));
  }
  // As PooledTier asks.
  static Status ask(FsStore& store, const std::vector<std::uint32_t>& numbers,
                    KeyOrder order = KeyOrder::kNone) {
    std::vector<ChunkKey> keys;
    for (const std::uint32_t number : numbers) keys.push_back(key_of(number));
    std::vector<ChunkKey> asked;
    store.catalogue()->begin_asking(keys, 0, &asked);
    EXPECT_EQ(asked, keys) << "not all of them were unknown";
    std::vector<bool> present(keys.size());
    Status status = store.locate(keys, order, store.epoch(), &present);
    if (!status) store.catalogue()->give_up_asking(keys, 0);
    return status;
  }

  TempDir dir_;
  FakeClock clock_;
  FaultyFileOps ops_;
  FsStore writer_{options_for(dir_.path() + "/root"), posix_file_ops(), clock_};
  FsStore asker_{options_for(dir_.path() + "/root"), ops_, clock_};
};

TEST_F(FsAskedByNameTest, what_another_has_written_is_found_when_it_is_asked_for) {
  write(writer_, 1);
  EXPECT_EQ(known(asker_, 1), Presence::kUnknown);
  ASSERT_TRUE(ask(asker_, {1}));  // the first of its group: the directory tells its size
  EXPECT_EQ(known(asker_, 1), Presence::kPresent);
  write(writer_, 2);
  ASSERT_TRUE(ask(asker_, {2}));
  EXPECT_EQ(known(asker_, 2), Presence::kPresent);
  for (const std::uint32_t number : {1u, 2u}) EXPECT_TRUE(read(asker_, number));
}

TEST_F(FsAskedByNameTest, what_is_not_there_is_a_miss_until_it_is_worth_asking_again) {
  write(asker_, 1);
  ASSERT_TRUE(ask(asker_, {2}));
  EXPECT_EQ(known(asker_, 2), Presence::kAbsent);
  write(writer_, 2);
  EXPECT_EQ(known(asker_, 2), Presence::kAbsent);
  clock_.advance(KnownRecords::kAskAgainAfter);
  EXPECT_EQ(known(asker_, 2), Presence::kWasAbsent);
  ASSERT_TRUE(ask(asker_, {2}));
  EXPECT_EQ(known(asker_, 2), Presence::kPresent);
}

TEST_F(FsAskedByNameTest, who_is_alone_asks_for_nothing) {
  writer_.close();
  for (int i = 0; i < 2; ++i) {  // its slot is given back; or is of one that died
    clock_.advance(Space::kDeadAfter);
    asker_.maintain();
  }
  EXPECT_EQ(known(asker_, 1), Presence::kAbsent);
  std::vector<ChunkKey> asked;
  asker_.catalogue()->begin_asking(std::vector{key_of(1)}, 0, &asked);
  EXPECT_TRUE(asked.empty());
}

TEST_F(FsAskedByNameTest, another_generation_of_the_namespace_is_shared_with_nobody) {
  writer_.forget();
  ASSERT_TRUE(writer_.begin_epoch());
  writer_.maintain();
  asker_.maintain();
  write(writer_, 1);
  EXPECT_EQ(known(asker_, 1), Presence::kAbsent);
  EXPECT_EQ(known(writer_, 2), Presence::kAbsent);
}

TEST_F(FsAskedByNameTest, behind_the_first_gap_of_a_prompt_nothing_is_looked_for) {
  write(asker_, 1);  // the size of its group is known
  for (const std::uint32_t number : {10u, 11u, 13u}) write(writer_, number);
  const std::vector<std::uint32_t> prompt{10, 11, 12, 13, 14};
  int looks = 0;
  ops_.set_rule([&](Call call) {
    looks += call == Call::kStat;
    return 0;
  });
  ASSERT_TRUE(ask(asker_, prompt, KeyOrder::kPrefix));
  ops_.clear();
  EXPECT_EQ(looks, 3);  // the two, and the gap, whose directory is not there
  EXPECT_EQ(known(asker_, 11), Presence::kPresent);
  for (const std::uint32_t number : {12u, 13u, 14u}) EXPECT_EQ(known(asker_, number), Presence::kAbsent);
  clock_.advance(KnownRecords::kAskAgainAfter);
  ASSERT_TRUE(ask(asker_, {12, 13, 14}));  // as of a sliding window, whose chunks are asked for one by one
  EXPECT_EQ(known(asker_, 13), Presence::kPresent);
}

TEST_F(FsAskedByNameTest, a_directory_that_does_not_answer_is_the_devices_failure) {
  write(asker_, 1);
  for (const std::uint32_t number : {2u, 3u}) write(writer_, number);
  ops_.fail_all(Call::kStat, EIO);
  EXPECT_EQ(ask(asker_, {2, 3}).kind(), StatusKind::kIo);
  ops_.clear();
  for (const std::uint32_t number : {2u, 3u}) EXPECT_EQ(known(asker_, number), Presence::kAbsent);
  clock_.advance(KnownRecords::kAskAgainAfter);
  ASSERT_TRUE(ask(asker_, {2, 3}));
  EXPECT_EQ(known(asker_, 3), Presence::kPresent);
}

TEST_F(FsAskedByNameTest, what_cannot_be_looked_at_hides_itself_only) {
  write(asker_, 1);  // the size of its group is known
  for (const std::uint32_t number : {10u, 11u, 12u, 13u}) write(writer_, number);
  const auto first_look_fails = [&](int error) {
    ops_.set_rule([=, failed = false](Call call) mutable {
      if (call != Call::kStat || failed) return 0;
      failed = true;
      return -error;
    });
  };
  std::uint32_t there = 10;
  for (const int error : {EACCES, ENOTDIR, ELOOP}) {  // somebody's file or a mode in the way: not the device
    first_look_fails(error);
    EXPECT_TRUE(ask(asker_, {20, there}));
    EXPECT_EQ(known(asker_, 20), Presence::kAbsent);
    EXPECT_EQ(known(asker_, there++), Presence::kPresent) << "the other is in its way";
    clock_.advance(KnownRecords::kAskAgainAfter);
  }
  first_look_fails(EIO);
  EXPECT_EQ(ask(asker_, {20, there}).kind(), StatusKind::kIo);
  EXPECT_EQ(known(asker_, there), Presence::kPresent) << "that one was seen";
  first_look_fails(ETIMEDOUT);
  const int before = ops_.calls_here();
  EXPECT_EQ(ask(asker_, {21, 22, 23}).kind(), StatusKind::kTimeout);
  EXPECT_EQ(ops_.calls_here() - before, 1) << "each would take as long";
}

TEST_F(FsAskedByNameTest, a_leaf_that_may_not_be_listed_has_no_records) {
  write(writer_, 1);  // of its group nothing is known: its directory is listed
  for (const int error : {EACCES, ENOTDIR, ELOOP}) {
    ops_.fail_all(Call::kOpen, error);
    EXPECT_TRUE(ask(asker_, {1}));
    EXPECT_EQ(known(asker_, 1), Presence::kAbsent);
    clock_.advance(KnownRecords::kAskAgainAfter);
  }
  ops_.clear();
  EXPECT_TRUE(ask(asker_, {1}));
  EXPECT_EQ(known(asker_, 1), Presence::kPresent);
}

TEST_F(FsAskedByNameTest, a_directory_in_a_records_place_is_no_record) {
  write(asker_, 1);
  write(writer_, 2);
  const fs::path path = path_of(dir_.path() + "/root", 2);
  ASSERT_TRUE(fs::remove(path));
  fs::create_directory(path);
  ASSERT_TRUE(ask(asker_, {2}));
  EXPECT_EQ(known(asker_, 2), Presence::kAbsent);
}

TEST_F(FsAskedByNameTest, a_reset_while_it_is_asked_for_makes_nothing_known) {
  write(asker_, 1);
  write(writer_, 2);
  ops_.set_rule([&](Call call) -> int {
    if (call == Call::kStat) asker_.forget();
    return 0;
  });
  EXPECT_EQ(ask(asker_, {2}).kind(), StatusKind::kCancelled);
  ops_.clear();
  EXPECT_EQ(known(asker_, 2), Presence::kAbsent);
  ASSERT_TRUE(asker_.begin_epoch());
  EXPECT_EQ(known(asker_, 2), Presence::kAbsent);
}

}  // namespace
}  // namespace kv_offload
