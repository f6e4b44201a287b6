// SPDX-License-Identifier: Apache-2.0
#include "policy/per_tenant.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <random>
#include <utility>

#include "base/status.h"
#include "out_of_memory.h"
#include "policy/lru.h"
#include "step_watch.h"

namespace kv_offload {
namespace {

constexpr std::uint64_t kBytes = 10;  // of each entry

class PerTenantTest : public testing::Test {
 protected:
  // Shares in entries of kBytes; the memory has 100.
  void make(const std::vector<double>& shares) {
    std::vector<TenantOptions> tenants;
    for (const double share : shares) tenants.push_back({"t", share / 100});
    shares_ = std::make_shared<TenantShares>(tenants, 100 * kBytes);
    policy_ = std::make_unique<PerTenant>([] { return std::make_unique<LruPolicy>(); }, shares_);
  }
  void insert(Slot slot, TenantId tenant) {
    policy_->insert(slot, {.tenant = tenant});
    shares_->charge(tenant, kBytes);
    tenant_of_[slot] = tenant;
  }
  void insert(Slot first, std::size_t count, TenantId tenant) {
    for (Slot slot = first; slot < first + count; ++slot) insert(slot, tenant);
  }
  void erase(Slot slot) {
    policy_->erase(slot);
    shares_->refund(tenant_of_[slot], kBytes);
  }
  void move(Slot slot, TenantId to) {
    policy_->access(slot, {.tenant = to});
    shares_->refund(std::exchange(tenant_of_[slot], to), kBytes);
    shares_->charge(to, kBytes);
  }
  std::optional<Slot> victim_for(TenantId tenant) {
    const TenantShares::Request request(*shares_, tenant, kBytes);
    return policy_->victim();
  }
  // Evicts for this tenant until it finds none, and returns the slots.
  std::vector<Slot> drain_for(TenantId tenant) {
    std::vector<Slot> order;
    while (const auto victim = victim_for(tenant)) {
      order.push_back(*victim);
      erase(*victim);
    }
    return order;
  }

  std::shared_ptr<TenantShares> shares_;
  std::unique_ptr<PerTenant> policy_;
  std::map<Slot, TenantId> tenant_of_;
};

TEST_F(PerTenantTest, the_tenant_furthest_above_its_share_gives_up_its_own_oldest_entry) {
  make({10, 1, 2});
  insert(0, 1, 0);
  insert(1, 2, 1);
  insert(3, 4, 2);
  EXPECT_EQ(victim_for(0), 3u) << "two above the share, against one";
  erase(3);
  EXPECT_EQ(policy_->victim(), 1u);
  EXPECT_EQ(victim_for(2), 4u) << "the requester would be two above";
}

TEST_F(PerTenantTest, a_tenant_at_its_share_gives_up_nothing_to_one_at_its_own) {
  make({0, 50, 50});
  insert(0, 50, 1);
  insert(50, 50, 2);
  EXPECT_EQ(victim_for(1), 0u);
  EXPECT_EQ(victim_for(2), 50u);
}

TEST_F(PerTenantTest, a_lent_share_is_taken_back_entry_by_entry) {
  make({0, 50, 50});
  insert(0, 100, 1);
  for (Slot slot = 100; slot < 150; ++slot) {
    ASSERT_EQ(victim_for(2), slot - 100);
    erase(slot - 100);
    insert(slot, 2);
  }
  EXPECT_EQ(victim_for(2), 100u) << "its share is used";
  EXPECT_EQ(shares_->used(1), 50 * kBytes);
}

TEST_F(PerTenantTest, a_tenant_above_its_share_takes_nothing_from_one_below) {
  make({0, 50, 50});
  insert(0, 60, 1);
  insert(60, 40, 2);
  for (Slot slot = 0; slot < 60; ++slot) policy_->pin(slot);
  EXPECT_EQ(victim_for(1), std::nullopt);
  EXPECT_EQ(victim_for(2), 60u) << "no entry of the other tenant is left, so its own";
}

TEST_F(PerTenantTest, a_tenant_without_a_victim_is_skipped) {
  make({40, 10, 10});
  insert(0, 20, 1);
  insert(20, 15, 2);
  for (Slot slot = 0; slot < 20; ++slot) policy_->pin(slot);
  EXPECT_EQ(victim_for(0), 20u);
  policy_->unpin(7);
  EXPECT_EQ(victim_for(0), 7u);
}

// Memory may be unusable for a while (rows that a rank still copies), so all may be below their shares.
TEST_F(PerTenantTest, tenants_below_their_shares_share_the_available_memory) {
  make({0, 50, 50});
  insert(0, 45, 1);
  insert(45, 10, 2);
  EXPECT_EQ(victim_for(2), 0u);
  EXPECT_EQ(victim_for(1), 0u);
  for (Slot slot = 0; slot < 45; ++slot) policy_->pin(slot);
  EXPECT_EQ(victim_for(1), std::nullopt) << "the other one is further below";
}

TEST_F(PerTenantTest, entries_of_a_tenant_without_a_share_are_evicted_first) {
  make({0, 100});
  insert(0, 3, 1);
  insert(3, 1, 0);
  EXPECT_EQ(victim_for(1), 3u);
  erase(3);
  EXPECT_EQ(victim_for(0), std::nullopt);
}

TEST_F(PerTenantTest, the_next_victims_alternate_between_tenants_that_are_equally_far_above) {
  make({0, 10, 10});
  insert(0, 13, 1);
  insert(13, 12, 2);
  std::vector<Slot> next;
  for (int i = 0; i < 5; ++i) {
    next.push_back(policy_->victim().value());
    policy_->set_aside(next.back());
  }
  EXPECT_EQ(next, (std::vector<Slot>{0, 1, 13, 2, 14}));
  for (std::size_t i = next.size(); i-- > 0;) policy_->put_back(next[i]);
  EXPECT_EQ(policy_->victim(), 0u);
}

TEST_F(PerTenantTest, a_moved_entry_belongs_to_the_other_tenant_and_stays_pinned_and_recorded) {
  struct Told final : EvictionPolicy {
    explicit Told(std::map<Slot, std::string>& told) : told_(told) {}
    void insert(Slot slot, const EntryInfo&) override { told_[slot] += "i"; }
    void access(Slot slot, const EntryInfo&) override { told_[slot] += "a"; }
    void set_recorded(Slot slot, bool recorded) override { told_[slot] += recorded ? "r" : "-"; }
    void erase(Slot slot) override { told_[slot] += "e"; }
    void pin(Slot slot) override { told_[slot] += "p"; }
    void unpin(Slot slot) override { told_[slot] += "u"; }
    std::optional<Slot> victim() override { return std::nullopt; }
    std::string_view name() const override { return "told"; }
    std::map<Slot, std::string>& told_;
  };
  make({0, 50, 50});
  std::map<Slot, std::string> told;
  PerTenant policy([&] { return std::make_unique<Told>(told); }, shares_);
  policy.insert(0, {.tenant = 1});
  policy.set_recorded(0, true);
  policy.pin(0);
  policy.access(0, {.tenant = 1});
  policy.access(0, {.tenant = 2});
  EXPECT_EQ(told[0], "irpaierp");
  policy.unpin(0);
  policy.erase(0);
  policy.insert(0, {.tenant = 1});
  policy.access(0, {.tenant = 2});
  EXPECT_EQ(told[0], "irpaierpueiie") << "the slot holds a new entry";
}

TEST_F(PerTenantTest, a_moved_entry_is_evicted_in_the_order_of_its_new_tenant) {
  make({0, 2, 2});
  insert(0, 3, 1);
  insert(3, 2, 2);
  move(0, 2);
  EXPECT_EQ(drain_for(2), (std::vector<Slot>{3, 4, 0, 1, 2})) << "the other tenant's come last";
}

TEST_F(PerTenantTest, an_entry_that_finds_no_memory_stays_with_its_tenant) {
  make({0, 2, 2});
  insert(0, 3, 1);
  const unsigned failures = testing::fail_each_allocation([&] { policy_->access(0, {.tenant = 2}); },
                                                          [&] { EXPECT_EQ(policy_->victim(), 0u); });
  EXPECT_GE(failures, 2u) << "for the tenant's policy, and for its table";
}

TEST_F(PerTenantTest, a_new_entry_that_finds_no_memory_is_unknown) {
  make({0, 2, 2});
  insert(0, 1, 1);
  const unsigned failures = testing::fail_each_allocation([&] { policy_->insert(1, {.tenant = 2}); },
                                                          [&] { EXPECT_EQ(policy_->victim(), 0u); });
  EXPECT_GE(failures, 1u);
}

TEST_F(PerTenantTest, the_time_reaches_the_policy_of_each_tenant) {
  make({0, 50, 50});
  std::vector<double> times;
  struct Timed final : EvictionPolicy {
    explicit Timed(std::vector<double>& times) : times_(times) {}
    void insert(Slot, const EntryInfo&) override {}
    void access(Slot, const EntryInfo&) override {}
    void set_now(double seconds) override { times_.push_back(seconds); }
    void erase(Slot) override {}
    void pin(Slot) override {}
    void unpin(Slot) override {}
    std::optional<Slot> victim() override { return std::nullopt; }
    std::string_view name() const override { return "timed"; }
    std::vector<double>& times_;
  };
  PerTenant policy([&] { return std::make_unique<Timed>(times); }, shares_);
  policy.set_now(5);
  policy.insert(0, {.tenant = 1});
  policy.set_now(6);
  EXPECT_EQ(times, (std::vector<double>{5, 5, 6, 6}));
}

// One tenant with a quarter of the memory uses it next to one that stores everything once.
TEST_F(PerTenantTest, a_tenant_hits_as_in_a_cache_of_the_size_of_its_share) {
  for (const std::string& name : eviction_policy_names()) {
    constexpr std::size_t kShare = 64, kMemory = 256;
    const auto run = [&](bool flooded) {
      const std::vector<TenantOptions> tenants{{"other", 0.75}, {"quiet", 0.25}};
      const auto shares = std::make_shared<TenantShares>(tenants, kMemory);
      const std::unique_ptr<EvictionPolicy> policy =
          flooded ? make_tenant_policy(name, shares) : make_eviction_policy(name);
      const std::size_t capacity = flooded ? kMemory : kShare;
      std::map<ChunkId, Slot> slots;
      std::map<Slot, std::pair<ChunkId, TenantId>> held;
      std::vector<Slot> free;
      for (std::size_t i = capacity; i-- > 0;) free.push_back(static_cast<Slot>(i));
      std::uint32_t request = 0;
      const auto use = [&](ChunkId id, ChunkId parent, TenantId tenant) {
        const EntryInfo info{id, parent, 0, request, 0, 0, tenant};
        if (const auto found = slots.find(id); found != slots.end()) {
          policy->access(found->second, info);
          return true;
        }
        if (free.empty()) {
          const TenantShares::Request needed(*shares, tenant, 1);
          const Slot victim = policy->victim().value();
          policy->erase(victim);
          shares->refund(held.at(victim).second, 1);
          slots.erase(held.at(victim).first);
          free.push_back(victim);
        }
        slots[id] = free.back();
        held[free.back()] = {id, tenant};
        policy->insert(free.back(), info);
        shares->charge(tenant, 1);
        free.pop_back();
        return false;
      };
      std::mt19937 random(7);
      std::geometric_distribution<ChunkId> session(0.06);
      ChunkId once = 1u << 20;
      int hits = 0, total = 0;
      for (int turn = 0; turn < 4000; ++turn) {
        ++request;
        const ChunkId first = 8 * (1 + session(random));
        bool hit = true;
        for (ChunkId i = 0; i < 4; ++i) {
          hit = use(2 * (first + i) + 1, i == 0 ? 0 : 2 * (first + i) - 1, 1) && hit;
          hits += hit;
          ++total;
        }
        if (!flooded) continue;
        ++request;
        for (int i = 0; i < 16; ++i, once += 2) use(once + 1, i == 0 ? 0 : once - 1, 0);
      }
      return static_cast<double>(hits) / total;
    };
    const double alone = run(false);
    EXPECT_GT(alone, 0.3) << name;
    EXPECT_LT(alone, 0.9) << name;
    EXPECT_GE(run(true), alone - 0.002) << name;
  }
}

TEST_F(PerTenantTest, steps_of_an_eviction_grow_neither_with_entries_nor_with_pinned_ones) {
  for (const std::string& name : eviction_policy_names()) {
    std::uint64_t most[2] = {0, 0};
    for (const bool large : {false, true}) {
      const std::vector<TenantOptions> tenants{{"a", 0.2}, {"b", 0.3}, {"c", 0.5}};
      const std::uint64_t entries = large ? 30'000 : 300;
      const auto shares = std::make_shared<TenantShares>(tenants, entries);
      const auto policy = make_tenant_policy(name, shares);
      for (Slot slot = 0; slot < entries; ++slot) {
        const auto tenant = static_cast<TenantId>(slot % 3);
        policy->insert(slot, {.id = 2ull * slot + 3, .request = slot / 30, .tenant = tenant});
        shares->charge(tenant, 1);
        if (slot % 2 == 0) policy->pin(slot);
      }
      for (std::uint64_t i = 0; i < entries / 4; ++i) {
        const TenantShares::Request request(*shares, static_cast<TenantId>(i % 3), 1);
        std::optional<Slot> victim;
        most[large] = std::max(most[large], testing::steps_of([&] { victim = policy->victim(); }));
        if (!victim) continue;
        policy->erase(*victim);
        shares->refund(static_cast<TenantId>(*victim % 3), 1);
      }
    }
    EXPECT_LE(most[true], 2 * most[false]) << name;
  }
}

TEST(TenantSharesTest, invalid_shares_are_refused) {
  const auto make = [](std::vector<double> shares) {
    std::vector<TenantOptions> tenants;
    for (const double share : shares) tenants.push_back({"acme", share});
    (void)TenantShares(tenants, 100);
  };
  make({0.1, 0.2, 0.7});
  EXPECT_THROW(make({}), InvalidArgument);
  EXPECT_THROW(make({-0.1}), InvalidArgument);
  EXPECT_THROW(make({0.6, 0.5}), InvalidArgument);
  EXPECT_THROW(make({std::numeric_limits<double>::quiet_NaN()}), InvalidArgument);
  EXPECT_THROW(make(std::vector<double>(TenantShares::kMaxTenants + 1, 0)), InvalidArgument);
}

TEST(TenantSharesTest, an_entry_moves_only_to_a_tenant_that_stays_less_far_above_its_share) {
  const std::vector<TenantOptions> tenants{{"a", 0.5}, {"b", 0.5}};
  TenantShares shares(tenants, 100);
  shares.charge(0, 50);
  EXPECT_FALSE(shares.should_move(0, 1, 1)) << "not above its share";
  shares.charge(0, 1);
  EXPECT_TRUE(shares.should_move(0, 1, 1));
  EXPECT_FALSE(shares.should_move(0, 0, 1));
  shares.charge(1, 50);
  EXPECT_FALSE(shares.should_move(0, 1, 1)) << "it would be moved back";
  shares.charge(0, 1);
  EXPECT_TRUE(shares.should_move(0, 1, 1));
  EXPECT_FALSE(shares.should_move(0, 1, 2));
}

}  // namespace
}  // namespace kv_offload
