// SPDX-License-Identifier: Apache-2.0
#include "policy/eviction_policy.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <random>
#include <set>

#include "base/split_table.h"
#include "base/status.h"
#include "out_of_memory.h"
#include "step_watch.h"
#include "test_iterations.h"

namespace kv_offload {
namespace {

class LruTest : public testing::Test {
 protected:
  std::unique_ptr<EvictionPolicy> policy_ = make_eviction_policy("lru");
  void insert(Slot slot) { policy_->insert(slot, EntryInfo{}); }
  // Evicts all unpinned slots and returns them in order.
  std::vector<Slot> drain() {
    std::vector<Slot> order;
    while (const auto victim = policy_->victim()) {
      order.push_back(*victim);
      policy_->erase(*victim);
    }
    return order;
  }
};

TEST_F(LruTest, an_empty_policy_has_no_victim) { EXPECT_EQ(policy_->victim(), std::nullopt); }

TEST_F(LruTest, the_oldest_slot_is_evicted_first) {
  for (const Slot slot : {5u, 1u, 9u}) insert(slot);
  EXPECT_EQ(drain(), (std::vector<Slot>{5, 1, 9}));
}

TEST_F(LruTest, victim_does_not_remove_the_slot) {
  insert(3);
  EXPECT_EQ(policy_->victim(), 3u);
  EXPECT_EQ(policy_->victim(), 3u);
}

TEST_F(LruTest, an_accessed_slot_is_evicted_last) {
  for (const Slot slot : {0u, 1u, 2u}) insert(slot);
  policy_->access(0, {});
  EXPECT_EQ(drain(), (std::vector<Slot>{1, 2, 0}));
}

TEST_F(LruTest, a_pinned_slot_is_never_the_victim) {
  for (const Slot slot : {0u, 1u}) insert(slot);
  policy_->pin(0);
  EXPECT_EQ(policy_->victim(), 1u);
  policy_->erase(1);
  EXPECT_EQ(policy_->victim(), std::nullopt);
}

TEST_F(LruTest, an_unpinned_slot_keeps_its_order) {
  for (const Slot slot : {0u, 1u, 2u}) insert(slot);
  policy_->pin(1);
  policy_->pin(0);
  EXPECT_EQ(policy_->victim(), 2u);
  policy_->unpin(1);
  EXPECT_EQ(policy_->victim(), 1u);
  policy_->pin(1);
  EXPECT_EQ(policy_->victim(), 2u);
  policy_->unpin(0);
  policy_->unpin(1);
  EXPECT_EQ(drain(), (std::vector<Slot>{0, 1, 2}));
}

TEST_F(LruTest, a_slot_accessed_while_pinned_is_evicted_last) {
  for (const Slot slot : {0u, 1u, 2u}) insert(slot);
  policy_->pin(0);
  EXPECT_EQ(policy_->victim(), 1u);
  policy_->access(0, {});
  policy_->unpin(0);
  EXPECT_EQ(drain(), (std::vector<Slot>{1, 2, 0}));
}

TEST_F(LruTest, an_erased_slot_can_be_inserted_again) {
  insert(0);
  policy_->pin(0);
  EXPECT_EQ(policy_->victim(), std::nullopt);
  policy_->erase(0);
  insert(1);
  insert(0);
  EXPECT_EQ(drain(), (std::vector<Slot>{1, 0}));
}

TEST(EvictionPolicyFactory, an_unknown_policy_is_refused_with_the_known_names) {
  try {
    make_eviction_policy("mru");
    FAIL();
  } catch (const InvalidArgument& error) {
    EXPECT_THAT(error.what(), testing::AllOf(testing::HasSubstr("'mru'"), testing::HasSubstr("lru")));
  }
}

// For every policy: a victim is a known, unpinned slot, and every unpinned slot is evicted eventually.
class AnyPolicy : public testing::TestWithParam<std::string> {
 protected:
  std::unique_ptr<EvictionPolicy> policy_ = make_eviction_policy(GetParam());
  std::vector<Slot> drain() {
    std::vector<Slot> order;
    while (const auto victim = policy_->victim()) {
      order.push_back(*victim);
      policy_->erase(*victim);
    }
    return order;
  }
  // Stores a prompt in the order of the cache: the deepest chunk first. Slot `first + n` holds chunk n.
  void store_prompt(Slot first, Slot count, std::uint32_t request) {
    for (Slot i = count; i-- > 0;) {
      policy_->insert(first + i, {.id = first + i + 1, .parent = i == 0 ? 0 : first + i, .request = request});
    }
  }
};

TEST_P(AnyPolicy, victims_are_known_and_unpinned_under_random_calls) {
  std::mt19937 random(7);
  std::set<Slot> unpinned, pinned;
  for (int i = 0; i < 60000; ++i) {
    const Slot slot = random() % 64;
    const bool is_pinned = pinned.contains(slot);
    const bool known = is_pinned || unpinned.contains(slot);
    const auto action = random() % 6;
    // Ids recur in other slots; parents may be unknown or form cycles.
    const EntryInfo info{.id = i % 3 == 0 ? 0 : 1 + random() % 96,
                         .parent = random() % 96,
                         .request = static_cast<std::uint32_t>(random() % 20),
                         .priority = static_cast<std::int8_t>(random() % 8 == 0 ? random() % 3 - 1 : 0)};
    if (!known) {
      policy_->insert(slot, info);
      unpinned.insert(slot);
    } else if (action == 0) {
      policy_->access(slot, info);
    } else if (action == 1) {
      policy_->erase(slot);
      pinned.erase(slot);
      unpinned.erase(slot);
    } else if (action == 2) {
      policy_->refresh(slot, info);
    } else if (is_pinned) {
      policy_->unpin(slot);
      unpinned.insert(pinned.extract(slot));
    } else if (action == 3) {
      policy_->pin(slot);
      pinned.insert(unpinned.extract(slot));
    }
    const auto victim = policy_->victim();
    ASSERT_EQ(victim.has_value(), !unpinned.empty()) << "call " << i;
    ASSERT_TRUE(!victim || unpinned.contains(*victim)) << "call " << i;
  }
  for (const Slot slot : drain()) ASSERT_EQ(unpinned.erase(slot), 1u);
  EXPECT_TRUE(unpinned.empty());
}

TEST_P(AnyPolicy, an_unpinned_slot_can_be_evicted_also_if_memory_runs_out) {
  const auto policy = make_eviction_policy(GetParam());
  for (const Slot slot : {0u, 1u, 2u}) policy->insert(slot, {.id = slot + 1});
  policy->pin(0);
  policy->pin(1);
  EXPECT_EQ(policy->victim(), 2u);
  {
    const testing::FailingAllocation failing(0);
    policy->unpin(0);
  }
  policy->unpin(1);
  std::set<Slot> evicted;
  for (auto victim = policy->victim(); victim; victim = policy->victim()) {
    evicted.insert(*victim);
    policy->erase(*victim);
  }
  EXPECT_EQ(evicted, (std::set<Slot>{0, 1, 2}));
}

TEST_P(AnyPolicy, the_end_of_a_prompt_is_evicted_before_its_head) {
  store_prompt(0, 5, 1);
  EXPECT_EQ(drain(), (std::vector<Slot>{4, 3, 2, 1, 0}));
}

TEST_P(AnyPolicy, a_hit_prompt_is_evicted_from_its_end_too) {
  store_prompt(0, 5, 1);
  for (Slot slot = 3; slot-- > 0;) policy_->access(slot, {.id = slot + 1u, .parent = slot, .request = 2});
  EXPECT_EQ(drain(), (std::vector<Slot>{4, 3, 2, 1, 0}));
}

TEST_P(AnyPolicy, the_victim_is_stable_between_calls) {
  store_prompt(0, 20, 1);
  store_prompt(20, 20, 2);
  EXPECT_EQ(policy_->victim(), policy_->victim());
}

TEST_P(AnyPolicy, low_priority_is_evicted_first_and_high_priority_last) {
  policy_->insert(0, {.id = 1, .request = 1, .priority = 1});
  policy_->insert(1, {.id = 2, .request = 2});
  policy_->insert(2, {.id = 3, .request = 3});
  policy_->insert(3, {.id = 4, .request = 4, .priority = -1});
  const std::vector<Slot> order = drain();
  EXPECT_EQ(order.front(), 3u);
  EXPECT_EQ(order.back(), 0u);
}

INSTANTIATE_TEST_SUITE_P(EvictionPolicy, AnyPolicy, testing::ValuesIn(eviction_policy_names()),
                         [](const auto& info) { return info.param; });

// The last insert also creates the first entry of another priority level.
TEST_P(AnyPolicy, steps_of_a_call_do_not_grow_with_the_entries) {
  std::uint64_t most[2] = {};
  for (const int large : {0, 1}) {
    const auto policy = make_eviction_policy(GetParam());
    const auto many = static_cast<Slot>(testing::rounds(large == 0 ? 100'000 : 1'000'000));
    for (Slot slot = 0; slot < many; ++slot) {
      const ChunkId id = (std::uint64_t{slot} + 1) * 0x9E3779B97F4A7C15ull | 1;
      const auto priority = static_cast<std::int8_t>(slot == many - 1 ? 1 : 0);
      const EntryInfo info{.id = id, .request = slot / 2 + 1, .priority = priority};
      most[large] = std::max(most[large], testing::steps_of([&] { policy->insert(slot, info); }));
    }
    for (Slot slot = 0; slot < many; ++slot)
      most[large] = std::max(most[large], testing::steps_of([&] { policy->erase(slot); }));
  }
  EXPECT_LT(most[0], 4 * SplitTable::kCells);
  EXPECT_LT(most[1], 4 * SplitTable::kCells);
}

}  // namespace
}  // namespace kv_offload
