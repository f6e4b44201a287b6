// SPDX-License-Identifier: Apache-2.0
#include "policy/expected_returns.h"

#include <gtest/gtest.h>

#include <limits>
#include <vector>

#include "policy/lru.h"

namespace kv_offload {
namespace {

constexpr double kNever = std::numeric_limits<double>::infinity();

class ExpectedReturnsTest : public ::testing::Test {
 protected:
  ExpectedReturnsTest() { policy_.set_now(1000); }
  void insert(Slot slot, double returns_at = 0, std::uint32_t depth = 0) {
    policy_.insert(slot, {.id = slot + 1, .depth = depth, .request = slot + 1, .returns_at = returns_at});
  }
  // Evicts all entries without pins.
  std::vector<Slot> evicted() {
    std::vector<Slot> order;
    while (const auto victim = policy_.victim()) {
      order.push_back(*victim);
      policy_.erase(*victim);
    }
    return order;
  }

  ExpectedReturns<LruPolicy> policy_;
};

using Order = std::vector<Slot>;

TEST_F(ExpectedReturnsTest, without_hints_the_order_is_that_of_the_other_policy) {
  for (Slot slot : {0, 1, 2}) insert(slot);
  EXPECT_EQ(evicted(), (Order{0, 1, 2}));
}

TEST_F(ExpectedReturnsTest, the_chunk_that_returns_last_is_evicted_first) {
  insert(0, 1010);
  insert(1, kNever);
  insert(2, 1030);
  insert(3, 1020);
  EXPECT_EQ(evicted(), (Order{1, 2, 3, 0}));
}

TEST_F(ExpectedReturnsTest, of_one_prompt_the_deepest_entry_is_evicted_first) {
  insert(0, 1010, 2);
  insert(1, 1010, 3);
  insert(2, 1010, 1);
  EXPECT_EQ(evicted(), (Order{1, 0, 2}));
}

TEST_F(ExpectedReturnsTest, an_entry_without_a_hint_is_expected_after_a_share_of_the_time_without_use) {
  insert(0);
  policy_.set_now(1100);
  const double limit = 1100 + kReturnPatience * 100;
  insert(1, limit - 1);
  EXPECT_EQ(policy_.victim(), 0u);
  policy_.set_return(1, limit + 1, 2);
  EXPECT_EQ(policy_.victim(), 1u);
}

TEST_F(ExpectedReturnsTest, an_overdue_entry_has_its_place_by_last_use) {
  insert(0);
  insert(1, 1010);
  policy_.set_now(1005);
  insert(2);
  policy_.set_now(1010);
  EXPECT_EQ(evicted(), (Order{0, 1, 2}));
}

TEST_F(ExpectedReturnsTest, a_use_ends_the_hint) {
  insert(0, kNever);
  insert(1);
  policy_.access(0, {.id = 1, .request = 9});
  EXPECT_EQ(evicted(), (Order{1, 0}));
}

TEST_F(ExpectedReturnsTest, a_later_hint_replaces_the_first_and_zero_ends_it) {
  insert(0, 1010);
  insert(1, 1020);
  policy_.set_return(0, 1030, 1);
  EXPECT_EQ(policy_.victim(), 0u);
  policy_.set_return(0, 0, 1);
  EXPECT_EQ(policy_.victim(), 1u);
}

TEST_F(ExpectedReturnsTest, pinned_entries_keep_their_hints) {
  insert(0, 1010);
  insert(1, 1020);
  policy_.pin(1);
  EXPECT_EQ(policy_.victim(), 0u);
  policy_.set_return(1, 1005, 2);
  policy_.unpin(1);
  EXPECT_EQ(evicted(), (Order{0, 1}));
}

TEST_F(ExpectedReturnsTest, a_hint_leaves_a_pinned_entry_pinned) {
  insert(0);
  insert(1);
  policy_.pin(0);
  policy_.set_return(0, kNever, 1);
  EXPECT_EQ(policy_.victim(), 1u);
  policy_.unpin(0);
  EXPECT_EQ(evicted(), (Order{0, 1}));
}

TEST_F(ExpectedReturnsTest, a_hint_that_ends_while_pinned_leaves_the_entry_pinned) {
  insert(0, 1010);
  policy_.pin(0);
  policy_.access(0, {.id = 1, .request = 9});
  EXPECT_EQ(policy_.victim(), std::nullopt);
  policy_.unpin(0);
  EXPECT_EQ(policy_.victim(), 0u);
}

TEST_F(ExpectedReturnsTest, entries_set_aside_come_back_in_order) {
  insert(0, 1010);
  insert(1, 1020);
  insert(2);
  policy_.set_aside(1);
  policy_.set_aside(0);
  EXPECT_EQ(policy_.victim(), 2u);
  policy_.put_back(0);
  policy_.put_back(1);
  EXPECT_EQ(evicted(), (Order{1, 0, 2}));
}

TEST_F(ExpectedReturnsTest, a_slot_that_is_used_again_has_no_hint) {
  insert(0, kNever);
  policy_.erase(0);
  insert(1);
  insert(0);
  EXPECT_EQ(evicted(), (Order{1, 0}));
}

TEST(ExpectedReturnsWithoutClock, hints_are_ignored) {
  ExpectedReturns<LruPolicy> policy;
  policy.insert(0, {.id = 1, .request = 1});
  policy.insert(1, {.id = 2, .request = 2, .returns_at = kNever});
  policy.set_return(1, kNever, 2);
  EXPECT_EQ(policy.victim(), 0u);
}

}  // namespace
}  // namespace kv_offload
