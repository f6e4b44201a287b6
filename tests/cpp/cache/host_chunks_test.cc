// SPDX-License-Identifier: Apache-2.0
#include "cache/host_chunks.h"

#include <limits>

#include "cache/parts.h"
#include "out_of_memory.h"

namespace kv_offload {
namespace {

using ::testing::_;
using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::IsEmpty;
using ::testing::Not;
using ::testing::Pair;
using ::testing::SizeIs;

class HostChunksTest : public ::testing::Test {
 protected:
  ChunkParts parts_;
  HostChunks& chunks_ = parts_.chunks;
};

TEST_F(HostChunksTest, a_row_is_free_again_when_its_chunk_is_discarded) {
  const Slot slot = parts_.resident("a");
  EXPECT_EQ(parts_.free_rows(), 3u);
  chunks_.discard(slot);
  EXPECT_EQ(parts_.free_rows(), 4u);
  EXPECT_FALSE(parts_.has("a"));
}

TEST_F(HostChunksTest, a_row_that_a_rank_may_still_fill_is_free_when_its_ticket_is_reported) {
  const Ticket ticket = parts_.tickets.next();
  chunks_.discard_store(parts_.filling("a", ticket));
  EXPECT_FALSE(parts_.has("a"));
  chunks_.poll();
  EXPECT_EQ(parts_.free_rows(), 3u);
  parts_.report(ticket);
  chunks_.poll();
  EXPECT_EQ(parts_.free_rows(), 4u);
}

TEST_F(HostChunksTest, a_row_whose_store_was_reported_is_free_at_once) {
  const Ticket ticket = parts_.tickets.next();
  const Slot slot = parts_.filling("a", ticket);
  parts_.report(ticket, 1);
  chunks_.discard_store(slot);
  EXPECT_EQ(parts_.free_rows(), 4u);
}

TEST_F(HostChunksTest, only_chunks_without_pins_are_victims_in_order) {
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

TEST_F(HostChunksTest, a_cancelled_write_is_not_marked_as_tried) {
  const Slot slot = parts_.resident("a");
  chunks_.begin_write(slot, 0);
  EXPECT_TRUE(chunks_.is_written_to(slot, 0));
  chunks_.end_write(slot, 0, false);
  EXPECT_FALSE(chunks_.is_written_to(slot, 0));
  EXPECT_FALSE(chunks_.was_write_tried(slot, 0));
}

TEST_F(HostChunksTest, only_the_first_load_of_a_fetched_chunk_counts_as_a_tier_hit) {
  const Slot slot = parts_.fetched("a", 3);
  EXPECT_EQ(chunks_.begin_load(slot), 3);
  EXPECT_EQ(chunks_.begin_load(slot), std::nullopt);
  chunks_.end_load(slot);
  chunks_.end_load(slot);
  EXPECT_EQ(chunks_.at(slot).origin, ChunkOrigin::kStore);
  EXPECT_EQ(chunks_.pinned(), 0u);
}

TEST_F(HostChunksTest, after_forgetting_only_unused_rows_are_free) {
  const Ticket store = parts_.tickets.next();
  parts_.filling("storing", store);
  const Slot loading = parts_.resident("loading");
  const Slot reading = parts_.fetching("reading");
  parts_.resident("idle");
  const RowId row = chunks_.quarantine(reading), loaded = chunks_.quarantine(loading);
  chunks_.forget();
  chunks_.poll();
  EXPECT_EQ(parts_.free_rows(), 1u);
  EXPECT_EQ(chunks_.quarantined_rows(), 3u);
  chunks_.release(row);
  EXPECT_EQ(parts_.free_rows(), 2u);
  parts_.report(store);
  chunks_.poll();
  EXPECT_EQ(parts_.free_rows(), 3u);
  chunks_.release(loaded);
  EXPECT_EQ(parts_.free_rows(), 4u);
  EXPECT_EQ(chunks_.resident(), 0u);
  EXPECT_EQ(chunks_.resident_bytes(), 0u);
}

// More chunks than one call checks.
class ForgottenChunksTest : public ::testing::Test {
 protected:
  static constexpr std::size_t kRows = 4 * HostChunks::kCheckedAtOnce;
  void fill() {
    for (std::size_t i = 0; i < kRows; ++i) parts_.resident(fmt::format("{}", i));
    parts_.events.take();
  }
  void drop_all() {
    while (chunks_.forgotten() > 0) chunks_.poll();
  }
  // Returns for each key how often it was reported as removed.
  std::map<std::string, int> removals() {
    std::map<std::string, int> count;
    for (const CacheEvent& event : parts_.events.take()) {
      for (const ChunkKey& key : event.keys) count[key.hex()] += event.removed;
    }
    return count;
  }

  ChunkParts parts_{{.rows = kRows}};
  HostChunks& chunks_ = parts_.chunks;
};

TEST_F(ForgottenChunksTest, all_rows_are_free_and_all_removals_reported_after_some_calls) {
  fill();
  chunks_.forget();
  EXPECT_EQ(chunks_.resident() + chunks_.resident_bytes(), 0u);
  EXPECT_GT(chunks_.forgotten(), 0u) << "the test needs more chunks";
  EXPECT_FALSE(parts_.has(fmt::format("{}", kRows - 1)));
  drop_all();
  EXPECT_EQ(parts_.free_rows(), kRows);
  const auto count = removals();
  EXPECT_THAT(count, SizeIs(kRows));
  EXPECT_THAT(count, Each(Pair(_, 1)));
}

TEST_F(ForgottenChunksTest,
       rows_in_flight_are_freed_once_also_if_their_hold_ends_before_their_chunks_are_dropped) {
  fill();
  const std::string last = fmt::format("{}", kRows - 1), before = fmt::format("{}", kRows - 2);
  const Slot written = chunks_.slot_of(chunks_.find(key_of(last)));
  const Slot loaded = chunks_.slot_of(chunks_.find(key_of(before)));
  const RowId row = chunks_.quarantine(written);
  (void)chunks_.quarantine(written);
  const RowId row_of_load = chunks_.quarantine(loaded);
  chunks_.forget();
  EXPECT_EQ(chunks_.quarantined_rows(), 2u);
  chunks_.release(row);
  chunks_.release(row_of_load);
  EXPECT_EQ(chunks_.quarantined_rows(), 1u);
  chunks_.release(row);
  EXPECT_EQ(chunks_.quarantined_rows(), 0u);
  drop_all();
  EXPECT_EQ(parts_.free_rows(), kRows);
  EXPECT_THAT(removals(), SizeIs(kRows));
}

TEST_F(ForgottenChunksTest, rows_of_unreported_stores_wait_for_the_report) {
  for (std::size_t i = 1; i < kRows; ++i) parts_.resident(fmt::format("{}", i));
  const Ticket store = parts_.tickets.next();
  parts_.filling("storing", store);
  chunks_.forget();
  drop_all();
  EXPECT_EQ(chunks_.quarantined_rows(), 1u);
  EXPECT_EQ(parts_.free_rows(), kRows - 1);
  parts_.report(store);
  chunks_.poll();
  EXPECT_EQ(parts_.free_rows(), kRows);
}

TEST_F(ForgottenChunksTest, a_chunk_stored_again_is_reported_removed_before_it_is_reported_present) {
  fill();
  chunks_.forget();
  const std::string last = fmt::format("{}", kRows - 1);
  parts_.resident(last);
  drop_all();
  EXPECT_TRUE(parts_.has(last));
  EXPECT_EQ(parts_.free_rows(), kRows - 1);
  std::vector<bool> removed;
  for (const CacheEvent& event : parts_.events.take()) {
    for (const ChunkKey& key : event.keys) {
      if (key == key_of(last)) removed.push_back(event.removed);
    }
  }
  EXPECT_THAT(removed, ElementsAre(true, false));
}

TEST_F(ForgottenChunksTest, many_resets_forget_all_chunks) {
  fill();
  for (unsigned i = 0; i < 3 * ChunkIndex::kMostEpochs; ++i) {
    chunks_.prepare_forget();
    chunks_.forget();
    EXPECT_FALSE(parts_.has(fmt::format("{}", kRows - 1)));
    parts_.resident(fmt::format("next{}", i));
  }
  chunks_.prepare_forget();
  chunks_.forget();
  EXPECT_EQ(chunks_.resident(), 0u);
  drop_all();
  EXPECT_EQ(parts_.free_rows(), kRows);
}

TEST_F(HostChunksTest, events_report_resident_and_evicted_chunks) {
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

TEST_F(HostChunksTest, a_store_that_runs_out_of_memory_is_not_reported) {
  const Slot slot = parts_.filling("a", kNoTicket);
  const unsigned failures =
      testing::fail_each_allocation([&] { chunks_.finish_store(slot); },
                                    [&] {
                                      EXPECT_EQ(chunks_.at(slot).state, ChunkState::kFilling);
                                      EXPECT_EQ(chunks_.resident_bytes(), 0u);
                                      EXPECT_THAT(parts_.events.take(), IsEmpty());
                                    });
  EXPECT_GT(failures, 1u);
  EXPECT_THAT(parts_.events.take(), SizeIs(1));
}

TEST_F(HostChunksTest, the_end_of_a_store_allocates_nothing) {
  const Ticket first = parts_.tickets.next(), second = parts_.tickets.next();
  const Slot a = parts_.filling("a", first), b = parts_.filling("b", second);
  parts_.report(first);
  {
    const testing::FailingAllocation failing(0);
    chunks_.discard_store(a);
    chunks_.discard_store(b);
    chunks_.poll();
    EXPECT_FALSE(failing.came());
  }
  EXPECT_EQ(parts_.free_rows(), 3u);
}

TEST_F(HostChunksTest, resident_bytes_are_those_of_whole_pages) {
  parts_.resident("a");
  parts_.fetching("b");
  EXPECT_EQ(chunks_.resident_bytes(), kPageBytes);
}

TEST(HostChunksOfSeveralSizesTest, a_slab_is_evicted_when_none_of_its_chunks_is_in_use) {
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

TEST_F(HostChunksTest, the_last_pin_keeps_a_row_and_a_write_only_delays_it) {
  const Slot slot = parts_.resident("a");
  chunks_.pin(slot);
  EXPECT_TRUE(chunks_.frees_row({}, slot));
  chunks_.begin_write(slot, 0);
  chunks_.begin_write(slot, 5);
  EXPECT_TRUE(chunks_.frees_row({}, slot));
  chunks_.pin(slot);
  EXPECT_FALSE(chunks_.frees_row({}, slot));
  EXPECT_TRUE(chunks_.frees_row({}, parts_.fetching("b")));
}

TEST(HostChunksOfNeighboursTest, a_borrowed_chunk_frees_no_row) {
  ChunkParts parts({.share_for = "model"});
  LendingEngine neighbour(parts);
  neighbour.lend("a");
  parts.chunks.share_in(*parts.region, "weights", Nanos(0));
  parts.rank->map_neighbours();
  parts.chunks.poll_neighbours(Nanos(0));
  const ChunkEntry* borrowed = parts.chunks.borrow(key_of("a"), 0);
  ASSERT_NE(borrowed, nullptr);
  EXPECT_EQ(borrowed->pins, 1u);
  EXPECT_FALSE(parts.chunks.frees_row({}, parts.chunks.slot_of(borrowed)));
}

// A prefetch takes no row of a chunk that is expected to be used, but one that no request has used yet.
TEST(HostChunksOfSeveralSizesTest, a_slab_for_no_request_spares_the_chunks_that_are_expected_back) {
  ChunkParts parts({.rows = 64, .shard_bytes = {4096, 65536}});
  parts.chunks.set_now(100);
  std::vector<Slot> small;
  for (RowId row = parts.chunks.allocate(0); row != kNoRow; row = parts.chunks.allocate(0)) {
    const ChunkKey key = key_of(fmt::format("s{}", small.size()));
    small.push_back(parts.chunks.insert_filling(key, 0, row, {.request = 7}, kNoTicket));
    parts.chunks.finish_store(small.back());
    parts.chunks.set_return(small.back(), 110);
  }
  EXPECT_THAT(parts.chunks.slab_to_evict(1, 0), IsEmpty());
  EXPECT_THAT(parts.chunks.slab_to_evict(1, 8), Not(IsEmpty()));
  parts.chunks.set_now(160);
  EXPECT_THAT(parts.chunks.slab_to_evict(1, 0), IsEmpty()) << "may still be used";
  parts.chunks.set_now(171);
  EXPECT_THAT(parts.chunks.slab_to_evict(1, 0), Not(IsEmpty()));
  parts.chunks.set_now(160);
  for (const Slot slot : small) parts.chunks.set_return(slot, std::numeric_limits<double>::infinity());
  EXPECT_THAT(parts.chunks.slab_to_evict(1, 0), Not(IsEmpty())) << "not used in time";
}

TEST(HostChunksOfSeveralSizesTest, a_slab_for_no_request_may_hold_chunks_that_no_request_has_used) {
  ChunkParts parts({.rows = 64, .shard_bytes = {4096, 65536}});
  int number = 0;
  for (RowId row = parts.chunks.allocate(0); row != kNoRow; row = parts.chunks.allocate(0)) {
    const ChunkKey key = key_of(fmt::format("s{}", number++));
    parts.chunks.finish_store(parts.chunks.insert_filling(key, 0, row, {}, kNoTicket));
  }
  EXPECT_THAT(parts.chunks.slab_to_evict(1, 0), Not(IsEmpty()));
}

}  // namespace
}  // namespace kv_offload
