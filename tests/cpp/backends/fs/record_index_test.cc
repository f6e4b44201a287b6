// SPDX-License-Identifier: Apache-2.0
// All knowledge belongs to one epoch, whichever thread adds it, and whenever.
#include "backends/fs/record_index.h"

#include <gtest/gtest.h>

#include <atomic>

#include "backends/fs/layout.h"
#include "out_of_memory.h"
#include "tier/tier_driver.h"

namespace kv_offload {
namespace {

using namespace testing;
using Extent = RecordIndex::Extent;

class RecordIndexTest : public ::testing::Test {
 protected:
  static std::shared_ptr<FsEpoch> epoch(std::uint64_t number) {
    auto epoch = std::make_shared<FsEpoch>();
    epoch->number = number;
    return epoch;
  }
  void begin(const std::shared_ptr<FsEpoch>& epoch, Extent extent = Extent::kOrder) {
    const auto next = records_.next();
    ASSERT_TRUE(next);
    ASSERT_TRUE(records_.begin(epoch, *next, extent));
  }
  static std::vector<FoundRecord> found(std::uint32_t first, std::uint32_t count) {
    std::vector<FoundRecord> found;
    for (std::uint32_t i = first; i < first + count; ++i) found.push_back({key_of(i), 8192, 8192, 0});
    return found;
  }
  static TierUses uses_of(const std::vector<std::uint32_t>& numbers) {
    auto uses = std::make_shared<std::vector<TierUse>>();
    for (const std::uint32_t number : numbers) uses->push_back({key_of(number), {.request = 1}});
    return uses;
  }
  bool has(std::uint32_t number) { return records_.contains(key_of(number)) == Presence::kPresent; }
  TierStats figures() {
    TierStats stats;
    records_.figures(&stats);
    return stats;
  }

  FakeClock clock_;
  RecordIndex records_{"lru", clock_};
  const std::atomic<bool> go_on_{false};
};

TEST_F(RecordIndexTest, calls_for_an_ended_epoch_change_nothing) {
  const auto old = epoch(1), now = epoch(2);
  begin(old, Extent::kSome);
  const auto victim_of_old = [&] {
    EXPECT_TRUE(records_.written({key_of(1), 8192}, {}, old));
    return *records_.take_victim();
  }();
  records_.reset();
  begin(now, Extent::kSome);
  EXPECT_TRUE(records_.written({key_of(2), 8192}, {}, now));

  EXPECT_EQ(records_.written({key_of(3), 8192}, {}, old).kind(), StatusKind::kCancelled);
  records_.put_back(victim_of_old);
  records_.adopt_names(old, found(10, 5), true, go_on_);
  const auto late = found(20, 5);
  const std::vector<RecordIndex::LastUse> order = {{1, 0}, {2, 1}, {3, 2}, {4, 3}, {5, 4}};
  records_.adopt_in_order(old, late, order, true, go_on_);
  records_.remove(key_of(2), old, TierRemoval::Reason::kCorrupt);
  records_.raise_extent(old, Extent::kOrder);
  records_.set_newer(old, true);
  records_.drop(old);

  EXPECT_TRUE(has(2));
  EXPECT_EQ(figures().chunks, 1u);
  EXPECT_EQ(records_.extent(), Extent::kSome);
  EXPECT_FALSE(figures().diverged);
  bool present = false, replace = false;
  RecordIndex::Pin pin;
  EXPECT_EQ(records_.begin_write(key_of(2), old, &present, &replace).kind(), StatusKind::kCancelled);
  EXPECT_EQ(records_.begin_read(key_of(2), old, &pin).kind(), StatusKind::kCancelled);
}

TEST_F(RecordIndexTest, the_next_epoch_is_higher_and_marked_if_by_reset) {
  begin(epoch(7));
  EXPECT_FALSE(records_.next()) << "there is one";
  records_.drop(records_.epoch());
  EXPECT_EQ(records_.next()->least_number, 8u);
  EXPECT_FALSE(records_.next()->by_reset);
  const RecordIndex::Next before = *records_.next();
  records_.reset();
  EXPECT_TRUE(records_.next()->by_reset);
  EXPECT_FALSE(records_.begin(epoch(8), before, Extent::kOrder)) << "it was prepared before the reset";
  EXPECT_EQ(records_.epoch(), nullptr);
}

// The scheduler's thread resets and copies data to compare, while closing an epoch may wait for a server.
TEST_F(RecordIndexTest, only_upkeep_closes_an_ended_epoch) {
  auto used_by_an_op = epoch(1);
  const std::weak_ptr<FsEpoch> watched = used_by_an_op;
  begin(used_by_an_op);
  records_.reset();
  records_.free_unused();
  used_by_an_op.reset();
  EXPECT_FALSE(watched.expired()) << "an op ended, on any thread";
  records_.free_unused();
  EXPECT_TRUE(watched.expired());

  begin(epoch(2));
  const std::weak_ptr<FsEpoch> next = records_.epoch();
  records_.reset();
  EXPECT_FALSE(next.expired()) << "a reset closes nothing";
  records_.close();
  EXPECT_TRUE(next.expired());
}

TEST_F(RecordIndexTest, a_reset_that_runs_out_of_memory_changes_nothing) {
  constexpr std::uint64_t kResets = 70;  // the queue of forgotten records allocates at the 64th
  unsigned failures = 0;
  for (std::uint64_t number = 1; number <= kResets; ++number) {
    const auto own = epoch(number);
    begin(own);
    EXPECT_TRUE(records_.written({key_of(1), 8192}, {}, own));
    failures += fail_each_allocation([&] { records_.reset(); },
                                     [&] {
                                       records_.free_unused();
                                       EXPECT_EQ(records_.epoch(), own);
                                       EXPECT_FALSE(records_.next().has_value());
                                       EXPECT_TRUE(has(1));
                                     });
    EXPECT_FALSE(has(1));
    ASSERT_TRUE(records_.next().has_value());
    EXPECT_EQ(records_.next()->least_number, number + 1);
    EXPECT_TRUE(records_.next()->by_reset);
  }
  EXPECT_GT(failures, 2 * kResets);
  std::vector<TierRemoval> removals;
  records_.take_removals(&removals);
  EXPECT_EQ(removals.size(), kResets);
}

TEST_F(RecordIndexTest, a_record_that_was_written_again_is_not_reported_as_evicted) {
  begin(epoch(1));
  EXPECT_TRUE(records_.written({key_of(1), 8192}, {}, records_.epoch()));
  EXPECT_TRUE(records_.written({key_of(2), 8192}, {}, records_.epoch()));
  const auto first = *records_.take_victim(), second = *records_.take_victim();
  EXPECT_TRUE(records_.written({key_of(1), 8192}, {}, records_.epoch()));
  records_.evicted(first);
  records_.evicted(second);
  std::vector<TierRemoval> removals;
  records_.take_removals(&removals);
  ASSERT_EQ(removals.size(), 1u);
  EXPECT_EQ(removals[0].key, key_of(2));
  EXPECT_TRUE(has(1));
}

TEST_F(RecordIndexTest, an_idle_engine_waits_with_a_bounded_number_of_removals) {
  const auto own = epoch(1);
  begin(own);
  const std::atomic<bool> go_on{false};
  EXPECT_TRUE(records_.written({key_of(1), 8192}, {}, own));
  constexpr std::uint32_t kMany = RecordIndex::kMostUnreported + 1000;
  // Records of other servers, which this server evicts for a third one.
  for (std::uint32_t i = 2; i < kMany; ++i) {
    const std::vector<FoundRecord> found{{key_of(i), 8192, 8192, 0}};
    records_.adopt_names(own, found, true, go_on);
    records_.remove(key_of(i), own, TierRemoval::Reason::kEvicted);
  }
  EXPECT_TRUE(has(1));
  records_.remove(key_of(1), own, TierRemoval::Reason::kEvicted);
  std::size_t all = 0;
  std::vector<TierRemoval> removals;
  for (records_.take_removals(&removals); !removals.empty(); records_.take_removals(&removals)) {
    all += removals.size();
    removals.clear();
  }
  EXPECT_EQ(all, RecordIndex::kMostUnreported + 1) << "that of the reported record too";
}

TEST_F(RecordIndexTest, a_record_that_another_process_removed_is_reported_if_it_was_reported_as_present) {
  const auto own = epoch(1);
  begin(own);
  const std::atomic<bool> go_on{false};
  const std::vector<FoundRecord> found{{key_of(1), 8192, 8192, 0}, {key_of(2), 8192, 8192, 0}};
  records_.adopt_names(own, found, true, go_on);
  EXPECT_TRUE(has(2));
  EXPECT_TRUE(records_.written({key_of(3), 8192}, {}, own));
  EXPECT_FALSE(records_.forget(key_of(4), own)) << "unknown";
  EXPECT_FALSE(records_.forget(key_of(1), epoch(1))) << "of another epoch";
  for (const std::uint32_t number : {1, 2, 3}) EXPECT_TRUE(records_.forget(key_of(number), own));
  EXPECT_TRUE(records_.has_removals());
  std::vector<TierRemoval> removals;
  records_.take_removals(&removals);
  EXPECT_FALSE(records_.has_removals());
  ASSERT_EQ(removals.size(), 2u);
  EXPECT_EQ(removals[0].key, key_of(2));
  EXPECT_EQ(removals[1].key, key_of(3));
  EXPECT_EQ(removals[1].reason, TierRemoval::Reason::kVanished);
}

TEST_F(RecordIndexTest, an_eviction_that_failed_does_not_forget_that_the_record_was_reported_as_present) {
  const auto own = epoch(1);
  begin(own);
  EXPECT_TRUE(records_.written({key_of(1), 8192}, {}, own));
  records_.put_back(*records_.take_victim());
  EXPECT_TRUE(records_.forget(key_of(1), own));
  EXPECT_TRUE(records_.has_removals());
}

TEST_F(RecordIndexTest, a_record_that_a_listing_finds_during_its_eviction_is_reported_when_it_is_forgotten) {
  const auto own = epoch(1);
  begin(own);
  EXPECT_TRUE(records_.written({key_of(1), 8192}, {}, own));
  const auto victim = records_.take_victim();
  ASSERT_TRUE(victim);
  records_.adopt_names(own, found(1, 1), true, go_on_);  // before its file is removed
  records_.evicted(*victim);
  EXPECT_FALSE(records_.has_removals()) << "an idle engine would be woken";
  EXPECT_TRUE(records_.forget(key_of(1), own));
  std::vector<TierRemoval> removals;
  records_.take_removals(&removals);
  ASSERT_EQ(removals.size(), 1u);
  EXPECT_EQ(removals.front().key, key_of(1));
}

TEST_F(RecordIndexTest, a_record_that_is_found_again_before_its_removal_was_taken_stays_reported) {
  const auto own = epoch(1), later = epoch(2);
  begin(own);
  EXPECT_TRUE(records_.written({key_of(1), 8192}, {}, own));
  std::vector<TierRemoval> removals;
  EXPECT_TRUE(records_.forget(key_of(1), own));
  records_.adopt_names(own, found(1, 1), true, go_on_);
  records_.take_removals(&removals);
  EXPECT_TRUE(removals.empty());
  records_.drop(own);  // the same after a reset
  begin(later);
  records_.adopt_names(later, found(1, 1), true, go_on_);
  records_.take_removals(&removals);
  EXPECT_TRUE(removals.empty());
  EXPECT_TRUE(records_.forget(key_of(1), later));
  records_.take_removals(&removals);
  ASSERT_EQ(removals.size(), 1u);
  EXPECT_EQ(removals.front().key, key_of(1));
}

TEST_F(RecordIndexTest, a_directory_that_could_not_be_read_is_looked_up_again_later) {
  begin(epoch(1), Extent::kSome);
  const std::vector<ChunkKey> keys = {key_of(1)};
  std::vector<ChunkKey> asked;
  records_.begin_lookup(keys, 0, &asked);
  ASSERT_EQ(asked, keys);
  EXPECT_EQ(records_.contains(key_of(1)), Presence::kLookupPending);
  records_.cancel_lookup(keys, 0);
  EXPECT_EQ(records_.contains(key_of(1)), Presence::kLookupFailed);
  records_.begin_lookup(keys, 0, &asked);
  EXPECT_EQ(asked.size(), 1u) << "not in a loop";
  clock_.advance(RecordIndex::kLookupRetryDelay);
  EXPECT_EQ(records_.contains(key_of(1)), Presence::kUnknown);
  records_.begin_lookup(keys, 0, &asked);
  EXPECT_EQ(asked.size(), 2u);
  records_.mark_listed(records_.epoch(), layout::leaf_of(key_of(1)));
  records_.cancel_lookup(keys, 0);
  clock_.advance(RecordIndex::kLookupRetryDelay);
  EXPECT_EQ(records_.contains(key_of(1)), Presence::kAbsent) << "it was listed meanwhile";
}

TEST_F(RecordIndexTest, without_an_epoch_every_record_is_absent) {
  begin(epoch(1), Extent::kSome);
  EXPECT_EQ(records_.contains(key_of(1)), Presence::kUnknown);
  EXPECT_TRUE(records_.written({key_of(1), 8192}, {}, records_.epoch()));
  records_.reset();
  EXPECT_EQ(records_.contains(key_of(1)), Presence::kAbsent);
  EXPECT_FALSE(records_.take_victim());
  std::vector<TierRemoval> removals;
  records_.take_removals(&removals);
  ASSERT_EQ(removals.size(), 1u);
  EXPECT_EQ(removals[0].reason, TierRemoval::Reason::kReset);
}

// A record whose chunk is in use in host memory is not old.
TEST_F(RecordIndexTest, uses_in_host_memory_count_before_any_eviction) {
  const auto now = epoch(1);
  begin(now);
  for (const std::uint32_t number : {1, 2, 3}) EXPECT_TRUE(records_.written({key_of(number), 8192}, {}, now));
  records_.used(uses_of({2, 1, 99}));
  std::vector<ChunkKey> gone;
  while (const auto victim = records_.take_victim()) gone.push_back(victim->record.key);
  EXPECT_EQ(gone, (std::vector<ChunkKey>{key_of(3), key_of(2), key_of(1)}));
}

TEST_F(RecordIndexTest, uses_from_before_a_reset_change_nothing_after_it) {
  begin(epoch(1));
  records_.used(uses_of({1}));
  records_.reset();
  const auto now = epoch(2);
  begin(now);
  for (const std::uint32_t number : {1, 2}) EXPECT_TRUE(records_.written({key_of(number), 8192}, {}, now));
  EXPECT_EQ(records_.take_victim()->record.key, key_of(1));
}

TEST_F(RecordIndexTest, the_oldest_of_too_many_uses_are_dropped) {
  const auto now = epoch(1);
  begin(now);
  for (const std::uint32_t number : {1, 2, 3}) EXPECT_TRUE(records_.written({key_of(number), 8192}, {}, now));
  records_.used(uses_of({1}));
  records_.used(uses_of({2}));
  const std::vector<std::uint32_t> others(RecordIndex::kMostUses - 1, 99);
  records_.used(uses_of(others));  // together with the use of 2, as many as are kept
  EXPECT_EQ(records_.take_victim()->record.key, key_of(1));
  EXPECT_EQ(records_.take_victim()->record.key, key_of(3));
}

TEST_F(RecordIndexTest, the_next_victim_stays_if_it_belongs_to_the_spared_request) {
  const auto now = epoch(1);
  begin(now);
  EXPECT_TRUE(records_.written({key_of(1), 8192}, {.request = 5}, now));
  bool own = false;
  EXPECT_FALSE(records_.take_victim(5, &own));
  EXPECT_TRUE(own);
  EXPECT_TRUE(has(1));
  own = false;
  EXPECT_TRUE(records_.take_victim(6, &own));
  EXPECT_FALSE(own);
}

TEST_F(RecordIndexTest, a_declined_write_is_remembered_until_written_or_reset) {
  begin(epoch(1));
  const ChunkId one = chunk_id(key_of(1)), two = chunk_id(key_of(2));
  records_.mark_declined(key_of(1), 5, records_.epoch());
  EXPECT_TRUE(records_.is_declined(one, 5));
  EXPECT_FALSE(records_.is_declined(one, 6)) << "a later request is judged separately";
  EXPECT_FALSE(records_.is_declined(two, 5));
  EXPECT_FALSE(records_.is_declined(0, 5)) << "it has no parent chunk";
  EXPECT_TRUE(records_.written({key_of(1), 8192}, {.request = 5}, records_.epoch()));
  EXPECT_FALSE(records_.is_declined(one, 5));
  const auto before = records_.epoch();
  records_.mark_declined(key_of(1), 5, before);
  records_.reset();
  EXPECT_FALSE(records_.is_declined(one, 5));
  begin(epoch(2));
  records_.mark_declined(key_of(1), 5, before);
  EXPECT_FALSE(records_.is_declined(one, 5)) << "that was decided before the reset";
}

// A removal that is reported late must not hide a record that was written since.
TEST_F(RecordIndexTest, a_record_written_again_after_a_reset_is_not_reported_as_removed) {
  begin(epoch(1));
  const auto many = static_cast<std::uint32_t>(RecordIndex::kMostRemovals) + 10;
  for (std::uint32_t i = 0; i < many; ++i)
    EXPECT_TRUE(records_.written({key_of(i), 8192}, {}, records_.epoch()));
  records_.reset();
  begin(epoch(2));
  EXPECT_TRUE(records_.written({key_of(many - 1), 8192}, {}, records_.epoch()));
  std::vector<TierRemoval> removals;
  records_.take_removals(&removals);
  EXPECT_EQ(removals.size(), RecordIndex::kMostRemovals);
  records_.take_removals(&removals);
  EXPECT_EQ(removals.size(), many - 1);
  for (const TierRemoval& removal : removals) EXPECT_NE(removal.key, key_of(many - 1));
  EXPECT_TRUE(has(many - 1));
  records_.take_removals(&removals);
  EXPECT_EQ(removals.size(), many - 1) << "once";
}

TEST_F(RecordIndexTest, a_read_from_before_a_reset_does_not_unpin_a_record_read_after_it) {
  begin(epoch(1));
  EXPECT_TRUE(records_.written({key_of(1), 8192}, {}, records_.epoch()));
  auto before = std::make_unique<RecordIndex::Pin>();
  ASSERT_TRUE(records_.begin_read(key_of(1), records_.epoch(), before.get()));
  records_.reset();
  begin(epoch(2));
  EXPECT_TRUE(records_.written({key_of(2), 8192}, {}, records_.epoch()));
  RecordIndex::Pin after;
  ASSERT_TRUE(records_.begin_read(key_of(2), records_.epoch(), &after));
  before.reset();
  EXPECT_FALSE(records_.take_victim()) << "it is being read";
}

}  // namespace
}  // namespace kv_offload
