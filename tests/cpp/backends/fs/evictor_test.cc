// SPDX-License-Identifier: Apache-2.0
// Victim selection for a write. A write of an ended epoch evicts nothing, and records that can no longer be
// hit are evicted first.
#include <gtest/gtest.h>

#include <algorithm>
#include <cerrno>
#include <map>
#include <memory>
#include <new>
#include <set>
#include <string>
#include <utility>

#include "backends/fs/store.h"
#include "base/thread_annotations.h"
#include "faulty_file_ops.h"
#include "fixture.h"
#include "tier/encoded_medium.h"

namespace kv_offload {
namespace {

using namespace testing;

// The root after a start with a smaller bound. A write that removed the whole excess would block the other
// writes until its thread counted as stuck.
TEST(EvictorTest, a_root_far_above_its_bound_is_trimmed_in_parts) {
  constexpr std::uint64_t kBytes = Evictor::kMostAtOnce, kBound = 2 * kBytes;
  constexpr std::uint32_t kRecords = 30;
  const TempDir dir;
  const std::string root = dir.path() + "/root";
  FakeClock clock;
  { FsStore(options_for(root, kBound), posix_file_ops(), clock).close(); }
  const fs::path epoch = fs::path(root) / std::string(64, '1') / "g1";
  for (std::uint32_t i = 0; i < kRecords; ++i) {
    const fs::path path = epoch / layout::record_path(key_of(1000 + i), kBytes);
    fs::create_directories(path.parent_path());
    std::ofstream(path).close();
    fs::resize_file(path, kBytes);  // sparse: counts its size
  }
  const auto left = [&] { return records_in(root).size(); };
  FsTierOptions reads = options_for(root, kBound);
  reads.may_trim = false;
  FsStore reader(reads, posix_file_ops(), clock);
  reader.start();
  reader.maintain();
  EXPECT_EQ(left(), kRecords);
  reader.close();
  FsStore store(options_for(root, kBound), posix_file_ops(), clock);
  store.start();
  Row row({16384});
  std::uint64_t moved = 0;
  TierOp op;
  op.kind = OpKind::kWrite;
  op.key = key_of(1);
  op.shards = row.shards();
  const Status refused = store.write(op, store.epoch(), &moved);
  EXPECT_EQ(refused.kind(), StatusKind::kUnavailable) << refused.to_string();
  EXPECT_GE(left(), kRecords - 10);
  std::size_t before = left();
  store.maintain();
  EXPECT_GE(left(), before - Evictor::kMostTrimmed / kBytes);
  EXPECT_LT(left(), before);
  for (int tick = 0; tick < 3; ++tick) store.maintain();
  EXPECT_LE(left(), 2u);
  EXPECT_GE(left(), 1u);
  before = left();
  EXPECT_TRUE(store.write(op, store.epoch(), &moved));
  EXPECT_EQ(left(), before + 1) << "nothing is evicted below the bound";
  store.close();
}

// Ten removals take a second, as on a network file system.
class SlowRemovals : public FaultyFileOps {
 public:
  explicit SlowRemovals(FakeClock& clock) : clock_(clock) {}
  int unlink(int directory, const std::string& path) override {
    clock_.advance(kTime);
    return FaultyFileOps::unlink(directory, path);
  }
  static constexpr Nanos kTime{std::chrono::milliseconds(100)};

 private:
  FakeClock& clock_;
};

// Each listing takes longer than a trim.
class SlowLists : public FaultyFileOps {
 public:
  explicit SlowLists(FakeClock& clock) : clock_(clock) {}
  int list(int fd, std::vector<DirEntry>* entries) override {
    clock_.advance(2 * Evictor::kLongestEviction);
    return FaultyFileOps::list(fd, entries);
  }

 private:
  FakeClock& clock_;
};

// Makes records of epoch 1 in the namespace of 64 times `digit`. They count their size, and take no blocks.
void make_sparse(const std::string& root, char digit, std::uint32_t count, std::uint64_t bytes) {
  const fs::path epoch = fs::path(root) / std::string(64, digit) / "g1";
  for (std::uint32_t i = 0; i < count; ++i) {
    const fs::path path = epoch / layout::record_path(key_of(1000 + i), bytes);
    fs::create_directories(path.parent_path());
    std::ofstream(path).close();
    fs::resize_file(path, bytes);
  }
}

TEST(EvictorTest, a_root_above_its_bound_on_a_slow_file_system_is_trimmed_in_parts_of_a_second) {
  constexpr std::uint64_t kBytes = std::uint64_t{1} << 20, kBound = 16 * kBytes;
  constexpr std::uint32_t kRecords = 60;
  const TempDir dir;
  const std::string root = dir.path() + "/root";
  FakeClock clock;
  { FsStore(options_for(root, kBound), posix_file_ops(), clock).close(); }
  const fs::path epoch = fs::path(root) / std::string(64, '1') / "g1";
  for (std::uint32_t i = 0; i < kRecords; ++i) {
    const fs::path path = epoch / layout::record_path(key_of(1000 + i), kBytes);
    fs::create_directories(path.parent_path());
    std::ofstream(path).close();
    fs::resize_file(path, kBytes);  // sparse: counts its size
  }
  SlowRemovals ops(clock);
  FsStore store(options_for(root, kBound), ops, clock);
  store.start();
  for (std::size_t left = kRecords; left > kBound / kBytes;) {
    const std::size_t before = left;
    store.maintain();
    left = records_in(root).size();
    ASSERT_LT(left, before);
    EXPECT_LE(before - left, static_cast<std::size_t>(Evictor::kLongestEviction / SlowRemovals::kTime));
  }
  store.close();
}

// Without this, the sum stays above the bound, and each tick would evict for it.
TEST(EvictorTest, a_root_above_its_bound_without_room_for_the_ledger_keeps_its_records) {
  constexpr std::uint64_t kBytes = std::uint64_t{1} << 20, kBound = 16 * kBytes;
  constexpr std::uint32_t kRecords = 60;
  const TempDir dir;
  const std::string root = dir.path() + "/root";
  FakeClock clock;
  { FsStore(options_for(root, kBound), posix_file_ops(), clock).close(); }
  make_sparse(root, '1', kRecords, kBytes);
  SlowRemovals ops(clock);
  FsStore store(options_for(root, kBound), ops, clock);
  store.start();
  store.maintain();
  const std::size_t left = records_in(root).size();
  ASSERT_LT(left, kRecords);
  ASSERT_GT(left, kBound / kBytes);
  ops.fail_all(Call::kPwritev, ENOSPC);
  for (int tick = 0; tick < 5; ++tick) store.maintain();
  EXPECT_EQ(records_in(root).size(), left);
  ops.clear();
  for (int tick = 0; tick < 10; ++tick) store.maintain();
  EXPECT_LE(records_in(root).size(), kBound / kBytes);
  store.close();
}

// The search for records that nothing can hit lists each namespace, on a network file system for seconds.
TEST(EvictorTest, a_slow_search_for_unused_epochs_does_not_stop_the_trim) {
  constexpr std::uint64_t kBytes = std::uint64_t{1} << 20, kBound = 16 * kBytes;
  constexpr std::uint32_t kRecords = 60;
  const TempDir dir;
  const std::string root = dir.path() + "/root";
  FakeClock clock;
  { FsStore(options_for(root, kBound), posix_file_ops(), clock).close(); }
  make_sparse(root, '1', kRecords, kBytes);
  SlowLists ops(clock);
  FsStore store(options_for(root, kBound), ops, clock);
  store.start();
  for (int tick = 0; tick < 10; ++tick) store.maintain();
  EXPECT_LE(records_in(root).size(), kBound / kBytes);
  EXPECT_GE(records_in(root).size(), kBound / kBytes - 1);
  store.close();
}

// Each part removes 64 MiB that nothing can hit.
TEST(EvictorTest, a_trim_of_unused_epochs_on_a_slow_file_system_ends_after_a_second) {
  constexpr std::uint64_t kBytes = Evictor::kMostAtOnce, kBound = 2 * kBytes;
  constexpr std::uint32_t kRecords = 30;
  const TempDir dir;
  const std::string root = dir.path() + "/root";
  FakeClock clock;
  FsTierOptions other = options_for(root, kBound);
  other.namespace_id.fill(0x22);
  { FsStore(other, posix_file_ops(), clock).close(); }
  make_sparse(root, '2', kRecords, kBytes);
  SlowRemovals ops(clock);
  FsStore store(options_for(root, kBound), ops, clock);
  store.start();
  for (std::size_t left = kRecords; left > 1;) {
    const std::size_t before = left;
    store.maintain();
    left = records_in(root).size();
    ASSERT_LT(left, before);
    EXPECT_LE(before - left, static_cast<std::size_t>(Evictor::kLongestEviction / SlowRemovals::kTime));
  }
  store.close();
}

// The reset happens while the write waits for the ledger lock; the other namespace owns the whole root.
TEST(EvictorTest, a_write_that_a_reset_overtook_evicts_nothing) {
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
    if (call == Call::kFlock && ours.epoch()) ours.forget(0);
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

// Until its records are known, the server must not evict its own: any of them may be worth keeping.
TEST(EvictorTest, a_new_server_can_write_to_a_root_full_of_reset_records) {
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
      before.forget(0);
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
    EXPECT_GT(records_in(root).size(), left / 2) << "a waiting write evicts only what it needs";
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

// The other server does nothing: it does not even give up what is above its share.
TEST(EvictorTest, a_reset_server_evicts_from_epochs_of_others) {
  const TempDir dir;
  const std::string root = dir.path() + "/root";
  FakeClock clock;
  const FsTierOptions options = options_for(root, std::uint64_t{1} << 20);
  FsStore idle(options, posix_file_ops(), clock), store(options, posix_file_ops(), clock);
  Row row({16384});
  std::uint64_t moved = 0;
  TierOp op;
  op.kind = OpKind::kWrite;
  op.shards = row.shards();
  const auto write = [&](FsStore& by, std::uint32_t key) {
    op.key = key_of(key);
    return by.write(op, by.epoch(), &moved);
  };
  for (std::uint32_t i = 0; i < 80; ++i) (void)write(idle, i);
  ASSERT_GT(records_in(root).size(), 20u);
  store.forget(0);
  ASSERT_TRUE(store.begin_epoch());
  const Status status = write(store, 1000);
  EXPECT_TRUE(status) << status.to_string();
  EXPECT_LE(du(root), options.max_bytes);
  store.close();
  idle.close();
}

// Makes some records unremovable.
class UnremovableRecords : public FaultyFileOps {
 public:
  void keep(const std::string& path) { kept_.insert(path); }
  int move(int from_directory, const std::string& from, int to_directory, const std::string& to,
           bool keep_existing) override {
    return kept_.contains(from) ? -EACCES
                                : FaultyFileOps::move(from_directory, from, to_directory, to, keep_existing);
  }
  int unlink(int directory, const std::string& path) override {
    return kept_.contains(path) ? -EACCES : FaultyFileOps::unlink(directory, path);
  }

 private:
  std::set<std::string> kept_;
};

// A full root of 1 MiB. A server of another namespace wrote records 0 to 199.
class EvictorBesideAnother : public ::testing::Test {
 protected:
  void SetUp() override {
    other_.namespace_id.fill(0x22);
    theirs_ = std::make_unique<FsStore>(other_, posix_file_ops(), clock_);
    for (std::uint32_t i = 0; i < 200; ++i) ASSERT_TRUE(write(*theirs_, i, row_));
    ours_ = std::make_unique<FsStore>(options_, ops_, clock_);
    ours_->start();
    ours_->maintain();
    for (std::uint32_t i = 1000; i < 1010; ++i) ASSERT_TRUE(write(*ours_, i, row_));
  }
  void TearDown() override {
    for (FsStore* store : {ours_.get(), theirs_.get()}) store->close();
  }
  static Status write(FsStore& store, std::uint32_t number, const Row& row) {
    TierOp op;
    op.kind = OpKind::kWrite;
    op.key = key_of(number);
    op.shards = row.shards();
    std::uint64_t moved = 0;
    return store.write(op, store.epoch(), &moved);
  }
  std::size_t records_of_theirs() const { return records_in(root_ + "/" + std::string(64, '2')).size(); }

  static constexpr std::uint64_t kPayload = 16384;
  TempDir dir_;
  std::string root_ = dir_.path() + "/root";
  FakeClock clock_;
  UnremovableRecords ops_;
  FsTierOptions options_ = options_for(root_, std::uint64_t{1} << 20), other_ = options_;
  Row row_{{kPayload}};
  std::unique_ptr<FsStore> theirs_, ours_;
};

TEST_F(EvictorBesideAnother, a_server_with_unremovable_records_evicts_none_of_others) {
  for (std::uint32_t i = 1000; i < 1010; ++i)
    ops_.keep(layout::record_path(key_of(i), kPayload + kRecordHeaderBytes));
  const std::size_t before = records_of_theirs();
  ASSERT_GT(before, 10u);
  for (std::uint32_t i = 2000; i < 2005; ++i) {
    const Status status = write(*ours_, i, row_);
    EXPECT_EQ(status.error_number(), EACCES) << status.to_string();
  }
  EXPECT_EQ(records_of_theirs(), before);
}

// The record and the write's reservation together exceed the bound, although the record alone is below
// max_bytes.
TEST_F(EvictorBesideAnother, a_record_that_can_never_fit_evicts_nothing) {
  const Row large({options_.max_bytes - 40960});
  const std::size_t before = records_in(root_).size();
  ASSERT_GT(before, 10u);
  EXPECT_EQ(write(*ours_, 2000, large).kind(), StatusKind::kNoSpace);
  EXPECT_EQ(records_in(root_).size(), before);
  EXPECT_TRUE(write(*ours_, 2001, row_)) << "the control";
}

// Its share follows the stored size of its records, an eighth of their raw size.
TEST(EvictorTest, a_server_with_encoded_records_gets_its_whole_share) {
  const TempDir dir;
  const std::string root = dir.path() + "/root";
  FakeClock clock;
  FsTierOptions options = options_for(root, std::uint64_t{8} << 20), other;
  options.o_direct = DirectMode::kOff;  // does not wait for the disk
  other = options;
  other.namespace_id.fill(0x22);
  options.form.compression = always_encoded();
  other.form.compression = always_encoded();
  FsStore first(options, posix_file_ops(), clock);
  Row row({65536 - 4096});
  std::uint64_t moved = 0, number = 0;
  TierOp op;
  op.kind = OpKind::kWrite;
  op.shards = row.shards();
  TierStats stats;
  const auto write_next = [&](FsStore& store) {
    op.key = key_of(static_cast<std::uint32_t>(number++));
    ASSERT_TRUE(store.write(op, store.epoch(), &moved));
    store.figures(&stats);
  };
  while (stats.evicted_bytes == 0 && !::testing::Test::HasFatalFailure()) write_next(first);
  const std::uint64_t all = stats.chunks;
  FsStore second(other, posix_file_ops(), clock);
  second.start();
  for (std::uint64_t i = 0; i < all && !::testing::Test::HasFatalFailure(); ++i) {
    if (i % 16 == 0) {
      clock.advance(std::chrono::seconds(1));
      second.maintain();
      first.maintain();
    }
    write_next(second);
  }
  EXPECT_GT(stats.chunks, all / 3) << "of " << all << " that fit";
  EXPECT_LE(du(root), options.max_bytes);
  for (FsStore* store : {&first, &second}) store->close();
}

// Measures the most file system calls of this thread under one hold of one mutex.
class CallsPerLock : public Mutex::Watcher {
 public:
  explicit CallsPerLock(FaultyFileOps& ops) : ops_(ops) { Mutex::watch(this); }
  ~CallsPerLock() override { Mutex::watch(nullptr); }
  void locked(const Mutex& mutex) override { begun_[&mutex] = ops_.calls_here(); }
  void unlocking(const Mutex& mutex) override {
    most_ = std::max(most_, ops_.calls_here() - std::exchange(begun_[&mutex], 0));
  }
  int most() const { return most_; }

 private:
  FaultyFileOps& ops_;
  std::map<const Mutex*, int> begun_;
  int most_ = 0;
};

// `find -delete` removes the oldest records of a full root, or all of them.
class EvictorMeetsMissingRecords : public ::testing::Test {
 protected:
  void SetUp() override {
    store_ = std::make_unique<FsStore>(options_for(root_, kBound), ops_, clock_);
    store_->start();
    store_->maintain();
    TierStats stats;
    for (; stats.evicted_bytes == 0; ++count_) {
      ASSERT_TRUE(write());
      store_->figures(&stats);
    }
  }
  void TearDown() override { store_->close(); }
  Status write() {
    TierOp op;
    op.kind = OpKind::kWrite;
    op.key = key_of(next_++);
    op.shards = row_.shards();
    std::uint64_t moved = 0;
    return store_->write(op, store_->epoch(), &moved);
  }
  void remove_first(std::uint32_t count) {
    for (std::uint32_t i = 0; i < count; ++i) {
      fs::remove(root_ + "/" + std::string(64, '1') + "/g1/" +
                 layout::record_path(key_of(i), kPayload + kRecordHeaderBytes));
    }
  }

  static constexpr std::uint64_t kBound = std::uint64_t{8} << 20;
  static constexpr std::uint64_t kPayload = 4096;
  // Two calls for each missing record, plus the other calls of a write.
  static constexpr int kMostCallsPerLock = 2 * 64 + 64;
  static constexpr int kMostCalls = 2 * 8 * 64 + 256;
  TempDir dir_;
  std::string root_ = dir_.path() + "/root";
  FakeClock clock_;
  FaultyFileOps ops_;
  Row row_{{kPayload}};
  std::unique_ptr<FsStore> store_;
  std::uint32_t next_ = 0, count_ = 0;
};

TEST_F(EvictorMeetsMissingRecords, other_threads_get_the_lock_between_missing_records) {
  constexpr std::uint32_t kMissing = 300;
  ASSERT_GT(count_, 2 * kMissing);
  remove_first(kMissing);
  const CallsPerLock calls(ops_);
  const int before = ops_.calls_here();
  EXPECT_TRUE(write()) << "an existing record was evicted";
  EXPECT_GT(ops_.calls_here() - before, static_cast<int>(kMissing)) << "the control";
  EXPECT_LE(calls.most(), kMostCallsPerLock);
}

TEST_F(EvictorMeetsMissingRecords, a_write_gives_up_after_many_missing_records_until_the_next_count) {
  ASSERT_GT(2 * count_, static_cast<std::uint32_t>(kMostCalls)) << "too few records to reach the limit";
  remove_first(count_);
  int before = ops_.calls_here();
  const Status status = write();
  EXPECT_EQ(status.error_number(), ENOENT) << status.to_string();
  EXPECT_LE(ops_.calls_here() - before, kMostCalls);
  clock_.advance(std::chrono::minutes(1));
  store_->maintain();
  TierStats stats;
  store_->figures(&stats);
  EXPECT_EQ(stats.chunks, 0u);
  before = ops_.calls_here();
  EXPECT_TRUE(write());
  EXPECT_LE(ops_.calls_here() - before, kMostCallsPerLock);
}

}  // namespace
}  // namespace kv_offload
