// SPDX-License-Identifier: Apache-2.0
#include "cache/host_chunks.h"

#include "cache/parts.h"

namespace kv_offload {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;
using ::testing::SizeIs;

class HostChunksTest : public ::testing::Test {
 protected:
  ChunkParts parts_;
  HostChunks& chunks_ = parts_.chunks;
};

TEST_F(HostChunksTest, ARowIsFreeAgainWhenItsChunkIsDiscarded) {
  const Slot slot = parts_.resident("a");
  EXPECT_EQ(parts_.free_rows(), 3u);
  chunks_.discard(slot);
  EXPECT_EQ(parts_.free_rows(), 4u);
  EXPECT_FALSE(parts_.has("a"));
}

TEST_F(HostChunksTest, ARowThatARankMayStillFillIsFreeWhenItsTicketIsReported) {
  const Ticket ticket = parts_.tickets.next();
  chunks_.discard_store(parts_.filling("a", ticket));
  EXPECT_FALSE(parts_.has("a"));
  chunks_.poll();
  EXPECT_EQ(parts_.free_rows(), 3u);
  parts_.report(ticket);
  chunks_.poll();
  EXPECT_EQ(parts_.free_rows(), 4u);
}

TEST_F(HostChunksTest, ARowWhoseStoreWasReportedIsFreeAtOnce) {
  const Ticket ticket = parts_.tickets.next();
  const Slot slot = parts_.filling("a", ticket);
  parts_.report(ticket, 1);
  chunks_.discard_store(slot);
  EXPECT_EQ(parts_.free_rows(), 4u);
}

TEST_F(HostChunksTest, OnlyChunksWithoutPinsAreVictimsInOrder) {
  const Slot a = parts_.resident("a");
  const Slot b = parts_.resident("b");
  const Slot c = parts_.resident("c");
  chunks_.pin(a);
  chunks_.begin_write(b, 0);
  EXPECT_EQ(chunks_.victim(), c);
  chunks_.end_write(b, 0, true);
  EXPECT_EQ(chunks_.victim(), b);
  EXPECT_TRUE(chunks_.was_write_tried(b, 0));
  EXPECT_FALSE(chunks_.was_write_tried(b, 1));
}

TEST_F(HostChunksTest, ACancelledWriteIsNotMarkedAsTried) {
  const Slot slot = parts_.resident("a");
  chunks_.begin_write(slot, 0);
  EXPECT_TRUE(chunks_.is_written_to(slot, 0));
  chunks_.end_write(slot, 0, false);
  EXPECT_FALSE(chunks_.is_written_to(slot, 0));
  EXPECT_FALSE(chunks_.was_write_tried(slot, 0));
}

TEST_F(HostChunksTest, OnlyTheFirstLoadOfAFetchedChunkCountsAsATierHit) {
  const Slot slot = parts_.fetched("a", 3);
  EXPECT_EQ(chunks_.begin_load(slot), 3);
  EXPECT_EQ(chunks_.begin_load(slot), std::nullopt);
  chunks_.end_load(slot);
  chunks_.end_load(slot);
  EXPECT_EQ(chunks_.at(slot).origin, ChunkOrigin::kStore);
  EXPECT_EQ(chunks_.pinned(), 0u);
}

TEST_F(HostChunksTest, AfterForgettingOnlyUnusedRowsAreFree) {
  const Ticket store = parts_.tickets.next(), load = parts_.tickets.next();
  parts_.filling("storing", store);
  const Slot loading = parts_.resident("loading");
  const Slot reading = parts_.fetching("reading");
  parts_.resident("idle");
  const RowId row = chunks_.at(reading).row;
  chunks_.quarantine(load, loading);
  chunks_.quarantine(row);
  chunks_.forget();
  EXPECT_EQ(parts_.free_rows(), 1u);
  EXPECT_EQ(chunks_.quarantined_rows(), 3u);
  chunks_.release(row);
  EXPECT_EQ(parts_.free_rows(), 2u);
  parts_.report(store);
  chunks_.poll();
  EXPECT_EQ(parts_.free_rows(), 3u);
  parts_.report(load);
  chunks_.poll();
  EXPECT_EQ(parts_.free_rows(), 4u);
  EXPECT_EQ(chunks_.resident(), 0u);
  EXPECT_EQ(chunks_.resident_bytes(), 0u);
}

TEST_F(HostChunksTest, EventsReportResidentAndEvictedChunks) {
  const Slot a = parts_.resident("a");
  parts_.fetched("b");
  chunks_.discard(a);
  chunks_.discard(parts_.fetching("never"));
  const auto events = parts_.events.take();
  ASSERT_THAT(events, SizeIs(2));
  EXPECT_THAT(events[0].keys, ElementsAre(key_of("a"), key_of("b")));
  EXPECT_FALSE(events[0].removed);
  EXPECT_THAT(events[1].keys, ElementsAre(key_of("a")));
  EXPECT_TRUE(events[1].removed);
  EXPECT_THAT(parts_.events.take(), IsEmpty());
}

TEST_F(HostChunksTest, ResidentBytesAreThoseOfWholePages) {
  parts_.resident("a");
  parts_.fetching("b");
  EXPECT_EQ(chunks_.resident_bytes(), kPageBytes);
}

TEST(HostChunksOfSeveralSizesTest, ASlabIsEvictedWhenNoneOfItsChunksIsInUse) {
  ChunkParts parts({.rows = 64, .shard_bytes = {4096, 65536}});
  EXPECT_FALSE(parts.chunks.has_one_row_size());
  std::vector<Slot> small;
  for (int i = 0;; ++i) {
    const RowId row = parts.chunks.allocate(0);
    if (row == kNoRow) break;
    small.push_back(
        parts.chunks.insert_filling(key_of(fmt::format("s{}", i)), 0, row, {.request = 7}, kNoTicket));
    parts.chunks.finish_store(small.back());
  }
  EXPECT_EQ(parts.chunks.allocate(1), kNoRow);
  EXPECT_THAT(parts.chunks.slab_to_evict(1, 7), IsEmpty()) << "all chunks belong to the requesting request";
  const auto slab = parts.chunks.slab_to_evict(1, 0);
  ASSERT_FALSE(slab.empty());
  for (const Slot slot : slab) parts.chunks.discard(slot);
  EXPECT_NE(parts.chunks.allocate(1), kNoRow);
}

}  // namespace
}  // namespace kv_offload
