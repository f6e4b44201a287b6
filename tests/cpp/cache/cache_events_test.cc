// SPDX-License-Identifier: Apache-2.0
#include "cache/cache_events.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "cache/cache_fixture.h"

namespace kv_offload {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;
using ::testing::SizeIs;

TEST(CacheEventsTest, AdjacentEventsOfOneKindAndTierAreMerged) {
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

TEST(CacheEventsTest, NoEventsAreKeptByDefault) {
  CacheEvents events(false);
  events.host_has(key_of("a"));
  EXPECT_THAT(events.take(), IsEmpty());
}

}  // namespace
}  // namespace kv_offload
