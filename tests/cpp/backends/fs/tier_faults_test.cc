// SPDX-License-Identifier: Apache-2.0
// File system faults: every call fails once, short transfers, signals, damaged and strange files, a device
// that does not answer.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/mount.h>

#include <atomic>
#include <cerrno>

#include "faulty_file_ops.h"
#include "fixture.h"

namespace kv_offload {
namespace {

using namespace testing;

class FsTierFaults : public ::testing::Test {
 protected:
  FsTierFaults() {
    options_ = options_for(root_);
    options_.file_ops = &ops_;
    options_.clock = &clock_;
    options_.close_wait = std::chrono::seconds(5);
  }

  void fail_to_read(TierUser& user, std::uint32_t number) {
    ops_.fail_all(Call::kPreadv, EIO);
    EXPECT_EQ(user.read(number).kind(), StatusKind::kIo);
    ops_.clear();
  }

  TempDir dir_;
  std::string root_ = dir_.path() + "/root";
  FaultyFileOps ops_;
  FakeClock clock_;
  FsTierOptions options_;
};

// Fails the n-th call of a write, for every n that a successful write makes.
class FsTierEveryStep : public FsTierFaults, public ::testing::WithParamInterface<int> {};

TEST_P(FsTierEveryStep, a_write_that_fails_at_any_call_leaves_nothing) {
  options_.fsync = FsyncMode::kFull;
  TierUser user(options_);
  user.wait_for_scan();
  ASSERT_TRUE(user.usage_becomes_exact(root_));
  int steps = 0;
  {
    const OneFault none(ops_, OneFault::kNever);
    ASSERT_TRUE(user.write(0));
    steps = none.calls();
  }
  ASSERT_GT(steps, 10);
  int failed = 0;
  for (int step = 0; step < steps; ++step) {
    const auto number = static_cast<std::uint32_t>(step) + 1;
    const OneFault fault(ops_, step, GetParam());
    const Status status = user.write(number);
    ops_.clear();
    const std::string where = "step " + std::to_string(step) + " " + fault.call() + ": " + status.to_string();
    EXPECT_TRUE(temporaries_in(root_).empty()) << where;
    EXPECT_EQ(user.has(number), status.is_ok()) << where;
    EXPECT_EQ(!path_of(root_, number).empty(), status.is_ok()) << where;
    if (status) {
      EXPECT_TRUE(user.read(number)) << where;
    } else {
      ++failed;
      EXPECT_EQ(status.kind(),
                GetParam() == ENOSPC || GetParam() == EDQUOT ? StatusKind::kNoSpace : StatusKind::kIo)
          << where;
      EXPECT_EQ(status.error_number(), GetParam()) << where;
      EXPECT_FALSE(status.path().empty()) << where;
    }
    const Status next = user.write(number + 1000);  // the next write settles open accounting
    ASSERT_TRUE(next) << where << "; then " << next.to_string();
    EXPECT_EQ(user.tier().stats().bytes, du(root_)) << where;
  }
  // Without disk space, the write is retried after an eviction, and the fault occurs only once.
  const bool no_space = GetParam() == ENOSPC || GetParam() == EDQUOT;
  EXPECT_TRUE(no_space ? failed < steps / 2 : failed > 8) << failed;
}

INSTANTIATE_TEST_SUITE_P(errors, FsTierEveryStep, ::testing::ValuesIn(testing::write_errors()));

// Renames, but reports an error: the server's response was lost (NFS), or a signal ended the wait for it
// (FUSE).
class LostAnswers : public FaultyFileOps {
 public:
  int move(int from_directory, const std::string& from, int to_directory, const std::string& to,
           bool keep_existing) override {
    const int rc = FaultyFileOps::move(from_directory, from, to_directory, to, keep_existing);
    return rc == 0 ? -error.load() : rc;
  }
  std::atomic<int> error{0};
};

TEST_F(FsTierFaults, a_rename_that_took_effect_but_reported_an_error_leaves_a_counted_record) {
  LostAnswers ops;
  options_.file_ops = &ops;
  TierUser user(options_);
  user.wait_for_scan();
  ASSERT_TRUE(user.write(0));  // creates its directory
  std::uint32_t number = 0;
  for (const int error : {ENOENT, EINTR, EIO}) {
    ops.error = error;
    EXPECT_TRUE(user.write(++number)) << error;
    ops.error = 0;
    EXPECT_FALSE(path_of(root_, number).empty());
    EXPECT_TRUE(user.read(number)) << error;
    EXPECT_EQ(user.tier().stats().bytes, du(root_)) << error;
  }
}

TEST_F(FsTierFaults, transfers_continue_after_signals_and_short_transfers) {
  std::atomic<int> calls{0};  // counted until the tier is closed
  TierUser user(options_);
  ops_.limit_transfers(4096 * 3);
  ops_.set_rule([&](Call call) {
    const bool interruptible =
        call == Call::kOpen || call == Call::kPreadv || call == Call::kPwritev || call == Call::kFlock;
    return interruptible && calls.fetch_add(1) % 2 == 0 ? -EINTR : 0;
  });
  EXPECT_TRUE(user.write(1, {100000, 5, 70000}));
  EXPECT_TRUE(user.read(1, {100000, 5, 70000}));
  ops_.limit_transfers(4096 + 512);  // not a multiple of a page
  EXPECT_TRUE(user.write(2, {100000, 5, 70000}));
  EXPECT_TRUE(user.read(2, {100000, 5, 70000}));
  EXPECT_GT(calls.load(), 40);
}

TEST_F(FsTierFaults, a_damaged_record_is_never_read_as_good_and_is_removed) {
  TierUser user(options_);
  user.wait_for_scan();
  const std::uint64_t size = 4096 + 8192;
  std::uint32_t number = 0;
  for (const std::uint64_t at : {0, 20, 60, 110, 4095, 4096, 8000, 12287}) {
    ASSERT_TRUE(user.write(++number));
    std::fstream file(path_of(root_, number), std::ios::in | std::ios::out | std::ios::binary);
    file.seekg(static_cast<std::streamoff>(at));
    const char flipped = static_cast<char>(file.get() ^ 4);
    file.seekp(static_cast<std::streamoff>(at));
    file.put(flipped);
    file.close();
    const Status status = user.read(number);
    EXPECT_EQ(status.kind(), StatusKind::kCorrupt) << "byte " << at;
    EXPECT_FALSE(status.path().empty());
    EXPECT_FALSE(user.has(number));
  }
  for (const std::uint64_t left : {std::uint64_t{0}, std::uint64_t{100}, std::uint64_t{4096}, size - 4096}) {
    ASSERT_TRUE(user.write(++number));
    fs::resize_file(path_of(root_, number), left);
    EXPECT_EQ(user.read(number).kind(), StatusKind::kCorrupt) << left;
  }
  EXPECT_EQ(user.removed(TierRemoval::Reason::kCorrupt), number);
  EXPECT_TRUE(records_in(root_).empty());
}

TEST_F(FsTierFaults, a_record_of_another_key_is_detected) {
  TierUser user(options_);
  ASSERT_TRUE(user.write(1));
  ASSERT_TRUE(user.write(2));
  fs::copy_file(path_of(root_, 2), path_of(root_, 1), fs::copy_options::overwrite_existing);
  EXPECT_EQ(user.read(1).kind(), StatusKind::kCorrupt);
  EXPECT_TRUE(user.read(2));
}

TEST_F(FsTierFaults, a_vanished_record_is_a_miss) {
  TierUser user(options_);
  ASSERT_TRUE(user.write(1));
  fs::remove(path_of(root_, 1));
  EXPECT_EQ(user.read(1).kind(), StatusKind::kNotFound);
  EXPECT_FALSE(user.has(1));
  EXPECT_EQ(user.removed(TierRemoval::Reason::kVanished), 1u);
}

TEST_F(FsTierFaults, directories_links_and_pipes_in_place_of_records_stay) {
  TierUser user(options_);
  for (std::uint32_t i = 1; i <= 3; ++i) ASSERT_TRUE(user.write(i));
  const std::vector<fs::path> paths = {path_of(root_, 1), path_of(root_, 2), path_of(root_, 3)};
  for (const fs::path& path : paths) fs::rename(path, path.string() + ".moved");
  fs::create_directory(paths[0]);
  fs::create_symlink(paths[1].string() + ".moved", paths[1]);
  ASSERT_EQ(::mkfifo(paths[2].c_str(), 0600), 0);
  for (std::uint32_t i = 1; i <= 3; ++i) {
    EXPECT_EQ(user.read(i).kind(), StatusKind::kIo) << i;
    EXPECT_FALSE(user.has(i));
    EXPECT_TRUE(fs::exists(fs::symlink_status(paths[i - 1])));
  }
  EXPECT_TRUE(user.removals.empty());
}

TEST_F(FsTierFaults, an_unreadable_record_is_kept_and_offered_again_later) {
  TierUser user(options_);
  ASSERT_TRUE(user.write(1));
  for (int seconds = 1; seconds <= 4; seconds *= 2) {
    fail_to_read(user, 1);
    EXPECT_FALSE(user.has(1));
    clock_.advance(std::chrono::milliseconds(seconds * 1000 - 1));
    EXPECT_FALSE(user.has(1)) << seconds;
    clock_.advance(std::chrono::milliseconds(1));
    EXPECT_TRUE(user.has(1)) << seconds;
  }
  EXPECT_TRUE(user.read(1));
  EXPECT_TRUE(user.removals.empty());
}

TEST_F(FsTierFaults, an_unreadable_record_is_replaced_by_a_new_write) {
  TierUser user(options_);
  user.wait_for_scan();
  ASSERT_TRUE(user.write(1));
  fail_to_read(user, 1);
  EXPECT_TRUE(user.write(1));
  EXPECT_TRUE(user.has(1));
  EXPECT_TRUE(user.read(1));
  EXPECT_EQ(records_in(root_).size(), 1u);
  EXPECT_TRUE(user.usage_becomes_exact(root_));
}

TEST_F(FsTierFaults, an_unreadable_record_stays_if_it_cannot_be_replaced) {
  TierUser user(options_);
  user.wait_for_scan();
  ASSERT_TRUE(user.write(1));
  fail_to_read(user, 1);
  ops_.fail_all(Call::kPwritev, EIO);
  EXPECT_EQ(user.write(1).kind(), StatusKind::kIo);
  ops_.clear();
  EXPECT_EQ(records_in(root_).size(), 1u);
  clock_.advance(std::chrono::seconds(61));
  EXPECT_TRUE(user.has(1));
  EXPECT_TRUE(user.read(1));
  EXPECT_TRUE(user.removals.empty());
  EXPECT_TRUE(user.usage_becomes_exact(root_));
}

TEST_F(FsTierFaults, a_device_that_does_not_answer_blocks_no_caller) {
  TierUser user(options_);
  user.wait_for_scan();
  for (std::uint32_t i = 0; i < 20; ++i) ASSERT_TRUE(user.write(i));
  ops_.block(Call::kPreadv, 2 * kPageBytes);
  std::vector<OpId> stuck;
  for (std::uint32_t i = 0; i < 10; ++i) stuck.push_back(user.start(OpKind::kRead, i, {8192}));
  ops_.wait_for_blocked(4);
  EXPECT_TRUE(user.tier().stats().readable);
  EXPECT_EQ(user.tier().contains(key_of(1)), Presence::kPresent);
  clock_.advance(options_.op_timeout + std::chrono::seconds(1));
  user.poll();
  const TierStats stats = user.tier().stats();
  EXPECT_FALSE(stats.writable);
  EXPECT_EQ(stats.breaker_trips, 2u);
  EXPECT_GE(stats.oldest_read_seconds, 11);
  EXPECT_EQ(user.tier().contains(key_of(1)), Presence::kPresent) << "known, but not readable";
  EXPECT_FALSE(stats.readable);
  EXPECT_EQ(user.read(1).kind(), StatusKind::kUnavailable);
  EXPECT_EQ(user.write(100).kind(), StatusKind::kUnavailable);
  // Queued ops have ended. Ops in the kernel have not, because it may still write.
  std::size_t unended = 0;
  for (const OpId id : stuck) {
    if (user.ended(id)) {
      EXPECT_EQ(user.finish(id).status.kind(), StatusKind::kUnavailable);
    } else {
      ++unended;
    }
  }
  EXPECT_GE(unended, 4u);
  ops_.release();
  for (const OpId id : stuck) user.finish(id);
  EXPECT_FALSE(user.tier().stats().readable) << "still in its cool-down";
  clock_.advance(std::chrono::seconds(1));
  EXPECT_TRUE(user.has(1));
  EXPECT_TRUE(user.read(1));
  EXPECT_TRUE(user.write(100));
  EXPECT_EQ(user.tier().stats().breaker_trips, 2u);
}

TEST_F(FsTierFaults, the_cool_down_doubles_while_the_device_keeps_failing) {
  TierUser user(options_);
  user.wait_for_scan();
  for (std::uint32_t i = 0; i < 8; ++i) {
    ops_.fail_all(Call::kPwritev, EIO);
    EXPECT_EQ(user.write(i).kind(), StatusKind::kIo);
  }
  EXPECT_EQ(user.write(50).kind(), StatusKind::kUnavailable);
  clock_.advance(std::chrono::seconds(1));
  EXPECT_EQ(user.write(51).kind(), StatusKind::kIo);  // the probe
  clock_.advance(std::chrono::seconds(1));
  EXPECT_EQ(user.write(52).kind(), StatusKind::kUnavailable);
  clock_.advance(std::chrono::seconds(1));
  ops_.clear();
  EXPECT_TRUE(user.write(53));
  EXPECT_TRUE(user.write(54));
  EXPECT_EQ(user.tier().stats().breaker_trips, 2u);
}

TEST_F(FsTierFaults, a_full_disk_stops_writes_and_not_reads) {
  TierUser user(options_);
  user.wait_for_scan();
  for (std::uint32_t i = 0; i < 20; ++i) ASSERT_TRUE(user.write(i));
  std::atomic<bool> full{true};
  ops_.set_rule([&](Call call) { return call == Call::kRename && full ? -ENOSPC : 0; });
  for (std::uint32_t i = 100; i < 110; ++i) EXPECT_FALSE(user.write(i));
  EXPECT_FALSE(user.tier().stats().writable);
  EXPECT_TRUE(user.tier().stats().readable);
  EXPECT_TRUE(user.has(19));
  EXPECT_TRUE(user.read(19));
}

TEST_F(FsTierFaults, a_full_disk_stops_writes_to_an_empty_cache_until_there_is_space) {
  TierUser user(options_);
  user.wait_for_scan();
  ASSERT_TRUE(user.write(1));  // evicted without success
  std::atomic<bool> full{true};
  ops_.set_rule([&](Call call) { return call == Call::kRename && full ? -ENOSPC : 0; });
  for (std::uint32_t i = 10; i < 20; ++i) {
    const Status status = user.write(i);
    EXPECT_TRUE(status.error_number() == ENOSPC || status.kind() == StatusKind::kUnavailable)
        << status.to_string();
  }
  EXPECT_FALSE(user.tier().stats().writable);
  full = false;
  clock_.advance(std::chrono::seconds(2));  // the breaker's cool-down
  EXPECT_TRUE(user.write(20));
  EXPECT_TRUE(user.read(20));
}

TEST_F(FsTierFaults, close_with_a_stuck_read_returns_and_frees_no_memory_in_use) {
  // Everything that an abandoned thread may still use is never freed.
  struct Left {
    FaultyFileOps ops;
    FakeClock clock;
    Row row{{8192}};
  };
  static Left* const left = new Left;
  FsTierOptions options = options_for(root_);
  options.file_ops = &left->ops;
  options.clock = &left->clock;
  options.close_wait = std::chrono::milliseconds(10);
  std::unique_ptr<Tier> tier;
  {
    TierUser user(options_for(root_));
    ASSERT_TRUE(user.write(1));
  }
  tier = make_fs_tier(options);
  while (!tier->stats().scan_complete) std::this_thread::yield();
  left->ops.block(Call::kPreadv, 2 * kPageBytes);
  TierOp op;
  op.id = 1;
  op.key = key_of(1);
  op.shards = left->row.shards();
  std::vector<TierOp> ops;
  ops.push_back(op);
  tier->submit(std::move(ops));
  left->ops.wait_for_blocked(1);
  tier->close();
  std::vector<Completion> completions;
  std::vector<TierRemoval> removals;
  tier->poll(&completions, &removals);
  EXPECT_TRUE(completions.empty()) << "the kernel may still write into the row";
  tier.reset();
  left->ops.release();
  left->ops.wait_for_all_closed();  // the thread returned, continued and was the last owner
  EXPECT_TRUE(left->row.holds(1));
}

TEST_F(FsTierFaults, a_small_file_system_that_fills_up_causes_no_failure) {
  const std::string mount_point = dir_.path() + "/small";
  fs::create_directory(mount_point);
  if (::mount("tmpfs", mount_point.c_str(), "tmpfs", 0, "size=2m") != 0) {
    GTEST_SKIP() << "a tmpfs cannot be mounted here (needs root)";
  }
  {
    FsTierOptions options = options_for(mount_point + "/root", std::uint64_t{64} << 20);
    TierUser user(options);
    user.wait_for_scan();
    for (std::uint32_t i = 0; i < 60; ++i) {
      const Status status = user.write(i, {65536});
      EXPECT_TRUE(status) << i << ": " << status.to_string();  // older records are evicted
    }
    EXPECT_TRUE(temporaries_in(mount_point).empty());
    std::uint32_t kept = 0;
    for (std::uint32_t i = 0; i < 60; ++i) {
      if (!user.has(i)) continue;
      ++kept;
      EXPECT_TRUE(user.read(i, {65536}));
    }
    EXPECT_GT(kept, 20u);
    EXPECT_LT(kept, 40u);
    EXPECT_TRUE(user.has(59));
  }
  ::umount(mount_point.c_str());
}

// A mount whose reads the kernel may continue after the process was killed, or one whose reads it ends first.
class ReadsOfAMount : public FaultyFileOps {
 public:
  bool ends_first = false;
  int direct = 0, buffered = 0;  // records opened for reading
  int open(int directory, const std::string& path, int flags, unsigned mode) override {
    if ((flags & O_ACCMODE) == O_RDONLY && path.ends_with(".rec"))
      ++((flags & O_DIRECT) != 0 ? direct : buffered);
    return FaultyFileOps::open(directory, path, flags, mode);
  }
  int statvfs(int fd, SpaceInfo* info) override {
    const int rc = FaultyFileOps::statvfs(fd, info);
    info->ends_reads_first = ends_first;
    return rc;
  }
};

TEST_F(FsTierFaults, no_read_continues_into_memory_that_outlives_the_process) {
  for (const bool outlives : {false, true}) {
    for (const bool ends_first : {false, true}) {
      ReadsOfAMount mount;
      mount.ends_first = ends_first;
      options_.file_ops = &mount;
      options_.memory_outlives = outlives;
      options_.o_direct = DirectMode::kOn;
      TierUser user(options_);
      user.wait_for_scan();
      ASSERT_TRUE(user.write(0));
      ASSERT_TRUE(user.read(0));
      const bool direct = !outlives || ends_first;
      EXPECT_EQ(mount.direct > 0, direct);
      EXPECT_EQ(mount.buffered > 0, !direct);
    }
  }
}

TEST(EndsReadsFirst, ends_reads_first_is_true_on_tmpfs_and_false_on_proc) {
  const auto of = [](const char* path) {
    const Fd fd(posix_file_ops(), ::open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC));
    SpaceInfo space;
    EXPECT_EQ(posix_file_ops().statvfs(fd.get(), &space), 0);
    return space.ends_reads_first;
  };
  EXPECT_TRUE(of("/dev/shm"));
  EXPECT_FALSE(of("/proc")) << "not known";
}

}  // namespace
}  // namespace kv_offload
