// SPDX-License-Identifier: Apache-2.0
#include "replay/trace_replay.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <random>

#include "base/status.h"
#include "cache/cache_fixture.h"
#include "replay/agent_sessions.h"

namespace kv_offload {
namespace {

Trace trace_of(const std::vector<std::vector<std::uint64_t>>& requests) {
  Trace trace;
  for (const auto& blocks : requests) {
    trace.blocks.insert(trace.blocks.end(), blocks.begin(), blocks.end());
    trace.ends.push_back(static_cast<std::uint32_t>(trace.blocks.size()));
  }
  return trace;
}

ReplayResult lru(const Trace& trace, std::size_t host, std::size_t tier = 0, TierSlotOptions options = {}) {
  return replay(trace, {.host_chunks = host, .tier_chunks = tier, .tier = options});
}

TEST(TraceReplay, hits_are_counted_up_to_the_first_miss) {
  const Trace trace = trace_of({{1, 2, 3}, {1, 2, 4}, {9, 2, 3}, {1, 2, 3}});
  const ReplayResult result = lru(trace, 100);
  EXPECT_EQ(result.host_hits, 0u + 2 + 0 + 3);
  EXPECT_EQ(result.stored, 5u);  // 1 2 3 4 9: each block once
  EXPECT_EQ(result.evicted, 0u);
}

TEST(TraceReplay, the_end_of_the_least_recent_prompt_is_evicted_first) {
  // Four fit: {4, 5} takes the ends of {1, 2, 3}: 1 and 2 stay.
  EXPECT_EQ(lru(trace_of({{1, 2, 3}, {4, 5}, {1, 2, 3}}), 4).host_hits, 2u);
  EXPECT_EQ(lru(trace_of({{1, 2, 3}, {4, 5}, {1, 2, 3}}), 5).host_hits, 3u);
  EXPECT_EQ(lru(trace_of({{1, 2, 3}, {4, 5}, {1, 2, 3}}), 2).host_hits, 0u);
}

TEST(TraceReplay, a_prompt_longer_than_the_cache_keeps_its_head) {
  const ReplayResult result = lru(trace_of({{1, 2, 3, 4, 5}, {1, 2, 3, 4, 5}}), 3);
  EXPECT_EQ(result.host_hits, 3u);
  EXPECT_EQ(result.declined, 4u);
}

TEST(TraceReplay, an_evicted_chunk_is_hit_on_the_tier) {
  const Trace trace = trace_of({{1, 2}, {3, 4}, {1, 2}, {3, 4}});
  const ReplayResult result = lru(trace, 2, 4);
  EXPECT_EQ(result.host_hits, 0u);
  EXPECT_EQ(result.tier_hits, 4u);
  EXPECT_EQ(result.written, 4u);
  EXPECT_EQ(result.stored, 4u);
}

TEST(TraceReplay, on_evict_writes_only_evicted_chunks) {
  const Trace trace = trace_of({{1, 2}, {3, 4}, {1, 2}});
  const ReplayResult result = lru(trace, 3, 4, {.write_policy = WritePolicy::kOnEvict});
  EXPECT_EQ(result.host_hits + result.tier_hits, 2u);
  EXPECT_EQ(result.written, 2u);  // 2, then 4
}

TEST(TraceReplay, reuse_writes_nothing_for_one_off_prompts) {
  const TierSlotOptions reuse{.write_policy = WritePolicy::kReuse, .reuse_threshold = 2};
  EXPECT_EQ(lru(trace_of({{1, 2}, {3, 4}, {5, 6}, {7}}), 4, 100, reuse).written, 0u);
  EXPECT_EQ(lru(trace_of({{1, 2}, {3, 4}, {1, 2}}), 4, 100, reuse).written, 2u);
  // Seen twice, although it was evicted in between.
  EXPECT_EQ(lru(trace_of({{1, 2}, {3, 4}, {5, 6}, {1, 2}}), 2, 100, reuse).written, 2u);
}

TEST(TraceReplay, the_tier_is_bounded) {
  const Trace trace = trace_of({{1, 2}, {3, 4}, {5, 6}, {5, 6}, {1, 2}});
  const ReplayResult result = lru(trace, 2, 2);
  EXPECT_EQ(result.tier_evicted, 6u);
  EXPECT_EQ(result.host_hits, 2u);
  EXPECT_EQ(result.tier_hits, 0u);
}

TEST(TraceReplay, a_kill_keeps_only_the_records_on_the_tier) {
  const Trace trace = trace_of({{1, 2}, {3, 4}, {3, 4, 5}, {1, 2}, {3, 4, 5}});
  const auto killed = [&](WritePolicy policy) {
    return replay(trace, {.host_chunks = 3,
                          .tier_chunks = 8,
                          .tier = {.write_policy = policy},
                          .kill_after = 3,
                          .recent_requests = 2});
  };
  const ReplayResult through = killed(WritePolicy::kWriteThrough);
  EXPECT_EQ(through.killed_with, 5u);
  EXPECT_EQ(through.recent_blocks, 5u);
  EXPECT_EQ(through.recent_hits, 5u);
  EXPECT_EQ(through.blocks_after, 5u);
  EXPECT_EQ(through.hits_after, 5u);
  const ReplayResult on_evict = killed(WritePolicy::kOnEvict);
  EXPECT_EQ(on_evict.killed_with, 2u) << "1 and 2 had left host memory";
  EXPECT_EQ(on_evict.recent_hits, 0u);
  EXPECT_EQ(on_evict.hits_after, 2u);
  EXPECT_EQ(lru(trace, 3, 8).killed_with, 0u) << "no engine was killed";
}

TEST(TraceReplay, kept_host_memory_outlives_a_kill_in_the_order_of_use) {
  const Trace prompts = trace_of({{1, 2}, {3, 4}, {3, 4, 5}, {1, 2}, {3, 4, 5}});
  const ReplayResult on_evict = replay(prompts, {.host_chunks = 3,
                                                 .tier_chunks = 8,
                                                 .tier = {.write_policy = WritePolicy::kOnEvict},
                                                 .kill_after = 3,
                                                 .recent_requests = 2,
                                                 .keep_host_memory = true});
  EXPECT_EQ(on_evict.killed_with, 2u);
  EXPECT_EQ(on_evict.recent_hits, 5u) << "3, 4 and 5 in host memory alone";
  EXPECT_EQ(on_evict.hits_after, 5u);
  const Trace again = trace_of({{1}, {2}, {1}, {3}, {4}, {1}});
  const ReplayResult kept = replay(again, {.host_chunks = 3, .kill_after = 4, .keep_host_memory = true});
  EXPECT_EQ(kept.hits_after, 1u) << "2 is the least recently used, not 1";
}

// Matches a server: a kept chunk without a record on any tier is written at its first use.
TEST(TraceReplay, kept_chunks_are_written_at_their_first_use_where_no_tier_has_them) {
  const Trace trace = trace_of({{1}, {2}, {1}, {3}});
  ReplayOptions options{.host_chunks = 3, .tier_chunks = 1, .kill_after = 2, .keep_host_memory = true};
  EXPECT_EQ(replay(trace, options).written, 4u) << "1, 2, 1 again, 3";
  options.tier.write_policy = WritePolicy::kOnEvict;
  EXPECT_EQ(replay(trace, options).written, 0u);
}

// Under `prefix` the end of {1, 2, 3} would be evicted next. After a restart the directory knows no prompts,
// only the times of use: the chunks of {1, 2, 3} are the least recently used, from its beginning.
TEST(TraceReplay, a_restarted_tier_keeps_the_order_of_use_but_no_prompts) {
  const Trace trace = trace_of({{1, 2, 3}, {4, 5, 6}, {7}, {4, 5, 6}, {1, 2, 3}});
  const auto hits_after = [&](const std::string& policy) {
    return replay(trace, {.host_chunks = 6,
                          .tier_chunks = 6,
                          .tier_eviction_policy = policy,
                          .kill_after = 2,
                          .recent_requests = 1})
        .hits_after;
  };
  EXPECT_EQ(hits_after("lru"), 3u);
  EXPECT_EQ(hits_after("prefix"), 3u) << "7 replaced 1, and the two chunks after 1 are useless without it";
}

// 1 and 2 are hit in host memory until the kill; the tier has room for three records.
TEST(TraceReplay, chunks_used_in_host_memory_stay_on_a_smaller_tier) {
  const Trace trace = trace_of({{1, 2}, {3}, {1, 2}, {4}, {1, 2}, {5}, {1, 2}, {6}});
  const ReplayResult result =
      replay(trace, {.host_chunks = 100, .tier_chunks = 3, .kill_after = 8, .recent_requests = 2});
  EXPECT_EQ(result.recent_hits, 3u);
}

TEST(TraceReplay, the_end_of_a_prompt_does_not_replace_its_beginning) {
  const Trace trace = trace_of({{1, 2, 3, 4, 5}, {6}});
  const ReplayResult result =
      replay(trace, {.host_chunks = 100, .tier_chunks = 3, .kill_after = 1, .recent_requests = 1});
  EXPECT_EQ(result.recent_hits, 3u);
  EXPECT_EQ(result.written, 4u);
  EXPECT_EQ(result.tier_declined, 2u);
  EXPECT_EQ(result.tier_evicted, 1u) << "6 belongs to another request";
}

// A missed chunk is stored again while its record is evicted: the beginning of the prompt is on no tier.
TEST(TraceReplay, a_record_may_be_evicted_while_its_chunk_is_stored) {
  std::vector<std::vector<std::uint64_t>> requests;
  std::mt19937 random(7);
  for (int i = 0; i < 2000; ++i) {
    std::vector<std::uint64_t> blocks;
    for (auto count = 1 + random() % 4; count-- > 0;) blocks.push_back(random() % 40);
    std::sort(blocks.begin(), blocks.end());
    blocks.erase(std::unique(blocks.begin(), blocks.end()), blocks.end());
    requests.push_back(blocks);
  }
  ReplayOptions options{.host_chunks = 6, .tier_chunks = 8};
  for (const std::string& policy : eviction_policy_names()) {
    options.eviction_policy = options.tier_eviction_policy = policy;
    for (const WritePolicy write_policy : {WritePolicy::kWriteThrough, WritePolicy::kOnEvict}) {
      options.tier.write_policy = write_policy;
      const ReplayResult result = replay(trace_of(requests), options);
      EXPECT_GT(result.tier_hits, 0u);
      EXPECT_EQ(result.written - result.tier_evicted, 8u);
    }
  }
}

TEST(TraceReplay, the_optimum_keeps_the_chunks_reused_soonest) {
  const Trace trace = trace_of({{1}, {2}, {3}, {1}, {4}, {2}, {1}});
  EXPECT_EQ(optimal_hits(trace, 1), 2u);  // 1, 1
  EXPECT_EQ(optimal_hits(trace, 2), 3u);
  EXPECT_EQ(optimal_hits(trace_of({{1, 2, 3}, {4, 5, 6}, {1, 2, 3}}), 2), 2u);
}

TEST(TraceReplay, no_policy_beats_the_optimum_and_all_are_equal_where_everything_fits) {
  std::mt19937 random(2);
  std::vector<std::vector<std::uint64_t>> requests;
  std::uint64_t next = 1;
  for (int i = 0; i < 2000; ++i) {
    std::vector<std::uint64_t> blocks;
    if (!requests.empty() && random() % 3 > 0) {
      blocks = requests[requests.size() - 1 - random() % std::min<std::size_t>(requests.size(), 60)];
      blocks.resize(1 + random() % blocks.size());
    }
    for (auto fresh = 1 + random() % 6; fresh-- > 0;) blocks.push_back(next++);
    requests.push_back(blocks);
  }
  const Trace trace = trace_of(requests);
  for (const std::string& policy : eviction_policy_names()) {
    for (const std::size_t capacity : {50, 200, 800}) {
      const ReplayResult result = replay(trace, {.host_chunks = capacity, .eviction_policy = policy});
      EXPECT_LE(result.host_hits, optimal_hits(trace, capacity)) << policy << " " << capacity;
      EXPECT_EQ(result.stored - result.evicted, capacity);
    }
    const ReplayResult all = replay(trace, {.host_chunks = 100000, .eviction_policy = policy});
    EXPECT_EQ(all.host_hits, optimal_hits(trace, 100000)) << policy;
  }
}

// Replays the same requests through the real cache, with rows and ranks.
class ReplayTwin : public CacheTest, public ::testing::WithParamInterface<std::string> {
 protected:
  std::size_t serve(std::span<const std::uint64_t> blocks) {
    Names prompt;
    std::vector<std::uint32_t> depths;
    for (const std::uint64_t block : blocks) {
      depths.push_back(static_cast<std::uint32_t>(prompt.size() + 1) * World::kTokens);
      prompt.push_back(fmt::format("{}", block));
    }
    const RequestHandle request = begin();
    const std::string seen = scan(request, prompt);
    const auto hits = static_cast<std::size_t>(std::count(seen.begin(), seen.end(), 'H'));
    if (hits > 0) load(request, {prompt.begin(), prompt.begin() + static_cast<long>(hits)});
    const auto all = keys(prompt);
    const StoreGrant grant =
        cache().prepare_store(request, std::span(all).subspan(hits), std::span(depths).subspan(hits));
    if (grant.transfer.ticket != kNoTicket) world().report(grant.transfer.ticket);
    for (std::size_t i = 0; i < grant.accepted.size(); ++i) {
      world().copy(all[hits + grant.accepted[i]], grant.transfer.rows[i], 0);
    }
    cache().complete_store(std::span(all).subspan(hits));
    end(request);
    step();
    return hits;
  }

  ReplayResult expect_same_hits(const Trace& trace) {
    constexpr std::size_t kRows = 64;
    WorldOptions options;
    options.ranks = 1;
    options.rows = kRows;
    options.tier = false;
    options.cache.eviction_policy = GetParam();
    make(options);
    std::vector<std::size_t> hits;
    for (std::size_t i = 0; i < trace.size(); ++i) hits.push_back(serve(trace.request(i)));
    ReplayResult result = replay(trace, {.host_chunks = kRows, .eviction_policy = GetParam()});
    EXPECT_THAT(result.host_hits_of, ::testing::ElementsAreArray(hits));
    return result;
  }
};

TEST_P(ReplayTwin, the_replay_counts_the_hits_of_the_cache) {
  std::mt19937 random(4);
  std::vector<std::vector<std::uint64_t>> requests;
  std::uint64_t next = 1;
  for (int i = 0; i < 600; ++i) {
    std::vector<std::uint64_t> blocks;
    if (!requests.empty() && random() % 2 == 0) {
      blocks = requests[requests.size() - 1 - random() % std::min<std::size_t>(requests.size(), 12)];
      blocks.resize(1 + random() % blocks.size());
    }
    for (auto fresh = 1 + random() % 5; fresh-- > 0 && blocks.size() < 20;) blocks.push_back(next++);
    requests.push_back(blocks);
  }
  const ReplayResult result = expect_same_hits(trace_of(requests));
  EXPECT_GT(result.evicted, 500u);
}

TEST_P(ReplayTwin, hits_the_same_chunks_as_the_cache_for_agent_sessions) {
  std::mt19937 random(5);
  AgentSessions sessions;
  MergeOptions options{.active = 5, .max_pause = 300, .chunk_blocks = 2};
  std::uint64_t next = 10;
  for (std::uint32_t session = 0; session < 30; ++session) {
    std::vector<std::size_t> lengths;  // of the prompts, by stream
    for (int request = 0; request < 20; ++request) {
      const std::uint32_t stream = random() % 4 == 0 ? random() % 3 : 0;
      if (lengths.size() <= stream) lengths.resize(stream + 1);
      const std::size_t common = lengths[stream] - std::min<std::size_t>(lengths[stream], random() % 3);
      sessions.streams.push_back(stream);
      sessions.durations.push_back(random() % 10);
      sessions.pauses.push_back(random() % 20);
      sessions.common.push_back(static_cast<std::uint32_t>(common));
      const std::size_t fresh = 1 + random() % 4;
      if (request == 0) {  // the system prompt of all sessions
        for (std::uint64_t block = 1; block <= 4; ++block) sessions.new_blocks.push_back(block);
      }
      for (std::size_t i = 0; i < fresh; ++i) sessions.new_blocks.push_back(next++);
      lengths[stream] = common + fresh + (request == 0 ? 4 : 0);
      sessions.new_ends.push_back(sessions.new_blocks.size());
    }
    sessions.session_ends.push_back(static_cast<std::uint32_t>(sessions.streams.size()));
    options.order.push_back(session);
  }
  const ReplayResult result = expect_same_hits(merge_sessions(sessions, options).trace);
  EXPECT_GT(result.evicted, 500u);
}

INSTANTIATE_TEST_SUITE_P(TraceReplay, ReplayTwin, ::testing::ValuesIn(eviction_policy_names()),
                         [](const auto& info) { return info.param; });

TEST(TraceReplay, invalid_options_are_refused) {
  Trace trace = trace_of({{1, 2}, {3}});
  EXPECT_THROW(lru(trace, 0), InvalidArgument);
  EXPECT_THROW(replay(trace, {.host_chunks = 1, .eviction_policy = "mru"}), InvalidArgument);
  EXPECT_THROW(replay(trace, {.host_chunks = 1, .kill_after = 3}), InvalidArgument);
  trace.ends = {2, 2};
  EXPECT_THROW(lru(trace, 1), InvalidArgument);
}

}  // namespace
}  // namespace kv_offload
