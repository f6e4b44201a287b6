// SPDX-License-Identifier: Apache-2.0
// Engines that share their host memory: what one of them loads from another's rows.
#include "cache/neighbours.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <chrono>
#include <filesystem>
#include <fstream>
#include <thread>

#include "cache/cache_fixture.h"
#include "cache/parts.h"
#include "memory/control_page.h"
#include "memory/shared_file.h"
#include "memory/sharing_engine.h"
#include "memory/shm_fixture.h"
#include "out_of_memory.h"
#include "step_watch.h"

namespace kv_offload {
namespace {

using ::testing::Contains;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

class SharedMemory : public ShmTest {
 protected:
  WorldOptions options(const std::string& identity = "weights") {
    WorldOptions made;
    made.tier = false;
    made.cache.share_identity = identity;
    made.cache.neighbour_interval = Nanos(0);
    made.engine_id = fmt::format("engine-{}", ++engines_);
    made.shm_directory = directory_;
    made.share_for = "model";
    return made;
  }
  std::unique_ptr<World> engine() { return std::make_unique<World>(options()); }

  // The engines find each other, and their workers map each other's areas.
  static void meet(const std::vector<World*>& worlds) {
    for (int round = 0; round < 3; ++round) {
      for (World* world : worlds) {
        world->clock.advance(std::chrono::seconds(2));
        world->cache->end_step();
        for (auto& rank : world->ranks) EXPECT_THAT(rank->map_neighbours(), IsEmpty());
      }
    }
  }
  static std::vector<ChunkKey> keys_of(const Names& names, std::uint32_t group = 0) {
    std::vector<ChunkKey> keys;
    for (const auto& name : names) keys.push_back(key_of(name, group));
    return keys;
  }
  // Names that got a row.
  static Names store(World& world, const Names& names, std::uint32_t group = 0, std::uint64_t weights = 0) {
    const auto keys = keys_of(names, group);
    const RequestHandle request = world.cache->begin_request("r", {});
    const StoreGrant grant = world.cache->prepare_store(request, keys);
    Names accepted;
    for (std::size_t i = 0; i < grant.accepted.size(); ++i) {
      accepted.push_back(names[grant.accepted[i]]);
      world.copy(keys[grant.accepted[i]], grant.transfer.rows[i], group, weights);
    }
    if (grant.transfer.ticket != kNoTicket) world.report(grant.transfer.ticket);
    world.cache->complete_store(keys);
    world.cache->end_request(request);
    world.cache->end_step();
    return accepted;
  }
  struct Load {
    RequestHandle request;
    std::vector<ChunkKey> keys;
    RowTransfer transfer;
  };
  // Begins to load the chunks that are hits.
  static Load begin_load(World& world, const Names& names, std::uint32_t group = 0) {
    Load load{world.cache->begin_request("r", {}), {}, {}};
    for (const ChunkKey& key : keys_of(names, group)) {
      if (world.cache->lookup(load.request, key) != LookupResult::kHit) break;
      load.keys.push_back(key);
    }
    load.transfer = world.cache->prepare_load(load.request, load.keys);
    world.cache->end_step();
    return load;
  }
  static void expect_right(const World& world, const Load& load, std::uint32_t group = 0) {
    for (std::size_t i = 0; i < load.keys.size(); ++i)
      EXPECT_TRUE(world.holds(load.keys[i], load.transfer.rows[i], group)) << load.keys[i].hex();
  }
  static void end_load(World& world, const Load& load) {
    if (load.transfer.ticket != kNoTicket) world.report(load.transfer.ticket);
    world.cache->complete_load(load.keys);
    world.cache->end_request(load.request);
    world.cache->end_step();
  }
  // Number of chunks that were loaded with the right bytes.
  static std::size_t load(World& world, const Names& names, std::uint32_t group = 0) {
    const Load load = begin_load(world, names, group);
    expect_right(world, load, group);
    end_load(world, load);
    return load.keys.size();
  }
  static Names numbered(const std::string& name, int count) {
    Names names;
    for (int i = 0; i < count; ++i) names.push_back(fmt::format("{}{}", name, i));
    return names;
  }
  // Parts of this file that this process has mapped.
  static int maps_of(std::uint64_t inode) {
    std::ifstream maps("/proc/self/maps");
    const std::string wanted = fmt::format(" {} ", inode);
    int count = 0;
    for (std::string line; std::getline(maps, line);)
      count += line.find(wanted) != std::string::npos && line.find("kv_offload") != std::string::npos ? 1 : 0;
    return count;
  }
  // Parts of the file of an engine that only the engine itself has mapped.
  int own_maps() {
    const auto alone = engine();
    return maps_of(alone->region->inode());
  }
  // An engine whose thread looks for neighbours, and which makes no step unless the test does.
  std::unique_ptr<World> idle_engine() {
    WorldOptions made = options();
    made.cache.neighbour_interval = std::chrono::milliseconds(1);
    return std::make_unique<World>(made);
  }
  // Its workers' threads run.
  static bool wait_for(World& world, const std::function<bool()>& condition) {
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::minutes(2);
    while (!condition()) {
      if (std::chrono::steady_clock::now() > deadline) return false;
      for (auto& rank : world.ranks) rank->map_neighbours();
      std::this_thread::yield();
    }
    return true;
  }
  static void step(World& world, int times = 1) {
    for (int i = 0; i < times; ++i) {
      world.cache->end_step();
      for (auto& rank : world.ranks) rank->map_neighbours();
    }
  }

  int engines_ = 0;
};

TEST_F(SharedMemory, a_chunk_of_a_neighbour_is_loaded_from_its_row) {
  const auto a = engine(), b = engine();
  meet({a.get(), b.get()});
  store(*a, {"x", "y"});
  EXPECT_EQ(load(*b, {"x", "y", "z"}), 2u);
  EXPECT_EQ(b->cache->stats().resident_chunks, 0u);
  EXPECT_EQ(b->cache->stats().borrowed_chunks, 0u) << "a chunk stayed borrowed after its request";
  EXPECT_EQ(b->hit_tokens("neighbour"), 2 * World::kTokens);
  EXPECT_EQ(b->metrics.value("kv_offload_neighbour_hit_tokens_total", {"0"}), 2 * World::kTokens);
  EXPECT_EQ(load(*a, {"x"}), 1u);
  EXPECT_EQ(a->hit_tokens("cpu"), World::kTokens);
}

TEST_F(SharedMemory, a_chunk_that_a_neighbour_has_is_not_stored_again) {
  const auto a = engine(), b = engine();
  meet({a.get(), b.get()});
  EXPECT_THAT(store(*a, {"x"}), ElementsAre("x"));
  EXPECT_THAT(store(*b, {"x", "y"}), ElementsAre("y"));
  EXPECT_EQ(load(*b, {"x", "y"}), 2u);
  EXPECT_EQ(load(*a, {"x", "y"}), 2u);
}

TEST_F(SharedMemory, of_many_chunks_those_that_a_neighbour_has_are_not_stored) {
  constexpr int kCount = 200;
  WorldOptions made[2] = {options(), options()};
  for (WorldOptions& one : made) one.rows = 2 * kCount;
  World a(made[0]), b(made[1]);
  meet({&a, &b});
  const Names all = numbered("k", kCount);
  Names at_a, at_b, new_ones;
  for (int i = 0; i < kCount; ++i) (i % 7 == 0 ? at_b : i % 3 == 0 ? at_a : new_ones).push_back(all[i]);
  store(b, at_b);
  store(a, at_a);
  EXPECT_EQ(store(b, all), new_ones);
  EXPECT_EQ(load(b, all), all.size());
}

TEST_F(SharedMemory, chunks_of_each_neighbour_are_found) {
  const auto a = engine(), b = engine(), c = engine(), d = engine();
  meet({a.get(), b.get(), c.get(), d.get()});
  store(*b, {"b"});
  store(*c, {"c"});
  store(*d, {"d"});
  for (const char* name : {"b", "c", "d"}) EXPECT_EQ(load(*a, {name}), 1u);
  EXPECT_THAT(store(*a, {"b", "c", "d", "new"}), ElementsAre("new"));
}

TEST_F(SharedMemory, lookups_and_stores_of_chunks_that_no_engine_has_take_no_lock_for_each) {
  const auto a = engine(), b = engine(), c = engine();
  meet({a.get(), b.get(), c.get()});
  store(*b, {"x"});
  const auto keys = keys_of(numbered("absent", 1000));
  const RequestHandle request = a->cache->begin_request("r", {});
  const testing::StepWatch watch;
  for (const ChunkKey& key : keys) ASSERT_EQ(a->cache->lookup(request, key), LookupResult::kMiss);
  EXPECT_LT(watch.holds(), 100u);
  const StoreGrant grant = a->cache->prepare_store(request, keys);
  EXPECT_EQ(grant.accepted.size(), 8u);
  EXPECT_LT(watch.holds(), 100u);
}

TEST_F(SharedMemory, a_store_that_a_neighbours_chunk_prevents_is_a_use_of_it) {
  const auto a = engine(), b = engine();
  meet({a.get(), b.get()});
  for (const std::string& name : numbered("k", 8)) store(*a, {name});  // k0 is the next victim
  EXPECT_THAT(store(*b, {"k0"}), IsEmpty());
  store(*a, {"new"});
  EXPECT_EQ(load(*b, {"k1"}), 0u);
  EXPECT_EQ(load(*b, {"k0"}), 1u);
}

TEST_F(SharedMemory, groups_with_rows_of_different_sizes_are_shared) {
  WorldOptions made[2] = {options(), options()};
  for (WorldOptions& one : made) {
    one.shard_bytes = {300, 3 * kPageBytes};
    one.rows = 64;
  }
  World a(made[0]), b(made[1]);
  meet({&a, &b});
  store(a, {"x"}, 0);
  store(a, {"x", "y"}, 1);
  EXPECT_EQ(load(b, {"x", "y"}, 0), 1u);
  EXPECT_EQ(load(b, {"x", "y"}, 1), 2u);
}

TEST_F(SharedMemory, an_owner_keeps_the_row_of_a_running_load) {
  const auto a = engine(), b = engine();
  meet({a.get(), b.get()});
  store(*a, {"x"});
  const Load running = begin_load(*b, {"x"});
  ASSERT_EQ(running.keys.size(), 1u);
  for (int round = 0; round < 4; ++round) store(*a, numbered(fmt::format("flood{}-", round), 8));
  expect_right(*b, running);
  EXPECT_EQ(a->cache->stats().lent_chunks, 1u);
  EXPECT_EQ(load(*a, {"x"}), 1u) << "the owner lost a chunk whose row it has to keep anyway";
  end_load(*b, running);
  for (int round = 4; round < 8; ++round) store(*a, numbered(fmt::format("flood{}-", round), 8));
  EXPECT_EQ(a->cache->stats().lent_chunks, 0u);
  EXPECT_EQ(load(*b, {"x"}), 0u);
}

TEST_F(SharedMemory, a_neighbours_use_protects_a_chunk_once) {
  const auto a = engine(), b = engine();
  meet({a.get(), b.get()});
  for (const std::string& name : numbered("k", 8)) store(*a, {name});  // k0 is the next victim
  EXPECT_EQ(load(*b, {"k0"}), 1u);
  store(*a, {"new"});
  EXPECT_EQ(load(*b, {"k1"}), 0u);
  EXPECT_EQ(load(*b, {"k0"}), 1u);
}

TEST_F(SharedMemory, a_flood_evicts_only_the_memory_of_its_engine) {
  const auto a = engine(), b = engine();
  meet({a.get(), b.get()});
  store(*a, numbered("a", 8));
  for (int round = 0; round < 5; ++round) store(*b, numbered(fmt::format("flood{}-", round), 8));
  EXPECT_EQ(load(*a, numbered("a", 8)), 8u);
}

TEST_F(SharedMemory, lookups_without_a_load_release_the_row_with_their_request) {
  const auto a = engine(), b = engine();
  meet({a.get(), b.get()});
  store(*a, {"x"});
  const RequestHandle request = b->cache->begin_request("r", {});
  EXPECT_EQ(b->cache->lookup(request, key_of("x")), LookupResult::kHit);
  EXPECT_EQ(b->cache->stats().borrowed_chunks, 1u);
  b->cache->end_request(request);
  EXPECT_EQ(b->cache->stats().borrowed_chunks, 0u);
  for (int round = 0; round < 4; ++round) store(*a, numbered(fmt::format("flood{}-", round), 8));
  EXPECT_EQ(a->cache->stats().lent_chunks, 0u);
}

TEST_F(SharedMemory, a_chunk_that_was_found_at_a_neighbour_is_reported_as_lost_when_it_is_returned) {
  const auto a = engine();
  WorldOptions made = options();
  made.cache.keep_events = true;
  World b(made);
  meet({a.get(), &b});
  store(*a, {"x", "y"});
  const RequestHandle request = b.cache->begin_request("r", {});
  for (const ChunkKey& key : keys_of({"x", "y"}))
    ASSERT_EQ(b.cache->lookup(request, key), LookupResult::kHit);
  EXPECT_THAT(b.cache->take_events(), IsEmpty());
  const RequestHandle other = b.cache->begin_request("without lookups", {});
  b.cache->end_request(request);
  {
    const testing::FailingAllocation once(0);  // for the event of one chunk, which is returned later
    b.cache->end_request(other);
    EXPECT_TRUE(once.came());
  }
  EXPECT_EQ(b.cache->stats().borrowed_chunks, 1u);
  b.clock.advance(std::chrono::seconds(1));
  b.cache->end_step();
  EXPECT_EQ(b.cache->stats().borrowed_chunks, 0u);
  const auto events = b.cache->take_events();
  ASSERT_EQ(events.size(), 1u);
  EXPECT_TRUE(events[0].removed);
  EXPECT_FALSE(events[0].storage);
  EXPECT_THAT(events[0].keys, ::testing::UnorderedElementsAre(key_of("x"), key_of("y")));
}

TEST_F(SharedMemory, a_request_that_may_not_load_from_host_memory_borrows_nothing) {
  const auto a = engine(), b = engine();
  meet({a.get(), b.get()});
  store(*a, {"x"});
  const RequestHandle request = b->cache->begin_request("r", {.load_from_cpu = false});
  EXPECT_EQ(b->cache->lookup(request, key_of("x")), LookupResult::kMiss);
  EXPECT_EQ(b->cache->stats().borrowed_chunks, 0u);
  b->cache->end_request(request);
}

TEST_F(SharedMemory, at_most_half_of_a_neighbours_rows_are_borrowed) {
  const auto a = engine(), b = engine();
  meet({a.get(), b.get()});
  store(*a, numbered("k", 8));
  const RequestHandle request = b->cache->begin_request("r", {});
  std::size_t hits = 0;
  for (const ChunkKey& key : keys_of(numbered("k", 8)))
    hits += b->cache->lookup(request, key) == LookupResult::kHit ? 1 : 0;
  EXPECT_EQ(hits, 4u);
  b->cache->end_request(request);
}

TEST_F(SharedMemory, at_most_half_of_a_neighbours_bytes_are_borrowed_with_rows_of_several_sizes) {
  WorldOptions made[2] = {options(), options()};
  for (WorldOptions& one : made) {
    one.shard_bytes = {300, 4 * kPageBytes};
    one.rows = 64;
  }
  World a(made[0]), b(made[1]);
  meet({&a, &b});
  const Names names = numbered("k", 16);
  ASSERT_EQ(store(a, names, 1).size(), 16u);
  const RequestHandle request = b.cache->begin_request("r", {});
  std::size_t hits = 0;
  for (const ChunkKey& key : keys_of(names, 1))
    hits += b.cache->lookup(request, key) == LookupResult::kHit ? 1 : 0;
  EXPECT_EQ(hits, 8u);
  EXPECT_THAT(store(a, {"new0", "new1"}, 1), ElementsAre("new0", "new1"));
  b.cache->end_request(request);
  EXPECT_EQ(load(b, {"new0", "new1"}, 1), 2u) << "bytes of returned rows still count";
}

class SharedChunks : public ::testing::Test {
 protected:
  // An owner with this many rows, and a neighbour that can read them.
  void open(PartsOptions parts = {}) {
    parts.share_for = "model";
    owner_ = std::make_unique<ChunkParts>(parts);
    owner_->chunks.share_in(*owner_->region, "weights", Nanos(0));
    neighbour_ = std::make_unique<ReadingEngine>(*owner_);
  }
  HostChunks& chunks() { return owner_->chunks; }
  // Fills the memory with chunks that the neighbour reads.
  void fill(std::uint64_t rows) {
    for (std::uint64_t i = 0; i < rows; ++i) {
      const std::string name = fmt::format("{}", i);
      slots_.push_back(owner_->resident(name));
      pinned_.push_back(neighbour_->pin(name));
    }
  }
  void unpin_all() {
    for (const RowId row : pinned_) neighbour_->rows->unpin(row);
  }
  void unpin_last() { neighbour_->rows->unpin(pinned_.back()); }
  void poll() { chunks().poll_neighbours(Nanos(0)); }
  // In a call that may begin a pass over all pins.
  std::uint64_t steps_of_poll() {
    return testing::steps_of([&] { chunks().poll_neighbours(std::chrono::seconds(100)); });
  }

  static constexpr std::uint64_t kMany = 3 * LentRows::kPinsPerPoll;
  std::unique_ptr<ChunkParts> owner_;
  std::unique_ptr<ReadingEngine> neighbour_;
  std::vector<Slot> slots_;
  std::vector<RowId> pinned_;
};

// The chunk was a victim, and a neighbour pins its row before it is discarded.
TEST_F(SharedChunks, a_discarded_row_is_free_when_no_neighbour_reads_it_any_more) {
  open();
  const Slot slot = owner_->resident("x");
  const RowId row = neighbour_->pin("x");
  chunks().discard(slot);
  poll();
  EXPECT_EQ(owner_->free_rows(), 3u);
  neighbour_->rows->unpin(row);
  poll();
  EXPECT_EQ(owner_->free_rows(), 4u);
}

TEST_F(SharedChunks, a_neighbours_use_changes_no_mark_of_a_chunk) {
  open();
  const Slot slot = owner_->resident("x"), other = owner_->resident("y");
  chunks().access(slot, 7, 0);
  chunks().access(other, 7, 0);
  chunks().retain(slot);
  chunks().retain(other);
  chunks().set_return(slot, 1000);
  const auto priority = chunks().at(slot).priority;
  const auto returns_at = chunks().at(slot).returns_at;
  ASSERT_EQ(chunks().victim(), slot);
  neighbour_->rows->mark_used(neighbour_->rows->find(key_of("x"))->row);
  EXPECT_TRUE(chunks().is_used_by_neighbour(slot));
  EXPECT_TRUE(chunks().at(slot).retained);
  EXPECT_EQ(chunks().at(slot).priority, priority);
  EXPECT_EQ(chunks().at(slot).returns_at, returns_at);
  EXPECT_EQ(chunks().at(slot).holder, 7u);
  EXPECT_EQ(chunks().victim(), other);
}

TEST_F(SharedChunks, a_step_visits_a_bounded_number_of_withdrawn_rows) {
  open({.rows = kMany});
  fill(kMany);
  for (const Slot slot : slots_) chunks().discard(slot);
  EXPECT_EQ(chunks().lent(), kMany);
  EXPECT_LE(steps_of_poll(), LentRows::kRowsPerPoll + LentRows::kPinsPerPoll);
  unpin_last();
  for (std::size_t i = 0; i < kMany / LentRows::kRowsPerPoll; ++i) poll();
  EXPECT_EQ(chunks().lent(), kMany - 1) << "the same ones were visited again";
  unpin_all();
  for (std::size_t i = 0; i < kMany / LentRows::kRowsPerPoll; ++i) poll();
  EXPECT_EQ(chunks().lent(), 0u) << "a row was not visited";
  EXPECT_EQ(owner_->free_rows(), kMany);
}

TEST_F(SharedChunks, a_step_visits_a_bounded_number_of_victims_that_neighbours_read) {
  open({.rows = kMany});
  fill(kMany);
  for (std::uint64_t i = 0; i < kMany; ++i) ASSERT_TRUE(chunks().is_used_by_neighbour(*chunks().victim()));
  EXPECT_FALSE(chunks().victim());
  EXPECT_LE(steps_of_poll(), LentRows::kRowsPerPoll + LentRows::kPinsPerPoll);
  unpin_last();
  for (std::size_t i = 0; i < kMany / LentRows::kRowsPerPoll; ++i) poll();
  EXPECT_EQ(chunks().lent(), kMany - 1) << "the same ones were visited again";
  unpin_all();
  for (std::size_t i = 0; i < kMany / LentRows::kRowsPerPoll; ++i) poll();
  EXPECT_EQ(chunks().lent(), 0u) << "a chunk was not visited";
  EXPECT_TRUE(chunks().victim());
}

TEST_F(SharedChunks, pins_of_a_dead_neighbour_are_cleared_over_several_steps) {
  open({.rows = kMany});
  fill(kMany);
  for (const Slot slot : slots_) chunks().discard(slot);
  neighbour_.reset();
  for (std::uint64_t i = 0; i < kMany / LentRows::kRowsPerPoll + kMany / LentRows::kPinsPerPoll; ++i)
    chunks().poll_neighbours(std::chrono::seconds(100));
  EXPECT_EQ(owner_->free_rows(), kMany);
}

// A slab holds rows of one size; the others of this test have a row that the neighbour reads.
TEST_F(SharedChunks, a_slab_with_a_row_that_a_neighbour_reads_is_not_evicted) {
  open({.rows = 64, .shard_bytes = {4096, 65536}});
  std::vector<Slot> slots;
  for (RowId row = chunks().allocate(0); row != kNoRow; row = chunks().allocate(0)) {
    const ChunkKey key = key_of(fmt::format("{}", slots.size()), 0);
    slots.push_back(chunks().insert_filling(key, 0, row, {.request = 7}, kNoTicket));
    chunks().finish_store(slots.back());
  }
  const std::vector<Slot> slab = chunks().slab_to_evict(1, 0);
  ASSERT_FALSE(slab.empty());
  for (const Slot slot : slots) {
    if (std::ranges::find(slab, slot) != slab.end()) continue;
    ASSERT_TRUE(neighbour_->rows->pin(*neighbour_->rows->find(chunks().at(slot).key)));
  }
  for (int i = 0; i < 100; ++i)
    EXPECT_THAT(chunks().slab_to_evict(1, 0), ::testing::UnorderedElementsAreArray(slab));
  neighbour_->pin(fmt::format("{}", std::ranges::find(slots, slab.back()) - slots.begin()));
  for (int i = 0; i < 100; ++i) EXPECT_THAT(chunks().slab_to_evict(1, 0), IsEmpty());
}

TEST_F(SharedMemory, a_step_returns_a_bounded_number_of_borrowed_chunks) {
  constexpr int kCount = 2 * LentRows::kRowsPerPoll + 10;
  WorldOptions made[2] = {options(), options()};
  for (WorldOptions& one : made) one.rows = 4 * kCount;
  World a(made[0]), b(made[1]);
  meet({&a, &b});
  const Names names = numbered("k", kCount);
  store(a, names);
  (void)b.cache->begin_request("runs on", {});
  const RequestHandle request = b.cache->begin_request("r", {});
  for (const ChunkKey& key : keys_of(names)) ASSERT_EQ(b.cache->lookup(request, key), LookupResult::kHit);
  b.cache->end_request(request);
  b.clock.advance(std::chrono::seconds(1));
  b.cache->end_step();
  EXPECT_EQ(b.cache->stats().borrowed_chunks, kCount - LentRows::kRowsPerPoll);
  b.cache->end_step();
  b.cache->end_step();
  EXPECT_EQ(b.cache->stats().borrowed_chunks, 0u);
}

// ---- resets

TEST_F(SharedMemory, an_engine_that_was_reset_neither_serves_nor_loads) {
  const auto a = engine(), b = engine(), c = engine();
  meet({a.get(), b.get(), c.get()});
  store(*a, {"a"});
  store(*b, {"b"});
  a->cache->reset();
  EXPECT_EQ(load(*b, {"a"}), 0u) << "old bytes of the engine that was reset";
  EXPECT_EQ(load(*a, {"b"}), 0u) << "old bytes of a neighbour";
  store(*a, {"new"}, 0, 1);
  EXPECT_EQ(load(*b, {"new"}), 0u) << "bytes of new weights";
  EXPECT_EQ(load(*c, {"b"}), 1u) << "the others keep theirs";
}

TEST_F(SharedMemory, a_load_that_runs_during_the_owners_reset_reads_its_old_bytes) {
  const auto a = engine(), b = engine();
  meet({a.get(), b.get()});
  store(*a, {"x"});
  const Load running = begin_load(*b, {"x"});
  a->cache->reset();
  for (int round = 0; round < 4; ++round) store(*a, numbered(fmt::format("new{}-", round), 8), 0, 1);
  expect_right(*b, running);
  end_load(*b, running);
  for (int i = 0; i < 3; ++i) {
    a->clock.advance(std::chrono::seconds(2));
    a->cache->end_step();
  }
  EXPECT_EQ(a->cache->stats().quarantined_rows, 0u) << "a row was not returned";
}

TEST_F(SharedMemory, a_load_that_runs_during_the_readers_reset_keeps_its_row) {
  const auto a = engine(), b = engine();
  meet({a.get(), b.get()});
  store(*a, {"x"});
  const Load running = begin_load(*b, {"x"});
  b->cache->reset();
  for (int round = 0; round < 4; ++round) store(*a, numbered(fmt::format("flood{}-", round), 8));
  expect_right(*b, running);
  EXPECT_EQ(a->cache->stats().lent_chunks, 1u);
  b->report(running.transfer.ticket);
  b->cache->end_step();
  a->cache->end_step();
  EXPECT_EQ(a->cache->stats().lent_chunks, 0u);
}

TEST_F(SharedMemory, a_chunk_in_use_by_a_request_survives_abandoned_jobs) {
  const auto a = engine(), b = engine();
  meet({a.get(), b.get()});
  store(*a, {"x"});
  const Load running = begin_load(*b, {"x"});
  b->cache->abandon_jobs();
  for (int round = 0; round < 4; ++round) store(*a, numbered(fmt::format("flood{}-", round), 8));
  expect_right(*b, running);
  b->report(running.transfer.ticket);
  b->cache->end_request(running.request);
  b->cache->end_step();
  b->clock.advance(std::chrono::seconds(1));
  b->cache->end_step();
  EXPECT_EQ(b->cache->stats().borrowed_chunks, 0u);
}

TEST_F(SharedMemory, an_engine_that_was_reset_attaches_to_no_further_neighbour) {
  const auto a = engine(), b = engine();
  meet({a.get(), b.get()});
  b->cache->reset();
  step(*b, 3);
  const auto c = engine();
  const int maps = maps_of(c->region->inode());
  step(*b, 3);
  EXPECT_EQ(maps_of(c->region->inode()), maps);
}

TEST_F(SharedMemory, a_reset_releases_neighbours_that_were_found_and_not_used) {
  const int maps = own_maps();
  const auto b = idle_engine();
  const auto a = engine();
  ASSERT_TRUE(wait_for(*b, [&] { return maps_of(a->region->inode()) > maps; }));
  b->cache->reset();
  EXPECT_TRUE(wait_for(*b, [&] { return maps_of(a->region->inode()) == maps; }));
}

// ---- engines that end

TEST_F(SharedMemory, an_idle_engine_releases_the_memory_of_a_neighbour_that_ended) {
  auto a = engine();
  const auto b = idle_engine();
  ASSERT_TRUE(wait_for(*b, [&] {
    b->cache->end_step();
    return b->cache->stats().neighbours == 1;
  }));
  const std::uint64_t inode = a->region->inode();
  ASSERT_GT(maps_of(inode), 0);
  a.reset();
  EXPECT_TRUE(wait_for(*b, [&] { return maps_of(inode) == 0; }));
}

TEST_F(SharedMemory, a_neighbour_that_ends_during_a_step_stays_mapped_until_the_step_ends) {
  const int maps = own_maps();
  auto a = engine();
  const auto b = idle_engine();
  ASSERT_TRUE(wait_for(*b, [&] {
    b->cache->end_step();
    return b->cache->stats().neighbours == 1;
  }));
  const std::uint64_t inode = a->region->inode();
  const RequestHandle request = b->cache->begin_request("r", {});
  EXPECT_EQ(b->cache->lookup(request, key_of("x")), LookupResult::kMiss);
  a.reset();
  ASSERT_TRUE(wait_for(*b, [&] { return b->cache->stats().neighbours == 0; }));
  // c takes the number of a. Once d is found, a whole check has passed since b found that a had ended.
  const auto c = engine(), d = engine();
  ASSERT_TRUE(wait_for(*b, [&] { return maps_of(d->region->inode()) > maps; }));
  for (auto& rank : b->ranks) rank->map_neighbours();
  EXPECT_GT(maps_of(inode), 0);
  for (const ChunkKey& key : keys_of(numbered("y", 100)))
    EXPECT_EQ(b->cache->lookup(request, key), LookupResult::kMiss);
  b->cache->end_step();
  EXPECT_TRUE(wait_for(*b, [&] { return maps_of(inode) == 0; }));
  b->cache->end_request(request);
}

TEST_F(SharedMemory, a_reset_after_a_lookup_releases_the_memory_of_neighbours) {
  const auto a = engine();
  const int maps = own_maps();
  const auto b = idle_engine();
  ASSERT_TRUE(wait_for(*b, [&] {
    b->cache->end_step();
    return b->cache->stats().neighbours == 1;
  }));
  const std::uint64_t inode = a->region->inode();
  const RequestHandle request = b->cache->begin_request("r", {});
  EXPECT_EQ(b->cache->lookup(request, key_of("x")), LookupResult::kMiss);
  b->cache->reset();
  EXPECT_TRUE(wait_for(*b, [&] { return maps_of(inode) == maps; }));
  EXPECT_EQ(b->cache->lookup(request, key_of("x")), LookupResult::kMiss);
  b->cache->end_request(request);
}

// vLLM offers chunks after the end of the step, and no further step may follow.
TEST_F(SharedMemory, an_engine_that_is_idle_after_a_store_releases_the_memory_of_a_neighbour_that_ended) {
  auto a = engine();
  const auto b = idle_engine();
  ASSERT_TRUE(wait_for(*b, [&] {
    b->cache->end_step();
    return b->cache->stats().neighbours == 1;
  }));
  const std::uint64_t inode = a->region->inode();
  const RequestHandle request = b->cache->begin_request("r", {});
  const auto keys = keys_of({"x", "y"});
  EXPECT_EQ(b->cache->prepare_store(request, keys).accepted.size(), 2u);
  a.reset();
  EXPECT_TRUE(wait_for(*b, [&] { return maps_of(inode) == 0; }));
  b->cache->complete_store(keys, false);
  b->cache->end_request(request);
}

TEST_F(SharedMemory, an_idle_engine_releases_an_ended_neighbour_that_it_never_used) {
  const int maps = own_maps();
  const auto b = idle_engine();
  auto a = engine();
  const std::uint64_t inode = a->region->inode();
  ASSERT_TRUE(wait_for(*b, [&] { return maps_of(inode) > maps; }));
  a.reset();
  EXPECT_TRUE(wait_for(*b, [&] { return maps_of(inode) == 0; }));
}

TEST_F(SharedMemory, a_load_never_reads_a_mapping_of_an_earlier_neighbour) {
  WorldOptions one_rank[3] = {options(), options(), options()};
  for (WorldOptions& one : one_rank) one.ranks = 1;
  auto a = std::make_unique<World>(one_rank[0]);
  World b(one_rank[1]);
  store(*a, {"old"});
  b.cache->end_step();
  std::unique_ptr<World> c;
  b.ranks[0]->map_neighbours([&](std::span<std::byte>, bool mapped) {  // e.g. registers it with CUDA
    if (!mapped || c) return Status::ok();
    a.reset();
    c = std::make_unique<World>(one_rank[2]);
    store(*c, {"new"});  // in the row in which a had the other one
    for (int i = 0; i < 3; ++i) b.cache->end_step();
    return Status::ok();
  });
  ASSERT_NE(c, nullptr);
  for (int i = 0; i < 3; ++i) {
    b.cache->end_step();
    load(b, {"new"});  // fails on wrong bytes
    b.ranks[0]->map_neighbours();
  }
  b.cache->end_step();
  EXPECT_EQ(load(b, {"new"}), 1u);
}

TEST_F(SharedMemory, a_load_outlives_its_owner) {
  auto a = engine();
  const auto b = engine();
  meet({a.get(), b.get()});
  store(*a, {"x"});
  const Load running = begin_load(*b, {"x"});
  a.reset();
  expect_right(*b, running);
  end_load(*b, running);
  meet({b.get()});
  EXPECT_EQ(b->cache->stats().neighbours, 0u);
  EXPECT_EQ(load(*b, {"x"}), 0u);
  EXPECT_EQ(names().size(), 1u) << "the owner's memory still has a name";
}

TEST_F(SharedMemory, rows_that_an_ended_reader_held_are_reused) {
  const auto a = engine();
  auto b = engine();
  meet({a.get(), b.get()});
  store(*a, {"x"});
  (void)begin_load(*b, {"x"});
  b.reset();  // without an end of its load
  for (int round = 0; round < 6; ++round) {
    a->clock.advance(std::chrono::seconds(2));
    store(*a, numbered(fmt::format("flood{}-", round), 8));
  }
  EXPECT_EQ(a->cache->stats().lent_chunks, 0u);
  EXPECT_EQ(a->cache->stats().quarantined_rows, 0u);
}

// ---- neighbours that are not used

TEST_F(SharedMemory, an_engine_for_which_no_name_is_left_reads_its_neighbours_and_warns) {
  const auto a = engine();
  const auto name = [&](unsigned number) { return SharedFile::shared_path_of(directory_, "model", number); };
  for (unsigned number = 1; number < kMostShared; ++number)
    std::filesystem::create_hard_link(name(0), name(number));
  const auto b = engine();
  EXPECT_THAT(b->cache->take_neighbour_problems(), Contains(HasSubstr("64 engines of this model")));
  meet({a.get(), b.get()});
  store(*a, {"x"});
  EXPECT_EQ(load(*b, {"x"}), 1u);
  EXPECT_THAT(store(*b, {"y"}), ElementsAre("y"));
  EXPECT_EQ(load(*a, {"y"}), 0u);
}

TEST_F(SharedMemory, as_many_engines_as_there_are_names_are_found) {
  const auto a = engine();
  const auto name = [&](unsigned number) { return SharedFile::shared_path_of(directory_, "model", number); };
  for (unsigned number = 1; number < kMostShared - 1; ++number)
    std::filesystem::create_hard_link(name(0), name(number));
  const auto b = engine();
  EXPECT_THAT(b->cache->take_neighbour_problems(), IsEmpty());
  EXPECT_TRUE(std::filesystem::exists(name(kMostShared - 1)));
  for (unsigned number = 1; number < kMostShared - 1; ++number) std::filesystem::remove(name(number));
  meet({a.get()});
  store(*b, {"x"});
  EXPECT_EQ(load(*a, {"x"}), 1u);
}

TEST_F(SharedMemory, a_neighbour_is_not_used_before_every_worker_has_mapped_it) {
  const auto a = engine(), b = engine();
  store(*a, {"x"});
  b->cache->end_step();
  b->ranks[0]->map_neighbours();
  b->cache->end_step();
  EXPECT_EQ(load(*b, {"x"}), 0u);
  b->ranks[1]->map_neighbours();
  b->cache->end_step();
  EXPECT_EQ(load(*b, {"x"}), 1u);
}

TEST_F(SharedMemory, a_rank_that_could_not_map_a_neighbour_tries_again) {
  const auto a = engine(), b = engine();
  store(*a, {"x"});
  b->cache->end_step();
  b->ranks[0]->map_neighbours();
  int tries = 0;
  std::vector<std::string> problems;
  for (std::uint32_t call = 0; call < 4 * HostRegion::kFirstPause; ++call) {
    for (std::string& problem : b->ranks[1]->map_neighbours([&](std::span<std::byte>, bool mapped) {
           if (!mapped) return Status::ok();
           return ++tries < 3 ? Status::error(StatusKind::kDevice, "no memory") : Status::ok();
         }))
      problems.push_back(std::move(problem));
    if (call < HostRegion::kFirstPause) {
      EXPECT_EQ(tries, 1) << "tried without a pause";
    }
  }
  EXPECT_EQ(tries, 3);
  EXPECT_THAT(problems, ElementsAre(HasSubstr("no memory")));
  b->cache->end_step();
  EXPECT_EQ(load(*b, {"x"}), 1u);
}

TEST_F(SharedMemory, a_neighbour_that_a_rank_cannot_map_is_left_and_tried_again_later) {
  const auto a = engine();
  const std::uint64_t inode = a->region->inode();
  const int maps = maps_of(inode);
  const auto b = engine();
  store(*a, {"x"});
  bool is_possible = false;
  const auto turn = [&](int times) {
    for (int i = 0; i < times; ++i) {
      b->cache->end_step();
      b->ranks[0]->map_neighbours();
      b->ranks[1]->map_neighbours([&](std::span<std::byte>, bool mapped) {
        return !mapped || is_possible ? Status::ok() : Status::error(StatusKind::kDevice, "no memory");
      });
    }
  };
  turn(10);
  EXPECT_GT(maps_of(inode), maps);
  EXPECT_THAT(b->cache->take_neighbour_problems(), IsEmpty());
  turn(60);
  EXPECT_EQ(maps_of(inode), maps) << "the ranks that could map it keep its memory";
  EXPECT_THAT(b->cache->take_neighbour_problems(), ElementsAre(HasSubstr("a rank cannot map it")));
  EXPECT_EQ(load(*b, {"x"}), 0u);
  turn(700);
  EXPECT_THAT(b->cache->take_neighbour_problems(), IsEmpty()) << "reported twice";
  is_possible = true;
  turn(700);
  EXPECT_EQ(load(*b, {"x"}), 1u);
}

TEST_F(SharedMemory, engines_of_other_weights_are_reported_once) {
  const auto a = engine();
  World b(options("other weights"));
  meet({a.get(), &b});
  store(*a, {"x"});
  EXPECT_EQ(load(b, {"x"}), 0u);
  EXPECT_THAT(b.cache->take_neighbour_problems(), ElementsAre(HasSubstr("another namespace")));
  meet({a.get(), &b});
  EXPECT_THAT(b.cache->take_neighbour_problems(), IsEmpty());
}

// ---- memory that also outlives its engine

class KeptSharedMemory : public SharedMemory {
 protected:
  WorldOptions kept(std::uint64_t rows, const std::string& identity = "weights") {
    WorldOptions made = options(identity);
    made.rows = rows;
    made.keep_for = "model";
    made.cache.keep_identity = identity;
    return made;
  }
  std::unique_ptr<World> with_rows(std::uint64_t rows) {
    WorldOptions made = options();
    made.rows = rows;
    return std::make_unique<World>(std::move(made));
  }
};

TEST_F(KeptSharedMemory, neighbours_read_the_chunks_that_the_next_engine_took_over) {
  const auto reader = with_rows(8);
  std::optional<World> owner(kept(8));
  store(*owner, {"a", "b", "c"});
  meet({&*owner, reader.get()});
  EXPECT_EQ(load(*reader, {"a", "b"}), 2u);
  owner.reset();
  owner.emplace(kept(8));
  EXPECT_EQ(owner->cache->stats().taken_over_chunks, 3u);
  EXPECT_EQ(load(*owner, {"a", "b", "c"}), 3u);
  meet({&*owner, reader.get()});
  EXPECT_EQ(load(*reader, {"a", "b", "c"}), 3u);
  EXPECT_EQ(owner->cache->stats().lent_chunks, 0u);
}

TEST_F(KeptSharedMemory, the_next_engine_evicts_no_chunk_that_a_neighbour_reads) {
  const auto reader = with_rows(2);
  std::optional<World> owner(kept(2));
  store(*owner, {"a", "b"});
  meet({&*owner, reader.get()});
  const Load held = begin_load(*reader, {"a"});
  ASSERT_EQ(held.keys.size(), 1u);
  owner.reset();
  owner.emplace(kept(2));
  EXPECT_EQ(store(*owner, {"c", "d"}).size(), 1u);
  expect_right(*reader, held);
  end_load(*reader, held);
}

// A reset drops chunks, and a row that a neighbour reads is then in no table of chunks.
TEST_F(KeptSharedMemory, the_next_engine_reuses_no_row_without_a_chunk_that_a_neighbour_reads) {
  const auto reader = with_rows(2);
  std::optional<World> owner(kept(2));
  store(*owner, {"a", "b"});
  meet({&*owner, reader.get()});
  const Load held = begin_load(*reader, {"a"});
  ASSERT_EQ(held.keys.size(), 1u);
  owner->cache->reset();
  owner.reset();
  owner.emplace(kept(2, "other weights"));
  EXPECT_EQ(owner->cache->stats().taken_over_chunks, 0u);
  EXPECT_EQ(owner->cache->stats().lent_chunks, 1u);
  EXPECT_EQ(store(*owner, {"c", "d"}).size(), 1u);
  expect_right(*reader, held);
  end_load(*reader, held);
  reader->cache->end_step();
  owner->clock.advance(std::chrono::seconds(2));
  owner->cache->end_step();
  EXPECT_EQ(owner->cache->stats().lent_chunks, 0u);
  EXPECT_EQ(store(*owner, {"e", "f"}).size(), 2u);
}

TEST_F(KeptSharedMemory, a_borrowed_chunk_is_not_entered_in_the_table_of_the_engine_that_reads_it) {
  const auto owner = with_rows(8);
  std::optional<World> reader(kept(8));
  store(*owner, {"a", "b"});
  meet({owner.get(), &*reader});
  for (const int priority : {0, 0, 5}) {
    const RequestHandle request = reader->cache->begin_request("r", {.priority = priority});
    EXPECT_EQ(reader->cache->lookup(request, key_of("a")), LookupResult::kHit);
    const std::vector<ChunkKey> keys{key_of("a")};
    const RowTransfer transfer = reader->cache->prepare_load(request, keys);
    reader->report(transfer.ticket);
    reader->cache->complete_load(keys);
    reader->cache->end_request(request);
    reader->cache->end_step();
  }
  reader.reset();
  reader.emplace(kept(8));
  EXPECT_EQ(reader->cache->stats().taken_over_chunks, 0u);
}

TEST_F(KeptSharedMemory, the_next_engine_has_new_memory_if_its_rows_have_other_sizes_and_one_is_read) {
  const auto reader = with_rows(8);
  std::optional<World> owner(kept(8));
  store(*owner, {"a", "b"});
  meet({&*owner, reader.get()});
  const Load held = begin_load(*reader, {"a"});
  ASSERT_EQ(held.keys.size(), 1u);
  for (const bool is_larger : {false, true}) {
    owner.reset();
    WorldOptions next = kept(is_larger ? 12 : 8);
    if (!is_larger) next.shard_bytes = {5000};
    owner.emplace(next);
    EXPECT_EQ(owner->cache->stats().taken_over_chunks, 0u);
    store(*owner, numbered("new", 8));
    expect_right(*reader, held);
  }
  end_load(*reader, held);
  EXPECT_EQ(load(*owner, {"new0"}), 1u);
}

// So many rows that the tables of kept rows of both sizes have no byte in common.
TEST_F(KeptSharedMemory, chunks_whose_rows_an_engine_with_other_sizes_has_overwritten_are_not_taken_over) {
  const Names all = numbered("k", 8);
  store(*std::make_unique<World>(kept(256)), all);
  WorldOptions other = kept(256);
  other.shard_bytes = {5 * kPageBytes};
  EXPECT_EQ(store(*std::make_unique<World>(other), all).size(), 8u);
  World last(kept(256));
  EXPECT_EQ(last.cache->stats().taken_over_chunks, 0u);
  EXPECT_EQ(load(last, all), 0u);
  EXPECT_THAT(names(), ::testing::SizeIs(2)) << "the memory was not taken over";
}

// Only a rank after the first one has other sizes, so the region is adopted first.
TEST_F(KeptSharedMemory, a_table_of_other_sizes_is_refused_while_a_process_reads_the_memory) {
  using testing::SharingEngine;
  std::optional<SharingEngine> reader(std::in_place, directory_, "reader");
  {
    SharingEngine owner(directory_, "owner", "weights", SharingEngine::kRows, true);
    ASSERT_TRUE(owner.store(3, 5));
    reader->look_around();
    ASSERT_TRUE(reader->pin(5));
  }
  RegionOptions both = ShmTest::options(SharingEngine::kRows * kPageBytes, 1, "next");
  both.keep_for = both.share_for = "model";
  const auto worker = HostRegion::attach_worker(both, 0, {{kPageBytes}, "test"});
  const auto scheduler = HostRegion::attach_scheduler(both);
  SharedRowsLayout other = SharedRowsLayout::of(SharingEngine::kRows * kPageBytes, kPageBytes);
  other.row_sizes = 1;
  EXPECT_THAT(message_of<ResourceError>([&] { LentRows(*scheduler, other, "weights"); }),
              HasSubstr("still reads the memory of the previous server"));
  reader.reset();
  LentRows lent(*scheduler, other, "weights");
  EXPECT_FALSE(lent.is_read(3)) << "a pin at a place of the earlier table counts";
}

// Bits that a process has set and not checked yet, and then stopped. Two rows then claim the same bytes, and
// only one pin can hold.
TEST_F(KeptSharedMemory, the_next_engine_does_not_start_if_a_pinned_row_cannot_be_told_from_an_earlier_one) {
  const auto with_sizes = [](WorldOptions made) {
    made.rows = 16;
    made.shard_bytes = {300, 4 * kPageBytes};
    return made;
  };
  auto reader = std::make_unique<World>(with_sizes(options()));
  std::optional<World> owner(with_sizes(kept(16)));
  for (const std::string& name : numbered("small", 16)) store(*owner, {name});
  ASSERT_EQ(store(*owner, {"large"}, 1).size(), 1u);
  meet({&*owner, reader.get()});
  const Load own = begin_load(*owner, {"large"}, 1);
  ASSERT_EQ(own.keys.size(), 1u);
  const RowId row = own.transfer.rows[0];
  end_load(*owner, own);
  const Load held = begin_load(*reader, {"large"}, 1);
  ASSERT_EQ(held.keys.size(), 1u);
  owner->cache->reset();
  const std::uint64_t table = ControlPage::padded_bytes(2) + 2 * owner->region->area_bytes();
  const auto place = static_cast<off_t>(table + kPageBytes + (row + 1) * sizeof(std::uint64_t));
  const Names all = names();
  const auto kept_name =
      std::ranges::find_if(all, [](const std::string& one) { return one.starts_with(kKeptNamePrefix); });
  ASSERT_NE(kept_name, all.end());
  const int file = ::open((directory_ + "/" + *kept_name).c_str(), O_RDWR | O_CLOEXEC);
  const auto set = [&](std::uint64_t bits) {
    ASSERT_EQ(::pwrite(file, &bits, sizeof(bits), place), ssize_t{sizeof(bits)});
  };
  owner.reset();
  set(1);  // the only reader has number 0
  EXPECT_THAT(message_of<ResourceError>([&] { World next(with_sizes(kept(16))); }),
              HasSubstr("cannot be told from"));
  set(0);
  owner.emplace(with_sizes(kept(16)));
  EXPECT_EQ(owner->cache->stats().lent_chunks, 1u);
  expect_right(*reader, held, 1);
  owner.reset();
  set(1);
  reader.reset();  // bits of an ended process do not count
  owner.emplace(with_sizes(kept(16)));
  EXPECT_EQ(owner->cache->stats().lent_chunks, 0u);
  ::close(file);
}

}  // namespace
}  // namespace kv_offload
