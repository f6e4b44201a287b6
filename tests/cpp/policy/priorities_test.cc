// SPDX-License-Identifier: Apache-2.0
#include "policy/priorities.h"

#include <gtest/gtest.h>

#include <map>
#include <utility>

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

TEST_F(PrioritisedTest, the_time_and_the_expected_return_reach_each_level) {
  struct Timed final : EvictionPolicy {
    explicit Timed(std::map<ChunkId, std::pair<double, double>>& told) : told_(told) {}
    void insert(Slot, const EntryInfo&) override {}
    void access(Slot, const EntryInfo&) override {}
    void set_now(double seconds) override { now_ = seconds; }
    void set_return(Slot, double returns_at, ChunkId id) override { told_[id] = {now_, returns_at}; }
    void erase(Slot) override {}
    void pin(Slot) override {}
    void unpin(Slot) override {}
    std::optional<Slot> victim() override { return std::nullopt; }
    std::string_view name() const override { return "timed"; }
    std::map<ChunkId, std::pair<double, double>>& told_;
    double now_ = 0;
  };
  std::map<ChunkId, std::pair<double, double>> told;
  Prioritised policy([&] { return std::make_unique<Timed>(told); });
  policy.set_now(1);
  policy.insert(0, {.id = 10});
  policy.insert(1, {.id = 11, .priority = 1});
  policy.set_return(0, 5, 10);
  policy.set_return(1, 6, 11);
  EXPECT_EQ(told[10], std::pair(1.0, 5.0));
  EXPECT_EQ(told[11], std::pair(1.0, 6.0)) << "its level was made after the time was reported";
  policy.set_now(2);
  policy.set_return(1, 7, 11);
  EXPECT_EQ(told[11], std::pair(2.0, 7.0));
}

TEST_F(PrioritisedTest, the_high_level_is_evicted_above_half_of_the_entries) {
  for (Slot slot = 0; slot < 3; ++slot) insert(slot, 0);
  for (Slot slot = 3; slot < 6; ++slot) insert(slot, 1);
  EXPECT_EQ(policy_.victim(), 0u);
  insert(6, 1);
  EXPECT_EQ(policy_.victim(), 3u);
}

TEST_F(PrioritisedTest, an_entry_that_finds_no_memory_is_counted_in_no_level) {
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

TEST_F(PrioritisedTest, a_new_priority_lowers_an_entry_also_if_it_is_pinned) {
  insert(0, 1);
  insert(1, 0);
  policy_.pin(0);
  policy_.set_priority(0, {.priority = -1});
  EXPECT_EQ(policy_.victim(), 1u);
  policy_.unpin(0);
  EXPECT_EQ(drain(), (std::vector<Slot>{0, 1}));
}

TEST_F(PrioritisedTest, a_new_priority_that_finds_no_memory_changes_nothing) {
  insert(0, 1);
  insert(1, 0);
  const unsigned failures = testing::fail_each_allocation([&] { policy_.set_priority(0, {.priority = -1}); },
                                                          [&] { EXPECT_EQ(policy_.victim(), 1u); });
  EXPECT_GE(failures, 2u) << "for the level, and for its table";
  EXPECT_EQ(drain(), (std::vector<Slot>{0, 1}));
}

TEST_F(PrioritisedTest, a_level_with_only_pinned_entries_is_skipped) {
  insert(0, -1);
  insert(1, 0);
  policy_.pin(0);
  EXPECT_EQ(policy_.victim(), 1u);
}

TEST(PrioritiesWithoutClock, hints_change_no_level) {
  for (const std::int8_t priority : {-1, 0, 1}) {
    const auto policy = make_eviction_policy("lru");
    policy->insert(0, {.id = 1, .request = 1, .priority = priority, .returns_at = 10});
    policy->insert(1, {.id = 2, .request = 2, .priority = priority, .returns_at = 20});
    EXPECT_EQ(policy->victim(), 0u) << int{priority};
  }
}

}  // namespace
}  // namespace kv_offload
