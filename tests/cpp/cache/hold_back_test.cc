// SPDX-License-Identifier: Apache-2.0
// Loads that together need more blocks than vLLM's cache has run one after the other.
#include "cache/cache_fixture.h"

namespace kv_offload {
namespace {

using ::testing::ElementsAre;

// Two groups; a prompt of four chunks needs at most (4 + 1) + 1 blocks in each.
class HoldBackTest : public OverBoth<CacheTest> {
 protected:
  static constexpr std::uint32_t kNeed = 12;
  const Names prompt_a_{"a0", "a1", "a2", "a3"}, prompt_b_{"b0", "b1", "b2", "b3"};

  void make_cache(std::uint32_t cache_blocks, std::vector<bool> full_attention = {true, false}) {
    make({.rows = 16,
          .shard_bytes = {300, 300},
          .cache = {.full_attention = std::move(full_attention), .cache_blocks = cache_blocks}});
    store(prompt_a_);
    store(prompt_b_);
    tier().finish();
    step();
  }
  RequestHandle ask() {
    const RequestHandle request = begin();
    cache().set_span(request, World::kTokens, 4 * World::kTokens);
    return request;
  }
  // Returns the first letter of the scan, which stands for the whole prompt.
  char told(RequestHandle request, const Names& prompt) {
    const std::string seen = scan(request, prompt);
    EXPECT_EQ(seen, std::string(seen.size(), seen[0]));
    return seen[0];
  }
};

KV_OFFLOAD_OVER_BOTH(HoldBackTest);

TEST_P(HoldBackTest, the_second_load_begins_when_the_first_has_ended) {
  make_cache(2 * kNeed);  // vLLM reserves one block for itself
  const RequestHandle a = ask(), b = ask();
  ASSERT_EQ(told(a, prompt_a_), 'H');
  const Job loading = begin_load(a, prompt_a_);
  EXPECT_EQ(told(b, prompt_b_), 'P');
  step();
  EXPECT_EQ(told(b, prompt_b_), 'P');
  end_load(loading);
  step();
  EXPECT_EQ(told(b, prompt_b_), 'H');
  load(b, prompt_b_);
  EXPECT_EQ(world().hit_tokens("cpu"), 2 * 4 * World::kTokens);
  EXPECT_EQ(world().metrics.value("kv_offload_lookup_tokens_total", {}), 2 * 4 * World::kTokens) << "no miss";
  end(a);
  end(b);
  EXPECT_EQ(cache().stats().pinned_chunks, 0u);
  EXPECT_EQ(cache().stats().waiting_requests, 0u);
}

TEST_P(HoldBackTest, loads_that_fit_together_run_together) {
  make_cache(2 * kNeed + 1);
  const RequestHandle a = ask(), b = ask();
  const Job loading = (told(a, prompt_a_), begin_load(a, prompt_a_));
  EXPECT_EQ(told(b, prompt_b_), 'H');
  end_load(loading);
}

TEST_P(HoldBackTest, without_windows_no_load_is_held_back) {
  make_cache(kNeed, {true, true});
  const RequestHandle a = ask(), b = ask();
  const Job loading = (told(a, prompt_a_), begin_load(a, prompt_a_));
  EXPECT_EQ(told(b, prompt_b_), 'H');
  end_load(loading);
}

TEST_P(HoldBackTest, a_single_load_is_never_held_back) {
  make_cache(1);
  EXPECT_EQ(told(ask(), prompt_a_), 'H');
}

TEST_P(HoldBackTest, a_request_of_unknown_length_counts_as_the_whole_cache) {
  make_cache(100 * kNeed);
  const RequestHandle a = ask(), b = begin();
  const Job loading = (told(a, prompt_a_), begin_load(a, prompt_a_));
  EXPECT_EQ(told(b, prompt_b_), 'P');
  end_load(loading);
}

TEST_P(HoldBackTest, no_load_is_held_back_past_the_deadline) {
  make_cache(kNeed);
  const RequestHandle a = ask(), b = ask();
  const Job loading = (told(a, prompt_a_), begin_load(a, prompt_a_));
  EXPECT_EQ(told(b, prompt_b_), 'P');
  step();
  pass_time(world().options().cache.lookup_timeout);
  step();
  EXPECT_EQ(told(b, prompt_b_), 'M');
  end(b);
  EXPECT_EQ(world().miss_tokens("deadline"), 4 * World::kTokens);
  end_load(loading);
  EXPECT_EQ(cache().stats().pinned_chunks, 0u);
}

TEST_P(HoldBackTest, chunks_of_a_held_back_load_stay_pinned_and_are_fetched) {
  make_cache(kNeed);
  world().restart();
  store(prompt_a_);
  store({"b0", "b1"});
  const RequestHandle a = ask(), b = ask();
  const Job loading = (told(a, prompt_a_), begin_load(a, prompt_a_));
  EXPECT_EQ(told(b, prompt_b_), 'P');
  step();
  EXPECT_THAT(names(tier().read_keys()), ElementsAre("b2", "b3"));
  store({"x0", "x1", "x2", "x3", "x4", "x5", "x6", "x7", "x8", "x9"});  // all free rows
  tier().finish();
  step();
  EXPECT_EQ(told(b, prompt_b_), 'P');
  end_load(loading);
  step();
  EXPECT_EQ(told(b, prompt_b_), 'H');
}

TEST_P(HoldBackTest, loads_that_a_reset_forgot_count_until_they_are_reported) {
  make_cache(kNeed);
  const RequestHandle a = ask(), b = ask();
  const Job loading = (told(a, prompt_a_), begin_load(a, prompt_a_));
  cache().reset();
  store(prompt_b_);
  EXPECT_EQ(told(b, prompt_b_), 'P');
  step();
  EXPECT_EQ(told(b, prompt_b_), 'P');
  world().report(loading.transfer.ticket);
  step();
  EXPECT_EQ(told(b, prompt_b_), 'H');
}

TEST_P(HoldBackTest, loads_that_had_ended_before_a_reset_do_not_count) {
  make_cache(kNeed);
  const RequestHandle a = ask(), b = ask();
  ASSERT_EQ(told(a, prompt_a_), 'H');
  const Job loading = begin_load(a, prompt_a_);
  cache().complete_load(keys(prompt_a_));  // one rank has not reported yet
  cache().reset();
  store(prompt_b_);
  EXPECT_EQ(told(b, prompt_b_), 'H');
  world().report(loading.transfer.ticket);
}

}  // namespace
}  // namespace kv_offload
