// SPDX-License-Identifier: Apache-2.0
// StorePath: which chunks are accepted, and when they become hits.
#include "base/refused_chunks.h"
#include "cache/cache_fixture.h"
#include "with_threads.h"

namespace kv_offload {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

class StoreTest : public OverBoth<CacheTest> {};
KV_OFFLOAD_OVER_BOTH(StoreTest);
class StoreFakeTest : public CacheTest {};

TEST_P(StoreTest, AChunkNeverStoredIsAMiss) { EXPECT_EQ(peek({"a"}), "M"); }

TEST_P(StoreTest, AChunkIsPendingWhileRanksCopyAndAHitOnceItsStoreCompleted) {
  const RequestHandle request = begin();
  const Job job = offer(request, {"a", "b"});
  EXPECT_EQ(peek({"a"}), "P");
  copy(job);
  EXPECT_EQ(peek({"a"}), "P");
  complete(job);
  EXPECT_EQ(peek({"a", "b"}), "HH");
}

TEST_P(StoreTest, AStoredChunkIsLoadedByteForByte) {
  store({"a", "b", "c"});
  const RequestHandle request = begin();
  EXPECT_EQ(scan(request, {"a", "b", "c", "d"}), "HHHM");
  load(request, {"a", "b", "c"});
}

TEST_P(StoreTest, KnownChunksAreSkippedAndNewOnesAccepted) {
  store({"a"});
  const RequestHandle request = begin();
  const Job filling = offer(request, {"b"});
  EXPECT_THAT(store({"a", "b", "c"}), ElementsAre("c"));
  copy(filling);
}

TEST_P(StoreTest, AnOfferWithoutNewChunksGetsNoTicket) {
  store({"a"});
  const Job job = offer(begin(), {"a"});
  EXPECT_EQ(job.transfer.ticket, kNoTicket);
  EXPECT_THAT(job.keys, IsEmpty());
}

TEST_P(StoreTest, RowsAreCountedPerGroupInTheOrderOfTheKeys) {
  make({.rows = 16, .shard_bytes = {300, 5000}});
  std::vector<ChunkKey> offered = keys({"a", "b"}, 0);
  offered.push_back(key_of("a", 1));
  const StoreGrant grant = cache().prepare_store(begin(), offered);
  EXPECT_THAT(grant.accepted, ElementsAre(0, 1, 2));
  EXPECT_THAT(grant.transfer.group_rows, ElementsAre(2, 1));
  EXPECT_EQ(grant.transfer.rows.size(), 3u);
}

TEST_P(StoreTest, KeysThatAreNotOrderedByGroupAreRefused) {
  make({.rows = 16, .shard_bytes = {300, 300}});
  EXPECT_THROW(cache().prepare_store(begin(), std::vector{key_of("a", 1), key_of("a", 0)}), InvalidArgument);
  EXPECT_THROW(cache().prepare_store(begin(), std::vector{key_of("a", 7)}), InvalidArgument);
}

TEST_P(StoreTest, AnOfferThatIsRefusedTakesNoRowAndEvictsNothing) {
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
TEST_F(StoreFakeTest, AnOfferThatThrowsHalfWayTakesNoRow) {
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

TEST_P(StoreTest, AFailedCopyIsNeverAHitAndItsRowIsUsedAgain) {
  const RequestHandle request = begin();
  const Job job = offer(request, {"a", "b"});
  copy(job, kDeviceFailed);
  complete(job);
  EXPECT_EQ(peek({"a"}), "M");
  EXPECT_EQ(world().miss_tokens("io_error"), World::kTokens);
  EXPECT_EQ(world().failures("cpu", "store", "device"), 2);
  EXPECT_EQ(store({"1", "2", "3", "4", "5", "6", "7", "8"}).size(), 8u);
}

TEST_P(StoreTest, OnlyTheGroupThatFailedIsLost) {
  make({.rows = 16, .shard_bytes = {300, 300}});
  const RequestHandle request = begin();
  const std::vector<ChunkKey> offered{key_of("a", 0), key_of("a", 1)};
  const StoreGrant grant = cache().prepare_store(request, offered);
  world().report(grant.transfer.ticket, 0b10);
  cache().complete_store(offered);
  EXPECT_EQ(cache().lookup(request, key_of("a", 0)), LookupResult::kHit);
  EXPECT_EQ(cache().lookup(request, key_of("a", 1)), LookupResult::kMiss);
}

TEST_P(StoreTest, ACompletionBeforeAllReportsFailsAndItsRowsWaitForTheReports) {
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

TEST_P(StoreTest, ACompletionWithFailureFailsTheStore) {
  const Job job = offer(begin(), {"a"});
  copy(job);
  complete(job, false);
  EXPECT_EQ(peek({"a"}), "M");
}

TEST_P(StoreTest, ARequestWithStoresDisabledStoresNothing) {
  EXPECT_THAT(store(begin({.skip_store = true}), {"a"}), IsEmpty());
}

// ---- rows and eviction

TEST_P(StoreTest, TheLeastRecentlyUsedChunkIsEvictedAndReported) {
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

TEST_P(StoreTest, TheTailOfAPrefixIsEvictedBeforeItsHead) {
  make({.rows = 3, .tier = false});
  store({"a", "b", "c"});
  EXPECT_THAT(names(cache().prepare_store(begin(), keys({"d"})).evicted), ElementsAre("c"));
}

TEST_P(StoreTest, ChunksInUseAreNeverEvicted) {
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

TEST_P(StoreTest, ARequestDoesNotEvictItsOwnPrefix) {
  make({.rows = 3, .tier = false});
  const RequestHandle request = begin();
  EXPECT_THAT(store(request, {"a", "b"}), ElementsAre("a", "b"));
  EXPECT_THAT(store(request, {"c", "d", "e"}), ElementsAre("c"));
  EXPECT_EQ(peek({"a", "b", "c"}), "HHH");
}

TEST_P(StoreTest, AfterADeclineLaterChunksAreDeclinedUntilItIsOfferedAgain) {
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

TEST_P(StoreTest, ADeclinedKeyKeepsTheAcceptedKeysBeforeIt) {
  make({.rows = 2, .shard_bytes = {300, 300}, .tier = false});
  std::vector<ChunkKey> offered = keys({"a", "b", "c"}, 0);
  offered.push_back(key_of("a", 1));
  const StoreGrant grant = cache().prepare_store(begin(), offered);
  EXPECT_THAT(grant.accepted, ElementsAre(0, 1));
}

TEST_P(StoreTest, ALargerGroupEvictsSlabsOfASmallerGroup) {
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

TEST_P(StoreTest, EventsReportStoresEvictionsWritesAndRemovals) {
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

TEST_P(StoreTest, StatsCountResidentChunks) {
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

TEST_P(StoreTest, ARequestThatEndedIsRefused) {
  const RequestHandle request = begin();
  end(request);
  EXPECT_THROW(end(request), InvalidArgument);
  EXPECT_THROW(cache().prepare_store(request, keys({"a"})), InvalidArgument);
}

TEST_P(StoreTest, ACacheThatCannotHoldOneRowOfEachGroupIsRefused) {
  EXPECT_THROW(make({.rows = 2, .shard_bytes = {4096, 16384}}), InvalidArgument);
}

}  // namespace
}  // namespace kv_offload
