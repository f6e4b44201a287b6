// SPDX-License-Identifier: Apache-2.0
// Tiers of an engine on two hosts: a chunk is whole or missing, whatever happens to one of its parts.
#include "hosts/host_tiers.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <deque>
#include <filesystem>
#include <functional>
#include <new>
#include <numeric>

#include "base/thread_annotations.h"
#include "hosts/two_hosts.h"
#include "out_of_memory.h"

namespace kv_offload {
namespace {

using namespace testing;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::UnorderedElementsAreArray;

class HostTiersTest : public TwoHosts {};

TEST_F(HostTiersTest, each_host_stores_and_loads_its_own_part) {
  start();
  for (std::uint32_t number = 1; number <= 100; ++number) {
    const Completion ended = finish(start_op(OpKind::kWrite, number));
    ASSERT_TRUE(ended.status.is_ok()) << ended.status.to_string();
    EXPECT_EQ(ended.bytes, kHosts * kShardBytes);
    EXPECT_EQ(ended.key, key_of(number));
  }
  EXPECT_EQ(records_on(0), 100u);
  EXPECT_EQ(records_on(1), 100u);
  for (std::uint32_t number = 1; number <= 100; ++number) {
    EXPECT_TRUE(has(number));
    EXPECT_TRUE(read(number).is_ok());
  }
  EXPECT_FALSE(has(101));
  EXPECT_EQ(read(101).kind(), StatusKind::kNotFound);
  EXPECT_TRUE(holds_soon([&] {
    poll();
    return tier_->stats().bytes == du(root_[0].path()) + du(root_[1].path());
  }));
  EXPECT_EQ(tier_->stats().capacity_bytes, options_[0].max_bytes + options_[1].max_bytes);
  EXPECT_GT(tier_->estimate_read_seconds(1 << 20), 0);
}

TEST_F(HostTiersTest, ranks_that_share_the_area_of_their_host_have_one_shard) {
  ranks_each_ = 3;
  start();
  const Completion ended = finish(start_op(OpKind::kWrite, 1));
  EXPECT_TRUE(ended.status.is_ok());
  EXPECT_EQ(ended.bytes, kHosts * kShardBytes);
  restart();
  EXPECT_TRUE(has(1));
  EXPECT_TRUE(read(1).is_ok());
  EXPECT_EQ(records_on(0), 1u);
  EXPECT_EQ(records_on(1), 1u);
}

TEST_F(HostTiersTest, chunks_of_all_groups_have_a_part_on_each_host) {
  // Host 0 has no bytes of group 1.
  start();
  TierOp op;
  op.id = 1u << 20;
  op.key = key_of(1, 1);
  op.group = 1;
  op.row = row_of(1);
  std::memset(part(1, 1).data(), 7, kPageBytes);
  for (const OpKind kind : {OpKind::kWrite, OpKind::kRead}) {
    ++op.id;
    op.kind = kind;
    const std::uint64_t bytes[kHosts] = {0, kPageBytes};
    op.shards = shards_of_row(*scheduler_, op.row, bytes, 1);
    tier_->submit({op});
    EXPECT_TRUE(finish(op.id).status.is_ok());
    if (kind == OpKind::kWrite) std::memset(part(1, 1).data(), 0, kPageBytes);
  }
  EXPECT_EQ(part(1, 1)[kPageBytes - 1], std::byte{7});
}

TEST_F(HostTiersTest, a_restart_of_all_hosts_keeps_the_chunks) {
  start();
  for (std::uint32_t number = 1; number <= 20; ++number) ASSERT_TRUE(write(number).is_ok());
  for (int i = 0; i < 2; ++i) {
    restart();
    for (std::uint32_t number = 1; number <= 20; ++number) {
      EXPECT_TRUE(has(number));
      EXPECT_TRUE(read(number).is_ok());
    }
  }
}

TEST_F(HostTiersTest, a_damaged_part_makes_the_chunk_a_miss_and_releases_the_other_parts) {
  start();
  for (const std::uint32_t host : {1u, 0u}) {
    ASSERT_TRUE(write(host).is_ok());
    ASSERT_TRUE(write(2 + host).is_ok());
    flip_a_bit(path_of(root_[host].path(), host));
    EXPECT_EQ(read(host).kind(), StatusKind::kCorrupt);
    EXPECT_FALSE(has(host));
    EXPECT_TRUE(holds_soon([&] {
      poll();
      return path_of(root_[0].path(), host).empty() && path_of(root_[1].path(), host).empty();
    })) << "host "
        << host;
    EXPECT_TRUE(read(2 + host).is_ok());
    EXPECT_TRUE(write(host).is_ok());
    EXPECT_TRUE(read(host).is_ok());
  }
}

TEST_F(HostTiersTest, a_missing_part_makes_the_chunk_a_miss_and_releases_the_other_parts) {
  start();
  for (const std::uint32_t host : {1u, 0u}) {
    ASSERT_TRUE(write(host).is_ok());
    std::filesystem::remove(path_of(root_[host].path(), host));
    EXPECT_EQ(read(host).kind(), StatusKind::kNotFound);
    EXPECT_TRUE(has_records_soon(host == 1 ? 0 : 1));
    EXPECT_FALSE(has(host));
    EXPECT_TRUE(write(host).is_ok());
    EXPECT_TRUE(read(host).is_ok());
  }
}

TEST_F(HostTiersTest, a_part_that_was_lost_while_the_engine_was_down_releases_the_other_parts) {
  start();
  for (std::uint32_t number = 1; number <= 4; ++number) ASSERT_TRUE(write(number).is_ok());
  stop();
  std::filesystem::remove(path_of(root_[1].path(), 2));
  std::filesystem::remove(path_of(root_[0].path(), 3));
  start();
  EXPECT_TRUE(has(1));
  EXPECT_FALSE(has(2));
  EXPECT_FALSE(has(3));
  EXPECT_TRUE(has(4));
  EXPECT_TRUE(holds_soon([&] {
    poll();
    return records_on(0) == 2;
  }));
  EXPECT_TRUE(read(4).is_ok());
  for (const std::uint32_t number : {2u, 3u}) {
    EXPECT_TRUE(write(number).is_ok());
    EXPECT_TRUE(read(number).is_ok());
  }
}

TEST_F(HostTiersTest, a_host_with_a_new_directory_makes_all_chunks_misses) {
  start();
  ASSERT_TRUE(write(1).is_ok());
  stop();
  std::filesystem::remove_all(root_[1].path());
  start();
  EXPECT_FALSE(has(1));
  weights = 1;
  EXPECT_TRUE(holds_soon([&] {
    poll();
    return records_on(0) == 0;
  }));
  EXPECT_TRUE(write(1).is_ok());
  EXPECT_TRUE(read(1).is_ok());
}

TEST_F(HostTiersTest, a_full_disk_on_one_host_leaves_no_part_on_the_others) {
  start();
  for (FaultyFileOps& ops : ops_) {
    ASSERT_TRUE(write(1).is_ok());
    ops.fail_all(Call::kPwritev, ENOSPC);
    EXPECT_EQ(write(2).kind(), StatusKind::kNoSpace);
    ops.clear();
    EXPECT_FALSE(has(2));
    EXPECT_TRUE(has_records_soon(0)) << "record 1 was evicted for it, on all hosts";
  }
  EXPECT_TRUE(write(2).is_ok());
  EXPECT_TRUE(read(2).is_ok());
}

TEST_F(HostTiersTest, a_removal_that_fails_on_a_host_is_counted_for_the_host) {
  start();
  for (const std::uint32_t host : {1u, 0u}) {
    ASSERT_TRUE(write(host).is_ok());
    ops_[host].fail_all(Call::kUnlink, EIO);
    flip_a_bit(path_of(root_[1 - host].path(), host));
    EXPECT_EQ(read(host).kind(), StatusKind::kCorrupt);
    EXPECT_TRUE(holds_soon([&] {
      poll();
      return tier_->parts()[host].removals[static_cast<std::size_t>(StatusKind::kIo)] > 0;
    })) << "host "
        << host;
    EXPECT_FALSE(path_of(root_[host].path(), host).empty());
    ops_[host].clear();
  }
}

TEST_F(HostTiersTest, a_part_that_one_host_evicts_is_released_on_the_others) {
  for (const std::uint32_t small : {1u, 0u}) {
    options_[small].max_bytes = std::uint64_t{1} << 20;
    options_[1 - small].max_bytes = std::uint64_t{64} << 20;
    start();
    const std::uint32_t first = 1 + 200 * small;
    std::size_t stored = 0;  // not all: nothing can be evicted before the scan of a full root has ended
    for (std::uint32_t number = first; number < first + 200; ++number) stored += write(number % 250).is_ok();
    EXPECT_GT(stored, 130u);
    EXPECT_TRUE(holds_soon([&] {
      poll();
      return records_on(0) == records_on(1);
    })) << records_on(0)
        << " records on host 0, " << records_on(1) << " on host 1";
    EXPECT_LT(records_on(0), 120u);
    EXPECT_FALSE(removals_.empty());
    std::size_t whole = 0;
    for (std::uint32_t number = 0; number < 250; ++number) {
      if (!has(number)) continue;
      ++whole;
      EXPECT_TRUE(read(number).is_ok());
    }
    EXPECT_EQ(whole, records_on(0));
    stop();
  }
}

TEST_F(HostTiersTest, a_failing_disk_on_one_host_takes_the_tier_out_of_service) {
  start();
  for (std::uint32_t number = 1; number <= 20; ++number) ASSERT_TRUE(write(number).is_ok());
  ops_[1].fail_all(Call::kPreadv, EIO);
  EXPECT_TRUE(holds_soon([&] {
    for (std::uint32_t number = 1; number <= 20; ++number) EXPECT_FALSE(read(number).is_ok());
    return !tier_->stats().readable;
  }));
  EXPECT_EQ(tier_->stats().breaker_trips, 1u);
  ops_[1].clear();
  EXPECT_EQ(records_on(0), 20u) << "records that could not be read were removed";
}

TEST_F(HostTiersTest, an_op_that_is_late_on_one_host_expires) {
  options_[1].n_write_threads = options_[1].n_read_threads = 1;
  start();
  ops_[1].block(Call::kPwritev, kShardBytes);
  const OpId first = start_op(OpKind::kWrite, 1), second = start_op(OpKind::kWrite, 2);
  ops_[1].wait_for_blocked(1);
  const OpId late = start_op(OpKind::kWrite, 3, SteadyClock().now() + std::chrono::milliseconds(1));
  (void)second;
  EXPECT_EQ(finish(late).status.kind(), StatusKind::kExpired) << "while the other ops are stuck";
  EXPECT_FALSE(has_ended(first));
  ops_[1].release();
  EXPECT_TRUE(finish(first).status.is_ok());
  EXPECT_FALSE(has(3));
}

TEST_F(HostTiersTest, writes_that_no_host_has_begun_can_be_cancelled_at_once) {
  for (FsTierOptions& options : options_) options.n_write_threads = options.n_read_threads = 1;
  remote_.most_writes = 2;
  start();
  for (FaultyFileOps& ops : ops_) ops.block(Call::kPwritev, kShardBytes);
  std::vector<OpId> ids;
  for (std::uint32_t number = 1; number <= 6; ++number) ids.push_back(start_op(OpKind::kWrite, number));
  for (FaultyFileOps& ops : ops_) ops.wait_for_blocked(1);
  EXPECT_EQ(tier_->stats().queued_writes, 6u);
  EXPECT_FALSE(tier_->cancel(ids[0])) << "both hosts write it";
  EXPECT_FALSE(tier_->cancel(ids[1])) << "the other host may have begun";
  EXPECT_TRUE(tier_->cancel(ids[2]));
  EXPECT_TRUE(tier_->cancel(ids[4]));
  EXPECT_EQ(finish(ids[2]).status.kind(), StatusKind::kCancelled);
  EXPECT_EQ(finish(ids[4]).status.kind(), StatusKind::kCancelled);
  for (FaultyFileOps& ops : ops_) ops.release();
  for (const std::size_t i : {0u, 1u, 3u, 5u}) EXPECT_TRUE(finish(ids[i]).status.is_ok()) << i;
  EXPECT_TRUE(has_records_soon(4));
}

TEST_F(HostTiersTest, many_writes_at_once_all_end) {
  remote_.most_writes = 3;
  start();
  std::vector<OpId> ids;
  for (std::uint32_t number = 1; number <= 200; ++number) ids.push_back(start_op(OpKind::kWrite, number));
  for (const OpId id : ids) EXPECT_TRUE(finish(id).status.is_ok());
  for (std::uint32_t number = 1; number <= 200; ++number) ids.push_back(start_op(OpKind::kRead, number));
  for (const OpId id : ids) EXPECT_TRUE(finish(id).status.is_ok());
}

TEST_F(HostTiersTest, a_reset_ends_writes_that_wait_for_the_other_host) {
  remote_.most_writes = 1;
  start();
  ops_[1].block(Call::kPwritev, kShardBytes);
  const OpId first = start_op(OpKind::kWrite, 1), second = start_op(OpKind::kWrite, 2);
  ops_[1].wait_for_blocked(1);
  EXPECT_TRUE(tier_->reset().is_ok());
  EXPECT_EQ(finish(second).status.kind(), StatusKind::kCancelled);
  ops_[1].release();
  EXPECT_FALSE(finish(first).status.is_ok());
  EXPECT_FALSE(has(1) || has(2));
}

// ---- a lost connection

TEST_F(HostTiersTest, an_op_on_a_lost_host_ends_only_when_no_thread_of_it_uses_the_row) {
  for (const OpKind kind : {OpKind::kRead, OpKind::kWrite}) {
    start();
    const std::uint32_t number = kind == OpKind::kRead ? 1 : 2;
    if (kind == OpKind::kRead) {
      ASSERT_TRUE(write(number).is_ok());
    }
    ops_[1].block(kind == OpKind::kRead ? Call::kPreadv : Call::kPwritev, kShardBytes);
    const OpId op = start_op(kind, number);
    ops_[1].wait_for_blocked(1);
    lose_connection();
    ASSERT_TRUE(links_->wait_until_connected(kPatience).is_ok());
    EXPECT_FALSE(has_ended(op)) << "a thread of the host is still at work";
    EXPECT_FALSE(tier_->stats().writable);
    EXPECT_EQ(tier_->contains(key_of(1)), Presence::kLookupFailed);
    ops_[1].release();
    EXPECT_TRUE(is_host_lost(finish(op).status));
    wait_until_usable();
    if (kind == OpKind::kRead) {
      EXPECT_TRUE(has(number));
      EXPECT_TRUE(read(number).is_ok());
    } else {
      EXPECT_FALSE(has(number));
      EXPECT_TRUE(write(number).is_ok());
      EXPECT_TRUE(read(number).is_ok());
    }
    stop();
  }
}

TEST_F(HostTiersTest, a_host_that_is_down_takes_no_ops) {
  start();
  ASSERT_TRUE(write(1).is_ok());
  agent_->close();
  EXPECT_TRUE(holds_soon([&] { return links_->lost_hosts() == std::vector<std::uint32_t>{1}; }));
  EXPECT_TRUE(is_host_lost(write(2)));
  EXPECT_TRUE(is_host_lost(read(1)));
  EXPECT_EQ(tier_->contains(key_of(1)), Presence::kLookupFailed) << "its part is not known to be missing";
  EXPECT_FALSE(tier_->stats().readable);
  EXPECT_FALSE(tier_->stats().writable);
  EXPECT_TRUE(holds_soon([&] {
    poll();
    return records_on(0) == 1;
  })) << "the part of the failed write was kept, or that of the stored chunk was not";
}

TEST_F(HostTiersTest, records_that_a_host_loses_while_it_is_not_connected_are_not_hits) {
  start();
  ASSERT_TRUE(write(1).is_ok());
  ASSERT_TRUE(has(1));
  lose_connection();
  std::filesystem::remove(path_of(root_[1].path(), 1));
  wait_until_usable();
  EXPECT_FALSE(has(1) && read(1).is_ok());
  EXPECT_TRUE(has_records_soon(0));
}

// ---- resets

TEST_F(HostTiersTest, a_reset_forgets_the_records_of_all_hosts) {
  start();
  ASSERT_TRUE(write(1).is_ok());
  EXPECT_TRUE(tier_->reset().is_ok());
  EXPECT_FALSE(has(1));
  EXPECT_FALSE(read(1).is_ok());
  weights = 1;
  EXPECT_TRUE(write(1).is_ok());
  EXPECT_TRUE(read(1).is_ok());
  restart();
  EXPECT_FALSE(has(1)) << "a record of the process that was reset";
  weights = 2;
  EXPECT_TRUE(write(1).is_ok());
  EXPECT_TRUE(read(1).is_ok());
}

TEST_F(HostTiersTest, an_op_from_before_a_reset_leaves_no_record) {
  start();
  ops_[1].block(Call::kPwritev, kShardBytes);
  const OpId op = start_op(OpKind::kWrite, 1);
  ops_[1].wait_for_blocked(1);
  EXPECT_TRUE(tier_->reset().is_ok());
  EXPECT_FALSE(has_ended(op));
  ops_[1].release();
  EXPECT_FALSE(finish(op).status.is_ok());
  EXPECT_FALSE(has(1));
}

TEST_F(HostTiersTest, a_reset_while_a_host_is_lost_is_made_up_for_before_it_is_used_again) {
  start();
  ASSERT_TRUE(write(1).is_ok());
  // The host cannot end its part of the connection before this op has ended.
  ops_[1].block(Call::kPwritev, kShardBytes);
  const OpId op = start_op(OpKind::kWrite, 2);
  ops_[1].wait_for_blocked(1);
  lose_connection();
  EXPECT_TRUE(holds_soon([&] {
    poll();
    return !tier_->stats().readable;
  }));
  EXPECT_EQ(tier_->reset().kind(), StatusKind::kUnavailable);
  ops_[1].release();
  EXPECT_FALSE(finish(op).status.is_ok());
  wait_until_usable();
  EXPECT_FALSE(has(1));
  weights = 1;
  EXPECT_TRUE(write(1).is_ok());
  EXPECT_TRUE(read(1).is_ok());
}

TEST_F(HostTiersTest, a_reset_that_a_host_does_not_confirm_in_time_is_repeated) {
  remote_.reset_timeout = std::chrono::milliseconds(1);
  start();
  ASSERT_TRUE(write(1).is_ok());
  ops_[1].block(Call::kMkdir);  // of the next epoch
  EXPECT_FALSE(tier_->reset().is_ok());
  EXPECT_FALSE(tier_->stats().writable);
  EXPECT_FALSE(tier_->stats().readable);
  EXPECT_FALSE(write(2).is_ok());
  ops_[1].release();
  wait_until_usable();
  EXPECT_FALSE(has(1));
  EXPECT_TRUE(write(1).is_ok());
}

TEST_F(HostTiersTest, a_reset_can_begin_without_waiting_for_any_host) {
  remote_.reset_timeout = std::chrono::hours(1);
  for (FsTierOptions& options : options_) options.op_timeout = std::chrono::hours(1);
  start();
  ASSERT_TRUE(write(1).is_ok());
  for (FaultyFileOps& ops : ops_) ops.block(Call::kMkdir);  // of the next epoch
  tier_->begin_reset(77);
  EXPECT_FALSE(has(1));
  EXPECT_FALSE(tier_->stats().writable);
  EXPECT_FALSE(write(2).is_ok());
  for (FaultyFileOps& ops : ops_) ops.release();
  wait_until_usable();
  EXPECT_FALSE(has(1));
  EXPECT_TRUE(write(1).is_ok());
}

TEST_F(HostTiersTest, a_part_from_before_a_reset_that_missed_its_host_is_never_used) {
  for (const std::uint32_t missed : {1u, 0u}) {
    start();
    ASSERT_TRUE(write(1).is_ok());
    stop();
    // The next engine resets its tiers, and this host is lost before that.
    TempDir copy;
    std::filesystem::copy(root_[missed].path(), copy.path(), std::filesystem::copy_options::recursive);
    start();
    ASSERT_TRUE(tier_->reset().is_ok());
    stop();
    std::filesystem::remove_all(root_[missed].path());
    std::filesystem::copy(copy.path(), root_[missed].path(), std::filesystem::copy_options::recursive);
    // New weights under the same name.
    ++weights;
    start();
    EXPECT_FALSE(has(1)) << "host " << missed;
    EXPECT_TRUE(write(1).is_ok());
    EXPECT_TRUE(read(1).is_ok()) << "host " << missed;
    restart();
    EXPECT_TRUE(has(1)) << "the hosts use different epochs again";
    EXPECT_TRUE(read(1).is_ok());
    stop();
  }
}

TEST_F(HostTiersTest, a_part_from_before_a_missed_reset_is_not_used_after_another_host_got_a_new_directory) {
  for (const std::uint32_t missed : {1u, 0u}) {
    start();
    ASSERT_TRUE(write(1).is_ok());
    stop();
    TempDir copy;
    std::filesystem::copy(root_[missed].path(), copy.path(), std::filesystem::copy_options::recursive);
    start();
    ASSERT_TRUE(tier_->reset().is_ok());
    stop();
    std::filesystem::remove_all(root_[missed].path());
    std::filesystem::copy(copy.path(), root_[missed].path(), std::filesystem::copy_options::recursive);
    // The epochs of both hosts have the same number again.
    std::filesystem::remove_all(root_[1 - missed].path());
    ++weights;
    start();
    EXPECT_FALSE(has(1)) << "host " << missed;
    EXPECT_TRUE(write(1).is_ok());
    EXPECT_TRUE(read(1).is_ok()) << "host " << missed;
    stop();
    for (const TempDir& root : root_) std::filesystem::remove_all(root.path());
  }
}

TEST_F(HostTiersTest, epochs_of_the_same_number_that_other_engines_made_do_not_agree) {
  start();
  ASSERT_TRUE(write(1).is_ok());
  stop();
  // On each host, another engine is reset, and a later one begins the next epoch.
  for (FsTierOptions chosen : options_) {
    for (const bool resets : {true, false}) {
      const auto alone = make_fs_tier(chosen);
      const Status reset = resets ? alone->reset() : Status::ok();
      EXPECT_TRUE(reset.is_ok());
      alone->close();
    }
  }
  start();
  EXPECT_FALSE(has(1));
  EXPECT_TRUE(write(1).is_ok());
  restart();
  EXPECT_TRUE(has(1));
  EXPECT_TRUE(read(1).is_ok());
}

TEST_F(HostTiersTest, engines_that_started_at_once_agree_at_their_next_start) {
  start();
  ASSERT_TRUE(write(1).is_ok());
  stop();
  // Each of two engines was the first one on one of the hosts.
  for (FsTierOptions chosen : options_) {
    chosen.epoch = {static_cast<std::uint64_t>(chosen.root_dir == options_[0].root_dir ? 7 : 8), true};
    make_fs_tier(chosen)->close();
  }
  start();
  ASSERT_TRUE(write(2).is_ok());
  const auto id_on = [&](std::uint32_t host) {
    const auto tier = make_fs_tier(options_[host]);
    const std::uint64_t id = tier->stats().epoch_id;
    tier->close();
    return id;
  };
  const std::uint64_t agreed = id_on(0);
  EXPECT_EQ(id_on(1), agreed);
  stop();
  for (const TempDir& root : root_) std::filesystem::remove_all(root.path());
  for (FsTierOptions chosen : options_) {
    chosen.epoch = {static_cast<std::uint64_t>(chosen.root_dir == options_[0].root_dir ? 7 : 8), true};
    make_fs_tier(chosen)->close();
  }
  start();
  EXPECT_EQ(id_on(0), agreed) << "the other engine would begin another epoch";
}

TEST_F(HostTiersTest, a_directory_that_is_removed_while_the_engine_runs_makes_its_chunks_misses) {
  for (const std::uint32_t host : {1u, 0u}) {
    start();
    for (std::uint32_t number = 1; number <= 5; ++number) ASSERT_TRUE(write(number).is_ok());
    std::filesystem::remove_all(root_[host].path());
    EXPECT_TRUE(holds_soon([&] {
      poll();
      return tier_->contains(key_of(1)) != Presence::kPresent &&
             tier_->contains(key_of(5)) != Presence::kPresent;
    })) << "host "
        << host;
    for (std::uint32_t number = 1; number <= 5; ++number) EXPECT_FALSE(has(number)) << "host " << host;
    EXPECT_TRUE(holds_soon([&] { return write(9).is_ok(); }));
    restart();
    EXPECT_TRUE(has(9)) << "the hosts use different epochs";
    EXPECT_TRUE(read(9).is_ok());
    stop();
    for (const TempDir& root : root_) std::filesystem::remove_all(root.path());
  }
}

// ---- the opening of the tiers

TEST_F(HostTiersTest, a_host_that_cannot_open_its_tiers_is_named_with_the_reason) {
  problem_ = "secondary_tiers: /mnt/kv does not exist";
  EXPECT_THAT(message_of<ResourceError>([&] { start(); }),
              HasSubstr("the tiers of the host of rank 1 at 127.0.0.1 cannot be used: secondary_tiers: "
                        "/mnt/kv does not exist"));
}

class OpeningHosts : public TwoHosts {
 protected:
  std::unique_ptr<Tier> open_part(std::uint32_t host, EpochChoice epoch) override {
    if (host == 1 && while_opening_) std::exchange(while_opening_, nullptr)();
    return TwoHosts::open_part(host, epoch);
  }

  std::function<void()> while_opening_;
};

TEST_F(OpeningHosts, a_connection_that_is_lost_while_a_host_opens_its_tiers_does_not_fail_the_start) {
  while_opening_ = [this] { lose_connection(); };
  start();
  EXPECT_TRUE(write(1).is_ok());
  EXPECT_TRUE(read(1).is_ok());
  restart();
  EXPECT_TRUE(has(1));
}

TEST_F(OpeningHosts, a_host_that_shuts_down_while_it_opens_its_tiers_is_named) {
  while_opening_ = [this] { agent_->close(); };
  EXPECT_EQ(message_of<ResourceError>([&] { start(); }),
            "the tiers of the host of rank 1 at 127.0.0.1 cannot be used: it has shut down");
}

// ---- clocks

// File operations of a host whose wall clock, and that of its file system, is `ahead` of the others.
class SkewedFileOps : public FaultyFileOps {
 public:
  explicit SkewedFileOps(Nanos ahead) : ahead_(ahead.count()) {}
  int stat(int directory, const std::string& path, FileInfo* info) override {
    return shifted(FaultyFileOps::stat(directory, path, info), info);
  }
  int fstat(int fd, FileInfo* info) override { return shifted(FaultyFileOps::fstat(fd, info), info); }
  int set_mtime(int directory, const std::string& path, std::int64_t nanos) override {
    return FaultyFileOps::set_mtime(directory, path, nanos - ahead_);
  }

 private:
  int shifted(int result, FileInfo* info) const {
    if (result == 0) info->mtime_nanos += ahead_;
    return result;
  }
  const std::int64_t ahead_;
};

class SkewedHosts : public TwoHosts {
 protected:
  SkewedHosts() {
    for (std::uint32_t host = 0; host < kHosts; ++host) options_[host].file_ops = &skewed_[host];
  }
  ~SkewedHosts() override {
    stop();
    for (SkewedFileOps& ops : skewed_) ops.wait_for_all_closed();
  }
  SkewedFileOps skewed_[kHosts] = {SkewedFileOps(-std::chrono::minutes(10)),
                                   SkewedFileOps(std::chrono::minutes(10))};
};

TEST_F(SkewedHosts, clocks_that_are_minutes_apart_lose_no_chunk) {
  start();
  for (std::uint32_t number = 1; number <= 20; ++number) ASSERT_TRUE(write(number).is_ok());
  for (int i = 0; i < 2; ++i) {
    for (std::uint32_t number = 1; number <= 20; ++number) {
      EXPECT_TRUE(has(number));
      EXPECT_TRUE(read(number).is_ok());
    }
    restart();
  }
  EXPECT_EQ(read(21).kind(), StatusKind::kNotFound);
  ASSERT_TRUE(tier_->reset().is_ok());
  EXPECT_FALSE(has(1));
  ++weights;
  ASSERT_TRUE(write(1).is_ok());
  EXPECT_TRUE(read(1).is_ok());
  restart();
  EXPECT_FALSE(has(1)) << "written after a reset";
}

TEST_F(SkewedHosts, full_directories_keep_the_newest_chunks_over_a_restart) {
  for (FsTierOptions& options : options_) options.max_bytes = std::uint64_t{1} << 20;
  start();
  for (std::uint32_t number = 0; number < 250; ++number) (void)write(number);
  EXPECT_TRUE(holds_soon([&] {
    poll();
    return records_on(0) == records_on(1);
  }));
  std::vector<std::uint32_t> kept;
  for (std::uint32_t number = 0; number < 250; ++number) {
    if (has(number)) kept.push_back(number);
  }
  ASSERT_FALSE(kept.empty());
  EXPECT_GE(kept.front(), 100u) << "an old chunk was kept";
  restart();
  for (const std::uint32_t number : kept) {
    EXPECT_TRUE(has(number));
    EXPECT_TRUE(read(number).is_ok());
  }
}

// ---- orders that fit no host

TEST_F(HostTiersTest, orders_that_do_not_fit_the_host_end_the_connection) {
  start();
  tier_.reset();
  links_.reset();  // it would connect again, and replace the connection of the test
  HostOp op;
  op.key = key_of(1);
  const auto ends = [&](FrameType type, const Bytes& body) {
    OtherScheduler other(endpoint());
    EXPECT_TRUE(other.reads(FrameType::kReady));
    other.send(type, body);
    return other.is_closed_soon();
  };
  op.row = static_cast<RowId>(region_[1]->area_bytes() / kPageBytes - 1);  // two pages do not fit
  EXPECT_TRUE(ends(FrameType::kOps, encode(TierOps{0, {op}})));
  op.row = 0xFFFFFFFF;
  EXPECT_TRUE(ends(FrameType::kOps, encode(TierOps{0, {op}})));
  op.row = 0;
  op.group = 2;
  EXPECT_TRUE(ends(FrameType::kOps, encode(TierOps{0, {op}})));
  op.group = 0;
  op.entry_info.tenant = 1;
  EXPECT_TRUE(ends(FrameType::kOps, encode(TierOps{0, {op}}))) << "there are no tenants";
  op.entry_info.tenant = 0;
  TierUse use;
  use.key = op.key;
  use.entry_info.tenant = 1;
  EXPECT_TRUE(ends(FrameType::kUses, encode(TierUsesFrame{0, false, {use}})));
  EXPECT_TRUE(ends(FrameType::kOps, encode(TierOps{1, {op}})));
  EXPECT_TRUE(ends(FrameType::kOps, Bytes{0, 1}));
  EXPECT_TRUE(ends(FrameType::kLookup, encode(TierLookup{3, KeyOrder::kNone, 0, {}})));
  EXPECT_TRUE(ends(FrameType::kLookup, encode(TierLookup{0, {KeyOrder::kNone, 1}, 0, {op.key}})));
  EXPECT_TRUE(ends(FrameType::kReset, encode(TierReset{1, 1, 1})));
  EXPECT_TRUE(ends(FrameType::kState, encode(TierState{}))) << "a frame of the other direction";
}

TEST_F(HostTiersTest, closing_the_tier_waits_for_ops_that_run_on_another_host) {
  start();
  ops_[1].block(Call::kPwritev, kShardBytes);
  const OpId op = start_op(OpKind::kWrite, 1);
  ops_[1].wait_for_blocked(1);
  EXPECT_TRUE(holds_soon([&] { return records_on(0) == 1; })) << "close() cancels what has not started";
  std::thread releaser([&] { ops_[1].release(); });
  tier_->close();
  releaser.join();
  ASSERT_TRUE(has_ended(op));
  EXPECT_TRUE(finish(op).status.is_ok());
}

TEST_F(HostTiersTest, a_closed_connection_leaves_nothing_usable) {
  start();
  ASSERT_TRUE(write(1).is_ok());
  links_->close();
  poll();
  EXPECT_FALSE(tier_->stats().readable);
  EXPECT_EQ(tier_->contains(key_of(1)), Presence::kLookupFailed);
  EXPECT_EQ(read(1).kind(), StatusKind::kUnavailable);
}

TEST_F(HostTiersTest, a_host_whose_tiers_were_closed_during_an_op_takes_no_new_ones) {
  options_[1].close_wait = remote_.close_wait = std::chrono::milliseconds(1);
  start();
  ASSERT_TRUE(write(1).is_ok());
  ops_[1].block(Call::kPreadv, kShardBytes);
  (void)start_op(OpKind::kRead, 1);
  ops_[1].wait_for_blocked(1);
  tier_.reset();
  links_.reset();
  OtherScheduler other(endpoint());
  EXPECT_TRUE(other.reads(FrameType::kReady));
  other.send(FrameType::kOpenTiers, encode(OpenTiers{1, {{}}, "settings"}));
  EXPECT_TRUE(other.reads(FrameType::kTiersOpened));
  other.send(FrameType::kReset, encode(TierReset{0, 1, 1}));
  EXPECT_TRUE(other.reads(FrameType::kResetDone));
  EXPECT_FALSE(other.has_seen(FrameType::kOpsEnded)) << "a thread still uses a row";
}

// If the end of a part counted twice, the op would end while a thread of another host still uses the row.
TEST(RemoteTierTest, memory_that_runs_out_in_a_poll_ends_no_op_twice) {
  const auto channel = std::make_shared<TierChannel>([] {});
  channel->begin_open({{}}, "settings");
  channel->begin_connection();
  EXPECT_EQ(channel->deliver(FrameType::kOpsEnded, {}, Nanos(0)), TierChannel::Delivery::kTaken);
  const std::unique_ptr<Tier> tier = make_remote_tier(channel, 0, {});
  std::vector<Completion> ended;
  std::vector<TierRemoval> removals;
  tier->poll(&ended, &removals);
  constexpr OpId kOps = 40;
  TierResults results;
  for (OpId id = 1; id <= kOps; ++id) {
    TierOp op;
    op.id = id;
    op.key = key_of(static_cast<std::uint32_t>(id));
    tier->submit({op});
    results.results.push_back({id, StatusKind::kOk, 0, 1, 0, 0});
  }
  EXPECT_EQ(channel->deliver(FrameType::kResults, encode(results), Nanos(0)), TierChannel::Delivery::kTaken);
  EXPECT_GT(fail_each_allocation([&] { tier->poll(&ended, &removals); }, [] {}), 0u);
  std::vector<OpId> ids;
  for (const Completion& one : ended) ids.push_back(one.id);
  std::vector<OpId> all(kOps);
  std::iota(all.begin(), all.end(), OpId{1});
  EXPECT_EQ(ids, all);
}

// The caller counts this part as failed. If an op of it ended too, the op would end early, as above.
TEST(RemoteTierTest, memory_that_runs_out_while_ops_are_refused_ends_all_or_none) {
  const auto channel = std::make_shared<TierChannel>([] {});
  channel->begin_open({{}}, "settings");
  channel->begin_connection();
  EXPECT_EQ(channel->deliver(FrameType::kOpsEnded, {}, Nanos(0)), TierChannel::Delivery::kTaken);
  RemoteTierOptions options;
  options.reset_timeout = std::chrono::hours(1);
  const std::unique_ptr<Tier> tier = make_remote_tier(channel, 0, options);
  tier->begin_reset(7);
  const auto ended = [&] {
    std::vector<Completion> completions;
    std::vector<TierRemoval> removals;
    tier->poll(&completions, &removals);
    EXPECT_EQ(tier->stats().queued_reads, 0u);
    return completions.size();
  };
  OpId next = 0;
  const auto submit = [&] {
    std::vector<TierOp> ops(3);
    for (TierOp& op : ops) {
      op.id = ++next;
      op.key = key_of(static_cast<std::uint32_t>(next));
    }
    tier->submit(std::move(ops));
  };
  EXPECT_GT(fail_each_allocation(submit, [&] { EXPECT_EQ(ended(), 0u); }), 0u);
  EXPECT_EQ(ended(), 3u);
}

TEST(RemoteTierTest, memory_that_runs_out_in_a_reset_loses_no_write_that_waits) {
  const auto channel = std::make_shared<TierChannel>([] {});
  channel->begin_open({{}}, "settings");
  channel->begin_connection();
  EXPECT_EQ(channel->deliver(FrameType::kOpsEnded, {}, Nanos(0)), TierChannel::Delivery::kTaken);
  RemoteTierOptions options;
  options.most_writes = 1;
  options.close_wait = Nanos(0);
  const std::unique_ptr<Tier> tier = make_remote_tier(channel, 0, options);
  for (OpId id = 1; id <= 3; ++id) {
    TierOp op;
    op.id = id;
    op.kind = OpKind::kWrite;
    op.key = key_of(static_cast<std::uint32_t>(id));
    tier->submit({op});
  }
  EXPECT_GT(fail_each_allocation([&] { tier->begin_reset(7); }, [] {}), 0u);
  std::vector<Completion> ended;
  std::vector<TierRemoval> removals;
  tier->poll(&ended, &removals);
  EXPECT_EQ(ended.size(), 2u);
  EXPECT_EQ(tier->stats().queued_writes, 1u) << "it was sent";
}

// The ids of writes of tenants 1 and 2 end in 1 and 2.
class RemoteTenantWrites : public ::testing::Test {
 protected:
  RemoteTenantWrites() {
    channel_->begin_open({{}}, "settings");
    channel_->begin_connection();
    EXPECT_EQ(channel_->deliver(FrameType::kOpsEnded, {}, Nanos(0)), TierChannel::Delivery::kTaken);
    RemoteTierOptions options;
    options.most_writes = 1;
    options.close_wait = Nanos(0);
    options.group_bytes = {kPageBytes, 3 * kPageBytes};
    tier_ = make_remote_tier(channel_, 0, options);
  }
  void write(TenantId tenant, int count, double weight = 0.5, std::uint8_t group = 0) {
    std::vector<TierOp> ops(static_cast<std::size_t>(count));
    for (TierOp& op : ops) {
      op.id = 10 * ++last_ + tenant;
      op.kind = OpKind::kWrite;
      op.key = key_of(static_cast<std::uint32_t>(op.id));
      op.entry_info.tenant = tenant;
      op.weight = weight;
      op.group = group;
    }
    tier_->submit(std::move(ops));
  }
  void poll() { tier_->poll(&ended_, &removals_); }
  // Returns the writes that were sent since the last call.
  std::vector<OpId> sent() {
    std::vector<OpId> ids;
    for (const auto& [type, body] : channel_->take_frames()) {
      if (type != FrameType::kOps) continue;
      const TierOps frame = decode_ops(body).value();
      for (const HostOp& op : frame.ops) ids.push_back(op.id);
    }
    return ids;
  }
  void end(OpId id) {
    const TierResults results{0, {{id, StatusKind::kOk, 0, 1, 0, 0}}};
    EXPECT_EQ(channel_->deliver(FrameType::kResults, encode(results), Nanos(0)),
              TierChannel::Delivery::kTaken);
    poll();
  }
  // Ends one write after the other. Returns those that are sent meanwhile.
  std::vector<OpId> run(int count) {
    std::vector<OpId> order;
    for (int i = 0; i < count; ++i) {
      const std::vector<OpId> some = sent();
      EXPECT_EQ(some.size(), 1u);
      if (some.empty()) break;
      order.push_back(some.front());
      end(some.front());
    }
    return order;
  }

  std::shared_ptr<TierChannel> channel_ = std::make_shared<TierChannel>([] {});
  std::unique_ptr<Tier> tier_;
  OpId last_ = 0;
  std::vector<Completion> ended_;
  std::vector<TierRemoval> removals_;
};

TEST_F(RemoteTenantWrites, a_long_queue_of_one_tenant_delays_another_tenants_writes_by_one_each) {
  write(2, 500);
  write(1, 3);
  EXPECT_EQ(run(1), std::vector<OpId>{12}) << "it was sent at once";
  const std::vector<OpId> next = run(6);
  EXPECT_EQ(std::count_if(next.begin(), next.end(), [](OpId id) { return id % 10 == 1; }), 3);
  EXPECT_EQ(run(2), (std::vector<OpId>{52, 62})) << "those of one tenant stay in order";
}

TEST_F(RemoteTenantWrites, are_sent_in_proportion_to_the_tenants_weights) {
  write(2, 200, 0.25);
  write(1, 200, 0.75);
  const std::vector<OpId> order = run(101);
  EXPECT_NEAR(
      static_cast<double>(std::count_if(order.begin(), order.end(), [](OpId id) { return id % 10 == 1; })),
      75, 1);
}

TEST_F(RemoteTenantWrites, of_large_parts_are_sent_less_often) {
  write(2, 200, 0.5, 1);
  write(1, 200, 0.5, 0);
  const std::vector<OpId> order = run(101);
  EXPECT_NEAR(
      static_cast<double>(std::count_if(order.begin(), order.end(), [](OpId id) { return id % 10 == 1; })),
      75, 1);
}

TEST_F(RemoteTenantWrites, that_wait_lose_none_when_memory_runs_out) {
  write(2, 3);
  write(1, 3);
  const std::vector<OpId> first = sent();
  ASSERT_EQ(first.size(), 1u);
  const TierResults results{0, {{first.front(), StatusKind::kOk, 0, 1, 0, 0}}};
  EXPECT_EQ(channel_->deliver(FrameType::kResults, encode(results), Nanos(0)), TierChannel::Delivery::kTaken);
  EXPECT_GT(fail_each_allocation([&] { poll(); }, [] {}), 0u);
  EXPECT_EQ(run(5).size(), 5u);
  EXPECT_TRUE(sent().empty());
  EXPECT_EQ(ended_.size(), 6u);
  EXPECT_GT(fail_each_allocation([&] { write(1, 3); }, [&] { EXPECT_EQ(tier_->stats().queued_writes, 0u); }),
            0u);
  EXPECT_EQ(run(3).size(), 3u);
}

TEST(RemoteTierTest, records_of_a_host_are_unknown_after_its_connection_was_lost) {
  const auto channel = std::make_shared<TierChannel>([] {});
  const auto deliver = [&](FrameType type, const Bytes& body) {
    EXPECT_EQ(channel->deliver(type, body, Nanos(0)), TierChannel::Delivery::kTaken);
  };
  channel->begin_open({{}}, "settings");
  const std::unique_ptr<Tier> tier = make_remote_tier(channel, 0, {});
  const auto poll = [&] {
    std::vector<Completion> ended;
    std::vector<TierRemoval> removals;
    tier->poll(&ended, &removals);
  };
  const auto connect = [&] {
    channel->begin_connection();
    deliver(FrameType::kOpsEnded, {});
    poll();
  };
  connect();
  tier->prefetch_presence({key_of(1)}, KeyOrder::kNone);
  deliver(FrameType::kAnswers, encode(TierAnswers{0, 0, {{key_of(1), TierAnswers::Found::kPresent}}}));
  poll();
  EXPECT_EQ(tier->contains(key_of(1)), Presence::kPresent);
  channel->end_connection("it was lost");
  connect();
  EXPECT_EQ(tier->contains(key_of(1)), Presence::kUnknown) << "it may have removed the record meanwhile";
}

// A poll without events does nothing; these are the reasons for which it still has to do something.
TEST(RemoteTierTest, a_poll_without_events_sends_touches_and_reports_the_rest_of_a_reset) {
  constexpr std::uint32_t kKeys = 5000;  // more than one poll reports
  const auto channel = std::make_shared<TierChannel>([] {});
  const auto deliver = [&](FrameType type, const Bytes& body) {
    EXPECT_EQ(channel->deliver(type, body, Nanos(0)), TierChannel::Delivery::kTaken);
  };
  channel->begin_open({{}}, "settings");
  const std::unique_ptr<Tier> tier = make_remote_tier(channel, 0, {});
  std::vector<TierRemoval> removals;
  const auto poll = [&] {
    std::vector<Completion> ended;
    tier->poll(&ended, &removals);
  };
  channel->begin_connection();
  deliver(FrameType::kOpsEnded, {});
  poll();
  poll();
  channel->take_frames();
  tier->touch(key_of(1));
  poll();
  const auto frames = channel->take_frames();
  ASSERT_EQ(frames.size(), 1u);
  EXPECT_TRUE(decode_uses(frames[0].second).value().is_touch);
  std::vector<ChunkKey> keys;
  for (std::uint32_t number = 0; number < kKeys; ++number) keys.push_back(key_of(number));
  tier->prefetch_presence(keys, KeyOrder::kNone);
  for (std::uint32_t number = 0; number < kKeys; ++number)
    deliver(FrameType::kAnswers, encode(TierAnswers{0, 0, {{keys[number], TierAnswers::Found::kPresent}}}));
  poll();
  EXPECT_TRUE(removals.empty());
  channel->end_connection("it was lost");
  poll();
  EXPECT_LT(removals.size(), kKeys);
  for (int i = 0; i < 10; ++i) poll();
  EXPECT_EQ(removals.size(), kKeys);
}

TEST(RemoteTierTest, a_reset_that_is_not_confirmed_is_repeated_without_any_event) {
  const auto channel = std::make_shared<TierChannel>([] {});
  channel->begin_open({{}}, "settings");
  channel->begin_connection();
  EXPECT_EQ(channel->deliver(FrameType::kOpsEnded, {}, Nanos(0)), TierChannel::Delivery::kTaken);
  RemoteTierOptions options;
  options.reset_timeout = Nanos(0);
  const std::unique_ptr<Tier> tier = make_remote_tier(channel, 0, options);
  tier->begin_reset(7);
  channel->take_frames();
  for (int i = 0; i < 3; ++i) {
    std::vector<Completion> ended;
    std::vector<TierRemoval> removals;
    tier->poll(&ended, &removals);
    const auto frames = channel->take_frames();
    ASSERT_EQ(frames.size(), 1u);
    EXPECT_EQ(frames[0].first, FrameType::kReset);
  }
}

TEST(RemoteTierTest, lookups_are_sent_with_their_tenant) {
  const auto channel = std::make_shared<TierChannel>([] {});
  channel->begin_open({{}}, "settings");
  const std::unique_ptr<Tier> tier = make_remote_tier(channel, 0, {});
  channel->begin_connection();
  EXPECT_EQ(channel->deliver(FrameType::kOpsEnded, {}, Nanos(0)), TierChannel::Delivery::kTaken);
  std::vector<Completion> ended;
  std::vector<TierRemoval> removals;
  tier->poll(&ended, &removals);
  (void)channel->take_frames();
  const LookupOptions options{KeyOrder::kPrefix, 2, 0.25};
  tier->prefetch_presence({key_of(1)}, options);
  const auto frames = channel->take_frames();
  ASSERT_EQ(frames.size(), 1u);
  ASSERT_EQ(frames[0].first, FrameType::kLookup);
  const auto lookup = decode_lookup(frames[0].second);
  ASSERT_TRUE(lookup);
  EXPECT_EQ(lookup->options, options);
}

TEST(RemoteTierTest, a_host_that_could_not_reset_its_tier_is_not_used_before_its_next_state) {
  const auto channel = std::make_shared<TierChannel>([] {});
  channel->begin_open({{}}, "settings");
  channel->begin_connection();
  const std::unique_ptr<Tier> tier = make_remote_tier(channel, 0, {});
  const auto deliver = [&](FrameType type, const Bytes& body) {
    EXPECT_EQ(channel->deliver(type, body, Nanos(0)), TierChannel::Delivery::kTaken);
    std::vector<Completion> ended;
    std::vector<TierRemoval> removals;
    tier->poll(&ended, &removals);
  };
  deliver(FrameType::kOpsEnded, {});
  deliver(FrameType::kState, encode(TierState{}));
  EXPECT_TRUE(tier->stats().readable && tier->stats().writable);
  tier->begin_reset(7);
  deliver(FrameType::kResetDone, encode(TierResetDone{0, 1, StatusKind::kIo}));
  EXPECT_FALSE(tier->stats().readable || tier->stats().writable);
  deliver(FrameType::kState, encode(TierState{}));
  EXPECT_TRUE(tier->stats().readable && tier->stats().writable);
  tier->begin_reset(8);
  deliver(FrameType::kResetDone, encode(TierResetDone{0, 2, StatusKind::kOk}));
  EXPECT_TRUE(tier->stats().readable && tier->stats().writable);
}

TEST(RemoteTierTest, an_epoch_from_before_a_refresh_is_not_reported) {
  const auto channel = std::make_shared<TierChannel>([] {});
  channel->begin_open({{}}, "settings");
  channel->begin_connection();
  const std::unique_ptr<Tier> tier = make_remote_tier(channel, 0, {});
  const auto deliver = [&](FrameType type, const Bytes& body) {
    EXPECT_EQ(channel->deliver(type, body, Nanos(0)), TierChannel::Delivery::kTaken);
    std::vector<Completion> ended;
    std::vector<TierRemoval> removals;
    tier->poll(&ended, &removals);
  };
  const auto deliver_state = [&](std::uint64_t epoch_id) {
    TierState state;
    state.stats.epoch_id = epoch_id;
    deliver(FrameType::kState, encode(state));
    return tier->stats().epoch_id;
  };
  deliver(FrameType::kOpsEnded, {});
  EXPECT_EQ(deliver_state(7), 7u);
  (void)channel->take_frames();
  tier->refresh_epoch();
  const auto frames = channel->take_frames();
  ASSERT_EQ(frames.size(), 1u);
  const auto order = decode_reset(frames[0].second);
  ASSERT_TRUE(order);
  EXPECT_TRUE(order->refreshes);
  EXPECT_EQ(tier->stats().epoch_id, 0u);
  EXPECT_EQ(deliver_state(7), 0u) << "the host may have sent it before it received the order";
  deliver(FrameType::kResetDone, encode(TierResetDone{0, order->epoch, StatusKind::kOk}));
  EXPECT_EQ(tier->stats().epoch_id, 0u);
  EXPECT_EQ(deliver_state(8), 8u);
}

TEST(RemoteTierTest, a_key_that_a_host_skipped_is_not_missing_there) {
  const auto channel = std::make_shared<TierChannel>([] {});
  channel->begin_open({{}}, "settings");
  channel->begin_connection();
  const std::unique_ptr<Tier> tier = make_remote_tier(channel, 0, {});
  std::vector<TierRemoval> removals;
  const auto poll = [&] {
    std::vector<Completion> ended;
    tier->poll(&ended, &removals);
  };
  EXPECT_EQ(channel->deliver(FrameType::kOpsEnded, {}, Nanos(0)), TierChannel::Delivery::kTaken);
  poll();
  for (int i = 0; i < 2; ++i) {
    (void)channel->take_frames();
    tier->prefetch_presence({key_of(1)}, KeyOrder::kPrefix);
    EXPECT_EQ(channel->take_frames().size(), 1u) << "it is asked again";
    EXPECT_EQ(tier->contains(key_of(1)), Presence::kLookupPending);
    const Bytes answer = encode(TierAnswers{0, 0, {{key_of(1), TierAnswers::Found::kSkipped}}});
    EXPECT_EQ(channel->deliver(FrameType::kAnswers, answer, Nanos(0)), TierChannel::Delivery::kTaken);
    poll();
    EXPECT_EQ(tier->contains(key_of(1)), Presence::kSkipped);
  }
  EXPECT_TRUE(removals.empty()) << "the other parts of the chunk are not useless";
}

TEST(RemoteTierTest, closing_does_not_throw_if_memory_runs_out) {
  bool failed = true;
  for (unsigned allocation = 0; failed; ++allocation) {
    ASSERT_LT(allocation, 200u);
    const auto channel = std::make_shared<TierChannel>([] {});
    channel->begin_open({{}}, "settings");
    channel->begin_connection();
    EXPECT_EQ(channel->deliver(FrameType::kOpsEnded, {}, Nanos(0)), TierChannel::Delivery::kTaken);
    RemoteTierOptions options;
    options.most_writes = 1;
    options.close_wait = Nanos(0);
    const std::unique_ptr<Tier> tier = make_remote_tier(channel, 0, options);
    for (OpId id = 1; id <= 3; ++id) {
      TierOp op;
      op.id = id;
      op.kind = OpKind::kWrite;
      op.key = key_of(static_cast<std::uint32_t>(id));
      tier->submit({op});
    }
    (void)channel->take_frames();
    {
      const FailingAllocation next(allocation);
      EXPECT_NO_THROW(tier->close());
      failed = next.came();
    }
    EXPECT_EQ(tier->stats().queued_writes == 1 && channel->take_frames().size() == 1, !failed)
        << "the waiting writes have ended, and the one that was sent is cancelled";
  }
}

// ---- a tier that the test plays

// Blocks the thread that passes it until the test lets it pass.
class Gate {
 public:
  void pass() {
    const MutexLock lock(mutex_);
    ++arrived_;
    changed_.notify_all();
    while (!is_open_ && passes_ == 0) changed_.wait_for(mutex_, std::chrono::minutes(2));
    if (passes_ > 0) --passes_;
    ++passed_;
  }
  void let_one_pass() {
    const MutexLock lock(mutex_);
    ++passes_;
    changed_.notify_all();
  }
  void open() {
    const MutexLock lock(mutex_);
    is_open_ = true;
    changed_.notify_all();
  }
  // Waits until the thread waits, and nothing that lets it pass is left.
  void wait_until_blocked() {
    EXPECT_TRUE(holds_soon([&] {
      const MutexLock lock(mutex_);
      return passes_ == 0 && arrived_ == passed_ + 1;
    }));
  }

 private:
  Mutex mutex_;
  CondVar changed_;
  bool is_open_ GUARDED_BY(mutex_) = false;
  std::size_t arrived_ GUARDED_BY(mutex_) = 0, passed_ GUARDED_BY(mutex_) = 0, passes_ GUARDED_BY(mutex_) = 0;
};

class GatedTier : public Tier {
 public:
  std::string_view name() const override { return "played"; }
  void submit(std::vector<TierOp>) override {
    if (fails_to_submit) throw std::bad_alloc();
  }
  bool cancel(OpId) override { return false; }
  void poll(std::vector<Completion>* completions, std::vector<TierRemoval>* removals) override {
    on_poll();
    std::ranges::move(std::exchange(ended, {}), std::back_inserter(*completions));
    if (batches.empty()) return;
    *removals = std::move(batches.front());
    batches.pop_front();
  }
  Presence contains(const ChunkKey& key) const override {
    const auto found = presence_of.find(key);
    return found == presence_of.end() ? presence : found->second;
  }
  void prefetch_presence(std::vector<ChunkKey> keys, const LookupOptions& options) override {
    asked.emplace_back(std::move(keys), options);
  }
  void forget_miss(const ChunkKey& key) override { forgotten.push_back(key); }
  void touch(const ChunkKey&) override {}
  Status reset(std::uint64_t startup_id) override {
    startup_ids.push_back(startup_id);
    if (std::exchange(fails_to_reset, false)) throw std::bad_alloc();
    batches = std::move(after_reset);
    return reset_status;
  }
  void refresh_epoch() override { ++refreshed; }
  TierStats stats() const override { return {}; }
  void close() override {}
  double estimate_read_seconds(std::uint64_t) const override { return 0; }

  std::vector<Completion> ended;                              // for the next poll
  std::deque<std::vector<TierRemoval>> batches, after_reset;  // one for each poll
  std::function<void()> on_poll = [] {};
  std::vector<std::uint64_t> startup_ids;  // of the resets
  Presence presence = Presence::kAbsent;
  std::map<ChunkKey, Presence> presence_of;  // of keys with another one
  std::vector<ChunkKey> forgotten;           // arguments of forget_miss()
  std::vector<std::pair<std::vector<ChunkKey>, LookupOptions>> asked;
  Status reset_status;
  bool fails_to_submit = false, fails_to_reset = false;
  std::atomic<int> refreshed{0};  // calls of refresh_epoch()
};

// A tier whose store does not respond.
class SilentTier final : public GatedTier {
 public:
  explicit SilentTier(std::string problem) : problem_(std::move(problem)) {}
  TierStats stats() const override {
    TierStats stats;
    stats.readable = stats.writable = false;
    return stats;
  }
  std::string epoch_problem() const override { return problem_; }

 private:
  const std::string problem_;
};

class SilentHosts : public TwoHosts {
 protected:
  ~SilentHosts() override { stop(); }
  std::unique_ptr<Tier> open_part(std::uint32_t, EpochChoice) override {
    return std::make_unique<SilentTier>(reason_);
  }
  std::string reason_;
};

// A Redis server chooses the text of its errors. vLLM's log is UTF-8.
TEST_F(SilentHosts, the_reason_of_a_store_is_logged_as_printable_text_of_limited_length) {
  reason_ = "bad\xff\nline" + std::string(2 * kMostEpochProblem, 'x');
  start();
  const std::string cut = "bad??line" + std::string(kMostEpochProblem - 9, 'x');
  EXPECT_THAT(
      links_->take_events(),
      ElementsAre(HasSubstr(fmt::format("on the host of rank 0 ({0}), the host of rank 1 ({0}). ", cut))));
}

TEST_F(SilentHosts, a_host_without_a_reason_is_named_alone) {
  start();
  EXPECT_THAT(links_->take_events(), ElementsAre(HasSubstr("on the host of rank 0, the host of rank 1. ")));
}

class PlayedHostTiers : public TwoHosts {
 protected:
  ~PlayedHostTiers() override {
    turns_.open();
    tiers_->close();
  }
  PlayedHostTiers() {
    region_[1] = HostRegion::attach_worker(region_options(1), 1, {{kShardBytes, kPageBytes}, "layout"});
    auto made = std::make_unique<GatedTier>();
    played_ = made.get();
    Tiers opened;
    opened.push_back(std::move(made));
    tiers_ = std::make_unique<HostTiers>(region_[1], [] {});
    pending_ = std::move(opened);
  }
  void open(std::size_t tenants = 0) { tiers_->open(1, std::move(pending_), tenants); }
  std::size_t count_soon(FrameType wanted) {
    std::size_t count = 0;
    EXPECT_TRUE(holds_soon([&] {
      for (const HostTiers::Frame& frame : tiers_->frames()) count += frame.first == wanted;
      return count > 0;
    }));
    return count;
  }

  Gate turns_;
  GatedTier* played_ = nullptr;
  Tiers pending_;
  std::unique_ptr<HostTiers> tiers_;
};

TEST_F(PlayedHostTiers, a_frame_of_one_connection_is_not_sent_on_the_next_one) {
  played_->on_poll = [&] { turns_.pass(); };
  open();
  turns_.wait_until_blocked();
  tiers_->begin_connection();
  turns_.let_one_pass();
  turns_.wait_until_blocked();  // in the turn that has executed begin_connection()
  tiers_->end_connection();
  tiers_->begin_connection();
  turns_.let_one_pass();
  turns_.wait_until_blocked();  // that turn is over
  EXPECT_TRUE(tiers_->frames().empty()) << "its frames were sent on the new connection";
  turns_.open();
  EXPECT_EQ(count_soon(FrameType::kOpsEnded), 1u);
}

TEST_F(PlayedHostTiers, an_op_of_an_earlier_connection_ends_before_the_next_connection_is_used) {
  played_->on_poll = [&] { turns_.pass(); };
  const auto next_turn = [&] {
    turns_.let_one_pass();
    turns_.wait_until_blocked();
  };
  open();
  turns_.wait_until_blocked();
  tiers_->begin_connection();
  next_turn();
  HostOp op;
  op.id = 1;
  op.key = key_of(1);
  ASSERT_TRUE(tiers_->take(FrameType::kOps, encode(TierOps{0, {op}})));
  next_turn();
  tiers_->end_connection();
  tiers_->begin_connection();
  next_turn();  // executes begin_connection()
  next_turn();
  EXPECT_TRUE(tiers_->frames().empty()) << "a thread still uses the row";
  Completion completion;
  completion.id = 1;
  played_->ended.push_back(completion);
  turns_.open();
  EXPECT_EQ(count_soon(FrameType::kOpsEnded), 1u);
}

TEST_F(PlayedHostTiers, removals_by_a_reset_are_not_sent_however_many_polls_they_take) {
  const auto removal = [](std::uint32_t number) {
    return std::vector<TierRemoval>{{key_of(number), TierRemoval::Reason::kReset}};
  };
  played_->after_reset = {removal(1), removal(2), {}, removal(3)};
  open();
  tiers_->begin_connection();
  EXPECT_EQ(count_soon(FrameType::kOpsEnded), 1u);
  ASSERT_TRUE(tiers_->take(FrameType::kReset, encode(TierReset{0, 1, 1})));
  std::vector<ChunkKey> sent;
  EXPECT_TRUE(holds_soon([&] {
    for (const HostTiers::Frame& frame : tiers_->frames()) {
      if (frame.first != FrameType::kRemovals) continue;
      const auto decoded = decode_removals(frame.second);
      for (const TierRemoval& one : decoded->removals) sent.push_back(one.key);
    }
    return !sent.empty();
  }));
  EXPECT_EQ(sent, std::vector<ChunkKey>{key_of(3)}) << "the directory was removed after the reset";
}

// Otherwise many lookups of the same keys would be queued while a store is slow.
TEST_F(PlayedHostTiers, a_lookup_that_has_not_begun_is_not_repeated_in_each_turn) {
  const std::vector<ChunkKey> keys{key_of(1), key_of(2), key_of(3)};
  played_->presence = Presence::kUnknown;
  played_->on_poll = [&] { turns_.pass(); };
  open();
  turns_.wait_until_blocked();
  tiers_->begin_connection();
  turns_.let_one_pass();
  turns_.wait_until_blocked();  // in the turn that has executed begin_connection()
  ASSERT_TRUE(tiers_->take(FrameType::kLookup, encode(TierLookup{0, KeyOrder::kPrefix, 0, keys})));
  turns_.let_one_pass();
  turns_.wait_until_blocked();  // in the turn that has executed the lookup
  const auto end_turns = [&](int turns) {
    for (int turn = 0; turn < turns; ++turn) {
      turns_.let_one_pass();
      turns_.wait_until_blocked();
    }
  };
  end_turns(99);
  ASSERT_EQ(played_->asked.size(), 1u);
  EXPECT_EQ(played_->asked[0].first, keys);
  EXPECT_EQ(played_->asked[0].second, KeyOrder::kPrefix);
  end_turns(1);
  ASSERT_EQ(played_->asked.size(), 2u) << "the tier may have abandoned the lookup";
  EXPECT_THAT(played_->asked[1].first, UnorderedElementsAreArray(keys));
  turns_.open();
}

// The tier has looked up the first keys. It does not look up those after a missing one.
TEST_F(PlayedHostTiers, keys_of_a_prompt_after_a_missing_one_are_answered_and_not_looked_up_again) {
  const std::vector<ChunkKey> keys{key_of(1), key_of(2), key_of(3), key_of(4)};
  played_->presence = Presence::kUnknown;
  played_->on_poll = [&] { turns_.pass(); };
  open();
  turns_.wait_until_blocked();
  tiers_->begin_connection();
  const auto end_turns = [&](int turns) {
    for (int turn = 0; turn < turns; ++turn) {
      turns_.let_one_pass();
      turns_.wait_until_blocked();
    }
  };
  end_turns(1);
  ASSERT_TRUE(tiers_->take(FrameType::kLookup, encode(TierLookup{0, KeyOrder::kPrefix, 0, keys})));
  ASSERT_TRUE(tiers_->take(FrameType::kLookup, encode(TierLookup{0, KeyOrder::kNone, 0, {key_of(5)}})));
  end_turns(2);
  std::map<ChunkKey, TierAnswers::Found> answers;
  const auto take_answers = [&] {
    for (const HostTiers::Frame& frame : tiers_->frames()) {
      if (frame.first != FrameType::kAnswers) continue;
      const auto decoded = decode_answers(frame.second);
      for (const TierAnswers::Answer& one : decoded->answers) answers[one.key] = one.found;
    }
  };
  take_answers();
  EXPECT_THAT(answers, IsEmpty());
  played_->presence_of = {{key_of(1), Presence::kPresent}, {key_of(3), Presence::kAbsent}};
  end_turns(100);
  take_answers();
  EXPECT_THAT(answers, UnorderedElementsAre(Pair(key_of(1), TierAnswers::Found::kPresent),
                                            Pair(key_of(3), TierAnswers::Found::kAbsent),
                                            Pair(key_of(4), TierAnswers::Found::kSkipped)));
  std::vector<ChunkKey> repeated;
  for (std::size_t i = 2; i < played_->asked.size(); ++i)
    repeated.insert(repeated.end(), played_->asked[i].first.begin(), played_->asked[i].first.end());
  EXPECT_THAT(repeated, UnorderedElementsAre(key_of(2), key_of(5)));
  turns_.open();
}

TEST_F(PlayedHostTiers, lookups_belong_to_the_tenants_for_whom_the_scheduler_asks) {
  played_->presence = Presence::kUnknown;
  played_->on_poll = [&] { turns_.pass(); };
  open(3);
  turns_.wait_until_blocked();
  tiers_->begin_connection();
  const auto end_turns = [&](int turns) {
    for (int turn = 0; turn < turns; ++turn) {
      turns_.let_one_pass();
      turns_.wait_until_blocked();
    }
  };
  end_turns(1);
  const LookupOptions first{KeyOrder::kPrefix, 1, 0.75}, second{KeyOrder::kNone, 2, 0.25};
  ASSERT_TRUE(tiers_->take(FrameType::kLookup, encode(TierLookup{0, first, 0, {key_of(1), key_of(2)}})));
  ASSERT_TRUE(tiers_->take(FrameType::kLookup, encode(TierLookup{0, second, 0, {key_of(3)}})));
  EXPECT_FALSE(tiers_->take(FrameType::kLookup, encode(TierLookup{0, {KeyOrder::kNone, 3}, 0, {key_of(4)}})))
      << "there are three tenants";
  end_turns(100);
  ASSERT_EQ(played_->asked.size(), 2u);
  EXPECT_EQ(played_->asked[0].second, first);
  EXPECT_EQ(played_->asked[1].second, second);
  end_turns(1);
  ASSERT_EQ(played_->asked.size(), 4u) << "repeated";
  EXPECT_THAT(played_->asked[2].first, UnorderedElementsAre(key_of(1), key_of(2)));
  EXPECT_EQ(played_->asked[2].second, (LookupOptions{KeyOrder::kNone, 1, 0.75}));
  EXPECT_EQ(played_->asked[3].first, std::vector<ChunkKey>{key_of(3)});
  EXPECT_EQ(played_->asked[3].second, second);
  turns_.open();
}

// Repeated after it was not confirmed in time, or on the next connection.
TEST_F(PlayedHostTiers, a_repeated_reset_is_confirmed_again_and_not_executed_again) {
  played_->reset_status = Status::error(StatusKind::kTimeout, "no answer");
  open();
  tiers_->begin_connection();
  EXPECT_EQ(count_soon(FrameType::kOpsEnded), 1u);
  std::vector<TierResetDone> confirmed;
  const auto confirm = [&](const TierReset& order) {
    ASSERT_TRUE(tiers_->take(FrameType::kReset, encode(order)));
    const std::size_t before = confirmed.size();
    EXPECT_TRUE(holds_soon([&] {
      for (const HostTiers::Frame& frame : tiers_->frames())
        if (frame.first == FrameType::kResetDone) confirmed.push_back(*decode_reset_done(frame.second));
      return confirmed.size() > before;
    }));
    EXPECT_EQ(confirmed.back().epoch, order.epoch);
    EXPECT_EQ(confirmed.back().kind, StatusKind::kTimeout);
  };
  confirm({0, 1, 70});
  confirm({0, 1, 70});
  tiers_->end_connection();
  tiers_->begin_connection();
  confirm({0, 1, 70});
  confirm({0, 2, 80});
  EXPECT_EQ(played_->startup_ids, (std::vector<std::uint64_t>{70, 80}));
}

TEST_F(PlayedHostTiers, an_order_to_read_the_epoch_again_is_executed_once_and_ends_no_epoch) {
  open();
  tiers_->begin_connection();
  EXPECT_EQ(count_soon(FrameType::kOpsEnded), 1u);
  for (int i = 0; i < 2; ++i) {  // repeated if it was not confirmed in time
    ASSERT_TRUE(tiers_->take(FrameType::kReset, encode(TierReset{0, 1, 0, true})));
    EXPECT_EQ(count_soon(FrameType::kResetDone), 1u);
  }
  EXPECT_EQ(played_->refreshed, 1);
  EXPECT_TRUE(played_->startup_ids.empty());
}

TEST_F(PlayedHostTiers, a_key_that_the_tier_skipped_is_answered_at_once) {
  played_->presence = Presence::kSkipped;
  played_->on_poll = [&] { turns_.pass(); };
  open();
  turns_.wait_until_blocked();
  tiers_->begin_connection();
  turns_.let_one_pass();
  turns_.wait_until_blocked();
  ASSERT_TRUE(tiers_->take(FrameType::kLookup, encode(TierLookup{0, KeyOrder::kPrefix, 0, {key_of(1)}})));
  turns_.let_one_pass();
  turns_.wait_until_blocked();
  ASSERT_EQ(played_->asked.size(), 1u) << "an old result is no answer";
  EXPECT_EQ(played_->forgotten, std::vector<ChunkKey>{key_of(1)});
  (void)tiers_->frames();
  turns_.open();
  std::vector<TierAnswers::Answer> answers;
  EXPECT_TRUE(holds_soon([&] {
    for (const HostTiers::Frame& frame : tiers_->frames()) {
      if (frame.first == FrameType::kAnswers) answers = decode_answers(frame.second)->answers;
    }
    return !answers.empty();
  }));
  EXPECT_EQ(answers.at(0).found, TierAnswers::Found::kSkipped);
}

TEST_F(PlayedHostTiers, a_reset_that_threw_is_executed_again_with_another_id) {
  played_->fails_to_reset = true;
  open();
  tiers_->begin_connection();
  EXPECT_EQ(count_soon(FrameType::kOpsEnded), 1u);
  ASSERT_TRUE(tiers_->take(FrameType::kReset, encode(TierReset{0, 1, 70})));
  EXPECT_TRUE(holds_soon([&] { return tiers_->has_failed(); }));
  tiers_->end_connection();
  tiers_->begin_connection();
  ASSERT_TRUE(tiers_->take(FrameType::kReset, encode(TierReset{0, 1, 70})));
  EXPECT_EQ(count_soon(FrameType::kResetDone), 1u);
  EXPECT_EQ(played_->startup_ids, (std::vector<std::uint64_t>{70, 0}))
      << "the first one may have used the id";
}

TEST_F(PlayedHostTiers, ops_that_cannot_be_submitted_end_the_connection_and_not_the_next_one) {
  played_->fails_to_submit = true;
  open();
  tiers_->begin_connection();
  EXPECT_EQ(count_soon(FrameType::kOpsEnded), 1u);
  EXPECT_FALSE(tiers_->has_failed());
  HostOp op;
  op.id = 1;
  op.key = key_of(1);
  ASSERT_TRUE(tiers_->take(FrameType::kOps, encode(TierOps{0, {op}})));
  EXPECT_TRUE(holds_soon([&] { return tiers_->has_failed(); }));
  tiers_->end_connection();
  tiers_->begin_connection();
  EXPECT_EQ(count_soon(FrameType::kOpsEnded), 1u);
  EXPECT_FALSE(tiers_->has_failed());
}

}  // namespace
}  // namespace kv_offload
