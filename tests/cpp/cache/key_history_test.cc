// SPDX-License-Identifier: Apache-2.0
#include "cache/key_history.h"

#include <gtest/gtest.h>

#include "cache/cache_fixture.h"

namespace kv_offload {
namespace {

TEST(KeyHistoryTest, RemembersWhyAKeyWasRemoved) {
  KeyHistory memory(100);
  EXPECT_EQ(memory.eviction_reason(key_of("a")), std::nullopt);
  memory.on_gone(key_of("a"), 0);
  memory.on_gone(key_of("b"), 7);
  memory.on_gone(key_of("b"), 5);
  EXPECT_EQ(memory.eviction_reason(key_of("a")), 0);
  EXPECT_EQ(memory.eviction_reason(key_of("b")), 5);
  EXPECT_EQ(memory.eviction_reason(key_of("a", 1)), std::nullopt);
}

TEST(KeyHistoryTest, CountsUsesUpToItsLimitAlongsideTheReason) {
  KeyHistory memory(100);
  memory.on_gone(key_of("a"), 3);
  for (std::uint32_t i = 1; i < 200; ++i) {
    EXPECT_EQ(memory.count_use(key_of("a")), std::min(i, KeyHistory::kMaxUses));
  }
  EXPECT_EQ(memory.eviction_reason(key_of("a")), 3);
}

TEST(KeyHistoryTest, AKeyIsForgottenRatherThanMistakenForAnother) {
  KeyHistory memory(1);  // the minimum size: 4096 cells
  for (int i = 0; i < 100000; ++i) memory.on_gone(key_of(fmt::format("{}", i)), i % 8);
  int remembered = 0;
  for (int i = 0; i < 100000; ++i) {
    const auto reason = memory.eviction_reason(key_of(fmt::format("{}", i)));
    if (!reason) continue;
    ++remembered;
    EXPECT_EQ(*reason, i % 8);
  }
  EXPECT_GT(remembered, 3000);
  EXPECT_LE(remembered, 4096);
  memory.clear();
  EXPECT_EQ(memory.eviction_reason(key_of("99999")), std::nullopt);
}

}  // namespace
}  // namespace kv_offload
