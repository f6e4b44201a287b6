// SPDX-License-Identifier: Apache-2.0
// The usage total of a root that several processes have open.
#include "backends/fs/space_ledger.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/file.h>

#include <cerrno>
#include <optional>

#include "backends/fs/layout.h"
#include "faulty_file_ops.h"
#include "fixture.h"
#include "out_of_memory.h"
#include "process_ops.h"
#include "tier/tier_runtime.h"

namespace kv_offload {
namespace {

using namespace testing;

constexpr std::uint64_t kMost = 1 << 20;

class SpaceLedgerTest : public ::testing::Test {
 protected:
  std::unique_ptr<SpaceLedger> open(std::uint64_t writer, FileOps& ops = posix_file_ops()) {
    return std::make_unique<SpaceLedger>(ops, root_.get(), dir_.path(), kMost, writer, writer);
  }
  SpaceFigures poll(SpaceLedger& space, Nanos now = Nanos{0}) {
    SpaceFigures figures;
    EXPECT_TRUE(space.poll(now, &figures));
    return figures;
  }
  // Finishes a count with this result.
  void count(std::uint64_t found) {
    std::uint64_t number = 0;
    ASSERT_TRUE(server_->begin_count(&number));
    ASSERT_TRUE(server_->finish_count(number, found));
  }
  Status reserve(Reservation& reservation, std::uint64_t bytes) {
    return reservation.grow_to(bytes, &missing_);
  }
  TempDir dir_;
  FaultyFileOps ops_;
  int error_ = 0;
  std::uint64_t missing_ = 0;
  Fd root_ = open_fd(posix_file_ops(), AT_FDCWD, dir_.path(), O_RDONLY | O_DIRECTORY, 0, &error_);
  std::unique_ptr<SpaceLedger> server_ = open(1), other_ = open(3, ops_);
};

TEST_F(SpaceLedgerTest, reservations_are_refused_uncounted_and_above_the_bound) {
  Reservation first(*server_), second(*other_);
  missing_ = 1;
  EXPECT_EQ(reserve(first, 1).kind(), StatusKind::kNoSpace);
  EXPECT_EQ(missing_, 0u);
  count(kMost - 100);
  EXPECT_TRUE(reserve(second, 60));
  EXPECT_EQ(reserve(first, 50).kind(), StatusKind::kNoSpace);
  EXPECT_EQ(missing_, 10u);
}

TEST_F(SpaceLedgerTest, used_bytes_stay_and_the_rest_of_a_reservation_is_returned) {
  count(1000);
  {
    Reservation reservation(*server_);
    ASSERT_TRUE(reserve(reservation, 500));
    EXPECT_EQ(server_->total(), 1500u);
    reservation.used = 200;
  }
  EXPECT_EQ(server_->total(), 1200u);
  EXPECT_EQ(poll(*other_).doubt, 0u);
}

// A reservation of one process, and a count by another: the counting process knows all reservations.
TEST_F(SpaceLedgerTest, a_reservation_of_another_process_survives_a_count) {
  count(1000);
  {
    Reservation theirs(*other_);
    ASSERT_TRUE(reserve(theirs, 500));
    count(1000);  // their file has no final name yet
    EXPECT_EQ(server_->total(), 1500u);
    theirs.used = 500;
  }
  EXPECT_EQ(poll(*server_).used, 1500u);
}

TEST_F(SpaceLedgerTest, a_file_created_during_a_count_is_never_missed) {
  count(1000);
  std::uint64_t number = 0;
  ASSERT_TRUE(server_->begin_count(&number));
  // At this point the count has reached the directory of the new file.
  {
    Reservation theirs(*other_);
    ASSERT_TRUE(reserve(theirs, 500));
    theirs.used = 500;
  }
  ASSERT_TRUE(server_->finish_count(number, 1000));
  EXPECT_EQ(server_->total(), 1500u);
  EXPECT_EQ(poll(*server_).doubt, 500u) << "it might have been counted";
}

TEST_F(SpaceLedgerTest, a_file_counted_before_its_reservation_ends_is_in_doubt) {
  count(1000);
  {
    Reservation theirs(*other_);
    ASSERT_TRUE(reserve(theirs, 500));
    count(1500);  // the file already has its final name
    theirs.used = 500;
  }
  const SpaceFigures figures = poll(*server_);
  EXPECT_EQ(figures.used, 2000u);
  EXPECT_EQ(figures.doubt, 500u);
}

TEST_F(SpaceLedgerTest, bytes_removed_between_two_counts_are_subtracted) {
  count(1000);
  (void)poll(*other_);
  other_->remove(300, other_->finished());
  EXPECT_EQ(poll(*server_).used, 700u);
  EXPECT_EQ(poll(*server_).doubt, 0u);
}

TEST_F(SpaceLedgerTest, bytes_that_a_count_missed_are_not_subtracted_again) {
  count(1000);
  (void)poll(*other_);
  const SpaceLedger::Finished before = other_->finished();
  count(700);  // the file was removed before this
  other_->remove(300, before);
  EXPECT_EQ(poll(*server_).used, 700u);
  EXPECT_EQ(poll(*server_).doubt, 300u);
  Reservation writer(*other_);
  writer.adopt(300, before);
  ASSERT_TRUE(reserve(writer, 300));
  EXPECT_EQ(other_->total(), 1000u) << "no space was gained without a removal";
}

TEST_F(SpaceLedgerTest, a_removal_during_a_count_never_makes_the_total_too_low) {
  count(1000);
  std::uint64_t number = 0;
  ASSERT_TRUE(server_->begin_count(&number));
  other_->remove(300, server_->finished());
  EXPECT_EQ(other_->total(), 700u);
  ASSERT_TRUE(server_->finish_count(number, 700));  // the file had been removed before
  EXPECT_EQ(server_->total(), 700u);
  EXPECT_EQ(poll(*server_).doubt, 300u) << "or not";
}

TEST_F(SpaceLedgerTest, two_concurrent_counts_are_both_right) {
  count(1000);
  std::uint64_t one = 0, two = 0;
  ASSERT_TRUE(server_->begin_count(&one));
  server_->add(100);
  ASSERT_TRUE(other_->begin_count(&two));
  server_->add(10);
  ASSERT_TRUE(server_->finish_count(one, 1000));
  EXPECT_EQ(server_->total(), 1110u);
  ASSERT_TRUE(other_->finish_count(two, 1100));
  EXPECT_EQ(other_->total(), 1110u);
}

TEST_F(SpaceLedgerTest, space_freed_by_one_process_belongs_to_it) {
  count(kMost);
  Reservation maker(*other_), thief(*server_);
  ASSERT_FALSE(reserve(maker, 500));
  maker.adopt(500, other_->finished());  // the file was removed
  EXPECT_FALSE(reserve(thief, 500));
  EXPECT_TRUE(reserve(maker, 500));
  EXPECT_FALSE(reserve(thief, 1));
}

TEST_F(SpaceLedgerTest, insufficient_freed_space_is_kept_from_others) {
  count(kMost);
  Reservation maker(*server_), other(*other_);
  ASSERT_FALSE(reserve(maker, 1000));
  maker.adopt(400, server_->finished());
  ASSERT_FALSE(reserve(maker, 1000));
  EXPECT_EQ(missing_, 600u);
  EXPECT_FALSE(reserve(other, 100)) << "it was freed for another reservation";
}

TEST_F(SpaceLedgerTest, a_failed_ledger_write_is_made_with_the_next_change) {
  count(1000);
  {
    Reservation reservation(*other_);
    ASSERT_TRUE(reserve(reservation, 500));
    reservation.used = 200;
    ops_.fail_all(Call::kPwritev, EIO);
  }
  other_->remove(100, other_->finished());
  {
    Reservation more(*other_);
    EXPECT_EQ(reserve(more, 1).kind(), StatusKind::kIo);
  }
  ops_.clear();
  EXPECT_EQ(poll(*server_).reserved, 500u) << "too high, not too low";
  EXPECT_EQ(poll(*other_).used, 1100u);
  EXPECT_EQ(poll(*other_).reserved, 0u);
}

TEST_F(SpaceLedgerTest, writes_of_other_processes_are_reported_and_only_grow) {
  count(kMost - 1000);
  std::uint64_t before = poll(*server_).writes_by_others;
  for (int i = 0; i < 3; ++i) {
    Reservation writer(*other_);
    writer.adopt(1000, other_->finished());  // replaces another record: the total does not change
    ASSERT_TRUE(reserve(writer, 1000));
    writer.used = 1000;
    ops_.clear();
  }
  EXPECT_EQ(poll(*server_).writes_by_others, before + 3);
  before = poll(*other_).writes_by_others;
  EXPECT_EQ(before, 0u) << "own writes do not count";
}

// ---- dead processes

TEST_F(SpaceLedgerTest, reservations_of_a_dead_process_count_as_used_until_the_next_count) {
  count(1000);
  ProcessOps process;
  const auto dying = open(5, process);
  Reservation lost(*dying);
  ASSERT_TRUE(reserve(lost, 500));
  EXPECT_EQ(poll(*server_).writers.size(), 3u) << "it lives";
  process.die();
  const SpaceFigures figures = poll(*server_);
  EXPECT_EQ(figures.writers.size(), 2u);
  EXPECT_EQ(figures.used, 1500u);
  EXPECT_EQ(figures.doubt, 501u);
  EXPECT_FALSE(fs::exists(dir_.path() + "/" + layout::presence_name(5)));
}

TEST_F(SpaceLedgerTest, a_process_that_died_while_freeing_space_leaves_the_total_in_doubt) {
  count(kMost);
  ProcessOps process;
  const auto dying = open(5, process);
  Reservation lost(*dying);
  ASSERT_FALSE(reserve(lost, 500));
  process.die();  // after a file was removed, before that was reported
  EXPECT_GT(poll(*server_).doubt, 0u);
}

TEST_F(SpaceLedgerTest, a_process_that_closed_or_did_nothing_leaves_no_doubt) {
  count(1000);
  ProcessOps process;
  const auto dying = open(5, process);
  open(7)->close();
  process.die();
  const SpaceFigures figures = poll(*server_);
  EXPECT_EQ(figures.writers.size(), 2u);
  EXPECT_EQ(figures.doubt, 0u);
  EXPECT_FALSE(fs::exists(dir_.path() + "/" + layout::presence_name(7)));
}

TEST_F(SpaceLedgerTest, a_dead_process_of_another_boot_leaves_doubt) {
  count(1000);
  ProcessOps process;
  process.on_host("of the boot before");
  const auto dying = open(5, process);
  process.die();
  EXPECT_GT(poll(*server_).doubt, 0u) << "its temporary files are never swept";
}

TEST_F(SpaceLedgerTest, a_process_that_is_idle_for_long_is_not_dead) {
  count(1000);
  Reservation theirs(*other_);
  ASSERT_TRUE(reserve(theirs, 500));
  for (int i = 0; i < 3; ++i) (void)poll(*server_, i * SpaceLedger::kDeadAfter);
  EXPECT_EQ(poll(*server_).reserved, 500u);
}

TEST_F(SpaceLedgerTest, an_idle_process_of_another_boot_is_declared_dead) {
  count(1000);
  ProcessOps process;
  process.on_host("of the boot before");
  const auto dying = open(5, process);
  process.die();
  fs::remove(dir_.path() + "/" + layout::presence_name(5));
  EXPECT_EQ(poll(*server_, Nanos{0}).writers.size(), 3u);
  EXPECT_EQ(poll(*server_, SpaceLedger::kDeadAfter - Nanos{1}).writers.size(), 3u);
  EXPECT_EQ(poll(*server_, SpaceLedger::kDeadAfter).writers.size(), 2u);
}

TEST_F(SpaceLedgerTest, a_process_declared_dead_returns_with_its_reservations) {
  count(1000);
  Reservation theirs(*other_);
  ASSERT_TRUE(reserve(theirs, 500));
  fs::resize_file(dir_.path() + "/ledger", 0);  // all slots are lost
  EXPECT_EQ(poll(*server_).state, SpaceState::kUncounted);
  count(1000);
  EXPECT_EQ(poll(*other_).reserved, 500u);
  EXPECT_EQ(poll(*server_).writers.size(), 2u);
}

// ---- a lock that is never released

// As by a process that was stopped during the few microseconds in which it holds the lock.
TEST_F(SpaceLedgerTest, a_lock_that_is_held_forever_costs_one_count) {
  count(1000);
  const std::string path = dir_.path() + "/ledger";
  const Fd held(posix_file_ops(), ::open(path.c_str(), O_RDWR));
  ASSERT_EQ(::flock(held.get(), LOCK_EX), 0);
  EXPECT_EQ(poll(*server_).state, SpaceState::kUncounted);
  count(1000);
  EXPECT_EQ(poll(*server_).state, SpaceState::kCounted);
  EXPECT_EQ(poll(*other_).writers.size(), 2u);
  // The stopped process continues on an orphaned file, and notices.
  ASSERT_EQ(::flock(held.get(), LOCK_UN), 0);
  EXPECT_EQ(poll(*other_).writers.size(), 2u);
}

TEST_F(SpaceLedgerTest, space_granted_on_a_replaced_page_is_requested_again) {
  count(kMost);
  Reservation writer(*other_);
  bool done = false;
  ops_.set_rule([&](Call call) {
    if (call != Call::kPwritev || done) return 0;
    done = true;  // stopped here for longer than others wait
    LedgerPage page = LedgerPage::fresh();
    std::ofstream(dir_.path() + "/new", std::ios::binary).write(reinterpret_cast<char*>(&page), sizeof(page));
    fs::rename(dir_.path() + "/new", dir_.path() + "/ledger");
    return 0;
  });
  EXPECT_EQ(reserve(writer, 1).kind(), StatusKind::kNoSpace);
  EXPECT_EQ(missing_, 0u) << "a count is due";
  EXPECT_EQ(poll(*server_).writers.size(), 2u);
}

TEST_F(SpaceLedgerTest, an_unreleased_lock_is_reported_but_no_device_failure) {
  count(1000);
  ops_.fail_all(Call::kFlock, EWOULDBLOCK);
  Reservation writer(*other_);
  const Status status = reserve(writer, 1);
  EXPECT_EQ(status.kind(), StatusKind::kTimeout) << status.to_string();
  EXPECT_FALSE(device_failed(status));
}

// ---- locks that do not reach other hosts

TEST_F(SpaceLedgerTest, lost_changes_are_detected_and_stop_writes) {
  count(1000);
  ProcessOps process;
  process.on_host("another");
  process.ignore_locks();
  FaultyFileOps between(process);
  const auto theirs = open(5, between);
  // The other process has read the page and not yet written it. We change the page now, and lose that change.
  const auto lose_one = [&] {
    bool done = false;
    between.set_rule([&](Call call) {
      if (call == Call::kPwritev && !std::exchange(done, true)) server_->add(10);
      return 0;
    });
    theirs->add(10);
    between.clear();
  };
  lose_one();
  EXPECT_EQ(poll(*server_).state, SpaceState::kUncounted) << "the total cannot be right";
  count(1020);
  EXPECT_EQ(poll(*server_).state, SpaceState::kCounted) << "a single lost change is tolerated";
  lose_one();
  EXPECT_EQ(poll(*server_).state, SpaceState::kNotExclusive);
  count(1040);
  Reservation writer(*server_);
  const Status status = reserve(writer, 1);
  EXPECT_EQ(status.kind(), StatusKind::kUnavailable);
  EXPECT_NE(status.message().find("nolock"), std::string::npos) << status.to_string();
}

TEST_F(SpaceLedgerTest, a_live_process_of_another_host_without_its_lock_is_detected) {
  count(1000);
  ProcessOps process;
  process.on_host("another");
  process.ignore_locks();
  const auto theirs = open(5, process);
  SpaceState state = poll(*server_).state;
  for (int i = 0; i < 5 && state == SpaceState::kCounted; ++i) {
    (void)poll(*theirs);
    state = poll(*server_).state;
  }
  EXPECT_EQ(state, SpaceState::kNotExclusive);
}

TEST_F(SpaceLedgerTest, a_joining_host_counts_first_and_blocks_no_other_host) {
  count(1000);
  ProcessOps process;
  process.on_host("another");
  const auto theirs = open(5, process);
  Reservation one(*theirs), two(*server_);
  EXPECT_FALSE(reserve(one, 1)) << "after a power failure the page may be older than the records";
  EXPECT_TRUE(reserve(two, 1));
  std::uint64_t number = 0;
  ASSERT_TRUE(theirs->begin_count(&number));
  ASSERT_TRUE(theirs->finish_count(number, 1000));
  EXPECT_TRUE(reserve(one, 1));
  EXPECT_TRUE(reserve(two, 2)) << "the page now belongs to the other host's boot";
}

// Makes each allocation of each call fail once, also while the page cannot be locked or read.
TEST_F(SpaceLedgerTest, changes_that_run_out_of_memory_are_applied_later) {
  constexpr std::uint64_t kUsed = 200, kGone = 50;
  std::uint64_t used = 10000;
  count(used);
  for (const Call broken : {Call::kFsync, Call::kFlock, Call::kPreadv}) {  // fsync: never called
    bool came = true;
    for (unsigned after = 0; came; ++after) {
      const std::string where = std::string(name_of(broken)) + " " + std::to_string(after);
      std::optional<Reservation> reservation(*other_);
      ASSERT_TRUE(reserve(*reservation, 500)) << where;
      reservation->used = kUsed;
      reservation->adopt(kGone, other_->finished());
      ops_.fail_all(broken, EIO);
      {
        const FailingAllocation failing(after);
        reservation.reset();
        came = failing.came();
      }
      ops_.clear();
      used += kUsed - kGone;
      ASSERT_EQ(poll(*server_).reserved > 0, broken != Call::kFsync) << where << ": the control";
      const SpaceFigures paid = poll(*other_);
      EXPECT_EQ(paid.used, used) << where;
      EXPECT_EQ(paid.reserved + paid.doubt, 0u) << where;
    }
  }
}

TEST_F(SpaceLedgerTest, abandoning_a_count_without_memory_leaves_the_page_unlocked) {
  count(10000);
  for (const Call broken : {Call::kFlock, Call::kPreadv}) {
    bool came = true;
    unsigned after = 0;
    for (; came; ++after) {
      std::uint64_t number = 0;
      ASSERT_TRUE(other_->begin_count(&number));
      ops_.fail_all(broken, EIO);
      {
        const FailingAllocation failing(after);
        other_->give_up_count();
        came = failing.came();
      }
      ops_.clear();
      const Fd page =
          open_fd(posix_file_ops(), root_.get(), std::string(layout::kLedgerFile), O_RDWR, 0, &error_);
      EXPECT_EQ(posix_file_ops().flock(page.get(), LOCK_EX | LOCK_NB), 0) << name_of(broken) << " " << after;
    }
    EXPECT_GT(after, 1u) << "the control";
    std::uint64_t number = 0;
    ASSERT_TRUE(other_->begin_count(&number));
    EXPECT_TRUE(other_->finish_count(number, 10000));
  }
}

}  // namespace
}  // namespace kv_offload
