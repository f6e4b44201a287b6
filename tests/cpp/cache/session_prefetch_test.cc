// SPDX-License-Identifier: Apache-2.0
// Prefetch through the whole cache: hints about sessions bring their prompts into host memory before the next
// request. prefetcher_test.cc tests the part alone.
#include "cache/cache_fixture.h"
#include "cache/prefetcher.h"

namespace kv_offload {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using ::testing::ElementsAre;
using ::testing::IsEmpty;

constexpr SessionId kFirstSession{1, 1}, kSecondSession{1, 2};
constexpr std::uint64_t kSessionRows = 64;  // an eighth is for prefetched chunks of one client

Hint resume_hint(double after, SessionId target = {}) { return {HintType::kResume, target, {}, after}; }
Hint prefetch(SessionId target = {}) { return {HintType::kPrefetch, target}; }

class SessionPrefetchTest : public OverBoth<CacheTest> {
 protected:
  SessionPrefetchTest() { make(options()); }
  static WorldOptions options() {
    WorldOptions made;
    made.ranks = 1;
    made.rows = kSessionRows;
    made.cache.full_attention = {true};
    return made;
  }
  static Names many(const std::string& name, std::uint64_t count) {
    Names made;
    for (std::uint64_t i = 0; i < count; ++i) made.push_back(name + "." + std::to_string(i));
    return made;
  }

  RequestHandle begin_turn(SessionId session, const Names& prompt) {
    const RequestHandle request = begin({.family = static_cast<std::uint32_t>(session.low)});
    scan(request, prompt);
    store(request, prompt);
    return request;
  }
  std::vector<HintOutcome> end_turn(RequestHandle request, SessionId session,
                                    const std::vector<Hint>& hints) {
    const auto outcomes = cache().end_turn(request, {session, 0}, hints);
    end(request);
    finish();
    return outcomes;
  }
  std::vector<HintOutcome> turn(SessionId session, const Names& prompt, const std::vector<Hint>& hints = {}) {
    return end_turn(begin_turn(session, prompt), session, hints);
  }
  std::vector<HintOutcome> apply(const Hint& hint) {
    return cache().apply_hints(std::span<const Hint>(&hint, 1));
  }
  // Ends the writes of the tier, but not its reads.
  void finish() {
    step();
    while (world().hand != nullptr && !tier().writes().empty() && tier().reads().empty()) {
      tier().finish();
      step();
    }
  }
  // Evicts all other chunks, with a prompt of no session that ends now.
  void evict_all() {
    const RequestHandle request = begin();
    store(request, many("x" + std::to_string(evictions_++), kSessionRows));
    finish();
    end(request);
  }
  Names in_memory(const Names& all) {
    Names found;
    for (const auto& name : all) {
      if (cache().is_in_memory(key_of(name))) found.push_back(name);
    }
    return found;
  }
  Names reads() { return names(tier().read_keys()); }

  int evictions_ = 0;
};

KV_OFFLOAD_OVER_BOTH(SessionPrefetchTest);

TEST_P(SessionPrefetchTest, a_session_is_in_host_memory_when_it_returns) {
  turn(kFirstSession, {"a", "b", "c"}, {resume_hint(600)});
  evict_all();
  ASSERT_THAT(in_memory({"a", "b", "c"}), IsEmpty());
  pass_time(seconds(599) - milliseconds(100));
  step();
  EXPECT_THAT(reads(), IsEmpty());
  pass_time(milliseconds(100));
  step();
  EXPECT_THAT(reads(), ElementsAre("a", "b", "c"));
  tier().finish();
  const RequestHandle request = begin();
  EXPECT_EQ(scan(request, {"a", "b", "c"}), "HHH");
  load(request, {"a", "b", "c"});  // checks the bytes
  step();
  EXPECT_EQ(world().metrics.value("kv_offload_prefetched_bytes_total", {"used"}), 3 * kPageBytes);
}

TEST_P(SessionPrefetchTest, an_engine_without_requests_needs_no_step) {
  turn(kFirstSession, {"a", "b"}, {resume_hint(60)});
  evict_all();  // its end is the end of the last request
  EXPECT_THAT(reads(), ElementsAre("a", "b"));
  tier().finish();
  EXPECT_EQ(peek({"a", "b"}), "HH");
}

TEST_P(SessionPrefetchTest, an_engine_with_requests_reads_only_chunks_that_are_due) {
  const RequestHandle running = begin();
  turn(kFirstSession, {"a", "b"}, {resume_hint(60)});
  evict_all();
  EXPECT_THAT(reads(), IsEmpty());
  end(running);
  EXPECT_THAT(reads(), ElementsAre("a", "b"));
}

TEST_P(SessionPrefetchTest, a_request_does_not_wait_for_reads_of_an_idle_engine) {
  WorldOptions made = options();
  made.rows = 4 * kSessionRows;
  make(made);
  turn(kFirstSession, many("a", 2 * Prefetcher::kReadsInFlight), {resume_hint(60)});
  const RequestHandle running = begin();
  for (int i = 0; i < 4; ++i) evict_all();
  end(running);
  EXPECT_EQ(reads().size(), 2 * Prefetcher::kReadsInFlight);
  begin();
  EXPECT_EQ(reads().size(), Prefetcher::kReadsInFlight);
}

TEST_P(SessionPrefetchTest, a_hint_prefetches_a_session_now) {
  const RequestHandle running = begin();
  turn(kFirstSession, {"a", "b"});
  evict_all();
  EXPECT_THAT(apply(prefetch(kFirstSession)), ElementsAre(HintOutcome::kAccepted));
  step();
  EXPECT_THAT(reads(), ElementsAre("a", "b"));
  tier().finish();
  EXPECT_EQ(scan(running, {"a", "b"}), "HH");
}

TEST_P(SessionPrefetchTest, a_hint_prefetches_the_missing_part_of_its_own_prompt) {
  turn(kFirstSession, {"a", "b"});
  const RequestHandle request = begin_turn(kFirstSession, {"a", "b", "c"});
  store(many("y", kSessionRows - 2));  // evicts "a", which was used first
  ASSERT_THAT(in_memory({"a", "b", "c"}), ElementsAre("b", "c"));
  pass_time(seconds(10));  // chunks that were just used are not evicted for a later return
  finish();
  const auto outcomes = cache().end_turn(request, {kFirstSession, 0}, std::vector<Hint>{prefetch()});
  EXPECT_THAT(outcomes, ElementsAre(HintOutcome::kAccepted));
  end(request);
  EXPECT_THAT(reads(), ElementsAre("a"));
}

TEST_P(SessionPrefetchTest, a_target_that_is_not_known_is_missing) {
  turn(kFirstSession, {"a"});
  EXPECT_THAT(apply(prefetch(kSecondSession)), ElementsAre(HintOutcome::kMissing));
}

TEST_P(SessionPrefetchTest, the_next_turn_the_release_and_a_reset_cancel_it) {
  const RequestHandle running = begin();
  const auto reads_after = [&](const std::function<void()>& event) {
    turn(kFirstSession, {"a"}, {resume_hint(600)});
    evict_all();
    event();
    evict_all();
    pass_time(seconds(600));
    step();
    const Names read = reads();
    tier().finish();
    step();
    return read;
  };
  EXPECT_THAT(reads_after([] {}), ElementsAre("a"));
  EXPECT_THAT(reads_after([&] { turn(kFirstSession, {"a"}); }), IsEmpty());
  EXPECT_THAT(reads_after([&] { apply({HintType::kRelease, kFirstSession}); }), IsEmpty());
  EXPECT_THAT(reads_after([&] {
                turn(kSecondSession, {"b"}, {{HintType::kSupersede, kFirstSession}});
              }),
              IsEmpty());
  EXPECT_THAT(reads_after([&] { cache().reset(); }), IsEmpty());
  end(running);
}

TEST_P(SessionPrefetchTest, a_reset_counts_the_chunks_that_it_forgets) {
  turn(kFirstSession, {"a", "b"}, {resume_hint(60)});
  evict_all();
  tier().finish();
  step();
  ASSERT_THAT(in_memory({"a", "b"}), ElementsAre("a", "b"));
  cache().reset();
  step();
  EXPECT_EQ(world().metrics.value("kv_offload_prefetched_bytes_total", {"unused"}), 2 * kPageBytes);
}

TEST_P(SessionPrefetchTest, a_forgotten_session_is_not_prefetched) {
  WorldOptions made = options();
  made.cache.max_sessions = 1;
  make(made);
  turn(kFirstSession, {"a"}, {resume_hint(60)});
  turn(kSecondSession, {"b"}, {resume_hint(60)});
  evict_all();
  EXPECT_THAT(reads(), ElementsAre("b"));
}

TEST_P(SessionPrefetchTest, without_a_tier_an_evicted_prompt_is_missing) {
  WorldOptions made = options();
  made.tier = false;
  make(made);
  turn(kFirstSession, {"a"});
  evict_all();
  EXPECT_THAT(apply(prefetch(kFirstSession)), ElementsAre(HintOutcome::kMissing));
}

// Reads that stop halfway leave a beginning that a request can use.
TEST_P(SessionPrefetchTest, the_chunks_of_two_groups_are_read_by_depth) {
  WorldOptions made = options();
  made.shard_bytes = {300, 300};
  made.cache.full_attention = {true, true};
  make(made);
  const RequestHandle request = begin({.family = 1});
  std::vector<ChunkKey> all = keys({"a", "b", "c"}, 0);
  for (const ChunkKey& key : keys({"a", "b", "c"}, 1)) all.push_back(key);
  const std::vector<std::uint32_t> depths{16, 32, 48, 16, 32, 48};
  const StoreGrant grant = cache().prepare_store(request, all, depths);
  ASSERT_EQ(grant.accepted.size(), all.size());
  world().report(grant.transfer.ticket);
  cache().complete_store(all);
  end_turn(request, kFirstSession, {resume_hint(60)});
  evict_all();
  EXPECT_THAT(reads(), ElementsAre("a", "a", "b", "b", "c", "c"));
}

TEST_P(SessionPrefetchTest, a_hint_that_is_repeated_for_ever_keeps_no_chunk) {
  WorldOptions made = options();
  made.tier = false;
  make(made);
  turn(kFirstSession, {"a"}, {resume_hint(500)});
  const auto repeat = [&](int times) {
    for (int i = 0; i < times; ++i) {
      pass_time(seconds(100));
      apply(resume_hint(1, kFirstSession));
      store(many("x" + std::to_string(evictions_++), kSessionRows / 2));
      finish();
    }
  };
  repeat(3);
  EXPECT_THAT(in_memory({"a"}), ElementsAre("a")) << "these hints count as given";
  repeat(10);
  EXPECT_THAT(in_memory({"a"}), IsEmpty()) << "others are used more recently";
}

TEST_P(SessionPrefetchTest, a_client_whose_hints_are_wrong_prefetches_nothing) {
  for (int round = 0; round < 100; ++round) {
    const bool is_late = round % 2 == 0;
    turn(kFirstSession, {"a"}, {resume_hint(is_late ? 10 : 100)});
    pass_time(seconds(is_late ? 100 : 10));
  }
  evict_all();
  EXPECT_THAT(apply(prefetch(kFirstSession)), ElementsAre(HintOutcome::kRejected));
  step();
  EXPECT_THAT(reads(), IsEmpty());
}

}  // namespace
}  // namespace kv_offload
