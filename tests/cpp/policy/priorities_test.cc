// SPDX-License-Identifier: Apache-2.0
#include "policy/priorities.h"

#include <gtest/gtest.h>

#include <map>

#include "out_of_memory.h"
#include "policy/lru.h"

namespace kv_offload {
namespace {

class PrioritisedTest : public testing::Test {
 protected:
  Prioritised policy_{[] { return std::make_unique<LruPolicy>(); }};
  void insert(Slot slot, std::int8_t priority) { policy_.insert(slot, {.priority = priority}); }
  std::vector<Slot> drain() {
    std::vector<Slot> order;
    while (const auto victim = policy_.victim()) {
      order.push_back(*victim);
      policy_.erase(*victim);
    }
    return order;
  }
};

TEST_F(PrioritisedTest, within_a_priority_level_the_policy_decides) {
  for (const Slot slot : {2u, 0u, 1u}) insert(slot, 0);
  insert(4, -5);
  insert(3, -1);
  EXPECT_EQ(drain(), (std::vector<Slot>{4, 3, 2, 0, 1}));
}

TEST_F(PrioritisedTest, a_hit_with_higher_priority_raises_an_entry) {
  for (const Slot slot : {0u, 1u, 2u}) insert(slot, 0);
  policy_.access(0, {.priority = 1});
  policy_.access(0, {.priority = 0});  // a later hit does not lower it
  policy_.access(1, {.priority = -1});
  EXPECT_EQ(drain(), (std::vector<Slot>{2, 1, 0}));
}

TEST_F(PrioritisedTest, a_raised_entry_stays_pinned) {
  insert(0, 0);
  policy_.pin(0);
  policy_.access(0, {.priority = 1});
  EXPECT_EQ(policy_.victim(), std::nullopt);
  policy_.unpin(0);
  EXPECT_EQ(policy_.victim(), 0u);
}

TEST_F(PrioritisedTest, a_raised_entry_stays_recorded) {
  struct Told final : EvictionPolicy {
    explicit Told(std::map<Slot, bool>& told) : told_(told) {}
    void insert(Slot slot, const EntryInfo&) override { told_[slot] = false; }
    void set_recorded(Slot slot, bool recorded) override { told_[slot] = recorded; }
    void access(Slot, const EntryInfo&) override {}
    void erase(Slot) override {}
    void pin(Slot) override {}
    void unpin(Slot) override {}
    std::optional<Slot> victim() override { return std::nullopt; }
    std::string_view name() const override { return "told"; }
    std::map<Slot, bool>& told_;
  };
  std::map<Slot, bool> told;
  Prioritised policy([&] { return std::make_unique<Told>(told); });
  for (const Slot slot : {0u, 1u, 2u}) policy.insert(slot, {});
  policy.set_recorded(0, true);
  policy.set_recorded(1, true);
  policy.set_recorded(1, false);
  for (const Slot slot : {0u, 1u, 2u}) policy.access(slot, {.priority = 1});
  EXPECT_EQ(told, (std::map<Slot, bool>{{0, true}, {1, false}, {2, false}}));
  policy.erase(0);
  policy.insert(0, {});
  policy.access(0, {.priority = 1});
  EXPECT_FALSE(told[0]) << "the slot holds a new entry, which no tier has";
}

TEST_F(PrioritisedTest, the_high_level_is_evicted_above_half_of_the_entries) {
  for (Slot slot = 0; slot < 3; ++slot) insert(slot, 0);
  for (Slot slot = 3; slot < 6; ++slot) insert(slot, 1);
  EXPECT_EQ(policy_.victim(), 0u);
  insert(6, 1);
  EXPECT_EQ(policy_.victim(), 3u);
}

TEST_F(PrioritisedTest, AnEntryThatFindsNoMemoryIsCountedInNoLevel) {
  for (const Slot slot : {0u, 1u}) insert(slot, 0);
  const unsigned failures =
      testing::fail_each_allocation([&] { insert(2, 1); }, [&] { EXPECT_EQ(policy_.victim(), 0u); });
  EXPECT_GE(failures, 2u);
  EXPECT_EQ(policy_.victim(), 0u) << "the high level holds a third";
}

TEST_F(PrioritisedTest, an_entry_that_finds_no_memory_in_a_higher_level_stays_in_its_own) {
  for (const Slot slot : {0u, 1u}) insert(slot, 0);
  const unsigned failures = testing::fail_each_allocation([&] { policy_.access(0, {.priority = 1}); },
                                                          [&] { EXPECT_EQ(policy_.victim(), 0u); });
  EXPECT_GE(failures, 2u) << "for the level, and for its table";
  EXPECT_EQ(drain(), (std::vector<Slot>{1, 0}));
}

TEST_F(PrioritisedTest, a_level_with_only_pinned_entries_is_skipped) {
  insert(0, -1);
  insert(1, 0);
  policy_.pin(0);
  EXPECT_EQ(policy_.victim(), 1u);
}

}  // namespace
}  // namespace kv_offload
