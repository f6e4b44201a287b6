// SPDX-License-Identifier: Apache-2.0
#include "cache/key_history.h"

#include <gtest/gtest.h>

#include "cache/cache_fixture.h"

namespace kv_offload {
namespace {

TEST(KeyHistoryTest, remembers_why_a_key_was_removed) {
  KeyHistory key_history(100);
  EXPECT_EQ(key_history.eviction_reason(key_of("a")), std::nullopt);
  key_history.record_removal(key_of("a"), 0);
  key_history.record_removal(key_of("b"), 7);
  key_history.record_removal(key_of("b"), 5);
  EXPECT_EQ(key_history.eviction_reason(key_of("a")), 0);
  EXPECT_EQ(key_history.eviction_reason(key_of("b")), 5);
  EXPECT_EQ(key_history.eviction_reason(key_of("a", 1)), std::nullopt);
}

TEST(KeyHistoryTest, counts_uses_up_to_its_limit_alongside_the_reason) {
  KeyHistory key_history(100);
  key_history.record_removal(key_of("a"), 3);
  for (std::uint32_t i = 1; i < 200; ++i) {
    EXPECT_EQ(key_history.count_use(key_of("a")), std::min(i, KeyHistory::kMaxUses));
  }
  EXPECT_EQ(key_history.eviction_reason(key_of("a")), 3);
}

TEST(KeyHistoryTest, a_key_is_forgotten_rather_than_mistaken_for_another) {
  KeyHistory key_history(1);  // the minimum size: 4096 cells
  for (int i = 0; i < 100000; ++i) key_history.record_removal(key_of(fmt::format("{}", i)), i % 8);
  int remembered = 0;
  for (int i = 0; i < 100000; ++i) {
    const auto reason = key_history.eviction_reason(key_of(fmt::format("{}", i)));
    if (!reason) continue;
    ++remembered;
    EXPECT_EQ(*reason, i % 8);
  }
  EXPECT_GT(remembered, 3000);
  EXPECT_LE(remembered, 4096);
  key_history.clear();
  EXPECT_EQ(key_history.eviction_reason(key_of("99999")), std::nullopt);
}

}  // namespace
}  // namespace kv_offload
