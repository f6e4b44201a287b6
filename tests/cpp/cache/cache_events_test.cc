// SPDX-License-Identifier: Apache-2.0
#include "cache/cache_events.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "cache/cache_fixture.h"
#include "out_of_memory.h"

namespace kv_offload {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;
using ::testing::SizeIs;

TEST(CacheEventsTest, adjacent_events_of_one_kind_and_tier_are_merged) {
  CacheEvents events(true);
  events.host_has(key_of("a"));
  events.host_has(key_of("b"));
  events.tier_has(key_of("a"), "fs");
  events.tier_has(key_of("a"), "other");
  events.tier_lost(key_of("a"), "other");
  events.host_lost(key_of("a"));
  const auto taken = events.take();
  ASSERT_THAT(taken, SizeIs(5));
  EXPECT_THAT(taken[0].keys, ElementsAre(key_of("a"), key_of("b")));
  EXPECT_TRUE(taken[1].storage);
  EXPECT_EQ(taken[1].owner, "fs");
  EXPECT_EQ(taken[2].owner, "other");
  EXPECT_TRUE(taken[3].removed);
  EXPECT_FALSE(taken[4].storage);
  EXPECT_THAT(events.take(), IsEmpty());
}

TEST(CacheEventsTest, an_event_that_runs_out_of_memory_is_not_recorded) {
  CacheEvents events(true);
  for (const Names& before : {Names{}, Names{"a"}}) {
    const auto record_before = [&] {
      for (const auto& name : before) events.host_has(key_of(name));
    };
    const auto expect_before = [&] {
      const auto taken = events.take();
      EXPECT_THAT(taken, SizeIs(before.size()));
      for (const CacheEvent& event : taken) EXPECT_THAT(event.keys, ElementsAre(key_of("a")));
      record_before();
    };
    record_before();
    EXPECT_GT(testing::fail_each_allocation([&] { events.host_has(key_of("b")); }, expect_before), 0u);
    events.take_back();
    expect_before();
    (void)events.take();
  }
}

TEST(CacheEventsTest, no_events_are_kept_by_default) {
  CacheEvents events(false);
  events.host_has(key_of("a"));
  EXPECT_THAT(events.take(), IsEmpty());
}

}  // namespace
}  // namespace kv_offload
