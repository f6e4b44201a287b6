// SPDX-License-Identifier: Apache-2.0
// The per-chunk cost of a cache call does not grow with the number of chunks in host memory, on the
// tier, in flight or requested by others. Each test does the same work at scale 1 and at scale 10
// and compares steps. Tests that need a tier use one with 10 million records.
#include "cache/tiered_cache.h"

#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <vector>

#include "cache/cache_fixture.h"
#include "cache/request_table.h"
#include "steps/counted_store.h"
#include "steps/steps.h"
#include "tier/io_pool.h"
#include "tier/thread_pool_tier.h"

namespace kv_offload::testing {
namespace {

constexpr double kMostGrowth = 1.7;  // a tree with ten times as many entries is 1.5 times as deep
constexpr std::uint64_t kRecords = 10'000'000;

struct Size {
  std::uint64_t rows = 4096;
  std::vector<std::uint64_t> shard_bytes{300};
  bool tier = true;
  StatusKind reads_end = StatusKind::kOk;
  std::vector<bool> full_attention{};
  std::uint32_t cache_blocks = 0;
  std::string policy = "lru";
  std::size_t most_keys = ThreadPoolTierOptions().most_keys;
};

// A cache whose tier has no threads: the test runs the tier's ops itself.
class Engine {
 public:
  explicit Engine(const Size& size) {
    WorldOptions options;
    options.ranks = 1;
    options.rows = size.rows;
    options.shard_bytes = size.shard_bytes;
    options.cache.load_policy = LoadPolicy::kAlways;
    options.cache.full_attention = size.full_attention;
    options.cache.cache_blocks = size.cache_blocks;
    options.cache.eviction_policy = size.policy;
    options.cache.keep_events = true;
    options.tier = size.tier;
    if (size.tier) {
      options.make_tier = [this, size](const Clock& clock) {
        ThreadPoolTierOptions tier;
        tier.name = "counted";
        tier.clock = &clock;
        tier.manual_pool = &pool_;
        tier.most_keys = size.most_keys;
        return make_thread_pool_tier(std::make_unique<CountedStore>(kRecords, size.reads_end), tier);
      };
    }
    world_ = std::make_unique<World>(options);
  }

  TieredCache& cache() { return *world_->cache; }
  FakeClock& clock() { return world_->clock; }
  void run(Lane lane, std::size_t most = static_cast<std::size_t>(-1)) {
    for (; most > 0; --most) {
      const auto op = pool_->begin_next(lane);
      if (!op) return;
      op();
    }
  }
  IoPool& pool() { return *pool_; }
  RequestHandle begin() { return cache().begin_request("r", {}); }
  static std::vector<ChunkKey> keys(std::uint64_t first, std::size_t count, std::uint32_t group = 0) {
    std::vector<ChunkKey> made;
    for (std::size_t i = 0; i < count; ++i) made.push_back(numbered_key(first + i, group));
    return made;
  }
  std::size_t look(RequestHandle request, const std::vector<ChunkKey>& keys) {
    std::size_t hits = 0;
    for (const ChunkKey& key : keys) hits += cache().lookup(request, key) == LookupResult::kHit;
    return hits;
  }
  // Asks for the keys until the tier knows its records and the reads are queued.
  RequestHandle ask(const std::vector<ChunkKey>& keys) {
    const RequestHandle request = begin();
    ask_again(request, keys);
    return request;
  }
  void ask_again(RequestHandle request, const std::vector<ChunkKey>& keys) {
    look(request, keys);
    cache().end_step();
    answer();
    look(request, keys);
    cache().end_step();
  }
  // Runs the lookups. They are urgent: they run before the queued reads.
  void answer() {
    while (pool_->depth(Lane::kRead).queued > reads_) pool_->begin_next(Lane::kRead)();
  }
  // Runs this step's lookups, which are sent to the tier at the end of the step.
  void answer_questions() {
    cache().end_step();
    run(Lane::kRead);
    cache().end_step();
  }
  void expect_reads(std::size_t reads) {
    reads_ = reads;
    ASSERT_EQ(pool_->depth(Lane::kRead).queued, reads);
  }
  Ticket store(RequestHandle request, const std::vector<ChunkKey>& keys, std::uint64_t* prepare = nullptr,
               std::uint64_t* complete = nullptr) {
    StoreGrant grant;
    const std::uint64_t prepared = steps_of([&] { grant = cache().prepare_store(request, keys); });
    EXPECT_EQ(grant.accepted.size(), keys.size());
    world_->report(grant.transfer.ticket);
    const std::uint64_t completed = steps_of([&] { cache().complete_store(keys); });
    if (prepare != nullptr) *prepare += prepared;
    if (complete != nullptr) *complete += completed;
    return grant.transfer.ticket;
  }
  void store(const std::vector<ChunkKey>& keys) {
    const RequestHandle request = begin();
    store(request, keys);
    cache().end_request(request);
    cache().end_step();
  }
  World& world() { return *world_; }

 private:
  IoPool* pool_ = nullptr;
  std::size_t reads_ = 0;
  std::unique_ptr<World> world_;
};

// `measure` returns the steps for one unit of work at this scale, 1 or 10.
template <typename Measure>
void expect_no_growth(Measure measure) {
  const double small = static_cast<double>(measure(1)), large = static_cast<double>(measure(10));
  ASSERT_GT(small, 0);
  EXPECT_LE(large / small, kMostGrowth) << small << " steps became " << large;
}

// ---- host memory

std::uint64_t steps_of_evicting_stores(const Size& size, std::uint32_t groups) {
  Engine engine(size);
  std::uint64_t next = 0, prepare = 0;
  const auto store = [&](std::uint64_t* steps) {
    std::vector<ChunkKey> keys;
    for (std::uint32_t g = 0; g < groups; ++g) {
      for (const ChunkKey& key : Engine::keys(next, 64, g)) keys.push_back(key);
    }
    next += 64;
    const RequestHandle request = engine.begin();
    engine.store(request, keys, steps);
    engine.cache().end_request(request);
    engine.cache().end_step();
  };
  const std::uint64_t fill = 2 * size.rows / (64 * groups);
  for (std::uint64_t i = 0; i < fill; ++i) store(nullptr);
  for (int i = 0; i < 16; ++i) store(&prepare);
  return prepare;
}

TEST(CacheSteps, a_store_that_evicts_costs_the_same_in_a_larger_memory) {
  expect_no_growth(
      [](std::uint64_t scale) { return steps_of_evicting_stores({.rows = 4096 * scale, .tier = false}, 1); });
}

TEST(CacheSteps, a_store_that_evicts_rows_of_two_sizes_costs_the_same_in_a_larger_memory) {
  expect_no_growth([](std::uint64_t scale) {
    return steps_of_evicting_stores({.rows = 4096 * scale,
                                     .shard_bytes = {300, 3 * kPageBytes},
                                     .tier = false,
                                     .full_attention = {true, true}},
                                    2);
  });
}

TEST(CacheSteps, a_store_costs_the_same_where_no_slab_can_be_emptied) {
  expect_no_growth([](std::uint64_t scale) {
    Engine engine({.rows = 16'384 * scale,
                   .shard_bytes = {300, 3 * kPageBytes},
                   .tier = false,
                   .full_attention = {true, true}});
    // Pins all of the memory: no rank has reported these stores.
    const RequestHandle request = engine.begin();
    for (std::uint64_t first = 0;; first += 512) {
      const auto keys = Engine::keys(first, 512);
      if (engine.cache().prepare_store(request, keys).accepted.size() < keys.size()) break;
    }
    std::uint64_t took = 0;
    for (std::uint64_t i = 0; i < 20; ++i) {
      const RequestHandle other = engine.begin();
      const auto keys = Engine::keys(i, 1, 1);
      took += steps_of([&] { EXPECT_TRUE(engine.cache().prepare_store(other, keys).accepted.empty()); });
      engine.cache().end_request(other);
    }
    return took;
  });
}

TEST(CacheSteps, a_million_token_prompt_costs_the_same_per_chunk) {
  std::uint64_t per_chunk[2][3] = {};
  for (const std::uint64_t scale : {1, 10}) {
    const std::size_t chunks = 6'250 * scale;  // 16 tokens each
    Engine engine({.rows = 70'000, .tier = false});
    const auto keys = Engine::keys(0, chunks);
    engine.store(keys);
    const RequestHandle request = engine.begin();
    std::uint64_t* took = per_chunk[scale == 10];
    took[0] = steps_of([&] { EXPECT_EQ(engine.look(request, keys), chunks); }) / chunks;
    RowTransfer load;
    took[1] = steps_of([&] { load = engine.cache().prepare_load(request, keys); }) / chunks;
    engine.world().report(load.ticket);
    took[2] = steps_of([&] { engine.cache().complete_load(keys); }) / chunks;
    engine.cache().end_request(request);
  }
  for (int verb = 0; verb < 3; ++verb) {
    ASSERT_GT(per_chunk[0][verb], 0u);
    EXPECT_LE(static_cast<double>(per_chunk[1][verb]) / static_cast<double>(per_chunk[0][verb]), kMostGrowth)
        << "verb " << verb;
  }
}

// A memory full of chunks: 8192, and ten times as many. The calls take the same time, not per chunk.
class FullMemorySteps : public ::testing::TestWithParam<std::string> {
 protected:
  static constexpr std::uint64_t kRows = 8192;
  static std::unique_ptr<Engine> full(std::uint64_t scale, std::uint64_t first = 0) {
    auto engine = std::make_unique<Engine>(Size{.rows = kRows * scale, .tier = false, .policy = GetParam()});
    fill(*engine, scale, first);
    return engine;
  }
  static void fill(Engine& engine, std::uint64_t scale, std::uint64_t first) {
    for (std::uint64_t i = 0; i < kRows * scale; i += 512) engine.store(Engine::keys(first + i, 512));
    EXPECT_EQ(engine.cache().stats().resident_chunks, kRows * scale);
    engine.cache().take_events();
  }
};

TEST_P(FullMemorySteps, a_reset_costs_the_same) {
  expect_no_growth([](std::uint64_t scale) {
    const auto engine = full(scale);
    const std::uint64_t took = steps_of([&] { engine->cache().reset(); });
    EXPECT_EQ(engine->cache().stats().resident_chunks, 0u);
    const RequestHandle request = engine->begin();
    EXPECT_EQ(engine->look(request, Engine::keys(kRows * scale - 64, 64)), 0u);
    engine->cache().end_request(request);
    return took;
  });
}

TEST_P(FullMemorySteps, a_close_costs_the_same) {
  expect_no_growth([](std::uint64_t scale) {
    const auto engine = full(scale);
    return steps_of([&] { engine->cache().close(); });
  });
}

TEST_P(FullMemorySteps, a_step_after_a_reset_costs_the_same) {
  expect_no_growth([](std::uint64_t scale) {
    const auto engine = full(scale);
    engine->cache().reset();
    return steps_of([&] { engine->cache().end_step(); });
  });
}

TEST_P(FullMemorySteps, a_store_right_after_a_reset_costs_the_same) {
  expect_no_growth([](std::uint64_t scale) {
    const auto engine = full(scale);
    engine->cache().reset();
    std::uint64_t took = 0;
    const RequestHandle request = engine->begin();
    for (std::uint64_t i = 0; i < kRows; i += 512)
      engine->store(request, Engine::keys(kRows * scale - kRows + i, 512), &took);
    engine->cache().end_request(request);
    return took;
  });
}

INSTANTIATE_TEST_SUITE_P(CacheSteps, FullMemorySteps, ::testing::Values("lru", "prefix"));

TEST(CacheSteps, completing_a_load_costs_the_same_among_many_loads) {
  expect_no_growth([](std::uint64_t scale) {
    Engine engine({.rows = 4096, .tier = false});
    std::vector<std::vector<ChunkKey>> prompts;
    std::vector<Ticket> tickets;
    for (std::uint64_t i = 0; i < 100 * scale; ++i) {
      prompts.push_back(Engine::keys(4 * i, 4));
      engine.store(prompts.back());
      const RequestHandle request = engine.begin();
      engine.look(request, prompts.back());
      tickets.push_back(engine.cache().prepare_load(request, prompts.back()).ticket);
    }
    std::uint64_t took = 0;
    for (std::size_t i = 0; i < 50; ++i) {
      const std::size_t last = prompts.size() - 1 - i;
      engine.world().report(tickets[last]);
      took += steps_of([&] { engine.cache().complete_load(prompts[last]); });
    }
    return took;
  });
}

// ---- hints about sessions

TEST(CacheSteps, the_end_of_a_turn_costs_the_same_among_many_sessions) {
  expect_no_growth([](std::uint64_t scale) {
    Engine engine({.rows = 8'000 * scale, .tier = false, .full_attention = {true}});
    const auto turn = [&](std::uint64_t session, std::uint64_t prompt, HintType type) {
      const RequestHandle request =
          engine.cache().begin_request("r", {.family = static_cast<std::uint32_t>(session + 1)});
      engine.store(request, Engine::keys(64 * prompt, 64));
      const Hint hint{type, {}, {}, 20};
      const std::uint64_t took = steps_of([&] {
        engine.cache().end_turn(request, {{1, session}, session}, std::span<const Hint>(&hint, 1));
      });
      engine.cache().end_request(request);
      return took;
    };
    for (std::uint64_t i = 0; i < 100 * scale; ++i) turn(i, i, HintType::kResume);
    std::uint64_t took = 0;
    for (std::uint64_t i = 0; i < 10; ++i) {
      took += turn(i, 100 * scale + 2 * i, HintType::kSupersede);
      took += turn(i, 100 * scale + 2 * i + 1, HintType::kRelease);
    }
    return took;
  });
}

TEST(CacheSteps, a_step_that_ends_retentions_costs_the_same_however_many_end) {
  expect_no_growth([](std::uint64_t scale) {
    const std::size_t chunks = 4'000 * scale;
    Engine engine({.rows = 70'000, .tier = false, .full_attention = {true}});
    const RequestHandle request = engine.cache().begin_request("r", {.family = 1});
    engine.store(request, Engine::keys(0, chunks));
    const Hint hint{HintType::kRetain, {}, {}, 1};
    EXPECT_EQ(engine.cache().end_turn(request, {{1, 1}, 1}, std::span<const Hint>(&hint, 1)).front(),
              HintOutcome::kAccepted);
    engine.cache().end_request(request);
    engine.clock().advance(std::chrono::seconds(1));
    return steps_of([&] { engine.cache().end_step(); });
  });
}

// ---- reads from a tier

TEST(CacheSteps, ending_a_request_with_queued_reads_costs_the_same_per_chunk) {
  expect_no_growth([](std::uint64_t scale) {
    const std::size_t chunks = 3'000 * scale;
    Engine engine({.rows = 70'000});
    engine.ask(Engine::keys(0, chunks));  // queued ahead of the request's reads
    engine.expect_reads(chunks);
    const RequestHandle request = engine.ask(Engine::keys(100'000, chunks));
    const std::uint64_t took = steps_of([&] { engine.cache().end_request(request); });
    for (std::size_t i = 0; i < chunks / RequestTable::kReadsCancelledPerStep; ++i) engine.cache().end_step();
    EXPECT_EQ(engine.pool().depth(Lane::kRead).queued, chunks);
    return took / chunks;
  });
}

TEST(CacheSteps, a_lookup_timeout_costs_the_same_per_chunk) {
  expect_no_growth([](std::uint64_t scale) {
    const std::size_t chunks = 3'000 * scale;
    Engine engine({.rows = 70'000});
    engine.ask(Engine::keys(0, chunks));
    engine.clock().advance(std::chrono::seconds(6));
    const std::uint64_t took = steps_of([&] { engine.cache().end_step(); });
    EXPECT_EQ(engine.cache().stats().waiting_requests, 0u);
    return took / chunks;
  });
}

TEST(CacheSteps, completed_reads_and_repeated_lookups_cost_the_same_per_chunk) {
  std::uint64_t arrive[2], again[2];
  for (const std::uint64_t scale : {1, 10}) {
    const std::size_t chunks = 3'000 * scale;
    Engine engine({.rows = 70'000});
    const auto keys = Engine::keys(0, chunks);
    const RequestHandle request = engine.ask(keys);
    engine.run(Lane::kRead);
    arrive[scale == 10] = steps_of([&] { engine.cache().end_step(); }) / chunks;
    EXPECT_EQ(engine.look(request, keys), chunks);
    engine.cache().prepare_load(request, keys);
    again[scale == 10] = steps_of([&] {
                           EXPECT_EQ(engine.look(request, keys), chunks);
                           engine.cache().admit(request);
                         }) /
                         chunks;
  }
  EXPECT_LE(static_cast<double>(arrive[1]) / static_cast<double>(arrive[0]), kMostGrowth)
      << arrive[0] << " became " << arrive[1];
  EXPECT_LE(static_cast<double>(again[1]) / static_cast<double>(again[0]), kMostGrowth);
}

TEST(CacheSteps, lookups_after_failed_reads_cost_the_same_per_chunk) {
  expect_no_growth([](std::uint64_t scale) {
    const std::size_t chunks = 1'000 * scale;
    Engine engine({.rows = 20'000, .reads_end = StatusKind::kNotFound});
    const auto keys = Engine::keys(0, chunks);
    const RequestHandle request = engine.ask(keys);
    engine.run(Lane::kRead);
    engine.cache().end_step();
    return steps_of([&] { EXPECT_EQ(engine.look(request, keys), 0u); }) / chunks;
  });
}

TEST(CacheSteps, ending_a_waiting_request_costs_the_same_among_many_waiting) {
  expect_no_growth([](std::uint64_t scale) {
    Engine engine({.rows = 4096});
    const auto keys = Engine::keys(0, 64);
    std::vector<RequestHandle> others;
    others.push_back(engine.ask(keys));
    for (std::uint64_t i = 1; i < 100 * scale; ++i) {
      others.push_back(engine.begin());
      engine.look(others.back(), keys);
    }
    engine.cache().end_step();
    std::uint64_t took = 0;
    for (std::size_t i = 0; i < 20; ++i)
      took += steps_of([&] { engine.cache().end_request(others[2 * i + 1]); });
    return took;
  });
}

// ---- memory

TEST(CacheSteps, ended_requests_keep_no_memory_of_their_prompts) {
  Engine engine({.rows = 4096});
  std::vector<RequestHandle> requests;
  const auto keys = Engine::keys(kRecords, 8192);  // no record exists for these keys
  engine.cache().end_request(engine.ask(keys));
  const std::uint64_t before = bytes_in_use();
  for (int i = 0; i < 100; ++i) {
    requests.push_back(engine.begin());
    engine.look(requests.back(), keys);
  }
  EXPECT_GT(bytes_in_use(), before + (std::uint64_t{8} << 20)) << "the test does not use enough memory";
  for (const RequestHandle request : requests) engine.cache().end_request(request);
  engine.answer_questions();
  EXPECT_LT(bytes_in_use(), before + (std::uint64_t{1} << 20));
}

TEST(CacheSteps, an_admitted_request_keeps_no_memory_of_its_lookups) {
  Engine engine({.rows = 4096});
  const auto keys = Engine::keys(kRecords, 8192);
  const auto run_some = [&](int requests) {
    for (int i = 0; i < requests; ++i) {
      const RequestHandle request = engine.begin();
      engine.look(request, keys);
      engine.cache().admit(request);
    }
    engine.answer_questions();
    return bytes_in_use();
  };
  const std::uint64_t before = run_some(5);
  EXPECT_LT(run_some(50), before + (std::uint64_t{1} << 20));
}

TEST(CacheSteps, writes_behind_a_stuck_write_do_not_accumulate_memory) {
  Engine engine({.rows = 256, .most_keys = 16'384});
  engine.store(Engine::keys(kRecords, 1));
  const auto stuck = engine.pool().begin_next(Lane::kWrite);
  const auto write = [&](std::uint64_t from, std::uint64_t to) {
    for (std::uint64_t i = from; i < to; ++i) {
      engine.store(Engine::keys(kRecords + 1 + 64 * i, 64));
      engine.run(Lane::kWrite);
      engine.cache().end_step();
      engine.cache().take_events();
    }
  };
  write(0, 300);  // fills the tier's bounded memory of keys
  const std::uint64_t before = bytes_in_use();
  write(300, 2'300);
  EXPECT_LT(bytes_in_use(), before + (std::uint64_t{1} << 19));
  stuck();
}

}  // namespace
}  // namespace kv_offload::testing
