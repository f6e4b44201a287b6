// SPDX-License-Identifier: Apache-2.0
#include "tier/digest_key_map.h"

#include <gtest/gtest.h>

#include "tier/tier_driver.h"

namespace kv_offload {
namespace {

using testing::key_of;

constexpr std::size_t kCells = std::size_t{1} << 14;

// A key is its own digest here.
struct DigestKeyMapTest : ::testing::Test {
  void remember(std::uint32_t number) { keys.remember(key_of(number), key_of(number)); }
  bool take(std::uint32_t number) {
    const auto key = keys.take(key_of(number), [&](const ChunkKey& each) { return each == key_of(number); });
    EXPECT_TRUE(!key || *key == key_of(number));
    return key.has_value();
  }
  std::uint32_t taken(std::uint32_t from, std::uint32_t to) {
    std::uint32_t count = 0;
    for (std::uint32_t i = from; i < to; ++i) count += take(i) ? 1 : 0;
    return count;
  }
  DigestKeyMap keys{kCells};
};

TEST_F(DigestKeyMapTest, a_key_is_found_once) {
  EXPECT_FALSE(take(1));
  remember(1);
  remember(1);
  EXPECT_FALSE(take(2));
  EXPECT_TRUE(take(1));
  EXPECT_FALSE(take(1));
}

TEST_F(DigestKeyMapTest, few_keys_are_forgotten_before_the_cells_are_full) {
  constexpr std::uint32_t kMost = kCells / 4 * 3;
  for (std::uint32_t i = 0; i < kMost; ++i) remember(i);
  EXPECT_GE(taken(0, kMost), kMost - 5);
}

TEST_F(DigestKeyMapTest, a_taken_key_frees_its_cell) {
  constexpr std::uint32_t kAlive = kCells / 2;
  for (std::uint32_t i = 0; i < kAlive; ++i) remember(i);
  for (std::uint32_t i = 0; i < 4 * kCells; ++i) {
    ASSERT_TRUE(take(i)) << i;
    remember(i + kAlive);
  }
}

TEST_F(DigestKeyMapTest, the_newest_keys_are_kept_when_there_are_too_many) {
  constexpr std::uint32_t kMany = 10 * kCells;
  for (std::uint32_t i = 0; i < kMany; ++i) remember(i);
  EXPECT_GE(taken(kMany - kCells / 8, kMany), kCells / 8 * 99 / 100);
  EXPECT_LE(taken(0, kMany), kCells);
}

}  // namespace
}  // namespace kv_offload
