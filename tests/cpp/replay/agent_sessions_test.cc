// SPDX-License-Identifier: Apache-2.0
#include "replay/agent_sessions.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>
#include <utility>

#include "base/status.h"
#include "policy/lru.h"

namespace kv_offload {
namespace {

using ::testing::ElementsAre;
using ::testing::Pair;

constexpr double kNever = std::numeric_limits<double>::infinity();

struct Recorded {
  std::uint32_t stream;
  double pause, duration;
  std::uint32_t common;
  std::vector<std::uint64_t> blocks;  // after the common ones
};

AgentSessions sessions_of(const std::vector<std::vector<Recorded>>& sessions) {
  AgentSessions made;
  for (const auto& session : sessions) {
    for (const Recorded& request : session) {
      made.streams.push_back(request.stream);
      made.durations.push_back(request.duration);
      made.pauses.push_back(request.pause);
      made.common.push_back(request.common);
      made.new_blocks.insert(made.new_blocks.end(), request.blocks.begin(), request.blocks.end());
      made.new_ends.push_back(made.new_blocks.size());
    }
    made.session_ends.push_back(static_cast<std::uint32_t>(made.streams.size()));
  }
  return made;
}

MergedSessions merged(const std::vector<std::vector<Recorded>>& sessions, MergeOptions options) {
  for (std::uint32_t i = 0; options.order.size() < sessions.size(); ++i) options.order.push_back(i);
  return merge_sessions(sessions_of(sessions), options);
}

std::vector<std::pair<double, double>> spans_of(const Trace& trace) {
  std::vector<std::pair<double, double>> spans;
  for (const RequestTimes& times : trace.times) spans.emplace_back(times.begins, times.ends);
  return spans;
}

std::vector<double> returns_of(const Trace& trace) {
  std::vector<double> returns;
  for (const RequestTimes& times : trace.times) returns.push_back(times.returns_at);
  return returns;
}

// Two of three sessions are active. The first one has two requests.
const std::vector<std::vector<Recorded>> kThree = {
    {{0, 0, 2, 0, {1, 2}}, {0, 3, 1, 2, {3}}},
    {{0, 0, 10, 0, {4}}},
    {{0, 0, 1, 0, {1, 5}}},
};

TEST(AgentSessions, the_next_session_begins_when_one_ends) {
  const MergedSessions found = merged(kThree, {.active = 2, .chunk_blocks = 1});
  EXPECT_THAT(found.requests, ElementsAre(0, 2, 1, 3));
  EXPECT_THAT(spans_of(found.trace), ElementsAre(Pair(0, 2), Pair(0, 10), Pair(5, 6), Pair(6, 7)));
  EXPECT_THAT(returns_of(found.trace), ElementsAre(5, kNever, kNever, kNever));
  EXPECT_THAT(found.trace.blocks, ElementsAre(1, 2, 4, 1, 2, 3, 1, 5));
  EXPECT_THAT(found.trace.ends, ElementsAre(2, 3, 6, 8));
}

TEST(AgentSessions, the_order_of_sessions_is_given) {
  const MergedSessions found = merged(kThree, {.order = {2, 1, 0}, .active = 1, .chunk_blocks = 1});
  EXPECT_THAT(found.requests, ElementsAre(3, 2, 0, 1));
  EXPECT_THAT(spans_of(found.trace), ElementsAre(Pair(0, 1), Pair(1, 11), Pair(11, 13), Pair(16, 17)));
}

TEST(AgentSessions, long_pauses_are_shortened) {
  const MergedSessions found = merged(kThree, {.active = 2, .max_pause = 1, .chunk_blocks = 1});
  EXPECT_THAT(spans_of(found.trace), ElementsAre(Pair(0, 2), Pair(0, 10), Pair(3, 4), Pair(4, 5)));
}

// The chunks in use when a request begins: {1, 2}, {1, 2, 4}, {1, 2, 3, 4}, {1, 4, 5}.
TEST(AgentSessions, the_need_is_the_average_of_the_chunks_in_use) {
  const MergedSessions found = merged(kThree, {.active = 2, .chunk_blocks = 1});
  EXPECT_DOUBLE_EQ(found.needed_chunks, (2 + 3 + 4 + 3) / 4.0);
}

TEST(AgentSessions, the_need_does_not_depend_on_the_length_of_the_last_session) {
  auto sessions = kThree;
  sessions.back().back().duration = 1000;
  const MergeOptions options{.active = 2, .chunk_blocks = 1};
  EXPECT_DOUBLE_EQ(merged(sessions, options).needed_chunks, merged(kThree, options).needed_chunks);
}

TEST(AgentSessions, a_chunk_of_two_prompts_is_needed_once) {
  const MergedSessions found =
      merged({{{0, 0, 4, 0, {1, 2}}}, {{0, 0, 4, 0, {1, 3}}}}, {.active = 2, .chunk_blocks = 1});
  EXPECT_DOUBLE_EQ(found.needed_chunks, (2 + 3) / 2.0);
  EXPECT_EQ(found.different_chunks, 3u);
  EXPECT_EQ(found.trace.times[0].shared, 1u);
}

// The sub-agent begins 2 s after the request before it, and outlives its agent. The session ends with it.
TEST(AgentSessions, sub_agents_run_concurrently) {
  const MergedSessions found = merged(
      {{{0, 0, 5, 0, {1}}, {1, 2, 4, 0, {2}}, {0, 1, 1, 1, {3}}, {1, 3, 1, 1, {4}}}, {{0, 0, 1, 0, {5}}}},
      {.active = 1, .chunk_blocks = 1});
  EXPECT_THAT(found.requests, ElementsAre(0, 1, 2, 3, 4));
  EXPECT_THAT(spans_of(found.trace),
              ElementsAre(Pair(0, 5), Pair(2, 6), Pair(6, 7), Pair(9, 10), Pair(10, 11)));
  EXPECT_THAT(found.trace.request(3), ElementsAre(2, 4));
}

TEST(AgentSessions, a_chunk_is_named_by_its_last_block_and_the_rest_is_left_out) {
  const MergedSessions found =
      merged({{{0, 0, 1, 0, {1, 2, 3, 4, 5}}, {0, 0, 1, 3, {6, 7, 8}}}}, {.active = 1, .chunk_blocks = 2});
  EXPECT_THAT(found.trace.request(0), ElementsAre(2, 4));
  EXPECT_THAT(found.trace.request(1), ElementsAre(2, 6, 8));
}

TEST(AgentSessions, invalid_sessions_are_refused) {
  const auto refused = [](auto change) {
    AgentSessions sessions = sessions_of(kThree);
    MergeOptions options{.order = {0, 1, 2}};
    change(sessions, options);
    EXPECT_THROW(merge_sessions(sessions, options), InvalidArgument);
  };
  refused([](auto& sessions, auto&) { sessions.session_ends.back() = 3; });
  refused([](auto& sessions, auto&) { sessions.new_ends[1] = 0; });
  refused([](auto& sessions, auto&) { sessions.pauses[1] = -1; });
  refused([](auto& sessions, auto&) { sessions.durations.pop_back(); });
  refused([](auto& sessions, auto&) { sessions.common[1] = 3; });
  refused([](auto&, auto& options) { options.order = {0, 3}; });
  refused([](auto&, auto& options) { options.order = {1, 1}; });
  refused([](auto&, auto& options) { options.active = 0; });
  refused([](auto&, auto& options) { options.chunk_blocks = 0; });
  refused([](auto&, auto& options) { options.max_pause = -1; });
}

struct Told {
  double now;
  ChunkId chunk;
  double returns_at;
  bool operator==(const Told&) const = default;
};

// LRU that records the hints and the time.
class HintedPolicy final : public EvictionPolicy {
 public:
  explicit HintedPolicy(std::vector<Told>& told) : told_(told) {}
  void insert(Slot slot, const EntryInfo& info) override { lru_.insert(slot, info); }
  void access(Slot slot, const EntryInfo& info) override { lru_.access(slot, info); }
  void set_now(double seconds) override {
    EXPECT_GE(seconds, now_);
    now_ = seconds;
  }
  void set_return(Slot, double returns_at, ChunkId id) override { told_.push_back({now_, id, returns_at}); }
  void erase(Slot slot) override { lru_.erase(slot); }
  void pin(Slot slot) override { lru_.pin(slot); }
  void unpin(Slot slot) override { lru_.unpin(slot); }
  std::optional<Slot> victim() override { return lru_.victim(); }
  std::string_view name() const override { return "hinted"; }

 private:
  LruPolicy lru_;
  std::vector<Told>& told_;
  double now_ = 0;
};

std::vector<Told> hints_of(const Trace& trace, std::size_t host_chunks, std::vector<double> hints,
                           bool late = true) {
  std::vector<Told> told;
  replay(trace, {.host_chunks = host_chunks,
                 .hints = std::move(hints),
                 .late_hints = late,
                 .make_policy = [&](std::string_view) { return std::make_unique<HintedPolicy>(told); }});
  return told;
}

// The requests end at 2, 10, 6 and 7, and the last one begins at 6. Chunk 1 is shared.
TEST(SessionHints, a_policy_receives_late_ones_when_the_request_ends) {
  const Trace trace = merged(kThree, {.active = 2, .chunk_blocks = 1}).trace;
  const std::vector<Told> told = hints_of(trace, 100, {5, 0, 7, 8});
  ASSERT_EQ(told.size(), 3u) << "of 2 after the first request, and of 2 and 3 after the third one";
  EXPECT_EQ(told[0], (Told{2, told[1].chunk, 5}));
  EXPECT_EQ(told[1].now, 6);
  EXPECT_EQ(told[1].returns_at, 7);
  EXPECT_NE(told[2].chunk, told[1].chunk);
}

// The first request begins at 0 and has the chunks 1 and 2.
TEST(SessionHints, a_policy_receives_others_while_the_request_runs) {
  const Trace trace = merged(kThree, {.active = 2, .chunk_blocks = 1}).trace;
  const std::vector<Told> told = hints_of(trace, 100, {5, 0, 0, 0}, false);
  ASSERT_EQ(told.size(), 1u) << "the same hint when it ends changes nothing";
  EXPECT_EQ(told[0].now, 0);
  EXPECT_EQ(told[0].returns_at, 5);
}

TEST(SessionHints, a_chunk_is_not_stored_if_all_others_return_sooner) {
  Trace trace{{1, 2, 3}, {1, 2, 1}, {{0, 1, 10, 0, 0}, {2, 3, 20, 0, 0}, {10, 11, 0, 0, 1}}};
  const ReplayResult without = replay(trace, {.host_chunks = 1});
  EXPECT_EQ(without.host_hits, 0u);
  const ReplayResult with = replay(trace, {.host_chunks = 1, .hints = {10, 20, 0}});
  EXPECT_EQ(with.host_hits, 1u);
  EXPECT_EQ(with.declined, 1u);
  const ReplayResult late = replay(trace, {.host_chunks = 1, .hints = {10, 20, 0}, .late_hints = true});
  EXPECT_EQ(late.host_hits, 0u);
  const ReplayResult above_tier = replay(trace, {.host_chunks = 1, .tier_chunks = 9, .hints = {10, 20, 0}});
  EXPECT_EQ(above_tier.declined, 0u);
}

// Chunk 1 comes at 0 and 100. Between them, eight other chunks evict it from host memory.
constexpr std::size_t kBack = 9;  // the request at 100
Trace returning_session() {
  Trace trace;
  for (std::uint32_t i = 0; i <= kBack; ++i) {
    trace.ends.push_back(i + 1);
    trace.blocks.push_back(i == kBack ? 1 : i + 1);
    const double begins = i == kBack ? 100 : i;
    trace.times.push_back({begins, begins + 0.5, 0, 0, i == kBack ? 1u : 0u});
  }
  return trace;
}
// A request of another session with one block, before the request at this place.
void insert_request(Trace* trace, std::size_t place, std::uint64_t block, double begins) {
  trace->ends.push_back(static_cast<std::uint32_t>(trace->ends.size() + 1));
  trace->blocks.insert(trace->blocks.begin() + static_cast<std::ptrdiff_t>(place), block);
  trace->times.insert(trace->times.begin() + static_cast<std::ptrdiff_t>(place),
                      {begins, begins + 1, 0, 0, 0});
}
ReplayOptions with_hint(const Trace& trace, double returns_at) {
  ReplayOptions options{.host_chunks = 8, .tier_chunks = 99};
  options.hints.assign(trace.size(), 0);
  options.hints[0] = returns_at;
  return options;
}

TEST(SessionPrefetch, a_prompt_is_in_host_memory_before_its_return) {
  const Trace trace = returning_session();
  ReplayOptions options = with_hint(trace, 100);
  const ReplayResult with = replay(trace, options);
  EXPECT_EQ(with.prefetched, 1u);
  EXPECT_EQ(with.prefetched_used, 1u);
  EXPECT_EQ(with.host_hits, 1u);
  EXPECT_EQ(with.tier_hits, 0u);
  options.prefetch = false;
  const ReplayResult without = replay(trace, options);
  EXPECT_EQ(without.prefetched, 0u);
  EXPECT_EQ(without.tier_hits, 1u);
}

TEST(SessionPrefetch, a_slower_tier_is_read_earlier) {
  Trace trace = returning_session();
  insert_request(&trace, kBack, 1, 97);
  ReplayOptions options = with_hint(trace, 100);
  EXPECT_EQ(replay(trace, options).tier_hits, 1u);
  options.tier_chunks_per_second = 0.5;
  EXPECT_EQ(replay(trace, options).tier_hits, 0u);
}

TEST(SessionPrefetch, nothing_is_read_for_a_session_that_is_back) {
  Trace trace = returning_session();
  // The first eight evict chunk 1 again.
  for (std::uint32_t i = 0; i < 9; ++i) insert_request(&trace, kBack + 1 + i, 20 + i, i == 8 ? 400 : 110 + i);
  const ReplayOptions options = with_hint(trace, 300);
  EXPECT_EQ(replay(trace, options).prefetched, 0u);
  trace.times[kBack].previous = 0;  // of another session
  EXPECT_EQ(replay(trace, options).prefetched, 1u);
}

TEST(SessionPrefetch, no_chunk_that_returns_sooner_is_evicted) {
  const Trace trace = returning_session();
  ReplayOptions options = with_hint(trace, 100);
  for (std::size_t i = 1; i < kBack; ++i) options.hints[i] = 99.9;
  EXPECT_EQ(replay(trace, options).prefetched, 0u);
}

// The chunk of a session that does not come back takes the whole quarter for 660 s.
TEST(SessionPrefetch, an_unused_chunk_counts_for_a_time) {
  for (const double later : {600.0, 800.0}) {
    Trace trace = returning_session();
    trace.times[kBack].previous = 0;
    trace.blocks[kBack] = 50;
    insert_request(&trace, kBack + 1, 60, 110);  // expected back at `later`
    for (std::uint32_t i = 0; i < 9; ++i)
      insert_request(&trace, kBack + 2 + i, 70 + i, i == 8 ? 900 : 120 + i);
    ReplayOptions options = with_hint(trace, 100);
    options.hints[kBack + 1] = later;
    options.host_chunks = 4;
    EXPECT_EQ(replay(trace, options).prefetched, later == 600 ? 1u : 2u);
  }
}

TEST(SessionHints, evicted_chunks_receive_none) {
  const Trace trace = merged(kThree, {.active = 2, .chunk_blocks = 1}).trace;
  EXPECT_TRUE(hints_of(trace, 1, {5, 0, 0, 0}).empty());
}

TEST(SessionHints, hints_that_do_not_change_eviction_change_no_hits) {
  const Trace trace = merged(kThree, {.active = 2, .chunk_blocks = 1}).trace;
  const ReplayResult with = replay(trace, {.host_chunks = 4, .hints = {5, 6, 7, 8}});
  const ReplayResult without = replay({trace.ends, trace.blocks}, {.host_chunks = 4});
  EXPECT_EQ(with.host_hits, without.host_hits);
  EXPECT_THAT(with.host_hits_of, ElementsAre(0, 0, 2, 1));
  EXPECT_EQ(without.host_hits_of, with.host_hits_of);
}

TEST(SessionHints, they_need_times) {
  const Trace trace = merged(kThree, {.active = 2, .chunk_blocks = 1}).trace;
  EXPECT_THROW(replay(trace, {.host_chunks = 4, .hints = {1}}), InvalidArgument);
  EXPECT_THROW(replay({trace.ends, trace.blocks}, {.host_chunks = 4, .hints = {1, 1, 1, 1}}),
               InvalidArgument);
}

}  // namespace
}  // namespace kv_offload
