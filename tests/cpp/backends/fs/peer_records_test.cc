// SPDX-License-Identifier: Apache-2.0
// Two processes share one root: each finds the other's records without a restart.
#include <gtest/gtest.h>

#include <fcntl.h>

#include "backends/fs/root.h"
#include "backends/fs/space_ledger.h"
#include "backends/fs/store.h"
#include "faulty_file_ops.h"
#include "fixture.h"

namespace kv_offload {
namespace {

using namespace testing;

class FsPeerRecordsTest : public ::testing::Test {
 protected:
  // Looks the key up until it is known, like a waiting request.
  bool finds(TierUser& user, std::uint32_t number) { return user.has(number); }
  bool finds_in_time(TierUser& user, std::uint32_t number) {
    return user.until([&] { return finds(user, number); });
  }
  TempDir dir_;
  std::string root_ = dir_.path() + "/root";
};

TEST_F(FsPeerRecordsTest, a_record_of_one_process_is_found_and_read_by_the_other) {
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

TEST_F(FsPeerRecordsTest, peer_records_written_after_the_scan_are_found) {
  TierUser one(options_for(root_)), other(options_for(root_));
  one.wait_for_scan();
  other.wait_for_scan();
  for (std::uint32_t i = 0; i < 3; ++i) {
    EXPECT_TRUE(one.write(i));
    EXPECT_TRUE(finds_in_time(other, i)) << i;
  }
  EXPECT_EQ(other.tier().stats().chunks, 3u);
}

TEST_F(FsPeerRecordsTest, a_record_evicted_by_the_other_is_a_miss_and_not_a_failure) {
  TierUser one(options_for(root_)), other(options_for(root_));
  one.wait_for_scan();
  other.wait_for_scan();
  EXPECT_TRUE(one.write(1));
  EXPECT_TRUE(finds_in_time(other, 1));
  ASSERT_TRUE(fs::remove(path_of(root_, 1)));
  EXPECT_EQ(other.read(1).kind(), StatusKind::kNotFound);
  EXPECT_FALSE(other.has(1));
}

TEST_F(FsPeerRecordsTest, a_removal_is_noticed_before_the_next_upkeep) {
  FakeClock clock;  // no upkeep is due
  FsTierOptions watching = options_for(root_);
  watching.clock = &clock;
  watching.watch_removals = true;
  TierUser one(options_for(root_)), other(watching);
  one.wait_for_scan();
  other.wait_for_scan();
  ASSERT_TRUE(other.write(1));
  EXPECT_FALSE(other.tier().has_removals());
  const fs::path path = path_of(root_, 1);
  const std::uint64_t bytes = du(path.string());
  ASSERT_TRUE(fs::remove(path));
  int error = 0;
  const Fd root = open_fd(posix_file_ops(), AT_FDCWD, root_, kOpenDirectory, 0, &error);
  SpaceLedger command(posix_file_ops(), root.get(), root_);
  command.remove(bytes, command.finished());
  clock.advance(std::chrono::milliseconds(500));
  EXPECT_TRUE(other.until([&] { return other.tier().has_removals(); }));
  EXPECT_TRUE(other.until([&] { return other.removed(TierRemoval::Reason::kVanished) == 1; }));
  EXPECT_FALSE(other.tier().has_removals());
}

TEST_F(FsPeerRecordsTest, a_tier_without_kv_events_wakes_no_idle_engine) {
  FsTierOptions full = options_for(root_, std::uint64_t{1} << 20);
  TierUser user(full);
  user.wait_for_scan();
  for (std::uint32_t i = 0; i < 300; ++i) user.start(OpKind::kWrite, i, {8192});
  ASSERT_TRUE(user.until([&] { return user.tier().stats().queued_writes == 0; }));
  EXPECT_FALSE(user.tier().has_removals());
  EXPECT_GT(user.removed(TierRemoval::Reason::kEvicted), 0u);
}

TEST_F(FsPeerRecordsTest, records_of_another_namespace_are_not_found) {
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

// Two stores driven by hand: upkeep runs only where a test calls it.
class FsPeerLookupTest : public ::testing::Test {
 protected:
  FsPeerLookupTest() {
    for (FsStore* store : {&writer_, &asker_}) store->start();
    for (FsStore* store : {&writer_, &asker_}) store->maintain();  // each sees the other
  }
  ~FsPeerLookupTest() override {
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
    return store.catalog()->contains(key_of(number));
  }
  // Looks keys up as ThreadPoolTier does.
  static Status ask(FsStore& store, const std::vector<std::uint32_t>& numbers,
                    KeyOrder order = KeyOrder::kNone) {
    std::vector<ChunkKey> keys;
    for (const std::uint32_t number : numbers) keys.push_back(key_of(number));
    std::vector<ChunkKey> asked;
    store.catalog()->begin_lookup(keys, 0, &asked);
    EXPECT_EQ(asked, keys) << "not all of them were unknown";
    std::vector<bool> present(keys.size());
    Status status = store.locate(keys, order, store.epoch(), &present);
    if (!status) store.catalog()->cancel_lookup(keys, 0);
    return status;
  }

  TempDir dir_;
  FakeClock clock_;
  FaultyFileOps ops_;
  FsStore writer_{options_for(dir_.path() + "/root"), posix_file_ops(), clock_};
  FsStore asker_{options_for(dir_.path() + "/root"), ops_, clock_};
};

TEST_F(FsPeerLookupTest, a_record_written_by_another_is_found_by_lookup) {
  write(writer_, 1);
  EXPECT_EQ(known(asker_, 1), Presence::kUnknown);
  ASSERT_TRUE(ask(asker_, {1}));  // the first of its group: the directory listing gives its size
  EXPECT_EQ(known(asker_, 1), Presence::kPresent);
  write(writer_, 2);
  ASSERT_TRUE(ask(asker_, {2}));
  EXPECT_EQ(known(asker_, 2), Presence::kPresent);
  for (const std::uint32_t number : {1u, 2u}) EXPECT_TRUE(read(asker_, number));
}

TEST_F(FsPeerLookupTest, a_missing_record_is_a_miss_until_its_absence_expires) {
  write(asker_, 1);
  ASSERT_TRUE(ask(asker_, {2}));
  EXPECT_EQ(known(asker_, 2), Presence::kAbsent);
  write(writer_, 2);
  EXPECT_EQ(known(asker_, 2), Presence::kAbsent);
  clock_.advance(RecordIndex::kLookupRetryDelay);
  EXPECT_EQ(known(asker_, 2), Presence::kStaleMiss);
  ASSERT_TRUE(ask(asker_, {2}));
  EXPECT_EQ(known(asker_, 2), Presence::kPresent);
}

TEST_F(FsPeerLookupTest, a_server_without_neighbours_looks_nothing_up) {
  writer_.close();
  for (int i = 0; i < 2; ++i) {  // its slot is free, or belongs to a dead process
    clock_.advance(SpaceLedger::kDeadAfter);
    asker_.maintain();
  }
  EXPECT_EQ(known(asker_, 1), Presence::kAbsent);
  std::vector<ChunkKey> asked;
  asker_.catalog()->begin_lookup(std::vector{key_of(1)}, 0, &asked);
  EXPECT_TRUE(asked.empty());
}

TEST_F(FsPeerLookupTest, another_epoch_of_the_namespace_is_not_shared) {
  writer_.forget(0);
  ASSERT_TRUE(writer_.begin_epoch());
  writer_.maintain();
  asker_.maintain();
  write(writer_, 1);
  EXPECT_EQ(known(asker_, 1), Presence::kAbsent);
  EXPECT_EQ(known(writer_, 2), Presence::kAbsent);
}

TEST_F(FsPeerLookupTest, nothing_after_the_first_gap_of_a_prompt_is_looked_up) {
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
  EXPECT_EQ(looks, 3);  // two hits and the gap, whose directory is missing
  EXPECT_EQ(known(asker_, 11), Presence::kPresent);
  EXPECT_EQ(known(asker_, 12), Presence::kAbsent);
  for (const std::uint32_t number : {13u, 14u}) EXPECT_EQ(known(asker_, number), Presence::kSkipped);
  clock_.advance(RecordIndex::kLookupRetryDelay);
  ASSERT_TRUE(ask(asker_, {12, 13, 14}));  // like a sliding window, whose chunks are looked up one by one
  EXPECT_EQ(known(asker_, 13), Presence::kPresent);
}

TEST_F(FsPeerLookupTest, a_directory_that_does_not_answer_is_a_device_failure) {
  write(asker_, 1);
  for (const std::uint32_t number : {2u, 3u}) write(writer_, number);
  ops_.fail_all(Call::kStat, EIO);
  EXPECT_EQ(ask(asker_, {2, 3}).kind(), StatusKind::kIo);
  ops_.clear();
  for (const std::uint32_t number : {2u, 3u}) EXPECT_EQ(known(asker_, number), Presence::kLookupFailed);
  clock_.advance(RecordIndex::kLookupRetryDelay);
  ASSERT_TRUE(ask(asker_, {2, 3}));
  EXPECT_EQ(known(asker_, 3), Presence::kPresent);
}

TEST_F(FsPeerLookupTest, an_inaccessible_path_hides_only_its_own_record) {
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
  for (const int error : {EACCES, ENOTDIR, ELOOP}) {  // a foreign file or a mode: not the device
    first_look_fails(error);
    EXPECT_TRUE(ask(asker_, {20, there}));
    EXPECT_EQ(known(asker_, 20), Presence::kAbsent);
    EXPECT_EQ(known(asker_, there++), Presence::kPresent) << "the foreign file blocks it";
    clock_.advance(RecordIndex::kLookupRetryDelay);
  }
  first_look_fails(EIO);
  EXPECT_EQ(ask(asker_, {20, there}).kind(), StatusKind::kIo);
  EXPECT_EQ(known(asker_, there), Presence::kPresent) << "it was found";
  first_look_fails(ETIMEDOUT);
  const int before = ops_.calls_here();
  EXPECT_EQ(ask(asker_, {21, 22, 23}).kind(), StatusKind::kTimeout);
  EXPECT_EQ(ops_.calls_here() - before, 1) << "every lookup would take as long";
}

TEST_F(FsPeerLookupTest, a_leaf_that_must_not_be_listed_has_no_records) {
  write(writer_, 1);  // its group is unknown, so its directory is listed
  for (const int error : {EACCES, ENOTDIR, ELOOP}) {
    ops_.fail_all(Call::kOpen, error);
    EXPECT_TRUE(ask(asker_, {1}));
    EXPECT_EQ(known(asker_, 1), Presence::kAbsent);
    clock_.advance(RecordIndex::kLookupRetryDelay);
  }
  ops_.clear();
  EXPECT_TRUE(ask(asker_, {1}));
  EXPECT_EQ(known(asker_, 1), Presence::kPresent);
}

TEST_F(FsPeerLookupTest, a_directory_in_place_of_a_record_is_not_a_record) {
  write(asker_, 1);
  write(writer_, 2);
  const fs::path path = path_of(dir_.path() + "/root", 2);
  ASSERT_TRUE(fs::remove(path));
  fs::create_directory(path);
  ASSERT_TRUE(ask(asker_, {2}));
  EXPECT_EQ(known(asker_, 2), Presence::kAbsent);
}

TEST_F(FsPeerLookupTest, a_reset_during_a_lookup_makes_nothing_known) {
  write(asker_, 1);
  write(writer_, 2);
  ops_.set_rule([&](Call call) -> int {
    if (call == Call::kStat) asker_.forget(0);
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
