// SPDX-License-Identifier: Apache-2.0
// Tenants over the whole cache: guaranteed shares of host memory, lending, and chunks that several tenants
// use.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <random>

#include "base/status.h"
#include "cache/cache_fixture.h"
#include "cache/parts.h"
#include "step_watch.h"

namespace kv_offload {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;

constexpr TenantId kOther = 0, kQuiet = 1, kFlood = 2;

RequestOptions of(TenantId tenant) {
  RequestOptions options;
  options.tenant = tenant;
  return options;
}

Names numbered(const std::string& prefix, int first, int count) {
  Names names;
  for (int i = first; i < first + count; ++i) names.push_back(fmt::format("{}{}", prefix, i));
  return names;
}

class TenantsTest : public CacheTest {
 protected:
  void make_world(std::uint64_t rows, std::vector<double> shares, const std::string& policy = "lru") {
    WorldOptions options;
    options.ranks = 1;
    options.rows = rows;
    options.tier = false;
    options.cache.eviction_policy = policy;
    const std::vector<std::string> names{"other", "quiet", "flood"};
    for (std::size_t i = 0; i < shares.size(); ++i) options.cache.tenants.push_back({names[i], shares[i]});
    make(options);
  }
  Names store_for(TenantId tenant, const Names& names) {
    const RequestHandle request = begin(of(tenant));
    Names accepted = store(request, names);
    end(request);
    return accepted;
  }
  // A request of the tenant that loads what it hits and stores the rest. Returns the number of hits.
  std::size_t use(TenantId tenant, const Names& names) {
    const RequestHandle request = begin(of(tenant));
    std::size_t hits = 0;
    while (hits < names.size() && lookup(request, names[hits]) == LookupResult::kHit) ++hits;
    if (hits > 0) load(request, Names(names.begin(), names.begin() + static_cast<std::ptrdiff_t>(hits)));
    store(request, names);
    end(request);
    step();
    return hits;
  }
  std::size_t held(const Names& names) { return names.size() - missing(names).size(); }
  Names missing(const Names& names) {
    Names absent;
    for (const std::string& name : names) {
      if (!cache().is_in_memory(key_of(name))) absent.push_back(name);
    }
    return absent;
  }
};

TEST_F(TenantsTest, an_idle_share_is_lent_and_taken_back_at_once) {
  make_world(20, {0, 0.5, 0.5});
  EXPECT_EQ(store_for(kFlood, numbered("f", 0, 20)).size(), 20u) << "the idle half is lent";
  EXPECT_EQ(store_for(kQuiet, numbered("q", 0, 10)).size(), 10u) << "in one call";
  EXPECT_EQ(held(numbered("q", 0, 10)), 10u);
  EXPECT_EQ(held(numbered("f", 0, 20)), 10u);
}

TEST_F(TenantsTest, a_flood_evicts_nothing_from_a_quiet_tenant) {
  make_world(20, {0, 0.5, 0.5});
  store_for(kQuiet, numbered("q", 0, 10));
  for (int i = 0; i < 10; ++i) store_for(kFlood, numbered("f", 20 * i, 20));
  EXPECT_THAT(missing(numbered("q", 0, 10)), IsEmpty());
}

TEST_F(TenantsTest, a_prompt_larger_than_its_share_is_cut_instead_of_taking_from_others) {
  make_world(20, {0, 0.5, 0.5});
  store_for(kQuiet, numbered("q", 0, 10));
  EXPECT_EQ(store_for(kFlood, numbered("f", 0, 30)), numbered("f", 0, 10));
  EXPECT_THAT(missing(numbered("q", 0, 10)), IsEmpty());
}

// The chunks of a store in progress are pinned, and use memory like others.
TEST_F(TenantsTest, chunks_that_are_still_copied_count) {
  make_world(20, {0, 0.5, 0.5});
  store_for(kQuiet, numbered("q", 0, 10));
  std::vector<RequestHandle> requests;
  std::vector<Job> jobs;
  for (int i = 0; i < 4; ++i) {
    requests.push_back(begin(of(kFlood)));
    jobs.push_back(offer(requests.back(), numbered("f", 5 * i, 5)));
  }
  EXPECT_THAT(missing(numbered("q", 0, 10)), IsEmpty());
  EXPECT_EQ(jobs[1].keys.size(), 5u);
  EXPECT_THAT(jobs[2].keys, IsEmpty());
  for (std::size_t i = 0; i < jobs.size(); ++i) {
    copy(jobs[i]);
    complete(jobs[i]);
    end(requests[i]);
  }
}

TEST_F(TenantsTest, a_discarded_store_is_refunded) {
  make_world(20, {0, 0.5, 0.5});
  for (int i = 0; i < 5; ++i) {
    const RequestHandle request = begin(of(kQuiet));
    const Job job = offer(request, numbered(fmt::format("x{}-", i), 0, 10));
    ASSERT_EQ(job.keys.size(), 10u);
    world().report(job.transfer.ticket);
    complete(job, false);
    end(request);
  }
  EXPECT_EQ(cache().tenant_stats()[kQuiet].bytes, 0u);
  EXPECT_EQ(store_for(kFlood, numbered("f", 0, 20)).size(), 20u);
}

TEST_F(TenantsTest, a_reset_refunds_every_tenant) {
  make_world(20, {0, 0.5, 0.5});
  store_for(kFlood, numbered("f", 0, 20));
  cache().reset();
  step();
  for (const auto& tenant : cache().tenant_stats()) EXPECT_EQ(tenant.bytes, 0u);
  EXPECT_EQ(store_for(kQuiet, numbered("q", 0, 20)).size(), 20u);
}

TEST_F(TenantsTest, a_chunk_that_a_tenant_below_its_share_uses_is_no_longer_charged_to_one_above) {
  make_world(20, {0, 0.5, 0.5});
  store_for(kFlood, {"system"});
  store_for(kFlood, numbered("f", 0, 19));
  EXPECT_EQ(use(kQuiet, {"system"}), 1u);
  EXPECT_EQ(cache().tenant_stats()[kQuiet].bytes, kPageBytes);
  for (int i = 0; i < 5; ++i) store_for(kFlood, numbered("g", 20 * i, 20));
  EXPECT_EQ(use(kFlood, {"system"}), 1u) << "the flood did not evict it";
  EXPECT_EQ(cache().tenant_stats()[kQuiet].bytes, kPageBytes) << "a use by the flood changes nothing";
}

TEST_F(TenantsTest, a_chunk_of_a_tenant_within_its_share_stays_charged_to_it) {
  make_world(20, {0, 0.5, 0.5});
  store_for(kQuiet, {"system"});
  EXPECT_EQ(use(kFlood, {"system"}), 1u);
  EXPECT_EQ(cache().tenant_stats()[kQuiet].bytes, kPageBytes);
  EXPECT_EQ(cache().tenant_stats()[kFlood].bytes, 0u);
}

TEST_F(TenantsTest, figures_name_each_tenant_with_its_share) {
  make_world(20, {0.2, 0.3, 0.5});
  store_for(kOther, {"o"});
  const auto stats = cache().tenant_stats();
  ASSERT_EQ(stats.size(), 3u);
  EXPECT_EQ(stats[0].name, "other");
  EXPECT_EQ(stats[0].bytes, kPageBytes);
  EXPECT_EQ(stats[1].share_bytes, 6 * kPageBytes);
  EXPECT_EQ(stats[2].name, "flood");
}

TEST_F(TenantsTest, hits_misses_and_evictions_are_counted_by_tenant) {
  make_world(4, {0.2, 0.3, 0.5});
  use(kQuiet, {"a", "b"});
  use(kQuiet, {"a", "b", "c"});
  use(kFlood, {"d"});
  use(kFlood, {"e", "f"});
  use(kFlood, {"g"});
  cache().publish_gauges();
  const auto value = [&](const std::string& name, const std::vector<std::string_view>& labels) {
    return labels.size() == 1 ? world().metrics.value("kv_offload_tenant_" + name, {labels[0]})
                              : world().metrics.value("kv_offload_tenant_" + name, {labels[0], labels[1]});
  };
  EXPECT_EQ(value("hit_tokens_total", {"quiet", "cpu"}), 2 * World::kTokens);
  EXPECT_EQ(value("miss_tokens_total", {"quiet"}), 2 * World::kTokens);
  EXPECT_EQ(value("miss_tokens_total", {"flood"}), 3 * World::kTokens);
  EXPECT_EQ(value("evicted_bytes_total", {"quiet"}), kPageBytes);
  EXPECT_EQ(value("evicted_bytes_total", {"flood"}), 2 * kPageBytes);
  EXPECT_EQ(value("bytes", {"quiet"}), 2 * kPageBytes);
  EXPECT_EQ(value("bytes", {"flood"}), 2 * kPageBytes);
  EXPECT_EQ(value("share_bytes", {"flood"}), 2 * kPageBytes);
  EXPECT_EQ(value("share_bytes", {"other"}), static_cast<double>(4 * kPageBytes / 5));
}

TEST_F(TenantsTest, without_tenants_no_metric_has_the_label) {
  make_world(4, {});
  use(kOther, {"a", "b"});
  use(kOther, {"a", "b", "c"});
  cache().publish_gauges();
  for (const auto& change : world().metrics.drain())
    EXPECT_THAT(change.definition->name, Not(HasSubstr("tenant")));
}

TEST_F(TenantsTest, an_unknown_tenant_is_refused) {
  make_world(20, {0.5, 0.5});
  EXPECT_THROW((void)begin(of(2)), InvalidArgument);
  make({});
  EXPECT_THROW((void)begin(of(1)), InvalidArgument);
  EXPECT_THAT(cache().tenant_stats(), IsEmpty());
}

// The cache of vLLM's calls, with prompts of several chunks that return, next to prompts that never do.
TEST_F(TenantsTest, a_quiet_tenant_hits_next_to_a_flood_as_alone_with_its_share) {
  for (const std::string& policy : eviction_policy_names()) {
    const auto run = [&](bool flooded) {
      make_world(flooded ? 200 : 100, flooded ? std::vector<double>{0, 0.5, 0.5} : std::vector<double>{},
                 policy);
      std::mt19937 random(3);
      std::geometric_distribution<int> session(0.06);
      std::size_t hits = 0, chunks = 0;
      for (int turn = 0; turn < 1500; ++turn) {
        const Names prompt = numbered(fmt::format("q{}-", session(random)), 0, 4 + turn % 5);
        hits += use(flooded ? kQuiet : kOther, prompt);
        chunks += prompt.size();
        if (flooded) use(kFlood, numbered(fmt::format("f{}-", turn), 0, 40));
      }
      return static_cast<double>(hits) / static_cast<double>(chunks);
    };
    const double alone = run(false);
    EXPECT_GT(alone, 0.3) << policy;
    EXPECT_LT(alone, 0.95) << policy;
    const double next_to_flood = run(true);
    RecordProperty(policy, fmt::format("{:.4f} alone, {:.4f} next to a flood", alone, next_to_flood));
    EXPECT_GE(next_to_flood, alone - 0.01) << policy;
  }
}

// The prompt has all memory that is lent. Its tenant is above its share, so each of its offers is declined
// while the other tenant takes the memory back.
TEST_F(TenantsTest, a_declined_offer_does_not_cost_more_in_a_larger_memory) {
  std::uint64_t most[2] = {0, 0};
  for (const bool large : {false, true}) {
    const int rows = large ? 4000 : 400;
    make_world(static_cast<std::uint64_t>(rows), {0, 0.5, 0.5});
    const RequestHandle flood = begin(of(kFlood));
    store(flood, numbered("f", 0, rows));
    const RequestHandle quiet = begin(of(kQuiet));
    store(quiet, {"first"});
    EXPECT_THAT(store(flood, {"more"}), IsEmpty());  // spares its own chunks once
    std::uint64_t steps = 0;
    constexpr int kOffers = 100;
    for (int i = 0; i < kOffers; ++i) {
      EXPECT_EQ(store(quiet, {fmt::format("q{}", i)}).size(), 1u);
      steps += testing::steps_of([&] { EXPECT_THAT(store(flood, {"more"}), IsEmpty()); });
    }
    most[large] = steps / kOffers;
  }
  EXPECT_LE(most[true], 2 * most[false] + 10);
}

// Without tenants the flood evicts the chunks of the other: the test above can fail.
TEST_F(TenantsTest, without_tenants_a_flood_takes_the_memory) {
  make_world(20, {});
  store_for(kOther, numbered("q", 0, 10));
  for (int i = 0; i < 10; ++i) store_for(kOther, numbered("f", 20 * i, 20));
  EXPECT_EQ(held(numbered("q", 0, 10)), 0u);
}

TEST(TenantPins, a_tenant_pins_at_most_its_share_of_the_limit) {
  WorldOptions options;
  options.ranks = 1;
  options.rows = 40;
  options.tier = false;
  options.cache.max_pinned_bytes = 20 * kPageBytes;
  options.cache.tenants = {{"other", 0.9}, {"small", 0.1}};
  World world(options);
  const auto pin = [&](TenantId tenant, std::uint64_t number) {
    RequestOptions request_options = of(tenant);
    request_options.family = static_cast<std::uint32_t>(number);
    const RequestHandle request = world.cache->begin_request("r", request_options);
    std::vector<ChunkKey> keys;
    for (int i = 0; i < 5; ++i) keys.push_back(key_of(fmt::format("p{}-{}", number, i)));
    const StoreGrant grant = world.cache->prepare_store(request, keys);
    world.report(grant.transfer.ticket);
    world.cache->complete_store(keys);
    const Hint hint{.type = HintType::kPin, .seconds = 60};
    const auto outcome = world.cache->end_turn(request, {{1, number}, 7}, {&hint, 1});
    world.cache->end_request(request);
    return outcome.at(0);
  };
  EXPECT_EQ(pin(1, 1), HintOutcome::kClipped);
  EXPECT_EQ(world.cache->stats().hint_pinned_bytes, 2 * kPageBytes);
  EXPECT_EQ(pin(1, 2), HintOutcome::kRejected);
  EXPECT_EQ(pin(0, 3), HintOutcome::kAccepted);
}

// Chunks of a slab belong to several tenants.
TEST(TenantSlabs, a_slab_is_emptied_only_of_chunks_that_the_requester_may_take) {
  PartsOptions options;
  options.rows = 64;
  options.shard_bytes = {300, 16 * kPageBytes};
  options.cache.tenants = {{"other", 0}, {"quiet", 0.5}, {"flood", 0.5}};
  SupplyParts parts(options);
  std::vector<Slot> slots;
  for (RowId row = parts.chunks.allocate(0); row != kNoRow; row = parts.chunks.allocate(0)) {
    const EntryInfo info{0, 0, 0, 1, 0, 0, slots.size() < 16 ? kQuiet : kFlood};
    const ChunkKey key = key_of(fmt::format("c{}", slots.size()));
    slots.push_back(parts.chunks.insert_filling(key, 0, row, info, kNoTicket));
    parts.chunks.finish_store(slots.back());
  }
  ASSERT_EQ(slots.size(), 64u);
  for (std::size_t i = 1; i < 16; ++i) parts.chunks.discard(slots[i]);
  // The slab with one chunk is the cheapest one to empty.
  EXPECT_NE(parts.row_provider.take(1, {2, kFlood}, nullptr), kNoRow);
  EXPECT_TRUE(parts.has("c0"));
}

TEST_F(TenantsTest, a_write_to_a_tier_names_the_tenant_that_is_charged) {
  WorldOptions options;
  options.ranks = 1;
  options.rows = 20;
  options.cache.tenants = {{"other", 0}, {"quiet", 0.5}, {"flood", 0.5}};
  make(options);
  store_for(kQuiet, {"a"});
  store_for(kOther, {"b"});
  std::vector<std::string> names;
  for (const TierOp& op : fake().writes()) names.push_back(op.tenant);
  EXPECT_THAT(names, ElementsAre("quiet", ""));
}

// Whatever host memory charges: a tier charges its records itself.
TEST_F(TenantsTest, a_tier_learns_which_tenant_uses_a_chunk_in_host_memory) {
  WorldOptions options;
  options.ranks = 1;
  options.rows = 20;
  options.cache.tenants = {{"other", 0}, {"quiet", 0.5}, {"flood", 0.5}};
  make(options);
  store_for(kFlood, {"a"});
  use(kQuiet, {"a"});
  step();
  EXPECT_EQ(cache().tenant_stats()[kFlood].bytes, kPageBytes);
  ASSERT_FALSE(fake().told_used.empty());
  for (const TierUse& use : fake().told_used) EXPECT_EQ(use.entry_info.tenant, kQuiet);
}

TEST(TenantTraffic, reads_and_writes_are_counted_by_tenant_and_tier) {
  PartsOptions options;
  options.cache.tenants = {{"other", 0}, {"quiet", 0.25}, {"flood", 0.5}};
  SupplyParts parts(options);
  const EntryInfo info{0, 0, 0, 1, 0, 0, kQuiet};
  const Slot written = parts.chunks.insert_filling(key_of("w"), 0, parts.take(0), info, kNoTicket);
  parts.chunks.finish_store(written);
  parts.ops.write(0, {&written, 1});
  parts.record("r");
  const TierIo::Read read{parts.chunks.insert_fetching(key_of("r"), 0, parts.take(0), info), 0};
  parts.ops.read({&read, 1}, Nanos(0), false);
  parts.finish();
  for (const std::string op : {"read", "write"}) {
    EXPECT_GT(parts.metrics.value("kv_offload_tenant_" + op + "_bytes_total", {"quiet", "fs"}), 0);
    EXPECT_EQ(parts.metrics.value("kv_offload_tenant_" + op + "_bytes_total", {"quiet", "fs"}),
              parts.metrics.value("kv_offload_" + op + "_bytes_total", {"fs"}));
  }
}

// Queued writes pin the chunks of both tenants.
TEST(TenantWrites, a_row_is_made_by_cancelling_writes_of_chunks_that_the_requester_may_take) {
  PartsOptions options;
  options.rows = 8;
  options.cache.tenants = {{"other", 0}, {"quiet", 0.5}, {"flood", 0.5}};
  SupplyParts parts(options);
  std::vector<Slot> slots;
  for (int i = 0; i < 8; ++i) {
    const EntryInfo info{0, 0, 0, 1, 0, 0, i < 3 ? kQuiet : kFlood};
    slots.push_back(
        parts.chunks.insert_filling(key_of(fmt::format("c{}", i)), 0, parts.take(0), info, kNoTicket));
    parts.chunks.finish_store(slots.back());
  }
  parts.ops.write(0, slots);
  EXPECT_NE(parts.row_provider.take(0, {2, kQuiet}, nullptr), kNoRow);
  for (int i = 0; i < 3; ++i) EXPECT_NE(parts.chunks.at(slots[static_cast<std::size_t>(i)]).writes, 0) << i;
  EXPECT_EQ(parts.ops.writes_in_flight(0), 3u) << "all writes of the flood were cancelled";
}

TEST(TenantWrites, an_op_carries_its_tenant_and_its_part_of_the_bandwidth) {
  PartsOptions options;
  options.cache.tenants = {{"other", 0}, {"quiet", 0.25}, {"flood", 0.5}};
  SupplyParts parts(options);
  for (const TenantId tenant : {kOther, kQuiet, kFlood}) {
    const EntryInfo info{0, 0, 0, 1, 0, 0, tenant};
    const Slot slot =
        parts.chunks.insert_filling(key_of(fmt::format("t{}", tenant)), 0, parts.take(0), info, kNoTicket);
    parts.chunks.finish_store(slot);
    parts.ops.write(0, {&slot, 1});
  }
  const auto& queued = parts.tier->writes();
  ASSERT_EQ(queued.size(), 3u);
  EXPECT_EQ(queued[1].entry_info.tenant, kQuiet);
  EXPECT_DOUBLE_EQ(queued[0].weight, TenantShares::kMinWeight);
  EXPECT_DOUBLE_EQ(queued[1].weight, 0.25);
  EXPECT_DOUBLE_EQ(queued[2].weight, 0.5);
}

// Memory that outlives the engine: the next one numbers its tenants differently.
TEST(TenantsKept, chunks_of_the_previous_engine_stay_charged_to_their_tenants_by_name) {
  std::string directory = "/dev/shm/tenants-kept-XXXXXX";
  ASSERT_NE(::mkdtemp(directory.data()), nullptr);
  WorldOptions options;
  options.ranks = 1;
  options.rows = 8;
  options.tier = false;
  options.shm_directory = directory;
  options.keep_for = "kept";
  options.cache.keep_identity = "model";
  options.cache.tenants = {{"other", 0.2}, {"quiet", 0.4}, {"flood", 0.4}};
  const auto store = [](World& world, TenantId tenant, const std::string& name) {
    const RequestHandle request = world.cache->begin_request("r", of(tenant));
    const std::vector<ChunkKey> keys{key_of(name)};
    const StoreGrant grant = world.cache->prepare_store(request, keys);
    world.copy(keys[0], grant.transfer.rows.at(0), 0);
    world.report(grant.transfer.ticket);
    world.cache->complete_store(keys);
    world.cache->end_request(request);
  };
  {
    World world(options);
    store(world, kQuiet, "q");
    store(world, kFlood, "f");
    store(world, kFlood, "g");
    store(world, kOther, "o");
  }
  options.engine_id = "next";
  options.cache.tenants = {{"other", 0.2}, {"flood", 0.4}, {"new", 0.2}};
  World world(options);
  ASSERT_EQ(world.cache->stats().taken_over_chunks, 4u);
  const auto stats = world.cache->tenant_stats();
  EXPECT_EQ(stats[0].bytes, 2 * kPageBytes) << "also those of a tenant that is no longer configured";
  EXPECT_EQ(stats[1].bytes, 2 * kPageBytes);
  EXPECT_EQ(stats[2].bytes, 0u);
  std::filesystem::remove_all(directory);
}

}  // namespace
}  // namespace kv_offload
