#include "policy/eviction_policy.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <random>
#include <set>

#include "base/status.h"

namespace kv_offload {
namespace {

class LruTest : public testing::Test {
 protected:
  std::unique_ptr<EvictionPolicy> policy_ = make_eviction_policy("lru", 16);
  void insert(Slot slot) { policy_->insert(slot, EntryInfo{}); }
  // The order in which everything unpinned would go.
  std::vector<Slot> drain() {
    std::vector<Slot> order;
    while (const auto victim = policy_->victim()) {
      order.push_back(*victim);
      policy_->erase(*victim);
    }
    return order;
  }
};

TEST_F(LruTest, AnEmptyPolicyHasNoVictim) { EXPECT_EQ(policy_->victim(), std::nullopt); }

TEST_F(LruTest, TheOldestGoesFirst) {
  for (const Slot slot : {5u, 1u, 9u}) insert(slot);
  EXPECT_EQ(drain(), (std::vector<Slot>{5, 1, 9}));
}

TEST_F(LruTest, AskingForTheVictimDoesNotRemoveIt) {
  insert(3);
  EXPECT_EQ(policy_->victim(), 3u);
  EXPECT_EQ(policy_->victim(), 3u);
}

TEST_F(LruTest, AnAccessMakesItTheLastToGo) {
  for (const Slot slot : {0u, 1u, 2u}) insert(slot);
  policy_->access(0);
  EXPECT_EQ(drain(), (std::vector<Slot>{1, 2, 0}));
}

TEST_F(LruTest, APinnedSlotIsNeverTheVictim) {
  for (const Slot slot : {0u, 1u}) insert(slot);
  policy_->pin(0);
  EXPECT_EQ(policy_->victim(), 1u);
  policy_->erase(1);
  EXPECT_EQ(policy_->victim(), std::nullopt);
}

TEST_F(LruTest, AnUnpinnedSlotHasKeptItsPlace) {
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

TEST_F(LruTest, ASlotThatWasAccessedWhilePinnedIsTheLastToGo) {
  for (const Slot slot : {0u, 1u, 2u}) insert(slot);
  policy_->pin(0);
  EXPECT_EQ(policy_->victim(), 1u);
  policy_->access(0);
  policy_->unpin(0);
  EXPECT_EQ(drain(), (std::vector<Slot>{1, 2, 0}));
}

TEST_F(LruTest, ErasedSlotsMayComeBackAsNewOnes) {
  insert(0);
  policy_->pin(0);
  EXPECT_EQ(policy_->victim(), std::nullopt);
  policy_->erase(0);
  insert(1);
  insert(0);
  EXPECT_EQ(drain(), (std::vector<Slot>{1, 0}));
}

TEST(EvictionPolicyFactory, AnUnknownNameIsRefusedNamingTheKnownOnes) {
  try {
    make_eviction_policy("mru", 1);
    FAIL();
  } catch (const InvalidArgument& error) {
    EXPECT_THAT(error.what(), testing::AllOf(testing::HasSubstr("'mru'"), testing::HasSubstr("lru")));
  }
}

// Whatever the policy, a victim is known, unpinned, and everything unpinned goes in the end.
class AnyPolicy : public testing::TestWithParam<std::string> {};

TEST_P(AnyPolicy, GivesOnlyUnpinnedKnownVictimsUnderRandomCalls) {
  std::mt19937 random(7);
  const auto policy = make_eviction_policy(GetParam(), 64);
  std::set<Slot> unpinned, pinned;
  for (int i = 0; i < 20000; ++i) {
    const Slot slot = random() % 64;
    const bool is_pinned = pinned.contains(slot);
    const bool known = is_pinned || unpinned.contains(slot);
    const auto action = random() % 5;
    if (!known) {
      policy->insert(slot, EntryInfo{});
      unpinned.insert(slot);
    } else if (action == 0) {
      policy->access(slot);
    } else if (action == 1) {
      policy->erase(slot);
      pinned.erase(slot);
      unpinned.erase(slot);
    } else if (is_pinned) {
      policy->unpin(slot);
      unpinned.insert(pinned.extract(slot));
    } else if (action == 2) {
      policy->pin(slot);
      pinned.insert(unpinned.extract(slot));
    }
    const auto victim = policy->victim();
    ASSERT_EQ(victim.has_value(), !unpinned.empty()) << "call " << i;
    ASSERT_TRUE(!victim || unpinned.contains(*victim)) << "call " << i;
  }
  while (const auto victim = policy->victim()) {
    ASSERT_EQ(unpinned.erase(*victim), 1u);
    policy->erase(*victim);
  }
  EXPECT_TRUE(unpinned.empty());
}

INSTANTIATE_TEST_SUITE_P(EvictionPolicy, AnyPolicy, testing::ValuesIn(eviction_policy_names()));

}  // namespace
}  // namespace kv_offload
