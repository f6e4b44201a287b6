// SPDX-License-Identifier: Apache-2.0
// StorePath: which chunks are accepted, and when they become hits.
#include "base/refused_chunks.h"
#include "cache/cache_fixture.h"

namespace kv_offload {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

class StoreTest : public OverBoth<CacheTest> {};
KV_OFFLOAD_OVER_BOTH(StoreTest);
class StoreFakeTest : public CacheTest {};

TEST_P(StoreTest, a_chunk_never_stored_is_a_miss) { EXPECT_EQ(peek({"a"}), "M"); }

TEST_P(StoreTest, a_chunk_is_pending_while_ranks_copy_and_a_hit_once_its_store_completed) {
  const RequestHandle request = begin();
  const Job job = offer(request, {"a", "b"});
  EXPECT_EQ(peek({"a"}), "P");
  copy(job);
  EXPECT_EQ(peek({"a"}), "P");
  complete(job);
  EXPECT_EQ(peek({"a", "b"}), "HH");
}

TEST_P(StoreTest, a_stored_chunk_is_loaded_byte_for_byte) {
  store({"a", "b", "c"});
  const RequestHandle request = begin();
  EXPECT_EQ(scan(request, {"a", "b", "c", "d"}), "HHHM");
  load(request, {"a", "b", "c"});
}

TEST_P(StoreTest, known_chunks_are_skipped_and_new_ones_accepted) {
  store({"a"});
  const RequestHandle request = begin();
  const Job filling = offer(request, {"b"});
  EXPECT_THAT(store({"a", "b", "c"}), ElementsAre("c"));
  copy(filling);
}

TEST_P(StoreTest, an_offer_without_new_chunks_gets_no_ticket) {
  store({"a"});
  const Job job = offer(begin(), {"a"});
  EXPECT_EQ(job.transfer.ticket, kNoTicket);
  EXPECT_THAT(job.keys, IsEmpty());
}

TEST_P(StoreTest, rows_are_counted_per_group_in_the_order_of_the_keys) {
  make({.rows = 16, .shard_bytes = {300, 5000}});
  std::vector<ChunkKey> offered = keys({"a", "b"}, 0);
  offered.push_back(key_of("a", 1));
  const StoreGrant grant = cache().prepare_store(begin(), offered);
  EXPECT_THAT(grant.accepted, ElementsAre(0, 1, 2));
  EXPECT_THAT(grant.transfer.group_rows, ElementsAre(2, 1));
  EXPECT_EQ(grant.transfer.rows.size(), 3u);
}

TEST_P(StoreTest, keys_that_are_not_ordered_by_group_are_refused) {
  make({.rows = 16, .shard_bytes = {300, 300}});
  EXPECT_THROW(cache().prepare_store(begin(), std::vector{key_of("a", 1), key_of("a", 0)}), InvalidArgument);
  EXPECT_THROW(cache().prepare_store(begin(), std::vector{key_of("a", 7)}), InvalidArgument);
}

TEST_P(StoreTest, an_offer_that_is_refused_takes_no_row_and_evicts_nothing) {
  make({.rows = 8, .shard_bytes = {300, 300}});
  const Names before{"s", "t", "u", "v", "w", "x", "y", "z"};
  store(before);
  tier().finish();
  step();
  const RequestHandle request = begin();
  EXPECT_THROW(cache().prepare_store(request, std::vector{key_of("a"), key_of("b"), key_of("c", 7)}),
               InvalidArgument);
  EXPECT_EQ(peek({"a"}), "M");
  EXPECT_EQ(peek(before), "HHHHHHHH");
  EXPECT_EQ(cache().stats().pinned_chunks, 0u);
  EXPECT_EQ(store(request, {"1", "2", "3", "4", "5", "6", "7", "8"}).size(), 8u);
}

// Functions called by an offer may throw, at least when memory runs out.
TEST_F(StoreFakeTest, an_offer_that_throws_half_way_takes_no_row) {
  make({.rows = 3});
  store({"old"});
  tier().finish();
  step();
  for (int calls_before : {0, 1}) {  // the first two chunks of an offer already have rows
    fake().on_touch = [calls_before]() mutable {
      if (calls_before-- == 0) throw std::bad_alloc();
    };
    EXPECT_THROW(cache().prepare_store(begin(), keys({"a", "b", "c", "d"})), std::bad_alloc);
    fake().on_touch = {};
    EXPECT_EQ(cache().stats().pinned_chunks, 0u);
    EXPECT_EQ(peek({"a"}), "M");
    if (calls_before == 0) {
      EXPECT_EQ(peek({"old"}), "H");
      EXPECT_EQ(store({"x", "y"}).size(), 2u);
      tier().finish();
      step();
    }
  }
  EXPECT_EQ(store({"1", "2", "3"}).size(), 3u);
}

TEST_P(StoreTest, a_failed_copy_is_never_a_hit_and_its_row_is_used_again) {
  const RequestHandle request = begin();
  const Job job = offer(request, {"a", "b"});
  copy(job, kDeviceFailed);
  complete(job);
  EXPECT_EQ(peek({"a"}), "M");
  EXPECT_EQ(world().miss_tokens("io_error"), World::kTokens);
  EXPECT_EQ(world().failures("cpu", "store", "device"), 2);
  EXPECT_EQ(store({"1", "2", "3", "4", "5", "6", "7", "8"}).size(), 8u);
}

TEST_P(StoreTest, only_the_group_that_failed_is_lost) {
  make({.rows = 16, .shard_bytes = {300, 300}});
  const RequestHandle request = begin();
  const std::vector<ChunkKey> offered{key_of("a", 0), key_of("a", 1)};
  const StoreGrant grant = cache().prepare_store(request, offered);
  world().report(grant.transfer.ticket, 0b10);
  cache().complete_store(offered);
  EXPECT_EQ(cache().lookup(request, key_of("a", 0)), LookupResult::kHit);
  EXPECT_EQ(cache().lookup(request, key_of("a", 1)), LookupResult::kMiss);
}

TEST_P(StoreTest, a_completion_before_all_reports_fails_and_its_rows_wait_for_the_reports) {
  make({.rows = 1});
  const RequestHandle request = begin();
  const Job job = offer(request, {"a"});
  world().ranks[0]->report(0, job.transfer.ticket, 0);  // rank 1 did not report
  complete(job);
  EXPECT_EQ(peek({"a"}), "M");
  EXPECT_EQ(cache().stats().quarantined_rows, 1u);
  EXPECT_THAT(store({"b"}), IsEmpty());
  world().ranks[1]->report(1, job.transfer.ticket, 0);
  step();
  EXPECT_THAT(store({"b"}), ElementsAre("b"));
}

TEST_P(StoreTest, a_completion_with_failure_fails_the_store) {
  const Job job = offer(begin(), {"a"});
  copy(job);
  complete(job, false);
  EXPECT_EQ(peek({"a"}), "M");
}

TEST_P(StoreTest, a_request_with_stores_disabled_stores_nothing) {
  EXPECT_THAT(store(begin({.skip_store = true}), {"a"}), IsEmpty());
}

// ---- rows and eviction

TEST_P(StoreTest, the_least_recently_used_chunk_is_evicted_and_reported) {
  make({.rows = 3, .tier = false});
  store({"a"});
  store({"b"});
  store({"c"});
  const RequestHandle reader = begin();
  scan(reader, {"a"});
  load(reader, {"a"});
  const StoreGrant grant = cache().prepare_store(begin(), keys({"d"}));
  EXPECT_THAT(names(grant.evicted), ElementsAre("b"));
  EXPECT_EQ(peek({"b"}), "M");
  EXPECT_EQ(world().miss_tokens("evicted"), World::kTokens);
  EXPECT_EQ(world().metrics.value("kv_offload_evicted_bytes_total", {"cpu"}), 2 * 4096);
}

TEST_P(StoreTest, the_tail_of_a_prefix_is_evicted_before_its_head) {
  make({.rows = 3, .tier = false});
  store({"a", "b", "c"});
  EXPECT_THAT(names(cache().prepare_store(begin(), keys({"d"})).evicted), ElementsAre("c"));
}

TEST_P(StoreTest, chunks_in_use_are_never_evicted) {
  make({.rows = 2, .tier = false});
  store({"a"});
  store({"b"});
  const RequestHandle reader = begin();
  scan(reader, {"a"});
  const Job job = begin_load(reader, {"a"});
  EXPECT_THAT(store({"c", "d"}), ElementsAre("c"));  // b was evicted
  EXPECT_EQ(peek({"a"}), "H");
  EXPECT_EQ(world().dropped("cpu", "pressure"), 2 * 4096);
  end_load(job);
}

TEST_P(StoreTest, a_request_does_not_evict_its_own_prefix) {
  make({.rows = 3, .tier = false});
  const RequestHandle request = begin();
  EXPECT_THAT(store(request, {"a", "b"}), ElementsAre("a", "b"));
  EXPECT_THAT(store(request, {"c", "d", "e"}), ElementsAre("c"));
  EXPECT_EQ(peek({"a", "b", "c"}), "HHH");
}

TEST_P(StoreTest, after_a_decline_later_chunks_are_declined_until_it_is_offered_again) {
  make({.rows = 2, .tier = false});
  const RequestHandle request = begin();
  EXPECT_THAT(store(request, {"a", "b", "c"}), ElementsAre("a", "b"));
  cache().reset();  // frees the rows, and restarts the request's offers
  EXPECT_THAT(store(request, {"d"}), ElementsAre("d"));
  const RequestHandle other = begin();
  const Job filling = offer(other, {"x", "y"});
  EXPECT_EQ(filling.keys.size(), 2u);  // d was evicted
  EXPECT_THAT(store(request, {"e"}), IsEmpty());
  copy(filling);
  complete(filling);
  end(other);
  EXPECT_THAT(store(request, {"f"}), IsEmpty());  // e is missing
  EXPECT_THAT(store(request, {"e"}), ElementsAre("e"));
  EXPECT_THAT(store(request, {"f"}), ElementsAre("f"));
}

TEST_P(StoreTest, a_declined_key_keeps_the_accepted_keys_before_it) {
  make({.rows = 2, .shard_bytes = {300, 300}, .tier = false});
  std::vector<ChunkKey> offered = keys({"a", "b", "c"}, 0);
  offered.push_back(key_of("a", 1));
  const StoreGrant grant = cache().prepare_store(begin(), offered);
  EXPECT_THAT(grant.accepted, ElementsAre(0, 1));
}

TEST_P(StoreTest, a_larger_group_evicts_slabs_of_a_smaller_group) {
  make({.ranks = 1, .rows = 64, .shard_bytes = {4096, 16384}, .tier = false});
  for (int i = 0; i < 64; ++i) store({fmt::format("s{}", i)});
  int accepted = 0;
  for (int i = 0; i < 12; ++i) {
    const std::vector<ChunkKey> large{key_of(fmt::format("l{}", i), 1)};
    const RequestHandle request = begin();
    const StoreGrant grant = cache().prepare_store(request, large);
    accepted += static_cast<int>(grant.accepted.size());
    if (!grant.accepted.empty()) world().report(grant.transfer.ticket);
    cache().complete_store(large);
    end(request);
  }
  EXPECT_EQ(accepted, 12);
}

// ---- events and figures

TEST_P(StoreTest, events_report_stores_evictions_writes_and_removals) {
  make({.rows = 1, .cache = {.keep_events = true}});
  store({"a"});
  tier().finish();
  step();
  store({"b"});
  tier().take_away(key_of("a"));
  step();
  std::vector<std::string> seen;
  for (const CacheEvent& event : cache().take_events()) {
    seen.push_back(fmt::format("{}{}{}", event.removed ? '-' : '+', event.storage ? event.owner + ":" : "",
                               names(event.keys).front()));
  }
  EXPECT_THAT(seen, ElementsAre("+a", "+fs:a", "-a", "+b", "-fs:a"));
  EXPECT_THAT(cache().take_events(), IsEmpty());
}

TEST_P(StoreTest, stats_count_resident_chunks) {
  store({"a", "b"});
  const auto stats = cache().stats();
  EXPECT_EQ(stats.resident_chunks, 2u);
  EXPECT_EQ(stats.resident_bytes, 2 * 2 * 4096u);
  EXPECT_EQ(stats.capacity_bytes, 2 * 8 * 4096u);
  EXPECT_EQ(stats.pinned_chunks, 2u);  // pinned by their writes
  cache().publish_gauges();
  EXPECT_EQ(world().metrics.value("kv_offload_tier_chunks", {"cpu"}), 2);
  EXPECT_EQ(world().metrics.value("kv_offload_queue_depth", {"fs", "write"}), 2);
  EXPECT_EQ(world().metrics.value("kv_offload_stored_tokens_total", {}), 2 * World::kTokens);
  EXPECT_EQ(world().metrics.value("kv_offload_stored_bytes_total", {}), 2 * 2 * 4096);
}

TEST_P(StoreTest, a_request_that_ended_is_refused) {
  const RequestHandle request = begin();
  end(request);
  EXPECT_THROW(end(request), InvalidArgument);
  EXPECT_THROW(cache().prepare_store(request, keys({"a"})), InvalidArgument);
}

TEST_P(StoreTest, a_cache_that_cannot_hold_one_row_of_each_group_is_refused) {
  EXPECT_THROW(make({.rows = 2, .shard_bytes = {4096, 16384}}), InvalidArgument);
}

}  // namespace
}  // namespace kv_offload
