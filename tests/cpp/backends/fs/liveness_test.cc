// SPDX-License-Identifier: Apache-2.0
// Several servers on one full root: each makes progress, whatever the others do.
#include <gtest/gtest.h>
#include <signal.h>

#include "faulty_file_ops.h"
#include "fixture.h"
#include "writer_processes.h"

namespace kv_offload {
namespace {

using namespace testing;

constexpr std::uint64_t kLivenessBound = std::uint64_t{2} << 20;
constexpr std::uint64_t kLivenessRecord = 65536 + 4096;
const ShardSizes kLivenessShards = {65536};

class FsLiveness : public ::testing::Test {
 protected:
  FsTierOptions timed_options() {
    FsTierOptions options = options_for(root_, kLivenessBound);
    options.clock = &clock_;
    options.op_timeout = std::chrono::hours(24);
    return options;
  }
  void fill(TierUser& user, std::uint32_t first = 0) {
    user.wait_for_scan();
    next_ = first;
    while (user.removed(TierRemoval::Reason::kEvicted) < 3) ASSERT_TRUE(user.write(next_++, kLivenessShards));
  }
  // The tier's own ticker may be scanning while this clock jumps. It then takes the jump for its own
  // duration, and pauses for twenty times as long.
  bool finds(TierUser& user, std::uint32_t number) {
    return user.until([&] {
      clock_.advance(std::chrono::seconds(1));
      return user.has(number);
    });
  }
  TempDir dir_;
  std::string root_ = dir_.path() + "/root";
  FakeClock clock_;
  std::uint32_t next_ = 0;
};

TEST_F(FsLiveness, an_idle_server_on_a_full_root_does_not_starve_another) {
  TierUser idle(timed_options()), busy(timed_options());
  busy.wait_for_scan();
  fill(idle);  // from here on it is not even polled
  ASSERT_TRUE(finds(busy, next_ - 1));
  ASSERT_TRUE(busy.until([&] {  // and all others
    if (busy.tier().stats().chunks >= idle.tier().stats().chunks) return true;
    clock_.advance(std::chrono::seconds(1));
    return false;
  }));
  for (std::uint32_t i = 1000; i < 1160; ++i) {
    const Status status = busy.write(i, kLivenessShards);
    ASSERT_TRUE(status) << i << ": " << status.to_string();
    ASSERT_LE(du(root_), kLivenessBound);
  }
}

TEST_F(FsLiveness, a_record_written_to_a_full_root_is_found_by_the_other_server) {
  TierUser one(timed_options()), other(timed_options());
  fill(one);
  other.wait_for_scan();
  for (int burst = 0; burst < 8; ++burst) {
    ASSERT_TRUE(one.write(next_, kLivenessShards));
    EXPECT_TRUE(finds(other, next_)) << "burst " << burst;
    ++next_;
  }
}

TEST_F(FsLiveness, an_engine_that_does_not_poll_keeps_scanning) {
  TierUser one(timed_options()), idle(timed_options());
  one.wait_for_scan();
  idle.wait_for_scan();
  ASSERT_TRUE(one.write(1, kLivenessShards));
  EXPECT_TRUE(idle.until([&] {
    clock_.advance(std::chrono::seconds(1));
    return idle.tier().contains(key_of(1)) == Presence::kPresent;
  }));
}

TEST_F(FsLiveness, unremovable_records_stay_known_and_the_error_is_reported) {
  FaultyFileOps ops;
  FsTierOptions options = timed_options();
  options.file_ops = &ops;
  TierUser user(options);
  fill(user);
  const std::uint64_t known = user.tier().stats().chunks;
  ops.set_rule([](Call call) { return call == Call::kUnlink || call == Call::kRename ? -EPERM : 0; });
  for (int i = 0; i < 8; ++i) {
    const Status status = user.write(next_++, kLivenessShards);
    EXPECT_EQ(status.kind(), StatusKind::kIo) << status.to_string();
    EXPECT_EQ(status.error_number(), EPERM);
  }
  EXPECT_EQ(user.tier().stats().chunks, known);
  EXPECT_EQ(user.tier().stats().breaker_trips, 1u) << "a device that refuses is switched off for a while";
  ops.clear();
  clock_.advance(std::chrono::seconds(2));
  EXPECT_TRUE(user.until([&] { return user.write(next_, kLivenessShards).is_ok(); }));
}

TEST_F(FsLiveness, servers_continue_alongside_failing_removals_and_resets) {
  FaultyFileOps ops;
  FsTierOptions broken_options = timed_options(), resetting_options = timed_options();
  broken_options.file_ops = &ops;
  resetting_options.namespace_id.fill(0x22);
  resetting_options.namespace_json = "{}";
  TierUser idle(timed_options()), broken(broken_options), resetting(resetting_options), user(timed_options());
  fill(user, 1000);
  resetting.wait_for_scan();
  ops.set_rule([](Call call) { return call == Call::kUnlink || call == Call::kRename ? -EPERM : 0; });
  for (int round = 0; round < 30; ++round) {
    (void)broken.write(static_cast<std::uint32_t>(5000 + round), kLivenessShards);
    const Status theirs = resetting.write(static_cast<std::uint32_t>(round), kLivenessShards);
    EXPECT_TRUE(theirs) << theirs.to_string();
    if (round % 10 == 9) {
      EXPECT_TRUE(resetting.tier().reset());
    }
    const Status status = user.write(next_++, kLivenessShards);
    ASSERT_TRUE(status) << round << ": " << status.to_string();
    ASSERT_LE(du(root_), kLivenessBound + 4 * kLivenessRecord);
  }
}

TEST_F(FsLiveness, a_new_namespace_gets_its_share_of_a_full_root) {
  FsTierOptions late = timed_options();
  late.namespace_id.fill(0x22);
  late.namespace_json = "{}";
  TierUser first(timed_options());
  fill(first);
  TierUser second(late);
  second.wait_for_scan();
  clock_.advance(std::chrono::seconds(1));
  second.poll();
  for (std::uint32_t i = 0; i < 60; ++i) {
    clock_.advance(std::chrono::seconds(1));  // one tick requests space, the other's next tick evicts
    first.poll();
    second.poll();
    EXPECT_TRUE(second.until([&] { return second.write(i, kLivenessShards).is_ok(); })) << i;
    ASSERT_LE(du(root_), kLivenessBound + kLivenessRecord);
  }
  EXPECT_GT(second.tier().stats().chunks, kLivenessBound / kLivenessRecord / 4);
  EXPECT_LT(second.tier().stats().chunks, kLivenessBound / kLivenessRecord * 3 / 4);
}

// ---- processes

TEST_F(FsLiveness, two_of_three_processes_continue_while_the_other_is_stopped_or_killed) {
  WriterProcesses writers(kLivenessShards);
  for (int i = 0; i < 3; ++i) writers.start(options_for(root_, kLivenessBound), WriterProcesses::Time::kReal);
  ASSERT_TRUE(writers.go_on(3, 40)) << "full, by all three";
  for (std::size_t stopped = 0; stopped < 3; ++stopped) {
    writers.signal(stopped, SIGSTOP);
    EXPECT_TRUE(writers.go_on(stopped, 40)) << stopped << " is stopped";
    writers.signal(stopped, SIGCONT);
  }
  writers.signal(1, SIGKILL);
  EXPECT_TRUE(writers.go_on(1, 40)) << "1 is killed";
}

}  // namespace
}  // namespace kv_offload
