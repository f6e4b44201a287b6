// SPDX-License-Identifier: Apache-2.0
#include "hosts/tier_channel.h"

#include <gtest/gtest.h>

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
  void open() { channel_.begin_open({1, {EpochChoice{}}, ""}); }
  Delivery deliver_state(double queue_seconds) {
    TierState state;
    state.queue_seconds = queue_seconds;
    return channel_.deliver(FrameType::kState, encode(state), Nanos(0));
  }

  TierChannel channel_{[] {}};
};

TEST_F(TierChannelTest, keeps_only_the_last_state_of_a_tier_while_nobody_takes_events) {
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

TEST_F(TierChannelTest, ignores_what_a_host_says_about_its_tiers_before_they_are_opened) {
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

TEST_F(TierChannelTest, takes_only_the_answer_to_the_last_request_to_open) {
  channel_.begin_open({7, {EpochChoice{}}, ""});
  EXPECT_EQ(channel_.deliver(FrameType::kTiersOpened, encode(TiersOpened{6, "", {1}}), Nanos(0)),
            Delivery::kTaken);
  std::vector<std::uint64_t> ids;
  EXPECT_EQ(channel_.wait_until_open(Nanos(0), &ids).kind(), StatusKind::kTimeout);
  EXPECT_EQ(channel_.deliver(FrameType::kTiersOpened, encode(TiersOpened{7, "", {5}}), Nanos(0)),
            Delivery::kTaken);
  EXPECT_TRUE(channel_.wait_until_open(Nanos(0), &ids).is_ok());
  EXPECT_EQ(ids, std::vector<std::uint64_t>{5});
}

}  // namespace
}  // namespace kv_offload
