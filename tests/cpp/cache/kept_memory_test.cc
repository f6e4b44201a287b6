// SPDX-License-Identifier: Apache-2.0
// Host memory that outlives its cache, and the chunks that the next cache finds in it.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "cache/cache_fixture.h"
#include "memory/shared_file.h"
#include "memory/shm_fixture.h"

namespace kv_offload {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;
using ::testing::StartsWith;

class KeptMemory : public ShmTest {
 protected:
  WorldOptions options(const std::string& identity = "weights") {
    WorldOptions made;
    made.tier = false;
    made.cache.keep_identity = identity;
    made.engine_id = fmt::format("engine-{}", ++engines_);
    made.shm_directory = directory_;
    made.keep_for = "model";
    return made;
  }
  static void store(World& world, const std::string& name, std::uint32_t group = 0,
                    const RequestOptions& asked = {}) {
    const std::vector<ChunkKey> keys{key_of(name, group)};
    const RequestHandle request = world.cache->begin_request("r", asked);
    const StoreGrant grant = world.cache->prepare_store(request, keys);
    ASSERT_EQ(grant.accepted.size(), 1u);
    world.copy(keys[0], grant.transfer.rows[0], group);
    world.report(grant.transfer.ticket);
    world.cache->complete_store(keys);
    world.cache->end_request(request);
    world.cache->end_step();
  }
  // True if the chunk is a hit and holds the stored bytes.
  static bool hits(World& world, const std::string& name, std::uint32_t group = 0,
                   const RequestOptions& asked = {}) {
    const std::vector<ChunkKey> keys{key_of(name, group)};
    const RequestHandle request = world.cache->begin_request("r", asked);
    const bool hit = world.cache->lookup(request, keys[0]) == LookupResult::kHit;
    if (hit) {
      const RowTransfer transfer = world.cache->prepare_load(request, keys);
      EXPECT_TRUE(world.holds(keys[0], transfer.rows[0], group)) << "wrong bytes of " << name;
      world.report(transfer.ticket);
      world.cache->complete_load(keys);
    }
    world.cache->end_request(request);
    world.cache->end_step();
    return hit;
  }

  int engines_ = 0;
};

TEST_F(KeptMemory, the_next_engine_hits_the_resident_chunks) {
  {
    World world(options());
    EXPECT_TRUE(world.cache->stats().is_kept);
    store(world, "a");
    store(world, "b");
  }
  EXPECT_THAT(names(), ElementsAre(StartsWith(std::string(kKeptNamePrefix))));
  World world(options());
  EXPECT_EQ(world.cache->stats().taken_over_chunks, 2u);
  EXPECT_EQ(world.cache->stats().resident_chunks, 2u);
  EXPECT_TRUE(hits(world, "a"));
  EXPECT_TRUE(hits(world, "b"));
  EXPECT_FALSE(hits(world, "c"));
}

TEST_F(KeptMemory, kept_chunks_are_reported_in_events) {
  { store(*std::make_unique<World>(options()), "a"); }
  WorldOptions next = options();
  next.cache.keep_events = true;
  World world(std::move(next));
  const std::vector<CacheEvent> events = world.cache->take_events();
  ASSERT_EQ(events.size(), 1u);
  EXPECT_THAT(events[0].keys, ElementsAre(key_of("a")));
  EXPECT_FALSE(events[0].removed);
}

TEST_F(KeptMemory, an_evicted_chunk_is_a_miss_and_the_chunk_in_its_row_is_a_hit) {
  {
    WorldOptions small = options();
    small.rows = 2;
    World world(std::move(small));
    for (const char* name : {"a", "b", "c"}) store(world, name);
  }
  WorldOptions small = options();
  small.rows = 2;
  World world(std::move(small));
  EXPECT_FALSE(hits(world, "a"));
  EXPECT_TRUE(hits(world, "b"));
  EXPECT_TRUE(hits(world, "c"));
}

TEST_F(KeptMemory, the_next_engine_evicts_the_least_recently_used_first) {
  const auto three_rows = [&] {
    WorldOptions made = options();
    made.rows = 3;
    return made;
  };
  {
    World world(three_rows());
    for (const char* name : {"a", "b", "c"}) store(world, name);
    EXPECT_TRUE(hits(world, "a"));
  }
  World world(three_rows());
  store(world, "d");
  EXPECT_FALSE(hits(world, "b"));
  EXPECT_TRUE(hits(world, "a"));
}

// Without its head, the rest of a prefix is useless.
TEST_F(KeptMemory, the_end_of_a_loaded_prefix_is_evicted_first) {
  const auto four_rows = [&] {
    WorldOptions made = options();
    made.rows = 4;
    return made;
  };
  const std::vector<ChunkKey> prefix{key_of("a"), key_of("b"), key_of("c")};
  {
    World world(four_rows());
    for (const char* name : {"a", "b", "c", "d"}) store(world, name);
    const RequestHandle request = world.cache->begin_request("r", {});
    for (const ChunkKey& key : prefix) EXPECT_EQ(world.cache->lookup(request, key), LookupResult::kHit);
    world.report(world.cache->prepare_load(request, prefix).ticket);
    world.cache->complete_load(prefix);
    world.cache->end_request(request);
  }
  World world(four_rows());
  store(world, "e");
  store(world, "f");
  EXPECT_FALSE(hits(world, "d"));
  EXPECT_FALSE(hits(world, "c"));
  EXPECT_TRUE(hits(world, "b"));
  EXPECT_TRUE(hits(world, "a"));
}

// The chunk was in vLLM's device cache, so vLLM offers it again.
TEST_F(KeptMemory, a_chunk_offered_again_counts_as_used) {
  const auto two_rows = [&] {
    WorldOptions made = options();
    made.rows = 2;
    return made;
  };
  {
    World world(two_rows());
    store(world, "a");
    store(world, "b");
    const RequestHandle request = world.cache->begin_request("r", {});
    EXPECT_TRUE(world.cache->prepare_store(request, std::vector{key_of("a")}).accepted.empty());
    world.cache->end_request(request);
  }
  World world(two_rows());
  store(world, "c");
  EXPECT_TRUE(hits(world, "a"));
  EXPECT_FALSE(hits(world, "b"));
}

TEST_F(KeptMemory, chunks_of_a_high_priority_request_stay_longer) {
  const auto two_rows = [&] {
    WorldOptions made = options();
    made.rows = 2;
    return made;
  };
  {
    World world(two_rows());
    store(world, "a", 0, {.priority = -1});
    store(world, "b", 0, {.priority = -1});
    EXPECT_TRUE(hits(world, "a"));
  }
  World world(two_rows());
  EXPECT_EQ(world.cache->stats().taken_over_chunks, 2u);
  EXPECT_TRUE(hits(world, "b", 0, {.priority = -1}));
  store(world, "c");
  EXPECT_TRUE(hits(world, "a"));
  EXPECT_FALSE(hits(world, "b"));
}

TEST_F(KeptMemory, an_incomplete_store_is_a_miss) {
  {
    World world(options());
    const RequestHandle request = world.cache->begin_request("r", {});
    ASSERT_EQ(world.cache->prepare_store(request, std::vector{key_of("a")}).accepted.size(), 1u);
  }
  World world(options());
  EXPECT_EQ(world.cache->stats().taken_over_chunks, 0u);
  EXPECT_FALSE(hits(world, "a"));
}

// A reset means that the weights changed in this process. The next process may have the previous weights.
TEST_F(KeptMemory, after_a_reset_the_next_engine_hits_nothing) {
  {
    World world(options());
    store(world, "before");
    world.cache->reset();
    store(world, "after");
    EXPECT_TRUE(hits(world, "after"));
  }
  {
    World world(options());
    EXPECT_FALSE(hits(world, "before"));
    EXPECT_FALSE(hits(world, "after"));
    store(world, "later");
  }
  World world(options());
  EXPECT_TRUE(hits(world, "later"));
}

TEST_F(KeptMemory, a_reused_row_is_a_miss) {
  const auto one_row = [&] {
    WorldOptions made = options();
    made.rows = 1;
    return made;
  };
  {
    World world(one_row());
    store(world, "a");
    const RequestHandle request = world.cache->begin_request("r", {});
    const StoreGrant grant = world.cache->prepare_store(request, std::vector{key_of("b")});
    ASSERT_EQ(grant.accepted.size(), 1u);
    world.copy(key_of("b"), grant.transfer.rows[0], 0);
  }
  World world(one_row());
  EXPECT_FALSE(hits(world, "a"));
  EXPECT_FALSE(hits(world, "b"));
}

TEST_F(KeptMemory, memory_of_other_weights_is_not_reused) {
  { store(*std::make_unique<World>(options("old")), "a"); }
  {
    World world(options("new"));
    EXPECT_FALSE(hits(world, "a"));
  }
  World world(options("old"));
  EXPECT_FALSE(hits(world, "a")) << "another chunk has used its rows since";
}

TEST_F(KeptMemory, memory_of_other_sizes_is_removed) {
  { store(*std::make_unique<World>(options()), "a"); }
  const std::vector<std::string> before = names();
  WorldOptions larger = options();
  larger.rows = 16;
  World world(std::move(larger));
  EXPECT_FALSE(hits(world, "a"));
  EXPECT_EQ(names().size(), 1u);
}

TEST_F(KeptMemory, rows_of_several_sizes_keep_their_places) {
  const auto hybrid = [&] {
    WorldOptions made = options();
    made.rows = 64;
    made.shard_bytes = {300, 3 * kPageBytes};
    return made;
  };
  {
    World world(hybrid());
    for (int i = 0; i < 5; ++i) {
      store(world, fmt::format("small{}", i), 0);
      store(world, fmt::format("large{}", i), 1);
    }
  }
  World world(hybrid());
  EXPECT_EQ(world.cache->stats().taken_over_chunks, 10u);
  for (int i = 0; i < 40; ++i) store(world, fmt::format("new{}", i), i % 2);
  for (int i = 0; i < 40; ++i) hits(world, fmt::format("new{}", i), i % 2);
  for (int i = 0; i < 5; ++i) {
    hits(world, fmt::format("small{}", i), 0);
    hits(world, fmt::format("large{}", i), 1);
  }
}

// The previous engine may have been killed while the chunk's write was in flight.
TEST_F(KeptMemory, a_chunk_without_a_record_is_written_when_it_is_used) {
  {
    World world(options());
    store(world, "a");
    store(world, "b");
  }
  WorldOptions with_tier = options();
  with_tier.tier = true;
  World world(std::move(with_tier));
  world.tier->records[key_of("b")].shards = {{}, {}};
  EXPECT_TRUE(hits(world, "a"));
  EXPECT_TRUE(hits(world, "b"));
  EXPECT_TRUE(hits(world, "a"));
  world.tier->finish();
  world.cache->end_step();
  EXPECT_EQ(world.metrics.value("kv_offload_write_bytes_total", {"fs"}), 2 * kPageBytes);
  EXPECT_TRUE(world.tier->records.contains(key_of("a")));
}

TEST_F(KeptMemory, memory_of_a_running_engine_is_not_reused) {
  World living(options());
  store(living, "a");
  {
    World beside(options());
    EXPECT_FALSE(hits(beside, "a"));
    EXPECT_EQ(beside.region->kept().origin, RegionOrigin::kInUse);
    EXPECT_TRUE(beside.cache->stats().is_kept);
    store(beside, "b");
    EXPECT_EQ(names().size(), 2u);
  }
  World next(options());
  EXPECT_TRUE(hits(next, "b"));
  EXPECT_FALSE(hits(next, "a"));
  EXPECT_TRUE(hits(living, "a"));
}

TEST_F(KeptMemory, without_the_setting_nothing_is_kept) {
  WorldOptions plain = options();
  plain.keep_for.clear();
  plain.cache.keep_identity.clear();
  { store(*std::make_unique<World>(std::move(plain)), "a"); }
  EXPECT_THAT(names(), IsEmpty());
}

}  // namespace
}  // namespace kv_offload
