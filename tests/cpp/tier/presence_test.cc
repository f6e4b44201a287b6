// SPDX-License-Identifier: Apache-2.0
#include "tier/presence.h"

#include <gtest/gtest.h>

#include <set>

#include "out_of_memory.h"
#include "tier/tier_driver.h"

namespace kv_offload {
namespace {

using namespace testing;
using std::chrono::milliseconds;

class PresenceCacheTest : public ::testing::Test {
 protected:
  static std::vector<ChunkKey> ask(PresenceCache& cache, const std::vector<ChunkKey>& keys) {
    std::vector<ChunkKey> asked;
    cache.begin_lookup(keys, cache.epoch_number(), &asked);
    return asked;
  }
  Presence of(std::uint32_t number) const { return cache_.contains(key_of(number)); }
  std::size_t removed(TierRemoval::Reason reason) {
    std::vector<TierRemoval> removals;
    cache_.take_removals(&removals);
    return static_cast<std::size_t>(std::count_if(removals.begin(), removals.end(),
                                                  [&](const TierRemoval& r) { return r.reason == reason; }));
  }

  FakeClock clock_;
  PresenceCache cache_{clock_, milliseconds(1000), 1000};
};

TEST_F(PresenceCacheTest, a_key_is_looked_up_once_until_there_is_an_answer) {
  EXPECT_EQ(of(1), Presence::kUnknown);
  EXPECT_EQ(ask(cache_, {key_of(1), key_of(2), key_of(1)}).size(), 2u);
  EXPECT_EQ(of(1), Presence::kLookupPending);
  EXPECT_TRUE(ask(cache_, {key_of(1), key_of(2)}).empty());
  cache_.answered(key_of(1), true, 0);
  cache_.answered(key_of(2), false, 0);
  EXPECT_EQ(of(1), Presence::kPresent);
  EXPECT_EQ(of(2), Presence::kAbsent);
  EXPECT_TRUE(ask(cache_, {key_of(1), key_of(2)}).empty());
}

TEST_F(PresenceCacheTest, absence_expires_and_presence_does_not) {
  ask(cache_, {key_of(1), key_of(2)});
  clock_.advance(milliseconds(500));
  cache_.answered(key_of(1), true, 0);
  cache_.answered(key_of(2), false, 0);
  clock_.advance(milliseconds(999));
  EXPECT_EQ(of(2), Presence::kAbsent);
  clock_.advance(milliseconds(1));
  EXPECT_EQ(of(2), Presence::kStaleMiss);
  EXPECT_EQ(of(1), Presence::kPresent);
  EXPECT_EQ(ask(cache_, {key_of(1), key_of(2)}), std::vector<ChunkKey>{key_of(2)});
}

TEST_F(PresenceCacheTest, absence_expires_sooner_when_the_store_answers_fast) {
  for (const auto& [took, absent] : {std::pair(0, 10), {2, 16}, {40, 320}, {200, 1000}}) {
    PresenceCache cache(clock_, milliseconds(1000), 1000);
    ask(cache, {key_of(1)});
    clock_.advance(milliseconds(took));
    cache.answered(key_of(1), false, 0);
    clock_.advance(milliseconds(absent) - Nanos(1));
    EXPECT_EQ(cache.contains(key_of(1)), Presence::kAbsent) << took;
    clock_.advance(Nanos(1));
    EXPECT_EQ(cache.contains(key_of(1)), Presence::kStaleMiss) << took;
  }
}

TEST_F(PresenceCacheTest, a_key_that_its_lookup_skipped_is_neither_absent_nor_pending) {
  const std::vector<ChunkKey> keys{key_of(1), key_of(2), key_of(3)};
  ask(cache_, {key_of(1), key_of(2)});
  cache_.written(key_of(2), 0);
  cache_.skipped(keys, 1);
  EXPECT_EQ(of(1), Presence::kLookupPending) << "the lookup of another epoch";
  cache_.skipped(keys, 0);
  EXPECT_EQ(of(1), Presence::kSkipped);
  EXPECT_EQ(of(2), Presence::kPresent) << "it was written meanwhile";
  EXPECT_EQ(of(3), Presence::kUnknown) << "it was not asked for";
  clock_.advance(milliseconds(5000));
  EXPECT_EQ(of(1), Presence::kSkipped);
  cache_.was_read(key_of(1), 0);
  EXPECT_EQ(of(1), Presence::kSkipped) << "the read may be older than the removal of the record";
  EXPECT_EQ(ask(cache_, {key_of(1)}), std::vector<ChunkKey>{key_of(1)});
  EXPECT_EQ(of(1), Presence::kLookupPending);
  cache_.skipped(keys, 0);
  cache_.forget_miss(key_of(1));
  EXPECT_EQ(of(1), Presence::kUnknown);
  EXPECT_EQ(ask(cache_, {key_of(1)}), std::vector<ChunkKey>{key_of(1)});
  cache_.answered(key_of(1), true, 0);
  EXPECT_EQ(of(1), Presence::kPresent);
}

TEST_F(PresenceCacheTest, an_answer_that_is_older_than_a_write_does_not_count) {
  ask(cache_, {key_of(1)});
  cache_.written(key_of(1), 0);
  cache_.answered(key_of(1), false, 0);
  EXPECT_EQ(of(1), Presence::kPresent);
}

TEST_F(PresenceCacheTest, nothing_learnt_before_a_reset_counts_after_it) {
  cache_.written(key_of(1), 0);
  ask(cache_, {key_of(2)});
  cache_.reset();
  EXPECT_EQ(removed(TierRemoval::Reason::kReset), 1u);
  EXPECT_EQ(of(1), Presence::kUnknown);
  ask(cache_, {key_of(2)});
  cache_.answered(key_of(2), true, 0);
  cache_.written(key_of(3), 0);
  cache_.removed(key_of(4), TierRemoval::Reason::kVanished, 0);
  EXPECT_EQ(of(2), Presence::kLookupPending);
  for (const std::uint32_t number : {3u, 4u}) EXPECT_EQ(of(number), Presence::kUnknown);
  cache_.answered(key_of(2), true, cache_.epoch_number());
  EXPECT_EQ(of(2), Presence::kPresent);
}

// Otherwise the lookup would stay pending forever: no answer from before the reset counts.
TEST_F(PresenceCacheTest, a_lookup_requested_before_a_reset_does_not_start_after_it) {
  cache_.reset();
  std::vector<ChunkKey> asked;
  cache_.begin_lookup(std::vector{key_of(1)}, 0, &asked);
  EXPECT_TRUE(asked.empty());
  EXPECT_EQ(ask(cache_, {key_of(1)}).size(), 1u);
}

TEST_F(PresenceCacheTest, a_removal_is_reported_once_and_only_for_present_keys) {
  cache_.written(key_of(1), 0);
  cache_.removed(key_of(1), TierRemoval::Reason::kVanished, 0);
  cache_.removed(key_of(1), TierRemoval::Reason::kVanished, 0);
  cache_.removed(key_of(2), TierRemoval::Reason::kVanished, 0);
  EXPECT_EQ(removed(TierRemoval::Reason::kVanished), 1u);
  EXPECT_EQ(of(1), Presence::kAbsent);
}

// Not every key of a prefix is checked: a missing one may not have been written yet.
TEST_F(PresenceCacheTest, a_key_that_a_read_missed_is_soon_looked_up_again) {
  ask(cache_, {key_of(1)});
  cache_.answered(key_of(1), true, 0);
  cache_.removed(key_of(1), TierRemoval::Reason::kVanished, 0);
  EXPECT_EQ(of(1), Presence::kAbsent);
  clock_.advance(PresenceCache::kMinAbsent);
  EXPECT_EQ(of(1), Presence::kStaleMiss);
}

TEST_F(PresenceCacheTest, an_abandoned_lookup_counts_as_failed_for_a_time) {
  ask(cache_, {key_of(1)});
  cache_.cancel_lookup(std::vector{key_of(1), key_of(2)}, 1);
  EXPECT_EQ(of(1), Presence::kLookupPending) << "that lookup belongs to another epoch";
  cache_.cancel_lookup(std::vector{key_of(1), key_of(2)}, 0);
  EXPECT_EQ(of(1), Presence::kLookupFailed);
  EXPECT_EQ(of(2), Presence::kUnknown) << "it was not being looked up";
  EXPECT_TRUE(ask(cache_, {key_of(1)}).empty()) << "not in a loop";
  clock_.advance(milliseconds(1000));
  EXPECT_EQ(of(1), Presence::kUnknown) << "it was never found absent";
  EXPECT_EQ(ask(cache_, {key_of(1)}).size(), 1u);
}

TEST_F(PresenceCacheTest, abandoning_lookups_needs_no_memory) {
  for (std::uint32_t count = 1; count <= 16; ++count) {
    PresenceCache cache(clock_, milliseconds(1000), 16);
    std::vector<ChunkKey> keys;
    for (std::uint32_t i = 0; i < count; ++i) keys.push_back(key_of(i));
    ask(cache, keys);
    {
      const FailingAllocation next(0);
      EXPECT_NO_THROW(cache.cancel_lookup(keys, 0));
    }
    for (const ChunkKey& key : keys)
      EXPECT_EQ(cache.contains(key), Presence::kLookupFailed) << "one of " << count;
  }
}

TEST_F(PresenceCacheTest, a_reset_that_runs_out_of_memory_changes_nothing) {
  bool failed = true;
  for (unsigned after = 0; failed; ++after) {
    PresenceCache cache(clock_, milliseconds(1000), 8);
    for (std::uint32_t i = 0; i < 6; ++i) cache.written(key_of(i), 0);
    ask(cache, {key_of(6)});
    {
      const FailingAllocation one(after);
      try {
        cache.reset();
      } catch (const std::bad_alloc&) {
      }
      failed = one.came();
    }
    std::vector<TierRemoval> removals;
    cache.take_removals(&removals);
    cache.answered(key_of(6), true, 0);
    EXPECT_EQ(cache.epoch_number(), failed ? 0u : 1u) << after;
    EXPECT_EQ(removals.size(), failed ? 0u : 6u) << after;
    for (std::uint32_t i = 0; i < 7; ++i)
      EXPECT_EQ(cache.contains(key_of(i)), failed ? Presence::kPresent : Presence::kUnknown) << after;
    EXPECT_TRUE(failed || after > 0) << "the reset allocates nothing";
  }
}

// Also keys that were learned again, with others in between.
TEST_F(PresenceCacheTest, a_reset_reports_each_present_key_once) {
  PresenceCache small(clock_, milliseconds(1000), 10);
  for (std::uint32_t i = 0; i < 8; ++i) small.written(key_of(i), 0);
  small.written(key_of(1), 0);                                  // old, still present
  small.removed(key_of(2), TierRemoval::Reason::kVanished, 0);  // old, no longer present
  std::vector<TierRemoval> removals;
  small.take_removals(&removals);
  ASSERT_EQ(removals.size(), 1u);
  removals.clear();
  small.reset();
  small.take_removals(&removals);
  std::multiset<ChunkKey> told;
  for (const TierRemoval& removal : removals) told.insert(removal.key);
  EXPECT_EQ(told, (std::multiset<ChunkKey>{key_of(0), key_of(1), key_of(3), key_of(4), key_of(5), key_of(6),
                                           key_of(7)}));
}

// The hash covers the first eight bytes and the group. A store is never asked for a key that was not
// requested.
TEST_F(PresenceCacheTest, keys_with_equal_hashes_are_kept_apart) {
  const ChunkKey one("12345678 one, then abcd"), other("12345678 other, then abcd");
  ASSERT_EQ(ChunkKey::Hash{}(one), ChunkKey::Hash{}(other));
  cache_.written(one, 0);
  EXPECT_EQ(cache_.contains(one), Presence::kPresent);
  EXPECT_EQ(cache_.contains(other), Presence::kUnknown);
  cache_.removed(other, TierRemoval::Reason::kVanished, 0);
  EXPECT_NE(cache_.contains(one), Presence::kAbsent)
      << "it may be forgotten, but not mistaken for the other key";
}

TEST_F(PresenceCacheTest, each_of_many_keys_is_found_in_any_order) {
  PresenceCache large(clock_, milliseconds(1000), 10000);
  constexpr std::uint32_t kKeys = 4000;
  for (std::uint32_t i = 0; i < kKeys; ++i) large.written(key_of(i), 0);
  for (std::uint32_t i = kKeys; i-- > 0;) {
    EXPECT_EQ(large.contains(key_of(i)), Presence::kPresent) << i;
    EXPECT_EQ(large.contains(key_of(kKeys + i)), Presence::kUnknown) << kKeys + i;
  }
}

TEST_F(PresenceCacheTest, the_cache_is_bounded_and_forgets_the_oldest_first) {
  PresenceCache small(clock_, milliseconds(1000), 10);
  for (std::uint32_t i = 0; i < 100; ++i) small.written(key_of(i), 0);
  std::uint32_t known = 0;
  for (std::uint32_t i = 0; i < 100; ++i) known += small.contains(key_of(i)) == Presence::kPresent;
  EXPECT_GE(known, 5u);
  EXPECT_LE(known, 11u);
  for (std::uint32_t i = 95; i < 100; ++i) EXPECT_EQ(small.contains(key_of(i)), Presence::kPresent);
}

TEST_F(PresenceCacheTest, present_keys_are_listed_in_parts_while_older_ones_are_forgotten) {
  PresenceCache cache(clock_, milliseconds(1000), 16);  // forgets at least 8 at once
  const auto rest = [&](std::uint64_t next) {
    std::set<ChunkKey> listed;
    for (bool more = true; more;) {
      std::vector<ChunkKey> keys;
      more = cache.list_present(&next, 3, &keys);
      EXPECT_LE(keys.size(), 3u);
      listed.insert(keys.begin(), keys.end());
    }
    return listed;
  };
  EXPECT_TRUE(rest(0).empty());
  for (std::uint32_t number = 0; number < 10; ++number) cache.written(key_of(number), 0);
  cache.removed(key_of(1), TierRemoval::Reason::kVanished, 0);
  std::uint64_t next = 0;
  std::vector<ChunkKey> first;
  EXPECT_TRUE(cache.list_present(&next, 6, &first));
  EXPECT_EQ(std::set<ChunkKey>(first.begin(), first.end()),
            (std::set<ChunkKey>{key_of(0), key_of(2), key_of(3), key_of(4), key_of(5)}));
  for (std::uint32_t number = 10; number < 16; ++number) cache.written(key_of(number), 0);  // forgets 0 to 7
  ASSERT_EQ(cache.contains(key_of(7)), Presence::kUnknown);
  ASSERT_EQ(cache.contains(key_of(8)), Presence::kPresent);
  std::set<ChunkKey> expected;
  for (std::uint32_t number = 8; number < 16; ++number) expected.insert(key_of(number));
  EXPECT_EQ(rest(next), expected);
  cache.reset();
  cache.written(key_of(3), 1);
  EXPECT_EQ(rest(next), std::set<ChunkKey>{key_of(3)});
}

TEST_F(PresenceCacheTest, a_read_does_not_undo_a_removal_that_came_meanwhile) {
  cache_.was_read(key_of(1), 0);
  EXPECT_EQ(of(1), Presence::kPresent) << "of another server";
  cache_.removed(key_of(1), TierRemoval::Reason::kVanished, 0);
  cache_.was_read(key_of(1), 0);
  EXPECT_EQ(of(1), Presence::kAbsent);
  clock_.advance(milliseconds(1000));
  EXPECT_EQ(of(1), Presence::kStaleMiss) << "the next lookup asks again";
  ask(cache_, {key_of(1)});
  cache_.was_read(key_of(1), 0);
  EXPECT_EQ(of(1), Presence::kLookupPending);
  cache_.written(key_of(1), 0);
  EXPECT_EQ(of(1), Presence::kPresent);
  cache_.was_read(key_of(2), 1);
  EXPECT_EQ(of(2), Presence::kUnknown) << "of another epoch";
}

TEST_F(PresenceCacheTest, a_key_that_was_written_since_the_question_has_not_vanished) {
  cache_.written(key_of(1), 0);
  clock_.advance(milliseconds(1));
  const Nanos asked = cache_.now();
  EXPECT_TRUE(cache_.vanished(key_of(1), asked, 1)) << "another epoch: there is nothing to ask again";
  EXPECT_EQ(of(1), Presence::kPresent);
  EXPECT_TRUE(cache_.vanished(key_of(1), asked, 0));
  EXPECT_EQ(of(1), Presence::kAbsent);
  EXPECT_TRUE(cache_.vanished(key_of(1), asked, 0));
  EXPECT_EQ(removed(TierRemoval::Reason::kVanished), 1u);
  clock_.advance(milliseconds(1));
  cache_.written(key_of(1), 0);
  EXPECT_FALSE(cache_.vanished(key_of(1), asked, 0));
  EXPECT_EQ(of(1), Presence::kPresent);
}

TEST_F(PresenceCacheTest, has_removals_until_they_are_taken) {
  cache_.written(key_of(1), 0);
  EXPECT_FALSE(cache_.has_removals());
  cache_.removed(key_of(1), TierRemoval::Reason::kVanished, 0);
  EXPECT_TRUE(cache_.has_removals());
  EXPECT_EQ(removed(TierRemoval::Reason::kVanished), 1u);
  EXPECT_FALSE(cache_.has_removals());
}

}  // namespace
}  // namespace kv_offload
