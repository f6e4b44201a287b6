// SPDX-License-Identifier: Apache-2.0
#include "hosts/tier_channel.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "out_of_memory.h"

namespace kv_offload {
namespace {

using Delivery = TierChannel::Delivery;

Bytes removals(std::uint8_t tier, std::size_t count) {
  TierRemovals frame{tier, 0, {}};
  for (std::size_t i = 0; i < count; ++i) {
    const std::string key(32, static_cast<char>(i));
    frame.removals.push_back({ChunkKey::unchecked(key.data(), key.size()), TierRemoval::Reason::kEvicted});
  }
  return encode(frame);
}

class TierChannelTest : public ::testing::Test {
 protected:
  TierChannelTest() {
    channel_.begin_connection();
    EXPECT_EQ(channel_.deliver(FrameType::kOpsEnded, {}, Nanos(0)), Delivery::kTaken);
  }
  void open() { channel_.begin_open({EpochChoice{}}, ""); }
  Delivery deliver_state(double queue_seconds) {
    TierState state;
    state.queue_seconds = queue_seconds;
    return channel_.deliver(FrameType::kState, encode(state), Nanos(0));
  }

  // Returns the round of the only frame, which orders the tiers to be opened.
  std::uint32_t sent_round() {
    const auto frames = channel_.take_frames();
    EXPECT_EQ(frames.size(), 1u);
    EXPECT_EQ(frames.at(0).first, FrameType::kOpenTiers);
    return decode_open_tiers(frames.at(0).second).value().round;
  }
  void answer(std::uint32_t round, std::uint64_t epoch) {
    EXPECT_EQ(channel_.deliver(FrameType::kTiersOpened, encode(TiersOpened{round, "", {{epoch, false, ""}}}),
                               Nanos(0)),
              Delivery::kTaken);
  }

  // Uses of chunks with the depths 0, 1, and so on.
  static TierUses uses(std::size_t count) {
    const std::string key(32, 'k');
    std::vector<TierUse> all(count, {ChunkKey::unchecked(key.data(), key.size()), {}});
    for (std::size_t i = 0; i < count; ++i) all[i].entry_info.depth = static_cast<std::uint32_t>(i);
    return std::make_shared<const std::vector<TierUse>>(std::move(all));
  }
  // Queues a frame of `bytes` for the connection.
  bool send(FrameType type, std::size_t bytes, bool may_drop) {
    std::vector<TierChannel::Frame> frames;
    frames.emplace_back(type, Bytes(bytes));
    return channel_.send(1, std::move(frames), may_drop);
  }

  int wakes_ = 0;  // of the thread of the connections
  TierChannel channel_{[this] { ++wakes_; }};
};

TEST_F(TierChannelTest, keeps_only_the_last_state_of_a_tier_until_events_are_taken) {
  open();
  for (int i = 0; i <= 1000; ++i) ASSERT_EQ(deliver_state(i), Delivery::kTaken);
  const auto events = channel_.take_events(0);
  ASSERT_EQ(events.size(), 2u);
  EXPECT_TRUE(std::holds_alternative<TierChannel::Ready>(events[0].what));
  EXPECT_EQ(std::get<TierState>(events[1].what).queue_seconds, 1000);
}

TEST_F(TierChannelTest, refuses_more_events_than_it_can_keep) {
  open();
  const Bytes frame = removals(0, kMostKeys);
  std::size_t taken = 0;
  while (taken < 10'000 && channel_.deliver(FrameType::kRemovals, frame, Nanos(0)) == Delivery::kTaken)
    ++taken;
  EXPECT_EQ(taken, TierChannel::kMostWaiting / frame.size());
  EXPECT_EQ(deliver_state(1), Delivery::kTaken) << "a state takes no more room";
  EXPECT_EQ(channel_.take_events(0).size(), taken + 2);
  EXPECT_EQ(channel_.deliver(FrameType::kRemovals, frame, Nanos(0)), Delivery::kTaken);
}

TEST_F(TierChannelTest, ignores_messages_about_tiers_before_they_are_opened) {
  EXPECT_EQ(deliver_state(1), Delivery::kTaken);
  open();
  EXPECT_EQ(channel_.take_events(0).size(), 1u) << "more than Ready";
  EXPECT_EQ(channel_.deliver(FrameType::kRemovals, removals(1, 1), Nanos(0)), Delivery::kMalformed);
}

TEST_F(TierChannelTest, forgets_the_events_of_a_connection_that_has_ended) {
  open();
  EXPECT_EQ(channel_.deliver(FrameType::kRemovals, removals(0, 1), Nanos(0)), Delivery::kTaken);
  channel_.end_connection("gone");
  channel_.begin_connection();
  EXPECT_EQ(channel_.deliver(FrameType::kOpsEnded, {}, Nanos(0)), Delivery::kTaken);
  const auto events = channel_.take_events(0);
  ASSERT_EQ(events.size(), 2u);
  EXPECT_TRUE(std::holds_alternative<TierChannel::Lost>(events[0].what));
  EXPECT_EQ(std::get<TierChannel::Ready>(events[1].what).connection, 2u);
  EXPECT_TRUE(channel_.take_events(0).empty());
}

// A scheduler that polls many hosts takes no lock of a host that has sent nothing.
TEST_F(TierChannelTest, says_whether_a_tier_has_events) {
  EXPECT_FALSE(channel_.has_events(0));
  channel_.begin_open({EpochChoice{}, EpochChoice{}}, "");
  for (const std::uint8_t tier : {0, 1}) {
    EXPECT_TRUE(channel_.has_events(tier));
    channel_.take_events(tier);
    EXPECT_FALSE(channel_.has_events(tier));
  }
  EXPECT_EQ(channel_.deliver(FrameType::kRemovals, removals(1, 1), Nanos(0)), Delivery::kTaken);
  EXPECT_FALSE(channel_.has_events(0));
  EXPECT_TRUE(channel_.has_events(1));
  EXPECT_EQ(channel_.take_events(1).size(), 1u);
  EXPECT_EQ(deliver_state(1), Delivery::kTaken);
  EXPECT_TRUE(channel_.has_events(0));
  EXPECT_EQ(deliver_state(2), Delivery::kTaken);
  EXPECT_EQ(channel_.take_events(0).size(), 1u);
  EXPECT_FALSE(channel_.has_events(0));
  channel_.end_connection("gone");
  for (const std::uint8_t tier : {0, 1}) {
    EXPECT_TRUE(channel_.has_events(tier)) << "the end of the connection";
    channel_.take_events(tier);
  }
  channel_.begin_connection();
  EXPECT_FALSE(channel_.has_events(0));
  EXPECT_EQ(channel_.deliver(FrameType::kOpsEnded, {}, Nanos(0)), Delivery::kTaken);
  EXPECT_TRUE(channel_.has_events(0) && channel_.has_events(1));
}

TEST_F(TierChannelTest, takes_only_the_answer_to_the_last_request_to_open) {
  open();
  const std::uint32_t round = sent_round();
  answer(round - 1, 1);
  std::vector<OpenedTier> tiers;
  EXPECT_EQ(channel_.wait_until_open(Nanos(0), &tiers).kind(), StatusKind::kTimeout);
  answer(round, 5);
  EXPECT_TRUE(channel_.wait_until_open(Nanos(0), &tiers).is_ok());
  EXPECT_EQ(tiers, (std::vector<OpenedTier>{{5, false, ""}}));
}

// With the state of a closed tier, a new tier without an epoch would seem to have one.
TEST_F(TierChannelTest, forgets_the_events_of_tiers_that_the_host_has_closed) {
  open();
  answer(sent_round(), 1);
  open();
  const std::uint32_t second = sent_round();
  EXPECT_EQ(deliver_state(1), Delivery::kTaken);
  EXPECT_EQ(channel_.deliver(FrameType::kRemovals, removals(0, 1), Nanos(0)), Delivery::kTaken);
  answer(second, 2);
  const auto events = channel_.take_events(0);
  ASSERT_EQ(events.size(), 1u);
  EXPECT_TRUE(std::holds_alternative<TierChannel::Ready>(events[0].what));
  EXPECT_EQ(deliver_state(2), Delivery::kTaken);
  answer(second - 1, 1);
  EXPECT_EQ(channel_.take_events(0).size(), 1u) << "the answer to another order";
}

TEST_F(TierChannelTest, events_of_closed_tiers_take_up_no_room) {
  open();
  const Bytes frame = removals(0, kMostKeys);
  const std::size_t most = TierChannel::kMostWaiting / frame.size();
  for (std::size_t i = 0; i < most; ++i)
    ASSERT_EQ(channel_.deliver(FrameType::kRemovals, frame, Nanos(0)), Delivery::kTaken);
  answer(sent_round(), 1);
  for (std::size_t i = 0; i < most; ++i)
    ASSERT_EQ(channel_.deliver(FrameType::kRemovals, frame, Nanos(0)), Delivery::kTaken);
  EXPECT_EQ(channel_.deliver(FrameType::kRemovals, frame, Nanos(0)), Delivery::kTooMuch);
}

TEST_F(TierChannelTest, orders_the_tiers_again_on_the_next_connection_and_ignores_the_earlier_answer) {
  open();
  const std::uint32_t first = sent_round();
  channel_.end_connection("cut");
  std::vector<OpenedTier> tiers;
  const Status lost = channel_.wait_until_open(Nanos(0), &tiers);
  EXPECT_EQ(lost.kind(), StatusKind::kTimeout);
  EXPECT_THAT(lost.message(), ::testing::EndsWith("could not be established again in time: cut"));
  channel_.end_connection("cannot connect");
  EXPECT_THAT(channel_.wait_until_open(Nanos(0), &tiers).message(), ::testing::EndsWith("cannot connect"));
  channel_.begin_connection();
  const std::uint32_t second = sent_round();
  EXPECT_NE(second, first);
  answer(first, 1);  // the host opens its tiers again after this answer
  EXPECT_EQ(channel_.wait_until_open(Nanos(0), &tiers).kind(), StatusKind::kTimeout);
  answer(second, 5);
  EXPECT_TRUE(channel_.wait_until_open(Nanos(0), &tiers).is_ok());
  EXPECT_EQ(tiers, (std::vector<OpenedTier>{{5, false, ""}}));
  channel_.end_connection("cut");
  channel_.begin_connection();
  EXPECT_TRUE(channel_.take_frames().empty()) << "open tiers stay open";
}

// A system call for each host in each step, and a thread that competes for the scheduler's cores.
TEST_F(TierChannelTest, a_few_uses_do_not_wake_the_thread_and_precede_the_next_order) {
  EXPECT_TRUE(send(FrameType::kUses, 1000, true));
  channel_.send_uses(1, 3, uses(kMostUses + 1));
  channel_.send_uses(2, 3, uses(1));  // another connection
  EXPECT_EQ(wakes_, 0);
  EXPECT_TRUE(send(FrameType::kOps, 1, false));
  EXPECT_EQ(wakes_, 1);
  const auto frames = channel_.take_frames();
  ASSERT_EQ(frames.size(), 4u);
  EXPECT_EQ(frames[3].first, FrameType::kOps);
  std::uint32_t next = 0;
  for (const std::size_t i : {1u, 2u}) {
    EXPECT_EQ(frames[i].first, FrameType::kUses);
    const auto frame = decode_uses(frames[i].second).value();
    EXPECT_EQ(frame.tier, 3u);
    EXPECT_FALSE(frame.is_touch);
    for (const TierUse& use : frame.uses) EXPECT_EQ(use.entry_info.depth, next++);
  }
  EXPECT_EQ(next, kMostUses + 1);
}

TEST_F(TierChannelTest, ops_of_any_number_are_sent_in_their_order_and_before_later_orders) {
  TierOps ops{3, std::vector<HostOp>(kMostOps + 1)};
  for (std::size_t i = 0; i < ops.ops.size(); ++i) {
    ops.ops[i].id = i;
    const std::string key(32, 'k');
    ops.ops[i].key = ChunkKey::unchecked(key.data(), key.size());
  }
  EXPECT_FALSE(channel_.send_ops(2, ops)) << "another connection";
  EXPECT_EQ(wakes_, 0);
  EXPECT_TRUE(channel_.send_ops(1, ops));
  EXPECT_EQ(wakes_, 1);
  EXPECT_TRUE(send(FrameType::kCancel, 1, false));
  const auto frames = channel_.take_frames();
  ASSERT_EQ(frames.size(), 3u);
  OpId next = 0;
  for (const std::size_t i : {0u, 1u}) {
    EXPECT_EQ(frames[i].first, FrameType::kOps);
    const auto frame = decode_ops(frames[i].second).value();
    EXPECT_EQ(frame.tier, 3u);
    for (const HostOp& op : frame.ops) EXPECT_EQ(op.id, next++);
  }
  EXPECT_EQ(next, kMostOps + 1);
  EXPECT_EQ(frames[2].first, FrameType::kCancel);
  EXPECT_TRUE(channel_.take_frames().empty());
  EXPECT_TRUE(channel_.send_ops(1, ops));
  channel_.end_connection("cut");
  EXPECT_FALSE(channel_.send_ops(1, ops));
  EXPECT_TRUE(channel_.take_frames().empty());
}

TEST_F(TierChannelTest, the_uses_of_a_step_are_queued_without_an_allocation) {
  const TierUses used = uses(1);
  const auto queue_and_take = [&] {
    channel_.send_uses(1, 0, used);
    EXPECT_EQ(channel_.take_frames().size(), 1u);
    EXPECT_EQ(used.use_count(), 1) << "they are kept";
  };
  queue_and_take();
  queue_and_take();
  const testing::FailingAllocation none(0);
  channel_.send_uses(1, 0, used);
  EXPECT_FALSE(none.came());
}

TEST_F(TierChannelTest, the_memory_of_a_burst_is_not_kept) {
  for (int i = 0; i < 5000; ++i) channel_.send_uses(1, 0, uses(1));
  EXPECT_EQ(channel_.take_frames().size(), 5000u);
  EXPECT_TRUE(channel_.take_frames().empty());
  const TierUses used = uses(1);
  const testing::FailingAllocation one(0);
  EXPECT_THROW(channel_.send_uses(1, 0, used), std::bad_alloc);
  EXPECT_TRUE(one.came());
}

TEST_F(TierChannelTest, frames_that_memory_has_run_out_for_are_not_sent_later) {
  const auto queue_and_take = [&] {
    EXPECT_TRUE(send(FrameType::kCancel, 1, false));
    channel_.send_uses(1, 0, uses(1));
    return channel_.take_frames().size();
  };
  std::size_t taken = 0;
  const unsigned failed = testing::fail_each_allocation([&] { taken = queue_and_take(); },
                                                        [&] {
                                                          EXPECT_LE(channel_.take_frames().size(), 1u);
                                                          EXPECT_TRUE(channel_.take_frames().empty());
                                                        });
  EXPECT_EQ(taken, 2u);
  EXPECT_GT(failed, 0u);
}

TEST_F(TierChannelTest, many_uses_wake_the_thread_and_too_many_are_dropped) {
  constexpr std::size_t kBytes = std::size_t{1} << 20;
  EXPECT_TRUE(send(FrameType::kUses, kBytes, true));
  EXPECT_EQ(wakes_, 1);
  channel_.send_uses(1, 0, uses(1));
  EXPECT_EQ(wakes_, 2);
  std::size_t sent = 2;
  while (sent < 100 && send(FrameType::kUses, kBytes, true)) ++sent;
  EXPECT_LT(sent, 100u);
  channel_.send_uses(1, 0, uses(1));
  EXPECT_TRUE(send(FrameType::kOps, 1, false)) << "orders are never dropped";
  EXPECT_EQ(channel_.take_frames().size(), sent + 1);
  EXPECT_TRUE(send(FrameType::kUses, 1, true));
  EXPECT_EQ(wakes_, static_cast<int>(sent) + 1) << "a thread that has taken all is not woken for a few";
}

TEST_F(TierChannelTest, does_not_wait_for_a_host_that_will_not_be_connected_again) {
  open();
  channel_.end_connection("it has shut down", true);
  std::vector<OpenedTier> tiers;
  const Status opened = channel_.wait_until_open(std::chrono::seconds(5), &tiers);
  EXPECT_EQ(opened.kind(), StatusKind::kUnavailable);
  EXPECT_EQ(opened.message(), "it has shut down");
}

}  // namespace
}  // namespace kv_offload
