// SPDX-License-Identifier: Apache-2.0
#include "cache/prefetcher.h"

#include <algorithm>
#include <limits>

#include "cache/parts.h"
#include "out_of_memory.h"
#include "step_watch.h"

namespace kv_offload {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using ::testing::ElementsAre;
using ::testing::IsEmpty;

constexpr SessionId kSessionA{1, 1}, kSessionB{1, 2};
constexpr std::size_t kMany = 2 * Prefetcher::kReadsInFlight;
constexpr double kNotExpected = std::numeric_limits<double>::infinity();

class PrefetcherTest : public ::testing::Test {
 protected:
  struct Parts : SupplyParts {
    explicit Parts(const PartsOptions& made, std::uint64_t max_bytes)
        : SupplyParts(made), prefetcher({groups, chunks, row_provider, ops, metrics}, max_bytes) {}
    Prefetcher prefetcher;
  };
  static constexpr std::uint64_t kChunkBytes = kPageBytes;

  // `rows` in host memory; at most `unused` prefetched chunks of each of several clients at once.
  void make(std::uint64_t rows, std::uint64_t unused = 64, PartsOptions options = {}) {
    options.rows = rows;
    if (options.cache.full_attention.empty()) options.cache.full_attention = {true};
    parts_ = std::make_unique<Parts>(options, 2 * unused * kChunkBytes);
    parts_->clock.advance(seconds(100));
    parts_->chunks.set_now(to_seconds(parts_->clock.now()));
  }
  Parts& parts() {
    if (!parts_) make(64);
    return *parts_;
  }
  // A prompt whose chunks are on the tier.
  std::shared_ptr<const Prefetcher::Prompt> recorded(const Names& names, std::uint64_t client = 0) {
    for (const auto& name : names) parts().record(name);
    return prompt(names, client);
  }
  std::shared_ptr<const Prefetcher::Prompt> prompt(const Names& names, std::uint64_t client = 0) {
    auto made = std::make_shared<Prefetcher::Prompt>();
    made->client = client;
    made->family = static_cast<std::uint32_t>(client + 1);
    made->bytes = names.size() * kChunkBytes;
    ChunkId parent = 0;
    std::uint32_t depth = 0;
    for (const auto& name : names) {
      const ChunkKey key = key_of(name);
      made->chunks.push_back({key, parent, depth += ChunkParts::kTokens, 0});
      parent = chunk_id(key);
    }
    return made;
  }
  static Names many() {
    Names names;
    for (std::size_t i = 0; i < kMany; ++i) names.push_back("a" + std::to_string(i));
    return names;
  }
  Nanos in(Nanos time) { return parts().clock.now() + time; }
  // The client has a prompt that is not read during a test.
  void expect_later(std::uint64_t client) {
    expect({client, client}, {"later"}, 2 * Prefetcher::kPenalty, client);
  }
  void expect(SessionId session, const Names& names, Nanos time, std::uint64_t client = 0) {
    parts().prefetcher.expect(session, recorded(names, client), in(time));
  }
  void step(bool is_idle = false) {
    parts().ops.poll();
    parts().chunks.set_now(to_seconds(parts().clock.now()));
    parts().prefetcher.run(parts().clock.now(), is_idle);
    parts().ops.end_step();
  }
  // Steps until no further read begins.
  void run_all() {
    do {
      parts().finish();
      step();
    } while (parts().tier->stats().queued_reads > 0);
  }
  Names reads() {
    Names names;
    for (const TierOp& op : parts().tier->reads()) {
      const std::string name(op.key.bytes().substr(0, 16));
      names.push_back(name.substr(0, name.find('-')));
    }
    return names;
  }
  bool is_resident(const std::string& name) { return parts().chunks.find_resident(key_of(name)) != nullptr; }
  double returns_at(const std::string& name) { return parts().chunks.find(key_of(name))->returns_at; }
  double prefetched(std::string_view outcome) {
    return parts().metrics.value("kv_offload_prefetched_bytes_total", {outcome});
  }
  void use(const std::string& name) {
    parts().chunks.access(parts().chunks.slot_of(parts().chunks.find(key_of(name))), 1, 0);
  }

  std::unique_ptr<Parts> parts_;
};

// ---- when

TEST_F(PrefetcherTest, a_due_prompt_is_read_from_its_first_chunk_on) {
  parts().resident("a");
  expect(kSessionA, {"a", "b", "c"}, Nanos(0));
  step();
  EXPECT_THAT(reads(), ElementsAre("b", "c"));
  parts().finish();
  EXPECT_TRUE(is_resident("b") && is_resident("c"));
  EXPECT_EQ(parts().chunks.find(key_of("c"))->parent, chunk_id(key_of("b")));
  EXPECT_EQ(parts().chunks.find(key_of("c"))->family, 1u);
  step();
  EXPECT_EQ(parts().prefetcher.size(), 0u);
}

TEST_F(PrefetcherTest, chunks_in_a_neighbours_memory_are_not_read) {
  make(64, 64, {.share_for = "model"});
  LendingEngine neighbour(parts());
  neighbour.lend("a");
  neighbour.lend("c");
  parts().chunks.share_in(*parts().region, "weights", Nanos(0));
  parts().rank->map_neighbours();
  parts().chunks.poll_neighbours(Nanos(0));
  ASSERT_EQ(parts().chunks.neighbours(), 1u);
  expect(kSessionA, {"a", "b", "c", "d"}, Nanos(0));
  step();
  EXPECT_THAT(reads(), ElementsAre("b", "d"));
  EXPECT_TRUE(neighbour.rows->take_use(0)) << "its owner may evict the chunk before the session returns";
}

TEST_F(PrefetcherTest, a_prompt_is_read_shortly_before_the_return) {
  expect(kSessionA, {"a"}, seconds(50));
  step();
  parts().clock.advance(seconds(50) - Prefetcher::kMinLead - milliseconds(1));
  step();
  EXPECT_THAT(reads(), IsEmpty());
  parts().clock.advance(milliseconds(1));
  step();
  EXPECT_THAT(reads(), ElementsAre("a"));
}

TEST_F(PrefetcherTest, reads_of_a_slow_tier_begin_earlier) {
  parts().tier->read_seconds = 5;
  expect(kSessionA, {"a"}, seconds(50));
  parts().clock.advance(seconds(50 - 2 * 5) - Prefetcher::kMinLead - milliseconds(1));
  step();
  EXPECT_THAT(reads(), IsEmpty());
  parts().clock.advance(milliseconds(1));
  step();
  EXPECT_THAT(reads(), ElementsAre("a"));
}

TEST_F(PrefetcherTest, reads_begin_at_most_a_minute_early_and_at_once_if_asked) {
  parts().tier->read_seconds = 3600;
  expect(kSessionA, {"a"}, Prefetcher::kMaxLead + milliseconds(1));
  parts().prefetcher.expect(kSessionB, recorded({"b"}), in(seconds(600)), true);
  step();
  EXPECT_THAT(reads(), ElementsAre("b"));
}

TEST_F(PrefetcherTest, a_later_return_does_not_stop_reads_that_begin_now) {
  const auto of_session = recorded({"a"});
  parts().prefetcher.expect(kSessionA, of_session, in(seconds(30)), true);
  parts().prefetcher.expect(kSessionA, of_session, in(seconds(600)));
  step();
  EXPECT_THAT(reads(), ElementsAre("a"));
  EXPECT_EQ(returns_at("a"), to_seconds(in(seconds(600))));
}

TEST_F(PrefetcherTest, an_idle_engine_reads_all_that_is_due_soon) {
  expect(kSessionA, many(), seconds(50));
  expect(kSessionB, {"late"}, Prefetcher::kIdleHorizon + milliseconds(1));
  step(true);
  EXPECT_EQ(reads().size(), kMany);
}

TEST_F(PrefetcherTest, an_idle_engine_also_reads_the_prompts_of_the_last_step) {
  expect(kSessionA, {"a"}, seconds(50));
  step();
  expect(kSessionB, {"b"}, seconds(55));
  step(true);
  EXPECT_THAT(reads(), ElementsAre("a", "b"));
}

TEST_F(PrefetcherTest, chunks_that_an_idle_engine_read_too_early_are_read_again) {
  expect(kSessionA, {"a", "b"}, seconds(50));
  step(true);
  parts().finish();
  parts().chunks.discard(parts().chunks.slot_of(parts().chunks.find(key_of("a"))));
  parts().clock.advance(seconds(50));
  run_all();
  EXPECT_TRUE(is_resident("a") && is_resident("b"));
  EXPECT_EQ(parts().prefetcher.size(), 0u);
}

TEST_F(PrefetcherTest, queued_reads_make_way_for_a_request_and_begin_again) {
  expect(kSessionA, many(), Nanos(0));
  step(true);
  const Slot awaited = parts().chunks.slot_of(parts().chunks.find(key_of(many().back())));
  ASSERT_TRUE(parts().ops.await(awaited, 1));
  parts().prefetcher.make_way();
  EXPECT_EQ(reads().size(), Prefetcher::kReadsInFlight + 1);
  EXPECT_EQ(reads().back(), many().back());
  run_all();
  for (const auto& name : many()) EXPECT_TRUE(is_resident(name)) << name;
  EXPECT_EQ(prefetched("unused"), 0);
}

TEST_F(PrefetcherTest, few_reads_run_while_requests_run) {
  expect(kSessionA, many(), Nanos(0));
  step();
  EXPECT_EQ(reads().size(), Prefetcher::kReadsInFlight);
  parts().tier->finish(1);
  step();
  EXPECT_EQ(reads().size(), Prefetcher::kReadsInFlight);
  run_all();
  EXPECT_TRUE(is_resident(many().back()));
}

TEST_F(PrefetcherTest, a_stuck_read_of_one_tier_does_not_stop_reads_of_another) {
  PartsOptions options;
  options.tiers = 2;
  make(64, 64, options);
  const auto wanted = recorded(many());
  parts().slower->records = parts().tier->records;
  std::erase_if(parts().tier->records, [](const auto& record) { return record.first != key_of("a0"); });
  parts().prefetcher.expect(kSessionA, wanted, in(Nanos(0)));
  for (std::size_t i = 0; i < kMany; ++i) {
    step();
    parts().slower->finish();
  }
  EXPECT_EQ(reads().size(), 1u);
  EXPECT_EQ(parts().chunks.resident(), kMany - 1);
}

TEST_F(PrefetcherTest, a_later_hint_replaces_the_expected_return) {
  expect(kSessionA, {"a"}, Nanos(0));
  expect(kSessionA, {"a"}, seconds(50));
  step();
  EXPECT_THAT(reads(), IsEmpty());
  EXPECT_EQ(parts().prefetcher.size(), 1u);
}

TEST_F(PrefetcherTest, nothing_is_read_for_a_session_that_is_back_or_long_overdue) {
  expect(kSessionA, {"a"}, seconds(50));
  expect(kSessionB, {"b"}, seconds(50));
  parts().prefetcher.cancel(kSessionA);
  parts().clock.advance(seconds(50) + Prefetcher::kGrace + milliseconds(1));
  step();
  EXPECT_THAT(reads(), IsEmpty());
  EXPECT_EQ(parts().prefetcher.size(), 0u);
}

// ---- what

TEST_F(PrefetcherTest, a_prompt_ends_at_the_first_chunk_that_no_tier_has) {
  recorded({"a", "c"});
  parts().prefetcher.expect(kSessionA, prompt({"a", "b", "c"}), in(Nanos(0)));
  run_all();
  EXPECT_TRUE(is_resident("a"));
  EXPECT_FALSE(parts().has("c"));
  EXPECT_EQ(parts().prefetcher.size(), 0u);
}

TEST_F(PrefetcherTest, a_prompt_of_two_groups_ends_at_the_first_chunk_that_no_tier_has) {
  PartsOptions options;
  options.shard_bytes = {300, 300};
  options.cache.full_attention = {true, true};
  make(64, 64, options);
  auto made = std::make_shared<Prefetcher::Prompt>();
  for (const char* name : {"a", "b", "c"}) {
    for (const std::uint32_t group : {0u, 1u}) {
      const ChunkKey key = key_of(name, group);
      made->chunks.push_back({key, 0, 0, group});
      if (key == key_of("b", 1)) continue;
      parts().tier->records[key] = {group, {std::vector<std::byte>(300)}};
    }
  }
  parts().prefetcher.expect(kSessionA, made, in(Nanos(0)));
  run_all();
  EXPECT_TRUE(parts().has("a", 0) && parts().has("a", 1) && parts().has("b", 0));
  EXPECT_FALSE(parts().has("c", 0) || parts().has("c", 1));
  EXPECT_EQ(parts().prefetcher.size(), 0u);
}

TEST_F(PrefetcherTest, a_window_may_begin_after_chunks_that_no_tier_has) {
  PartsOptions options;
  options.cache.full_attention = {false};
  make(64, 64, options);
  recorded({"b"});
  parts().prefetcher.expect(kSessionA, prompt({"a", "b"}), in(Nanos(0)));
  run_all();
  EXPECT_TRUE(is_resident("b"));
}

TEST_F(PrefetcherTest, unknown_chunks_are_looked_up_in_the_tier) {
  for (const char* name : {"a", "b", "c"}) parts().tier->forgotten.insert(key_of(name));
  recorded({"a", "b"});
  parts().prefetcher.expect(kSessionA, prompt({"a", "b", "c"}), in(Nanos(0)));
  step();
  EXPECT_THAT(reads(), IsEmpty());
  run_all();
  EXPECT_TRUE(is_resident("a") && is_resident("b"));
  EXPECT_EQ(parts().tier->asked.size(), 1u);
  EXPECT_EQ(parts().prefetcher.size(), 0u);
}

TEST_F(PrefetcherTest, lookups_belong_to_the_tenant_of_the_prompt) {
  PartsOptions options;
  options.cache.tenants = {{"other", 0}, {"quiet", 0.5}, {"flood", 0.5}};
  make(64, 64, options);
  parts().tier->forgotten.insert(key_of("a"));
  auto of_tenant = std::make_shared<Prefetcher::Prompt>(*recorded({"a"}));
  of_tenant->tenant = 2;
  parts().prefetcher.expect(kSessionA, of_tenant, in(Nanos(0)));
  run_all();
  ASSERT_EQ(parts().tier->asked.size(), 1u);
  EXPECT_EQ(parts().tier->asked[0].second, (LookupOptions{KeyOrder::kNone, 2, 0.5}));
}

TEST_F(PrefetcherTest, a_stale_miss_is_looked_up_once) {
  parts().tier->is_sure = false;
  parts().prefetcher.expect(kSessionA, prompt({"a"}), in(Nanos(0)));
  run_all();
  step();
  EXPECT_EQ(parts().tier->asked.size(), 1u);
  EXPECT_EQ(parts().prefetcher.size(), 0u);
}

// By the lookup of a request, which had begun before and ended at an earlier chunk.
TEST_F(PrefetcherTest, a_chunk_that_a_lookup_skipped_is_looked_up_again) {
  parts().tier->answers = false;
  parts().tier->forgotten.insert(key_of("a"));
  parts().prefetcher.expect(kSessionA, recorded({"a"}), in(Nanos(0)));
  step();
  ASSERT_EQ(parts().tier->asked.size(), 1u);
  parts().tier->forgotten.clear();
  parts().tier->skipped.insert(key_of("a"));
  step();
  ASSERT_EQ(parts().tier->asked.size(), 2u);
  EXPECT_EQ(parts().tier->asked[1].first, std::vector<ChunkKey>{key_of("a")});
  parts().tier->forgotten.clear();
  run_all();
  EXPECT_TRUE(is_resident("a"));
}

TEST_F(PrefetcherTest, a_tier_that_is_out_of_service_is_not_read) {
  parts().tier->available = false;
  expect(kSessionA, {"a"}, Nanos(0));
  step();
  EXPECT_THAT(reads(), IsEmpty());
}

TEST_F(PrefetcherTest, a_failed_read_leaves_nothing_behind) {
  expect(kSessionA, {"a"}, Nanos(0));
  step();
  parts().tier->damage(key_of("a"));
  parts().finish();
  step();
  EXPECT_FALSE(parts().has("a"));
  EXPECT_EQ(parts().prefetcher.unused_bytes(), 0u);
  EXPECT_EQ(prefetched("unused"), 0);
  EXPECT_EQ(parts().free_rows(), 64u);
}

TEST_F(PrefetcherTest, no_row_is_lost_if_memory_runs_out) {
  unsigned failures = 0;
  for (bool came = true; came; ++failures) {
    make(4);
    auto wanted = std::make_shared<Prefetcher::Prompt>(*recorded({"x", "a", "b"}));
    wanted->priority = 1;  // higher than that of "x", which an insert after it raises
    parts().resident("x");
    parts().prefetcher.expect(kSessionA, wanted, in(Nanos(0)));
    {
      const testing::FailingAllocation failing(failures);
      try {
        step();
      } catch (const std::bad_alloc&) {
      }
      came = failing.came();
    }
    parts().prefetcher.cancel(kSessionA);
    parts().finish();
    step();
    EXPECT_EQ(parts().chunks.pinned(), 0u) << "allocation " << failures;
    EXPECT_EQ(parts().free_rows() + parts().chunks.resident(), 4u) << "allocation " << failures;
    EXPECT_EQ(parts().prefetcher.unused_bytes(), (parts().chunks.resident() - 1) * kChunkBytes);
  }
  EXPECT_GT(failures, 10u);
}

TEST_F(PrefetcherTest, bytes_are_counted_once_if_memory_runs_out) {
  expect(kSessionA, {"a"}, Nanos(0));
  run_all();
  use("a");
  EXPECT_GT(testing::fail_each_allocation([this] { parts().prefetcher.run(parts().clock.now(), false); },
                                          [this] { EXPECT_EQ(prefetched("used"), 0); }),
            0u);
  EXPECT_EQ(prefetched("used"), kChunkBytes);
  EXPECT_EQ(parts().prefetcher.unused_bytes(), 0u);
}

TEST_F(PrefetcherTest, a_chunk_that_leaves_before_its_review_is_counted_once) {
  expect(kSessionA, {"used", "unused", "failed"}, Nanos(0));
  step();
  parts().tier->damage(key_of("failed"));
  parts().finish();
  use("used");
  for (const char* name : {"used", "unused"})
    parts().chunks.discard(parts().chunks.slot_of(parts().chunks.find(key_of(name))));
  for (int i = 0; i < 2; ++i) {
    step();
    EXPECT_EQ(prefetched("used"), kChunkBytes);
    EXPECT_EQ(prefetched("unused"), kChunkBytes);
    EXPECT_EQ(parts().prefetcher.unused_bytes(), 0u);
  }
}

TEST_F(PrefetcherTest, chunks_that_a_reset_forgets_are_counted_once) {
  expect(kSessionA, {"used", "unused"}, Nanos(0));
  step();
  parts().finish();
  use("used");
  expect(kSessionB, {"reading"}, Nanos(0));
  step();
  parts().ops.forget();
  parts().prefetcher.forget();
  parts().chunks.forget();
  for (int i = 0; i < 2; ++i) {
    parts().finish();
    step();
    EXPECT_EQ(prefetched("used"), kChunkBytes);
    EXPECT_EQ(prefetched("unused"), kChunkBytes);
  }
}

TEST_F(PrefetcherTest, a_read_keeps_its_room_until_it_ends) {
  expect(kSessionA, {"a"}, Nanos(0));
  step();
  parts().tier->start(OpKind::kRead);
  parts().clock.advance(Prefetcher::kGrace + milliseconds(1));
  step();
  EXPECT_EQ(parts().prefetcher.unused_bytes(), kChunkBytes) << "its row is in use";
  parts().tier->finish_started();
  step();
  EXPECT_EQ(parts().prefetcher.unused_bytes(), 0u);
}

TEST_F(PrefetcherTest, a_reset_forgets_all) {
  expect(kSessionA, {"a"}, Nanos(0));
  expect(kSessionB, {"b"}, seconds(90));
  step();
  parts().ops.forget();
  parts().prefetcher.forget();
  parts().chunks.forget();
  parts().finish();
  EXPECT_EQ(parts().prefetcher.size(), 0u);
  EXPECT_EQ(parts().prefetcher.unused_bytes(), 0u);
  parts().chunks.poll();
  EXPECT_EQ(parts().free_rows(), 64u);
  expect(kSessionA, {"a"}, Nanos(0));
  run_all();
  EXPECT_TRUE(is_resident("a"));
}

// ---- bounds

TEST_F(PrefetcherTest, a_chunk_expected_sooner_is_not_evicted) {
  make(2);
  const auto wanted = recorded({"a", "b"});
  parts().chunks.set_return(parts().resident("later"), to_seconds(in(seconds(90))));
  parts().chunks.set_return(parts().resident("sooner"), to_seconds(in(seconds(10))));
  parts().prefetcher.expect(kSessionA, wanted, in(seconds(60)));
  step(true);
  EXPECT_THAT(reads(), ElementsAre("a"));
  EXPECT_TRUE(parts().has("sooner"));
  EXPECT_FALSE(parts().has("later"));
}

TEST_F(PrefetcherTest, the_end_of_a_long_prompt_does_not_evict_its_beginning) {
  make(2);
  expect(kSessionA, {"a", "b", "c"}, seconds(1));
  run_all();
  EXPECT_TRUE(is_resident("a") && is_resident("b"));
  EXPECT_FALSE(parts().has("c"));
}

TEST_F(PrefetcherTest, no_write_is_cancelled) {
  make(1);
  const Slot slot = parts().resident("written");
  parts().ops.write(0, {&slot, 1});
  expect(kSessionA, {"a"}, Nanos(0));
  step();
  EXPECT_EQ(parts().tier->writes().size(), 1u);
  EXPECT_THAT(reads(), IsEmpty());
}

TEST_F(PrefetcherTest, no_chunk_is_evicted_that_waits_for_its_write) {
  PartsOptions options;
  options.cache.tiers.resize(1);
  options.cache.tiers[0].write_policy = WritePolicy::kOnEvict;
  constexpr std::size_t kRows = 128;
  make(kRows, kRows, options);
  Names wanted;
  for (std::size_t i = 0; i < kRows; ++i) wanted.push_back("a" + std::to_string(i));
  const auto of_session = recorded(wanted);
  for (std::size_t i = 0; i < kRows; ++i) parts().resident("x" + std::to_string(i));
  parts().prefetcher.expect(kSessionA, of_session, in(seconds(50)));
  step(true);
  EXPECT_GT(parts().tier->writes().size(), 0u);
  EXPECT_EQ(parts().chunks.resident(), kRows) << "no chunk that is not on the tier was evicted";
  EXPECT_EQ(parts().metrics.value("kv_offload_dropped_bytes_total", {"fs", "pressure"}), 0);
  parts().finish();
  step(true);
  EXPECT_GT(reads().size(), 0u);
}

TEST_F(PrefetcherTest, a_client_that_is_alone_may_use_all_the_room) {
  make(64, 2);
  expect(kSessionA, {"a", "b", "c", "d", "e"}, Nanos(0), 1);
  run_all();
  EXPECT_EQ(parts().prefetcher.unused_bytes(), 4 * kChunkBytes);
}

TEST_F(PrefetcherTest, a_client_is_alone_again_when_the_others_have_no_prompt_and_no_chunk) {
  make(64, 2);
  expect(kSessionB, {"x"}, Nanos(0), 2);
  run_all();
  expect(kSessionA, {"a", "b", "c", "d"}, Nanos(0), 1);
  run_all();
  EXPECT_EQ(parts().prefetcher.unused_bytes(), 3 * kChunkBytes);
  use("x");
  run_all();
  EXPECT_EQ(parts().prefetcher.unused_bytes(), 4 * kChunkBytes);
}

TEST_F(PrefetcherTest, unused_chunks_of_one_client_are_bounded_and_their_use_makes_room) {
  make(64, 2);
  expect_later(2);
  expect(kSessionA, {"a", "b", "c"}, Nanos(0), 1);
  run_all();
  EXPECT_FALSE(parts().has("c"));
  EXPECT_EQ(parts().prefetcher.unused_bytes(), 2 * kChunkBytes);
  expect(kSessionB, {"x"}, Nanos(0), 2);
  run_all();
  EXPECT_TRUE(is_resident("x"));
  use("a");
  run_all();
  EXPECT_TRUE(is_resident("c"));
  EXPECT_EQ(prefetched("used"), kChunkBytes);
}

TEST_F(PrefetcherTest, unused_chunks_of_all_clients_are_bounded) {
  make(64, 1);
  for (std::uint64_t client = 1; client <= 3; ++client)
    expect({1, client}, {"a" + std::to_string(client)}, Nanos(0), client);
  run_all();
  EXPECT_EQ(parts().prefetcher.unused_bytes(), 2 * kChunkBytes);
}

TEST_F(PrefetcherTest, clients_of_one_tenant_together_get_its_share_while_others_prefetch) {
  PartsOptions options;
  options.cache.tenants = {{"other", 0}, {"quiet", 0.5}, {"flood", 0.5}};
  make(64, 4, options);  // 8 chunks, 4 for each of the two tenants
  const auto expect_for = [&](TenantId tenant, std::uint64_t client, const Names& names, Nanos time) {
    auto made = std::make_shared<Prefetcher::Prompt>(*recorded(names, client));
    made->tenant = tenant;
    parts().prefetcher.expect({tenant, client}, made, in(time));
  };
  for (std::uint64_t client = 1; client <= 3; ++client) {
    const std::string name = "f" + std::to_string(client);
    expect_for(2, client, {name + "a", name + "b", name + "c"}, Nanos(0));
  }
  expect_for(1, 4, {"a", "b", "c", "d"}, seconds(1));
  run_all();
  for (const char* name : {"a", "b", "c", "d"}) EXPECT_TRUE(is_resident(name)) << name;
  EXPECT_EQ(parts().prefetcher.unused_bytes(), 8 * kChunkBytes);
  // Then the other tenant has no prompt and no chunk.
  for (const char* name : {"a", "b", "c", "d"}) use(name);
  run_all();
  EXPECT_EQ(parts().prefetcher.unused_bytes(), 8 * kChunkBytes) << "the idle share is lent";
  parts().prefetcher.forget();
  EXPECT_EQ(parts().prefetcher.unused_bytes(), 0u);
}

TEST_F(PrefetcherTest, what_no_tenant_has_as_a_share_is_lent_to_each) {
  PartsOptions options;
  options.cache.tenants = {{"other", 0}, {"quiet", 0.25}, {"flood", 0.25}};
  make(64, 4, options);  // 8 chunks, 2 for each of the two tenants; the other tenant's share is less than one
  const auto expect_for = [&](TenantId tenant, std::uint64_t client, const Names& names, Nanos time) {
    auto made = std::make_shared<Prefetcher::Prompt>(*recorded(names, client));
    made->tenant = tenant;
    parts().prefetcher.expect({tenant, client}, made, in(time));
  };
  expect_for(1, 9, {"a", "b"}, std::chrono::hours(1));
  expect_for(0, 8, {"o"}, Nanos(0));
  run_all();
  EXPECT_TRUE(is_resident("o"));
  for (std::uint64_t client = 1; client <= 3; ++client) {
    const std::string name = "f" + std::to_string(client);
    expect_for(2, client, {name + "a", name + "b", name + "c"}, Nanos(0));
  }
  run_all();
  EXPECT_EQ(parts().prefetcher.unused_bytes(), 6 * kChunkBytes) << "two chunks are left for the quiet tenant";
}

TEST_F(PrefetcherTest, unused_chunks_count_against_their_tenant_for_a_while) {
  PartsOptions options;
  options.cache.tenants = {{"other", 0}, {"quiet", 0.5}, {"flood", 0.5}};
  make(64, 1, options);
  const auto expect_for = [&](TenantId tenant, std::uint64_t client, const std::string& name, Nanos time) {
    auto made = std::make_shared<Prefetcher::Prompt>(*recorded({name}, client));
    made->tenant = tenant;
    parts().prefetcher.expect({tenant, client}, made, in(time));
  };
  expect_for(1, 9, "later", 2 * Prefetcher::kPenalty);
  expect_for(2, 1, "a", Nanos(0));
  run_all();
  parts().chunks.discard(parts().chunks.slot_of(parts().chunks.find(key_of("a"))));
  expect_for(2, 2, "b", seconds(1));
  run_all();
  EXPECT_FALSE(parts().has("b")) << "of another client, but of the same tenant";
  parts().clock.advance(Prefetcher::kPenalty + seconds(2));
  step();
  expect_for(2, 2, "b", Nanos(0));
  run_all();
  EXPECT_TRUE(is_resident("b"));
}

// Other tenants with thousands of prompts that are due.
class PrefetcherTenants : public PrefetcherTest {
 protected:
  static constexpr std::uint64_t kFlood = 400;

  void make_for(double quiet, double flood) {
    PartsOptions options;
    options.cache.tenants = {{"other", 1 - quiet - flood}, {"quiet", quiet}, {"flood", flood}};
    make(2048, 2048, options);
  }
  void expect_for(TenantId tenant, std::uint64_t session,
                  std::shared_ptr<const Prefetcher::Prompt> of_session, Nanos time) {
    auto made = std::make_shared<Prefetcher::Prompt>(*of_session);
    made->tenant = tenant;
    made->client = tenant;
    parts().prefetcher.expect({tenant, session}, made, in(time));
  }
  void flood(Nanos time, std::size_t chunks = 1) {
    for (std::uint64_t i = 1; i <= kFlood; ++i) {
      Names names;
      for (std::size_t at = 0; at < chunks; ++at) names.push_back(fmt::format("f{}x{}", i, at));
      expect_for(2, i, recorded(names), time);
    }
  }
  std::size_t reads_of(char first) {
    const Names names = reads();
    return static_cast<std::size_t>(
        std::ranges::count_if(names, [first](const std::string& name) { return name[0] == first; }));
  }
};

TEST_F(PrefetcherTenants, a_prompt_is_read_in_the_turns_of_its_tenant) {
  make_for(0.5, 0.5);
  flood(Nanos(0));
  step();
  parts().finish();
  expect_for(1, 1, recorded({"q1", "q2", "q3"}), milliseconds(500));
  step();
  EXPECT_EQ(reads_of('q'), 3u);
}

TEST_F(PrefetcherTenants, prompts_are_read_in_proportion_to_the_shares) {
  make_for(0.75, 0.25);
  flood(Nanos(0));
  for (std::uint64_t i = 1; i <= kFlood; ++i)
    expect_for(1, i, recorded({fmt::format("q{}", i)}), milliseconds(500));
  std::size_t quiet = 0, all = 0;
  for (int i = 0; i < 20; ++i) {
    step();
    quiet += reads_of('q');
    all += reads().size();
    parts().finish();
  }
  EXPECT_EQ(all, 20 * Prefetcher::kReadsInFlight);
  EXPECT_NEAR(static_cast<double>(quiet), 0.75 * static_cast<double>(all), 3);
}

TEST_F(PrefetcherTenants, long_prompts_of_a_tenant_do_not_delay_short_ones_of_another) {
  make_for(0.5, 0.5);
  flood(Nanos(0), 16);
  for (std::uint64_t i = 1; i <= 8; ++i)
    expect_for(1, i, recorded({fmt::format("q{}", i)}), milliseconds(500));
  std::size_t quiet = 0, steps = 0;
  for (; quiet < 8 && steps < 100; ++steps) {
    step();
    quiet += reads_of('q');
    parts().finish();
  }
  EXPECT_LE(steps, 4u);
}

// Those of the flood wait for their lookups, and again in each later step.
TEST_F(PrefetcherTenants, prompts_that_wait_do_not_delay_those_of_another_tenant) {
  make_for(0.5, 0.5);
  const auto unknown = [this](const std::string& name) {
    parts().tier->forgotten.insert(key_of(name));
    return prompt({name});
  };
  for (std::uint64_t i = 1; i <= kFlood; ++i) expect_for(2, i, unknown(fmt::format("f{}", i)), Nanos(0));
  for (std::uint64_t i = 1; i <= kFlood / Prefetcher::kPromptsPerStep + 1; ++i) {
    parts().ops.poll();
    parts().prefetcher.run(parts().clock.now(), false);  // no lookup ends
  }
  parts().record("q");
  expect_for(1, 1, unknown("q"), milliseconds(500));
  for (int i = 0; i < 3; ++i) step();
  EXPECT_EQ(reads_of('q'), 1u);
}

// The reads of the flood take nearly all visits, so a step visits few prompts of the other tenant.
TEST_F(PrefetcherTenants, prompts_that_wait_do_not_delay_others_of_a_tenant_with_few_visits) {
  make_for(0.1, 0.8);
  parts().resident("a");
  for (std::uint64_t i = 1; i <= kFlood; ++i) expect_for(1, i, prompt({"a"}), Nanos(0));
  while (parts().prefetcher.size() > 0) step();  // before the flood, it had all visits
  for (std::uint64_t i = 1; i <= 10; ++i) {
    const std::string name = fmt::format("w{}", i);
    parts().tier->forgotten.insert(key_of(name));
    expect_for(1, i, prompt({name}), Nanos(0));
  }
  flood(Nanos(0), 16);
  std::size_t found = 0;
  for (int i = 0; i < 60 && found == 0; ++i) {
    if (i == 20) expect_for(1, 21, recorded({"q"}), milliseconds(500));
    parts().ops.poll();
    parts().prefetcher.run(parts().clock.now(), false);  // no lookup ends
    found = reads_of('q');
    parts().finish();
  }
  EXPECT_EQ(found, 1u);
}

TEST_F(PrefetcherTenants, tenants_whose_prompts_are_not_due_take_no_visits) {
  PartsOptions options;
  options.cache.tenants = {{"other", 0}, {"quiet", 0}, {"flood", 0.5}};
  for (std::size_t i = 3; i < TenantShares::kMaxTenants; ++i)
    options.cache.tenants.push_back({fmt::format("t{}", i), 0});
  make(2048, 2048, options);
  flood(Nanos(0));
  for (TenantId tenant = 3; tenant < TenantShares::kMaxTenants; ++tenant)
    expect_for(tenant, 1, prompt({"later"}), 2 * Prefetcher::kMaxLead);
  step();
  EXPECT_EQ(reads().size(), Prefetcher::kReadsInFlight);
}

// The chunks of the flood are in host memory already. Its number is the lower one.
TEST_F(PrefetcherTenants, prompts_of_which_nothing_is_read_do_not_delay_those_of_another_tenant) {
  make_for(0.5, 0.5);
  parts().resident("s");
  for (std::uint64_t i = 1; i <= kFlood; ++i)
    expect_for(1, i, prompt(Names(Prefetcher::kChunksPerStep, "s")), Nanos(0));
  step();
  expect_for(2, 1, recorded({"q"}), milliseconds(500));
  for (int i = 0; i < 3; ++i) step();
  EXPECT_EQ(reads_of('q'), 1u);
}

TEST_F(PrefetcherTenants, a_step_checks_as_many_prompts_of_many_tenants_as_of_one) {
  const auto cost = [this](std::size_t tenants) {
    PartsOptions options;
    for (std::size_t i = 0; i < TenantShares::kMaxTenants; ++i)
      options.cache.tenants.push_back({fmt::format("t{}", i), 0});
    make(64, 64, options);
    for (std::size_t tenant = 0; tenant < tenants; ++tenant) {
      for (std::uint64_t i = 0; i < 2 * Prefetcher::kPromptsPerStep; ++i)
        expect_for(static_cast<TenantId>(tenant), i + 1, prompt({"a"}), Prefetcher::kMaxLead - seconds(1));
    }
    return testing::steps_of([this] { step(); });
  };
  const std::uint64_t one = cost(1);
  EXPECT_GE(one, Prefetcher::kPromptsPerStep);
  EXPECT_LE(cost(TenantShares::kMaxTenants), one);
}

TEST_F(PrefetcherTenants, a_step_costs_the_same_however_many_prompts_of_tenants_are_due) {
  const auto cost = [this](std::uint64_t prompts) {
    make_for(0.5, 0.5);
    for (const TenantId tenant : {1, 2}) {
      for (std::uint64_t i = 0; i < prompts; ++i) expect_for(tenant, i + 1, prompt({"a", "b"}), Nanos(0));
    }
    return testing::steps_of([this] { step(); });
  };
  const std::uint64_t few = cost(2 * Prefetcher::kPromptsPerStep);
  EXPECT_GT(few, 0u);
  EXPECT_EQ(cost(20 * Prefetcher::kPromptsPerStep), few);
}

TEST_F(PrefetcherTest, the_prompts_of_a_client_without_room_do_not_block_others) {
  make(512, 1);
  expect({2, 1}, {"first"}, Nanos(0), 1);
  run_all();
  for (std::uint64_t i = 0; i < 4 * Prefetcher::kPromptsPerStep; ++i)
    expect({3, i}, {"p" + std::to_string(i)}, Nanos(0), 1);
  expect(kSessionB, {"x"}, seconds(1), 2);
  for (int i = 0; i < 10; ++i) step();
  EXPECT_THAT(reads(), ElementsAre("x"));
}

TEST_F(PrefetcherTest, prompts_that_return_first_are_read_first) {
  constexpr std::uint64_t kPrompts = 3 * Prefetcher::kPromptsPerStep;
  make(2 * kPrompts, kPrompts);
  for (std::uint64_t i = kPrompts; i-- > 0;)
    expect({1, kPrompts - i}, {"p" + std::to_string(i)}, milliseconds(i));
  for (std::uint64_t read = 0; read < kPrompts;) {
    step();
    ASSERT_THAT(reads(), ::testing::Not(IsEmpty()));
    for (const auto& name : reads()) EXPECT_EQ(name, "p" + std::to_string(read++));
    parts().finish();
  }
}

TEST_F(PrefetcherTest, a_long_prompt_is_due_before_short_ones_that_return_earlier) {
  for (std::uint64_t i = 0; i < 2 * Prefetcher::kPromptsPerStep; ++i)
    expect({3, i}, {"p" + std::to_string(i)}, seconds(10));
  parts().resident("s");
  Names names(5000, "s");  // takes 12 s, with 8 chunks in each step of 20 ms
  names.front() = "first";
  expect(kSessionA, names, seconds(12));
  for (int i = 0; i < 5; ++i) step();
  EXPECT_THAT(reads(), ElementsAre("first"));
}

TEST_F(PrefetcherTest, chunks_whose_session_stays_away_are_evicted_first) {
  expect(kSessionA, {"a"}, Nanos(0));
  run_all();
  parts().clock.advance(Prefetcher::kGrace);
  step();
  EXPECT_NE(returns_at("a"), kNotExpected);
  parts().clock.advance(milliseconds(1));
  step();
  EXPECT_EQ(returns_at("a"), kNotExpected);
  EXPECT_EQ(prefetched("unused"), kChunkBytes);
  EXPECT_EQ(parts().prefetcher.unused_bytes(), 0u);
}

TEST_F(PrefetcherTest, a_later_return_keeps_the_chunks) {
  expect(kSessionA, {"a"}, Nanos(0));
  run_all();
  parts().chunks.set_return(parts().chunks.slot_of(parts().chunks.find(key_of("a"))),
                            to_seconds(in(seconds(100))));
  parts().clock.advance(seconds(100));
  step();
  EXPECT_NE(returns_at("a"), kNotExpected);
  EXPECT_EQ(parts().prefetcher.unused_bytes(), kChunkBytes);
}

TEST_F(PrefetcherTest, unused_chunks_count_against_their_client_for_a_while) {
  make(64, 1);
  expect_later(3);
  expect(kSessionA, {"a"}, Nanos(0), 1);
  run_all();
  parts().chunks.discard(parts().chunks.slot_of(parts().chunks.find(key_of("a"))));
  expect(kSessionA, {"a"}, seconds(1), 1);
  run_all();
  EXPECT_FALSE(parts().has("a"));
  EXPECT_EQ(prefetched("unused"), kChunkBytes);
  expect(kSessionB, {"x"}, Nanos(0), 2);
  run_all();
  EXPECT_TRUE(is_resident("x"));
  parts().clock.advance(Prefetcher::kPenalty + milliseconds(1));
  step();
  expect(kSessionA, {"a"}, Nanos(0), 1);
  run_all();
  EXPECT_TRUE(is_resident("a"));
}

TEST_F(PrefetcherTest, a_step_examines_a_bounded_number_of_chunks) {
  make(64);
  Names names;
  for (std::size_t i = 0; i < Prefetcher::kChunksPerStep; ++i) names.push_back("s");
  names.push_back("last");
  parts().resident("s");
  expect(kSessionA, names, Nanos(0));
  step();
  EXPECT_THAT(reads(), IsEmpty());
  step();
  EXPECT_THAT(reads(), ElementsAre("last"));
}

TEST_F(PrefetcherTest, a_step_costs_the_same_among_many_prompts) {
  const auto cost = [this](std::uint64_t prompts) {
    make(64);
    for (std::uint64_t i = 0; i < prompts; ++i)
      parts().prefetcher.expect({1, i + 1}, prompt({"a", "b"}), in(Nanos(0)));
    return testing::steps_of([this] { step(); });
  };
  const std::uint64_t few = cost(2 * Prefetcher::kPromptsPerStep);
  EXPECT_GT(few, 0u);
  EXPECT_EQ(cost(20 * Prefetcher::kPromptsPerStep), few);
}

}  // namespace
}  // namespace kv_offload
