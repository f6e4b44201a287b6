// SPDX-License-Identifier: Apache-2.0
#include "cache/chunk_groups.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "base/status.h"
#include "cache/cache_fixture.h"

namespace kv_offload {
namespace {

using ::testing::ElementsAre;

GroupGeometry group_of(std::uint32_t id, std::uint32_t tokens, std::uint64_t first, std::uint64_t second) {
  GroupGeometry group;
  group.group_id = id;
  group.tokens_per_chunk = tokens;
  group.shard_bytes[0] = first;
  group.shard_bytes[1] = second;
  return group;
}

CacheOptions two_groups() {
  CacheOptions options;
  options.groups = {group_of(4, 16, 100, 5000), group_of(9, 32, 300, 0)};
  return options;
}

TEST(ChunkGroupsTest, a_chunk_takes_whole_pages_in_each_area_and_its_row_the_largest_shard) {
  const ChunkGroups groups(two_groups(), 2);
  EXPECT_EQ(groups[0].bytes, 3 * kPageBytes);
  EXPECT_EQ(groups[1].bytes, kPageBytes);
  EXPECT_THAT(groups.row_bytes(), ElementsAre(5000, 300));
  EXPECT_DOUBLE_EQ(groups.bytes_per_token(), 3 * 4096 / 16.0 + 4096 / 32.0);
}

TEST(ChunkGroupsTest, each_of_several_shards_in_an_area_takes_whole_pages) {
  CacheOptions options;
  options.groups = {group_of(4, 16, 5000, 5000)};
  options.groups[0].shards_per_area = 3;
  const ChunkGroups groups(options, 2);
  EXPECT_EQ(groups[0].bytes, 2 * 3 * 2 * kPageBytes);
  EXPECT_THAT(groups.row_bytes(), ElementsAre(3 * 2 * kPageBytes));
  options.groups[0].shards_per_area = 32;
  EXPECT_NO_THROW(ChunkGroups(options, 2));
  options.groups[0].shards_per_area = 33;
  EXPECT_THROW(ChunkGroups(options, 2), InvalidArgument) << "more shards than a record can hold";
}

TEST(ChunkGroupsTest, keys_are_found_by_the_id_of_their_group) {
  const ChunkGroups groups(two_groups(), 2);
  EXPECT_EQ(groups.position_of(key_of("a", 9)), 1u);
  EXPECT_EQ(groups.position_of(key_of("a", 1)), std::nullopt);
  EXPECT_EQ(groups.require_position(key_of("a", 9), 1), 1u);
  EXPECT_THROW(groups.require_position(key_of("a", 4), 1), InvalidArgument) << "out of order";
  EXPECT_THROW(groups.require_position(key_of("a", 1), 0), InvalidArgument) << "key of an unknown group";
}

TEST(ChunkGroupsTest, a_single_group_has_full_attention_by_default) {
  CacheOptions options = two_groups();
  EXPECT_TRUE(ChunkGroups(options, 2).has_windows());
  EXPECT_FALSE(ChunkGroups(options, 2).kinds_are_known());
  options.full_attention = {true, true};
  EXPECT_FALSE(ChunkGroups(options, 2).has_windows());
  options.groups.pop_back();
  options.full_attention.clear();
  EXPECT_FALSE(ChunkGroups(options, 2).has_windows());
  options.full_attention = {false};
  EXPECT_TRUE(ChunkGroups(options, 2).has_windows());
}

TEST(ChunkGroupsTest, tokens_before_a_chunk_end_at_its_beginning) {
  const ChunkGroups groups(two_groups(), 2);
  EXPECT_EQ(groups.tokens_before(1, 96), 64);
  EXPECT_EQ(groups.tokens_before(1, 32), 0);
  EXPECT_EQ(groups.tokens_before(1, 0), 0) << "unknown";
}

TEST(ChunkGroupsTest, invalid_groups_are_refused) {
  CacheOptions options;
  EXPECT_THROW(ChunkGroups(options, 1), InvalidArgument);
  options.groups.assign(32, group_of(0, 16, 1, 0));
  EXPECT_THROW(ChunkGroups(options, 1), InvalidArgument);
  options.groups = {group_of(0, 0, 100, 0)};
  EXPECT_THROW(ChunkGroups(options, 1), InvalidArgument) << "no tokens";
  options.groups = {group_of(0, 16, 0, 100)};
  EXPECT_THROW(ChunkGroups(options, 1), InvalidArgument) << "no bytes in the existing areas";
  options.groups = {group_of(0, 16, 100, 0)};
  options.full_attention = {true, false};
  EXPECT_THROW(ChunkGroups(options, 1), InvalidArgument) << "two attention kinds for one group";
}

}  // namespace
}  // namespace kv_offload
