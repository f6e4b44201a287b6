// SPDX-License-Identifier: Apache-2.0
// Fetches from a tier: which chunks are read, when, and how failures are handled.
#include <algorithm>

#include "cache/cache_fixture.h"
#include "cache/request_table.h"
#include "tier/io_pool.h"
#include "tier/memory_store.h"
#include "tier/thread_pool_tier.h"

namespace kv_offload {
namespace {

using std::chrono::seconds;
using ::testing::ElementsAre;
using ::testing::IsEmpty;

class FetchTest : public OverBoth<CacheTest> {};
KV_OFFLOAD_OVER_BOTH(FetchTest);
class FetchFakeTest : public CacheTest {
 protected:
  // The record of "b" exists now. The request already has "a" and loads "b".
  void expect_loaded(RequestHandle request, decltype(FakeTier::records)::node_type record_of_b) {
    fake().records.insert(std::move(record_of_b));
    step();  // vLLM looks up once a step
    EXPECT_EQ(scan(request, {"a", "b"}), "HP");
    step();
    tier().finish();
    EXPECT_EQ(scan(request, {"a", "b"}), "HH");
  }
};

TEST_P(FetchTest, a_recorded_chunk_is_fetched_verified_and_loaded) {
  record({"a", "b"});
  const RequestHandle request = begin();
  EXPECT_EQ(scan(request, {"a", "b", "c"}), "PPM");
  EXPECT_THAT(tier().read_keys(), IsEmpty());  // no read before the end of the step
  EXPECT_TRUE(cache().has_pending_work());
  step();
  EXPECT_THAT(names(tier().read_keys()), ElementsAre("a", "b"));
  EXPECT_EQ(scan(request, {"a", "b", "c"}), "PPM");
  step();
  tier().finish();
  EXPECT_EQ(scan(request, {"a", "b", "c"}), "HHM");
  EXPECT_FALSE(cache().has_pending_work());
  EXPECT_EQ(cache().load_source(key_of("a")), 0);
  load(request, {"a", "b"});
  EXPECT_EQ(world().hit_tokens("fs"), 2 * World::kTokens);
  EXPECT_EQ(world().hit_tokens("cpu"), 0);
  EXPECT_EQ(world().miss_tokens("not_stored"), World::kTokens);
  EXPECT_EQ(world().metrics.value("kv_offload_lookup_tokens_total", {}), 3 * World::kTokens);
}

TEST_P(FetchTest, events_report_a_record_that_was_read) {
  make({.cache = {.keep_events = true}});
  record({"a"});
  cache().take_events();
  const RequestHandle request = begin();
  scan(request, {"a"});
  step();
  tier().finish();
  EXPECT_EQ(scan(request, {"a"}), "H");
  Names stored;
  for (const CacheEvent& event : cache().take_events()) {
    ASSERT_FALSE(event.removed);
    for (const std::string& name : names(event.keys)) stored.push_back(event.owner + name);
  }
  EXPECT_THAT(stored, ::testing::UnorderedElementsAre("a", "fsa"));
}

TEST_P(FetchTest, a_fetched_chunk_counts_as_its_tier_once_then_as_host_memory) {
  record({"a"});
  for (int i = 0; i < 2; ++i) {
    const RequestHandle request = begin();
    scan(request, {"a"});
    step();
    tier().finish();
    EXPECT_EQ(scan(request, {"a"}), "H");
    load(request, {"a"});
    end(request);
  }
  EXPECT_EQ(world().hit_tokens("fs"), World::kTokens);
  EXPECT_EQ(world().hit_tokens("cpu"), World::kTokens);
  EXPECT_EQ(cache().load_source(key_of("a")), -1);
}

TEST_P(FetchTest, waiting_requests_share_a_fetch) {
  record({"a", "b"});
  const RequestHandle first = begin(), second = begin(), third = begin();
  scan(first, {"a", "b"});
  scan(second, {"a"});
  step();
  scan(third, {"a", "b"});
  step();
  EXPECT_EQ(tier().queued_reads(), 2u);
  tier().finish();
  EXPECT_EQ(scan(first, {"a", "b"}), "HH");
  load(first, {"a", "b"});
  end(first);
  EXPECT_EQ(cache().stats().pinned_chunks, 2u);  // the other requests still wait
  end(second);
  end(third);
  EXPECT_EQ(cache().stats().pinned_chunks, 0u);
}

TEST_P(FetchTest, the_oldest_request_is_fetched_first) {
  record({"a", "b"});
  const RequestHandle older = begin(), younger = begin();
  scan(younger, {"b"});
  scan(older, {"a"});
  step();
  EXPECT_THAT(names(tier().read_keys()), ElementsAre("a", "b"));
}

TEST_P(FetchTest, hits_stay_pinned_while_the_request_waits_for_the_rest) {
  make({.rows = 2});
  record({"b"});
  store({"a"});
  tier().finish();
  step();
  const RequestHandle request = begin();
  EXPECT_EQ(scan(request, {"a", "b"}), "HP");
  step();
  EXPECT_THAT(store({"x"}), IsEmpty());  // this request uses both rows
  tier().finish();
  EXPECT_EQ(scan(request, {"a", "b"}), "HH");
  load(request, {"a", "b"});
  EXPECT_THAT(store({"x"}), ElementsAre("x"));
}

TEST_P(FetchTest, a_plan_is_trimmed_to_the_available_rows) {
  make({.rows = 3});
  record({"a", "b"});
  store({"c", "d"});
  tier().finish();
  world().restart();
  const RequestHandle other = begin();
  const Job filling = offer(other, {"x"});  // one of three rows is in use
  const RequestHandle request = begin();
  EXPECT_EQ(scan(request, {"a", "b", "c", "d"}), "PPPP");
  step();
  tier().finish();
  EXPECT_EQ(scan(request, {"a", "b", "c", "d"}), "HHM");
  load(request, {"a", "b"});
  EXPECT_EQ(world().miss_tokens("pressure"), World::kTokens);
  copy(filling);
}

TEST_P(FetchTest, no_request_waits_past_the_deadline) {
  record({"a", "b"});
  store({"c"});
  const RequestHandle request = begin();
  EXPECT_EQ(scan(request, {"c", "a"}), "HP");
  step();
  pass_time(seconds(4));
  EXPECT_EQ(scan(request, {"c", "a"}), "HP");
  step();
  pass_time(seconds(2));
  EXPECT_EQ(scan(request, {"c", "a"}), "HM");
  step();
  EXPECT_EQ(cache().stats().waiting_requests, 0u);
  EXPECT_EQ(scan(request, {"c", "a"}), "HM");  // unchanged until the request is admitted
  load(request, {"c"});
  EXPECT_EQ(world().miss_tokens("deadline"), World::kTokens);
  EXPECT_EQ(scan(request, {"a"}), "P");  // preempted: the request may wait again
}

TEST_P(FetchTest, a_request_without_further_lookups_loses_its_pins_at_the_deadline) {
  record({"a"});
  const RequestHandle request = begin();
  scan(request, {"a"});
  step();
  tier().finish();
  step();
  EXPECT_EQ(cache().stats().pinned_chunks, 1u);
  pass_time(seconds(6));
  step();
  EXPECT_EQ(cache().stats().pinned_chunks, 0u);
  EXPECT_EQ(scan(request, {"a"}), "H");
}

// The engine is full, and vLLM does not look up the request.
TEST_P(FetchTest, a_queued_request_loads_from_the_tier_however_long_it_is_queued) {
  record({"a"});
  const RequestHandle request = begin();
  EXPECT_EQ(scan(request, {"a"}), "P");
  step();
  tier().finish();
  for (std::uint64_t i = 0; i < RequestTable::kUnaskedSteps; ++i) step();
  pass_time(seconds(6));
  step();
  store({"1", "2", "3", "4", "5", "6", "7", "8"});  // evicts it
  EXPECT_EQ(scan(request, {"a"}), "P");
  step();
  tier().finish();
  EXPECT_EQ(scan(request, {"a"}), "H");
  load(request, {"a"});
  EXPECT_EQ(world().miss_tokens("deadline"), 0);
}

TEST_P(FetchTest, a_fetch_without_waiters_is_cancelled) {
  record({"a"});
  const RequestHandle request = begin();
  scan(request, {"a"});
  step();
  end(request);
  EXPECT_EQ(tier().queued_reads(), 0u);
  step();
  EXPECT_EQ(cache().stats().pinned_chunks, 0u);
  EXPECT_EQ(peek({"a"}), "P");  // still recorded
  EXPECT_FALSE(cache().has_pending_work());
}

// ---- failures

TEST_P(FetchTest, a_corrupt_record_is_a_permanent_miss) {
  record({"a", "b"});
  tier().damage(key_of("b"));
  const RequestHandle request = begin();
  scan(request, {"a", "b"});
  step();
  tier().finish();
  EXPECT_EQ(scan(request, {"a", "b"}), "HM");
  load(request, {"a"});
  EXPECT_EQ(peek({"b"}), "M");
  EXPECT_EQ(world().miss_tokens("corrupt"), 2 * World::kTokens);
  EXPECT_EQ(world().failures("fs", "read", "corrupt"), 1);
  EXPECT_EQ(cache().stats().pinned_chunks, 0u);
}

TEST_P(FetchTest, the_same_request_does_not_retry_an_unreadable_record) {
  record({"a"});
  tier().fail(StatusKind::kIo);
  const RequestHandle request = begin();
  scan(request, {"a"});
  step();
  tier().finish();
  for (int i = 0; i < 3; ++i) {
    EXPECT_EQ(scan(request, {"a"}), "M");
    step();
  }
  EXPECT_EQ(tier().queued_reads(), 0u);
  EXPECT_EQ(world().failures("fs", "read", "io"), 1);
  end(request);
  EXPECT_EQ(world().miss_tokens("io_error"), World::kTokens);
}

TEST_P(FetchTest, a_vanished_record_is_a_miss_without_a_failure) {
  record({"a"});
  const RequestHandle request = begin();
  scan(request, {"a"});
  step();
  tier().take_away(key_of("a"));
  tier().finish();
  EXPECT_EQ(scan(request, {"a"}), "M");
  end(request);
  EXPECT_EQ(world().miss_tokens("evicted"), World::kTokens);
  EXPECT_EQ(world().failures("fs", "read", "not_found"), 0);
}

TEST_P(FetchTest, the_ranks_see_while_a_request_waits_for_records) {
  record({"a"});
  const HostRegion& rank = *world().ranks[0];
  const RequestHandle request = begin();
  EXPECT_EQ(scan(request, {"a"}), "P");
  step();
  EXPECT_TRUE(rank.is_fetching());
  EXPECT_EQ(scan(request, {"a"}), "P");
  step();
  EXPECT_TRUE(rank.is_fetching());
  tier().finish();
  EXPECT_EQ(scan(request, {"a"}), "H");
  step();
  EXPECT_FALSE(rank.is_fetching());
}

// vLLM 0.31 and 0.32 end the step before they end its requests, and an idle engine makes no further one.
TEST_P(FetchTest, the_ranks_see_that_the_last_waiting_request_ended) {
  record({"a"});
  const HostRegion& rank = *world().ranks[0];
  for (const bool by_reset : {false, true}) {
    const RequestHandle request = begin();
    EXPECT_EQ(scan(request, {"a"}), "P");
    step();
    step();
    EXPECT_TRUE(rank.is_fetching());
    if (by_reset) {
      cache().reset();
    } else {
      end(request);
    }
    EXPECT_FALSE(rank.is_fetching());
    tier().finish();
  }
}

TEST_F(FetchFakeTest, the_ranks_see_that_a_request_waits_for_a_lookup_until_the_cache_is_closed) {
  fake().knows = false;
  const HostRegion& rank = *world().ranks[0];
  EXPECT_FALSE(rank.is_fetching());
  EXPECT_EQ(scan(begin(), {"a"}), "R");
  step();
  EXPECT_TRUE(rank.is_fetching());
  cache().close();
  EXPECT_FALSE(rank.is_fetching());
}

TEST_P(FetchTest, a_tier_with_an_open_circuit_breaker_is_not_awaited) {
  record({"a"});
  tier().switch_off();
  EXPECT_EQ(peek({"a"}), "M");
  EXPECT_EQ(world().miss_tokens("io_error"), World::kTokens);
}

TEST_F(FetchFakeTest, an_unknown_key_is_looked_up_again_until_the_deadline) {
  fake().knows = false;
  const RequestHandle request = begin();
  EXPECT_EQ(scan(request, {"a", "b"}), "RR");
  EXPECT_TRUE(cache().has_pending_work());
  EXPECT_TRUE(fake().asked.empty());
  step();
  ASSERT_EQ(fake().asked.size(), 1u) << "one call for all keys";
  EXPECT_EQ(fake().asked[0].first, (std::vector<ChunkKey>{key_of("a"), key_of("b")}));
  EXPECT_EQ(fake().asked[0].second, KeyOrder::kPrefix);
  EXPECT_EQ(scan(request, {"a"}), "R");
  pass_time(seconds(6));
  step();
  EXPECT_EQ(scan(request, {"a"}), "M");
}

TEST_F(FetchFakeTest, a_pending_lookup_is_awaited_and_not_sent_again) {
  fake().knows = fake().is_sure = false;
  fake().asks = true;
  const RequestHandle first = begin(), second = begin();
  EXPECT_EQ(scan(first, {"a", "b"}), "RR");
  step();
  ASSERT_EQ(fake().asked.size(), 1u);
  for (int i = 0; i < 2; ++i) {
    EXPECT_EQ(scan(first, {"a", "b"}), "RR");
    EXPECT_EQ(scan(second, {"a", "b"}), "RR");
    EXPECT_TRUE(cache().has_pending_work());
    step();
    EXPECT_EQ(fake().asked.size(), 1u);
  }
  fake().knows = true;
  EXPECT_EQ(scan(first, {"a"}), "M");
  EXPECT_EQ(scan(second, {"a"}), "M") << "the same reply answered this request's lookup";
}

// A tier that ends its lookup of a prompt at the first missing chunk, and another tier, which has that chunk.
class SkippedChunks : public FetchFakeTest {
 protected:
  SkippedChunks() {
    make({.cache = {.tiers = {TierSlotOptions{}, TierSlotOptions{}}}, .slower = &other_});
    record({"a", "b", "c", "d"});
    other_->records.insert(fake().records.extract(key_of("b")));
    for (const char* name : {"a", "b", "c", "d"}) fake().forgotten.insert(key_of(name));
    other_->forgotten.insert(key_of("b"));
    fake().answers = other_->answers = false;
    request_ = begin();
    EXPECT_EQ(scan(request_, {"a", "b", "c", "d"}), "RRRR");
    step();
    EXPECT_EQ(fake().asked.size(), 1u);
    fake().forgotten.clear();
    fake().skipped = {key_of("c"), key_of("d")};
  }

  FakeTier* other_ = nullptr;
  RequestHandle request_{};
};

TEST_F(SkippedChunks, are_looked_up_again_together_if_another_tier_has_the_missing_one) {
  other_->forgotten.clear();
  for (int i = 0; i < 3; ++i) {
    EXPECT_EQ(scan(request_, {"a", "b", "c", "d"}), "PPRR");
    step();
  }
  ASSERT_GE(fake().asked.size(), 2u);
  EXPECT_EQ(fake().asked[1].first, (std::vector<ChunkKey>{key_of("c"), key_of("d")}));
  EXPECT_EQ(fake().asked[1].second, KeyOrder::kPrefix);
  fake().forgotten.clear();
  fake().finish();
  other_->finish();
  EXPECT_EQ(scan(request_, {"a", "b", "c", "d"}), "HHPP");
}

TEST_F(SkippedChunks, are_looked_up_again_although_a_later_one_has_been_skipped_twice) {
  other_->forgotten.clear();
  EXPECT_EQ(scan(request_, {"a", "b", "c", "d"}), "PPRR");
  step();
  fake().forgotten.clear();
  fake().skipped = {key_of("d")};
  EXPECT_EQ(scan(request_, {"a", "b", "c", "d"}), "PPPR");
  step();
  ASSERT_EQ(fake().asked.size(), 3u);
  EXPECT_EQ(fake().asked[2].first, (std::vector<ChunkKey>{key_of("d")}));
}

TEST_F(SkippedChunks, are_not_looked_up_while_the_other_tier_has_not_answered) {
  for (int i = 0; i < 3; ++i) {
    EXPECT_EQ(scan(request_, {"a", "b", "c", "d"}), "PRRR");
    step();
  }
  EXPECT_EQ(fake().asked.size(), 1u);
  other_->forgotten.clear();
  other_->remove(key_of("b"), TierRemoval::Reason::kEvicted);
  EXPECT_EQ(scan(request_, {"a", "b"}), "PM");
  EXPECT_EQ(fake().asked.size(), 1u);
}

TEST_F(SkippedChunks, that_are_missing_everywhere_are_a_miss) {
  other_->forgotten.clear();
  fake().records.erase(key_of("c"));
  EXPECT_EQ(scan(request_, {"a", "b", "c"}), "PPR");
  step();
  fake().forgotten.clear();
  EXPECT_EQ(scan(request_, {"a", "b", "c"}), "PPM");
}

TEST_F(FetchFakeTest, each_request_looks_up_a_stale_miss_once) {
  record({"a"});
  fake().is_sure = false;
  const RequestHandle request = begin();
  EXPECT_EQ(scan(request, {"a", "b", "c"}), "PRR");
  step();
  ASSERT_EQ(fake().asked.size(), 1u);
  EXPECT_EQ(fake().asked[0].first, (std::vector<ChunkKey>{key_of("b"), key_of("c")}));
  tier().finish();
  step();  // so long that the reply is out of date again
  EXPECT_EQ(scan(request, {"a", "b"}), "HM");
  EXPECT_EQ(scan(request, {"c"}), "M");
  step();
  EXPECT_EQ(fake().asked.size(), 1u);
  EXPECT_EQ(scan(begin(), {"b"}), "R");
  end(request);
  const RequestHandle later = begin();
  ASSERT_EQ(later, request) << "the handle is reused";
  EXPECT_EQ(scan(later, {"b"}), "R");
}

TEST_F(FetchFakeTest, a_key_whose_lookup_failed_is_a_miss_with_that_reason) {
  fake().fails_lookups = true;
  EXPECT_EQ(peek({"a"}), "M");
  EXPECT_EQ(world().miss_tokens("io_error"), World::kTokens);
  fake().available = false;
  EXPECT_EQ(peek({"a"}), "M");
  EXPECT_EQ(world().miss_tokens("io_error"), 2 * World::kTokens) << "the tier is out of service";
  fake().fails_lookups = false;
  EXPECT_EQ(peek({"a"}), "M");
  EXPECT_EQ(world().miss_tokens("not_stored"), World::kTokens) << "known to be absent";
}

TEST_F(FetchFakeTest, a_failed_lookup_is_not_repeated_by_the_request_and_keeps_its_reason) {
  for (const bool is_found_absent : {false, true}) {
    const double failed = world().miss_tokens("io_error");
    fake().knows = false;
    const RequestHandle request = begin();
    EXPECT_EQ(scan(request, {"a"}), "R");
    step();
    const std::size_t asked = fake().asked.size();
    fake().knows = fake().fails_lookups = true;
    EXPECT_EQ(scan(request, {"a"}), "M");
    step();
    fake().knows = is_found_absent;  // another request looks it up again, or the failure is forgotten
    fake().fails_lookups = false;
    EXPECT_EQ(scan(request, {"a"}), "M");
    step();
    EXPECT_EQ(fake().asked.size(), asked);
    end(request);
    EXPECT_EQ(world().miss_tokens("io_error"), failed + (is_found_absent ? 0 : World::kTokens));
  }
}

// The older lookup result must not be used instead.
TEST_F(FetchFakeTest, a_repeated_lookup_waits_for_its_reply) {
  record({"a"});
  fake().is_sure = fake().answers = false;
  const RequestHandle request = begin();
  EXPECT_EQ(scan(request, {"b"}), "R");
  step();
  EXPECT_EQ(scan(request, {"b"}), "R") << "no reply yet";
  fake().answers = true;
  step();
  EXPECT_EQ(scan(request, {"b"}), "M");
}

TEST_F(FetchFakeTest, a_request_with_its_reply_does_not_wait_when_another_looks_up_again) {
  fake().is_sure = false;
  const RequestHandle patient = begin({.remote_wait = seconds(4)}), other = begin();
  EXPECT_EQ(scan(patient, {"a"}), "R");
  EXPECT_EQ(scan(other, {"a"}), "R");
  for (int i = 0; i < 5; ++i) {
    step();  // so long that the reply is out of date again
    EXPECT_EQ(scan(patient, {"a"}), "R");
    EXPECT_EQ(scan(other, {"a"}), "M") << "the reply was: absent";
  }
}

// vLLM may look up again when the device has no free blocks, while another request's lookup is pending.
TEST_F(FetchFakeTest, a_request_with_its_reply_does_not_wait_for_another_requests_lookup) {
  fake().is_sure = false;
  const RequestHandle first = begin();
  EXPECT_EQ(scan(first, {"a"}), "R");
  step();
  EXPECT_EQ(scan(first, {"a"}), "M");
  fake().answers = false;
  const RequestHandle second = begin();
  EXPECT_EQ(scan(second, {"a"}), "R");
  for (int i = 0; i < 2; ++i) {
    step();
    EXPECT_EQ(scan(first, {"a"}), "M") << i;
    EXPECT_EQ(scan(second, {"a"}), "R") << "no reply to its lookup yet";
  }
  fake().answers = true;
  step();
  EXPECT_EQ(scan(second, {"a"}), "M");
}

TEST_F(FetchFakeTest, a_request_with_the_reply_of_one_tier_waits_for_the_other_tier) {
  FakeTier* slow = nullptr;
  make({.slower = &slow});
  fake().is_sure = slow->knows = false;
  const RequestHandle request = begin();
  for (int i = 0; i < 3; ++i) {
    EXPECT_EQ(scan(request, {"a"}), "R") << i;
    step();
  }
  slow->knows = true;
  EXPECT_EQ(scan(request, {"a"}), "M");
}

TEST_F(FetchFakeTest, records_of_another_server_are_awaited_as_long_as_the_request_allows) {
  record({"a", "b"});
  auto written_later = fake().records.extract(key_of("b"));
  const RequestHandle request = begin({.remote_wait = seconds(2)});
  EXPECT_EQ(scan(request, {"a", "b"}), "PR");
  step();
  EXPECT_TRUE(fake().asked.empty()) << "the tier knows which records are absent";
  tier().finish();
  pass_time(seconds(2) - Nanos(1));
  EXPECT_EQ(scan(request, {"a", "b"}), "HR");
  expect_loaded(request, std::move(written_later));
  EXPECT_EQ(scan(request, {"a", "b", "c"}), "HHR");
  step();
  pass_time(Nanos(1));
  EXPECT_EQ(scan(request, {"a", "b", "c"}), "HHM") << "the wait started at the first lookup";
  end(request);
  EXPECT_EQ(world().miss_tokens("not_stored"), World::kTokens);
  EXPECT_EQ(peek({"c"}), "M") << "no other request waits";
}

TEST_F(FetchFakeTest, a_request_that_waits_for_a_record_repeats_its_lookup) {
  fake().is_sure = false;
  const RequestHandle request = begin({.remote_wait = seconds(2)});
  for (std::size_t asked = 1; asked <= 3; ++asked) {
    EXPECT_EQ(scan(request, {"a"}), "R");
    step();
    EXPECT_EQ(fake().asked.size(), asked);
  }
  pass_time(seconds(2));
  EXPECT_EQ(scan(request, {"a"}), "M");
}

TEST_F(FetchFakeTest, a_record_announced_too_early_is_still_awaited) {
  record({"a", "b"});
  const RequestHandle request = begin({.remote_wait = seconds(2)});
  EXPECT_EQ(scan(request, {"a", "b"}), "PP");
  step();
  auto written_later = fake().records.extract(key_of("b"));
  tier().finish();
  EXPECT_EQ(scan(request, {"a", "b"}), "HR");
  expect_loaded(request, std::move(written_later));
}

TEST_F(FetchFakeTest, a_record_is_not_awaited_past_the_deadline_or_if_loads_are_excluded) {
  const RequestHandle patient = begin({.remote_wait = seconds(600)});
  EXPECT_EQ(scan(patient, {"a"}), "R");
  pass_time(seconds(6));
  step();
  EXPECT_EQ(scan(patient, {"a"}), "M");
  EXPECT_EQ(scan(begin({.load_tiers = 0, .remote_wait = seconds(600)}), {"a"}), "M");
  EXPECT_EQ(scan(begin({.load_policy = LoadPolicy::kNever, .remote_wait = seconds(600)}), {"a"}), "M");
  fake().switch_off();
  step();
  EXPECT_EQ(scan(begin({.remote_wait = seconds(600)}), {"a"}), "M");
}

// After a reset the tier is in an epoch that no other server writes to.
TEST_F(FetchFakeTest, a_record_is_not_awaited_on_a_tier_that_was_reset) {
  cache().reset();
  step();
  EXPECT_EQ(scan(begin({.remote_wait = seconds(2)}), {"a"}), "M");
  fake().is_sure = false;
  const RequestHandle request = begin({.remote_wait = seconds(2)});
  EXPECT_EQ(scan(request, {"b"}), "R") << "looked up once, as by every request";
  step();
  EXPECT_EQ(scan(request, {"b"}), "M");
}

TEST_F(FetchFakeTest, a_record_that_would_not_be_fetched_is_not_awaited) {
  make({.rows = 1});
  record({"a"});
  record({"b"});
  const RequestHandle request = begin({.remote_wait = seconds(2)});
  EXPECT_EQ(scan(request, {"a", "b"}), "PP");
  step();
  EXPECT_EQ(scan(request, {"a", "b"}), "PM") << "only one row is free";
  tier().take_away(key_of("b"));
  EXPECT_EQ(scan(request, {"a", "b"}), "PM");
}

// The tier replied in time: no server stored the record.
TEST_F(FetchFakeTest, an_awaited_record_that_never_appears_counts_as_not_stored) {
  fake().is_sure = false;
  for (const Nanos await : {seconds(2), seconds(600)}) {
    const RequestHandle request = begin({.remote_wait = await});
    EXPECT_EQ(scan(request, {"a"}), "R");
    step();
    pass_time(seconds(6));
    step();
    EXPECT_EQ(scan(request, {"a"}), "M");
    end(request);
  }
  EXPECT_EQ(world().miss_tokens("not_stored"), 2 * World::kTokens);
  EXPECT_EQ(world().miss_tokens("deadline"), 0);
}

// ---- load policies

TEST_P(FetchTest, policy_never_loads_nothing_from_tiers) {
  record({"a"});
  store({"b"});
  const RequestHandle request = begin({.load_policy = LoadPolicy::kNever});
  EXPECT_EQ(scan(request, {"b", "a"}), "HM");
  end(request);
  EXPECT_EQ(world().miss_tokens("disabled"), World::kTokens);
}

TEST_P(FetchTest, a_request_may_exclude_the_tiers_or_host_memory) {
  record({"a"});
  store({"b"});
  EXPECT_EQ(scan(begin({.load_tiers = 0}), {"b", "a"}), "HM");
  const RequestHandle request = begin({.load_from_cpu = false});
  EXPECT_EQ(lookup(request, "b"), LookupResult::kMiss);  // not recorded yet
  EXPECT_EQ(lookup(request, "a"), LookupResult::kPending);
  step();
  tier().finish();
  EXPECT_EQ(lookup(request, "a"), LookupResult::kHit);
}

TEST_F(FetchFakeTest, loading_is_skipped_where_computing_is_faster) {
  make({.rows = 16});
  record({"a", "b"});
  // 160 tokens in 0.1 s: 1600 tokens/s.
  const RequestHandle worker = begin();
  Names prompt;
  for (int i = 0; i < 10; ++i) prompt.push_back(fmt::format("w{}", i));
  step();
  store(worker, prompt);
  tier().finish();
  step();
  pass_time(std::chrono::milliseconds(100));
  step();
  fake().read_seconds = 2;  // for 32 tokens, which take 20 ms to compute
  const auto outcome = [&] {
    const RequestHandle request = begin();
    scan(request, {"a", "b"});
    step();
    const std::string seen = scan(request, {"a", "b"});
    end(request);
    step();
    return seen;
  };
  EXPECT_EQ(outcome(), "M");
  EXPECT_EQ(world().miss_tokens("recompute_cheaper"), World::kTokens);
  EXPECT_EQ(world().metrics.value("kv_offload_decisions_total", {"recompute"}), 1);
  fake().read_seconds = 0.001;
  EXPECT_EQ(outcome(), "PP");
  EXPECT_EQ(world().metrics.value("kv_offload_decisions_total", {"load"}), 1);
}

// ---- several groups

// Acts like vLLM: looks up in each step, loads when no lookup is pending, ends the request. Steps until
// all requests have ended.
class FetchTogetherTest : public FetchTest {
 protected:
  struct Ask {
    RequestHandle request;
    Names wanted;
    std::size_t loaded = 0;
    bool ended = false;
  };
  void run(std::vector<Ask>& asks, int most_steps) {
    for (int i = 0; i < most_steps; ++i) {
      bool all = true;
      for (Ask& ask : asks) {
        if (ask.ended) continue;
        const std::string seen = scan(ask.request, ask.wanted);
        if (seen.find_first_of("PR") != std::string::npos) {
          all = false;
          continue;
        }
        ask.loaded = static_cast<std::size_t>(std::count(seen.begin(), seen.end(), 'H'));
        if (ask.loaded > 0)
          load(ask.request,
               {ask.wanted.begin(), ask.wanted.begin() + static_cast<std::ptrdiff_t>(ask.loaded)});
        end(ask.request);
        ask.ended = true;
      }
      if (all) return;
      step();
      tier().finish();
    }
  }
  static Names numbered(const char* name, int count) {
    Names all;
    for (int i = 0; i < count; ++i) all.push_back(fmt::format("{}{}", name, i));
    return all;
  }
};

KV_OFFLOAD_OVER_BOTH(FetchTogetherTest);

TEST_P(FetchTogetherTest, two_plans_that_do_not_fit_together_both_finish) {
  make({.rows = 5});
  record(numbered("a", 4));
  record(numbered("b", 4));
  std::vector<Ask> asks{{begin(), numbered("a", 4)}, {begin(), numbered("b", 4)}};
  run(asks, 20);  // time does not advance, so no deadline ends a request
  for (const Ask& ask : asks) EXPECT_TRUE(ask.ended) << ask.wanted[0];
  for (const Ask& ask : asks) EXPECT_EQ(ask.loaded, 4u) << ask.wanted[0];
  EXPECT_EQ(world().miss_tokens("pressure"), 0);
  EXPECT_EQ(cache().stats().pinned_chunks, 0u);
  EXPECT_EQ(cache().stats().waiting_requests, 0u);
}

TEST_P(FetchTogetherTest, a_prefix_larger_than_host_memory_is_loaded_in_part) {
  make({.rows = 5});
  for (int i = 0; i < 12; i += 4) {
    Names part = numbered("p", 12);
    record({part.begin() + i, part.begin() + i + 4});
  }
  std::vector<Ask> asks{{begin(), numbered("p", 12)}};
  run(asks, 20);
  EXPECT_TRUE(asks[0].ended);
  EXPECT_EQ(asks[0].loaded, 5u);
  EXPECT_EQ(world().miss_tokens("pressure"), World::kTokens);
}

TEST_P(FetchTogetherTest, many_requests_that_exceed_host_memory_all_finish) {
  make({.rows = 7});
  const Names letters{"a", "b", "c", "d", "e", "f", "g", "h"};
  for (const std::string& letter : letters) record(numbered(letter.c_str(), 3));
  std::vector<Ask> asks;
  for (int round = 0; round < 3; ++round) {
    for (const std::string& letter : letters) asks.push_back({begin(), numbered(letter.c_str(), 3)});
  }
  run(asks, 200);
  for (const Ask& ask : asks) {
    EXPECT_TRUE(ask.ended) << ask.wanted[0];
    EXPECT_EQ(ask.loaded, 3u) << ask.wanted[0];
  }
  EXPECT_EQ(cache().stats().pinned_chunks, 0u);
}

class HybridVerbs : public CacheTest {
 protected:
  // Group 0 is scanned from the left, group 1 has a window of one chunk.
  void make_hybrid(std::vector<bool> full_attention, std::uint64_t rows = 16,
                   const Names& prompt = {"a", "b", "c"}) {
    make({.rows = rows,
          .shard_bytes = {300, 300},
          .cache = {.full_attention = std::move(full_attention), .lookup_timeout = deadline_}});
    for (const std::string& name : prompt) {
      for (const std::uint32_t group : {0u, 1u}) {
        const RequestHandle request = begin();
        const std::vector<ChunkKey> key{key_of(name, group)};
        const StoreGrant grant = cache().prepare_store(request, key);
        world().copy(key[0], grant.transfer.rows.at(0), group);
        world().report(grant.transfer.ticket);
        cache().complete_store(key);
        tier().finish();
        end(request);
        step();
      }
    }
    world().restart();
  }
  Nanos deadline_{seconds(5)};
  std::string look(RequestHandle request, const Names& wanted, std::uint32_t group) {
    std::string seen;
    for (const auto& name : wanted) {
      seen.push_back("MHPR"[static_cast<int>(cache().lookup(request, key_of(name, group)))]);
    }
    return seen;
  }
  std::string look(RequestHandle request, const Names& wanted, const Names& window) {
    const std::string seen = look(request, wanted, 0u);
    return seen + look(request, window, 1u);
  }
};

class HybridTest : public OverBoth<HybridVerbs> {};
KV_OFFLOAD_OVER_BOTH(HybridTest);
class HybridFakeTest : public HybridVerbs {};

TEST_P(HybridTest, later_groups_are_read_only_after_the_first_group) {
  make_hybrid({true, false});
  const RequestHandle request = begin();
  EXPECT_EQ(look(request, {"a", "b", "c"}, {"c"}), "PPPP");
  step();
  EXPECT_EQ(tier().queued_reads(), 3u);
  EXPECT_EQ(look(request, {"a", "b", "c"}, {"c"}), "PPPP");
  step();
  EXPECT_EQ(tier().queued_reads(), 3u);
  tier().finish();
  EXPECT_EQ(look(request, {"a", "b", "c"}, {"c"}), "HHHP");
  step();
  EXPECT_EQ(tier().queued_reads(), 1u);
  tier().finish();
  EXPECT_EQ(look(request, {"a", "b", "c"}, {"c"}), "HHHH");
}

TEST_F(HybridFakeTest, lookups_mark_keys_that_are_a_prefix) {
  make_hybrid({true, false});
  fake().knows = false;
  const RequestHandle first = begin(), second = begin();
  EXPECT_EQ(look(first, {"x", "y"}, {"y", "x"}), "RRRR");
  EXPECT_EQ(look(second, {"z", "u"}, 0u), "RR");
  step();
  using Asked = std::vector<std::pair<std::vector<ChunkKey>, LookupOptions>>;
  EXPECT_EQ(fake().asked, (Asked{{{key_of("x", 0), key_of("y", 0)}, KeyOrder::kPrefix},
                                 {{key_of("y", 1), key_of("x", 1)}, KeyOrder::kNone},
                                 {{key_of("z", 0), key_of("u", 0)}, KeyOrder::kPrefix}}));
}

TEST_F(FetchFakeTest, lookups_belong_to_the_tenant_of_the_request) {
  WorldOptions options;
  options.cache.tenants = {{"other", 0}, {"quiet", 0.75}, {"flood", 0.25}};
  make(options);
  fake().knows = false;
  const auto begin_for = [&](TenantId tenant) {
    RequestOptions request_options;
    request_options.tenant = tenant;
    return begin(request_options);
  };
  const RequestHandle other = begin_for(0), quiet = begin_for(1), flood = begin_for(2);
  EXPECT_EQ(scan(flood, {"a", "b"}), "RR");
  EXPECT_EQ(scan(quiet, {"c"}), "R");
  EXPECT_EQ(scan(other, {"d"}), "R");
  step();
  using Asked = std::vector<std::pair<std::vector<ChunkKey>, LookupOptions>>;
  EXPECT_EQ(fake().asked, (Asked{{{key_of("a"), key_of("b")}, {KeyOrder::kPrefix, 2, 0.25}},
                                 {{key_of("c")}, {KeyOrder::kPrefix, 1, 0.75}},
                                 {{key_of("d")}, {KeyOrder::kPrefix, 0, TenantShares::kMinWeight}}}));
}

// Of a chunk in host memory, for a request that may not load it from there.
TEST_F(FetchFakeTest, a_lookup_of_a_resident_chunk_belongs_to_the_tenant_of_the_request) {
  WorldOptions options;
  options.cache.tenants = {{"other", 0}, {"quiet", 0.75}, {"flood", 0.25}};
  make(options);
  RequestOptions flood, quiet;
  flood.tenant = 2;
  quiet.tenant = 1;
  quiet.load_from_cpu = false;
  EXPECT_EQ(store(begin(flood), {"a"}), Names{"a"});
  fake().knows = false;
  EXPECT_EQ(scan(begin(quiet), {"a"}), "M");
  step();
  using Asked = std::vector<std::pair<std::vector<ChunkKey>, LookupOptions>>;
  EXPECT_EQ(fake().asked, (Asked{{{key_of("a")}, {KeyOrder::kNone, 1, 0.75}}}));
}

// A cache whose store takes 30 ms for each call, which is about one chunk, as a bucket may. The test runs the
// calls one by one.
class SlowStoreTest : public CacheTest {
 protected:
  static constexpr Nanos kCall = std::chrono::milliseconds(30);

  SlowStoreTest() {
    WorldOptions options;
    options.ranks = 1;
    options.rows = 64;
    options.cache.load_policy = LoadPolicy::kAlways;
    options.cache.tenants = {{"other", 0}, {"quiet", 0.5}, {"flood", 0.5}};
    options.make_tier = [this](const Clock& clock) {
      ThreadPoolTierOptions made;
      made.name = "slow";
      made.op_timeout = std::chrono::seconds(60);
      made.clock = &clock;
      made.manual_pool = &pool_;
      return make_thread_pool_tier(std::make_unique<testing::MemoryStore>(server_, NamespaceId{}, 1), made);
    };
    make(std::move(options));
  }
  void run_one(Lane lane) {
    if (const auto next = pool_->begin_next(lane)) next();
    pass_time(kCall);
  }

  std::shared_ptr<testing::MemoryServer> server_ = std::make_shared<testing::MemoryServer>();
  IoPool* pool_ = nullptr;
};

TEST_F(SlowStoreTest, lookups_of_one_tenant_do_not_make_those_of_another_time_out) {
  RequestOptions quiet, flooding;
  quiet.tenant = 1;
  flooding.tenant = 2;
  const Names prompt{"q0", "q1", "q2", "q3"};
  const RequestHandle storing = begin(quiet);
  EXPECT_EQ(store(storing, prompt), prompt);
  end(storing);
  for (std::size_t i = 0; i < prompt.size(); ++i) run_one(Lane::kWrite);
  step();
  world().restart();  // an engine that knows none of the records
  std::vector<RequestHandle> flood;
  for (int i = 0; i < 10; ++i) {
    flood.push_back(begin(flooding));
    Names other;
    for (int j = 0; j < 30; ++j) other.push_back(fmt::format("f{}.{}", i, j));
    EXPECT_EQ(scan(flood.back(), other), std::string(30, 'R'));
  }
  step();
  for (std::size_t i = 0; i < flood.size(); ++i) run_one(Lane::kRead);  // the calls of the prompts are queued
  const Nanos lookup_timeout = world().options().cache.lookup_timeout;
  ASSERT_GT(pool_->depth(Lane::kRead).queued * kCall, lookup_timeout);
  const Nanos began = world().clock.now();
  const RequestHandle request = begin(quiet);
  std::string seen = scan(request, prompt);
  while (seen.find_first_of("PR") != std::string::npos) {
    step();
    run_one(Lane::kRead);
    seen = scan(request, prompt);
  }
  ASSERT_EQ(seen, "HHHH");
  EXPECT_LT(world().clock.now() - began, lookup_timeout / 2);
  load(request, prompt);
  end(request);
  EXPECT_EQ(world().miss_tokens("deadline"), 0);
}

// vLLM first looks for the longest part in each group. Here group 1 has both chunks in host memory.
TEST_F(HybridFakeTest, parts_of_a_last_block_are_not_a_prefix) {
  make_hybrid({true, true});
  for (const char* part : {"long", "short"}) {
    const RequestHandle writer = begin();
    const std::vector<ChunkKey> key{key_of(part, 1)};
    const StoreGrant grant = cache().prepare_store(writer, key);
    world().copy(key[0], grant.transfer.rows.at(0), 1);
    world().report(grant.transfer.ticket);
    cache().complete_store(key);
    tier().finish();
    end(writer);
    step();
  }
  fake().knows = false;
  fake().asked.clear();
  const RequestHandle request = begin();
  for (const char* part : {"long", "short"}) EXPECT_EQ(look(request, {part}, {part}), "RH");
  step();
  ASSERT_EQ(fake().asked.size(), 2u);
  for (const auto& [keys, order] : fake().asked) EXPECT_EQ(keys.size(), 1u);
}

TEST_P(HybridTest, full_attention_groups_are_read_together) {
  make_hybrid({true, true});
  const RequestHandle request = begin();
  look(request, {"a", "b"}, 0u);
  look(request, {"a", "b"}, 1u);
  step();
  EXPECT_EQ(tier().queued_reads(), 4u);
}

TEST_P(HybridTest, chunks_that_a_window_scan_skipped_are_not_read) {
  make_hybrid({false, false});
  tier().take_away(key_of("b", 1));
  const RequestHandle request = begin();
  EXPECT_EQ(look(request, {"c", "b", "a"}, 1u), "PMP");
  step();
  EXPECT_THAT(names(tier().read_keys()), ElementsAre("a"));
}

TEST_P(HybridTest, only_the_last_scan_of_a_group_counts) {
  make_hybrid({true, false});
  const RequestHandle request = begin();
  look(request, {"a", "b", "c"}, 0u);
  look(request, {"x"}, 1u);
  look(request, {"a"}, 0u);
  step();
  EXPECT_THAT(names(tier().read_keys()), ElementsAre("a"));
}

// Rows suffice but time does not: only the chunks after the cut are computed.
TEST_F(HybridFakeTest, the_worthwhile_part_of_a_prefix_is_loaded_completely) {
  Names prompt, others;
  for (int i = 0; i < 12; ++i) prompt.push_back(fmt::format("p{}", i));
  for (int i = 0; i < 10; ++i) others.push_back(fmt::format("w{}", i));
  deadline_ = std::chrono::milliseconds(500);  // the planner uses 400 ms of it
  make_hybrid({true, false}, 64, prompt);
  const RequestHandle worker = begin();  // 160 tokens in 2 s: the whole prompt would take 2.4 s
  step();
  store(worker, others);
  tier().finish();
  step();
  pass_time(seconds(2));
  step();
  fake().read_seconds = 0.6;  // to read the whole prompt: 8 of 12 chunks arrive in time
  const RequestHandle request = begin();
  look(request, prompt, 0u);
  step();
  ASSERT_EQ(world().metrics.value("kv_offload_decisions_total", {"partial"}), 1);
  EXPECT_EQ(tier().queued_reads(), 8u);
  tier().finish();
  EXPECT_EQ(look(request, prompt, 0u), "HHHHHHHHMMMM");
  end(request);
  EXPECT_EQ(world().miss_tokens("recompute_cheaper"), 4 * World::kTokens);
}

TEST_F(HybridFakeTest, the_worthwhile_part_of_a_prefix_waits_for_rows) {
  Names prompt, of_older, others;
  for (int i = 0; i < 12; ++i) prompt.push_back(fmt::format("p{}", i));
  for (int i = 0; i < 8; ++i) of_older.push_back(fmt::format("q{}", i));
  for (int i = 0; i < 10; ++i) others.push_back(fmt::format("w{}", i));
  Names all = prompt;
  all.insert(all.end(), of_older.begin(), of_older.end());
  deadline_ = std::chrono::milliseconds(500);
  make_hybrid({true, false}, 14, all);
  const RequestHandle worker = begin();
  step();
  store(worker, others);
  tier().finish();
  step();
  pass_time(seconds(2));
  step();
  const RequestHandle older = begin(), request = begin();
  look(older, of_older, 0u);
  step();
  fake().read_seconds = 0.6;
  look(request, prompt, 0u);
  step();
  ASSERT_EQ(world().metrics.value("kv_offload_decisions_total", {"partial"}), 1);
  EXPECT_EQ(tier().queued_reads(), 8u + 4u) << "two rows of six are for the windows";
  tier().finish();
  EXPECT_EQ(look(request, prompt, 0u), "HHHHPPPPPPPP");
  step();
  EXPECT_EQ(tier().queued_reads(), 0u);
  end(older);
  EXPECT_EQ(look(request, prompt, 0u), "HHHHPPPPPPPP");
  step();
  EXPECT_EQ(tier().queued_reads(), 4u);
  tier().finish();
  EXPECT_EQ(look(request, prompt, 0u), "HHHHHHHHMMMM");
  end(request);
  EXPECT_EQ(world().miss_tokens("recompute_cheaper"), 4 * World::kTokens);
  EXPECT_EQ(world().miss_tokens("pressure"), 0);
  EXPECT_EQ(world().metrics.value("kv_offload_decisions_total", {"partial"}), 1);
}

TEST_P(HybridTest, a_trimmed_plan_leaves_rows_for_the_windows) {
  make_hybrid({true, false}, 3);
  const RequestHandle holder = begin();
  const Job filling = offer(holder, {"x"});
  const RequestHandle request = begin();
  EXPECT_EQ(look(request, {"a", "b", "c"}, 0u), "PPP");
  step();
  tier().finish();
  EXPECT_EQ(look(request, {"a", "b"}, {"a"}), "HMP");
  step();
  tier().finish();
  EXPECT_EQ(look(request, {"a", "b"}, {"a"}), "HMH");
  copy(filling);
}

}  // namespace
}  // namespace kv_offload
