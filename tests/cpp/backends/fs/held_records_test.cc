// SPDX-License-Identifier: Apache-2.0
// Limits the work under the lock of the records: the scheduler's thread waits for that lock.
#include <gtest/gtest.h>

#include <atomic>
#include <cstring>

#include "backends/fs/record_index.h"
#include "out_of_memory.h"
#include "step_watch.h"
#include "test_iterations.h"
#include "tier/presence.h"

namespace kv_offload {
namespace {

using namespace testing;

// The blocks of a table fill up at about the same time, so one hold may split some blocks of several tables.
// One step takes a few nanoseconds.
constexpr std::uint64_t kMostSteps = 32 * SplitTable::kCells / 2;

// A list that grows under the lock copies all its elements. Tables allocate a block at a time, and the nodes
// of a queue are small, but not the list of its nodes.
constexpr std::size_t kMostAllocated = std::size_t{512} << 10;

// The largest allocation under a lock during the watch, on the thread that created it.
class AllocationWatch final : public Mutex::Watcher {
 public:
  AllocationWatch() { Mutex::watch(this); }
  ~AllocationWatch() override { Mutex::watch(nullptr); }
  void locked(const Mutex&) override {
    if (depth_++ == 0) (void)take_largest_allocation();
  }
  void unlocking(const Mutex&) override {
    if (depth_ > 0 && --depth_ == 0) most_ = std::max(most_, take_largest_allocation());
  }
  std::size_t most() const { return most_; }

 private:
  int depth_ = 0;
  std::size_t most_ = 0;
};

ChunkKey held_key(std::uint64_t number) {
  std::uint64_t words[4] = {};
  std::uint64_t state = number + 1;
  for (std::uint64_t& word : words) {
    state += 0x9E3779B97F4A7C15ull;
    word = (state ^ state >> 29) * 0xBF58476D1CE4E5B9ull;
    word ^= word >> 32;
  }
  char bytes[36] = {};
  std::memcpy(bytes, words, sizeof(words));
  return ChunkKey::unchecked(bytes, sizeof(bytes));
}

class HeldRecordsTest : public ::testing::TestWithParam<const char*> {
 protected:
  std::shared_ptr<FsEpoch> begin(std::uint64_t number) {
    auto epoch = std::make_shared<FsEpoch>();
    epoch->number = number;
    EXPECT_TRUE(records_.begin(epoch, *records_.next(), RecordIndex::Extent::kSome));
    return epoch;
  }
  static std::vector<FoundRecord> found(std::uint64_t count) {
    std::vector<FoundRecord> found;
    for (std::uint64_t i = 0; i < count; ++i) found.push_back({held_key(i), 8192, 8192, 0});
    return found;
  }
  // Returns the most steps in one hold while this many records are found by a scan, used, reported and
  // forgotten.
  std::uint64_t most_of_a_life(std::uint64_t count) {
    const StepWatch watch;
    live(count);
    EXPECT_GT(watch.holds(), 3 * count / RecordIndex::kRecordsPerLock);
    return watch.most();
  }
  void live(std::uint64_t count) {
    const auto epoch = begin(count);
    const std::vector<FoundRecord> all = found(count);
    records_.adopt_names(epoch, all, false, go_on_);
    std::vector<RecordIndex::LastUse> order;
    for (std::uint32_t i = 0; i < count; ++i) order.push_back({i, i});
    records_.adopt_in_order(epoch, all, order, true, go_on_);
    EXPECT_TRUE(records_.unknown_of(all).empty());
    for (std::uint64_t i = 0; i < count; i += 2) records_.touch(held_key(i));
    std::shared_ptr<FsEpoch> of;
    EXPECT_EQ(records_.take_touched(&of).size(), (count + 1) / 2);
    auto uses = std::make_shared<std::vector<TierUse>>();
    for (std::uint64_t i = 0; i < count; ++i) uses->push_back({held_key(i), {.request = 1}});
    records_.used(uses);
    records_.apply_uses();
    for (std::uint64_t i = 0; i < count; i += 10)
      records_.remove(held_key(i), epoch, TierRemoval::Reason::kCorrupt);
    std::uint64_t known = 0;
    std::vector<FsCatalog::Record> records;
    records.reserve(RecordIndex::kRecordsPerLock);
    for (Slot next = 0; records_.known_from(epoch, &next, &records); records.clear()) known += records.size();
    EXPECT_EQ(known, count - (count + 9) / 10);
    for (std::uint64_t i = 5; i < count; i += 10) EXPECT_TRUE(records_.forget(held_key(i), epoch));
    EXPECT_LT(steps_of([&] { records_.reset(); }), kMostSteps);
    std::vector<TierRemoval> removals;
    for (std::size_t before = 1; before != removals.size();) {
      before = removals.size();
      // Other threads may wait for all holds of one call.
      EXPECT_LE(steps_of([&] { records_.take_removals(&removals); }), RecordIndex::kMostRemovals);
      EXPECT_LE(removals.size() - before, RecordIndex::kMostRemovals);
    }
    EXPECT_EQ(removals.size(), count) << "each once";
    records_.free_unused();
  }
  // Each write takes the place of another record, as in a full root. The removals are collected in one list.
  void evict(std::uint64_t count) {
    const auto epoch = begin(count + 1);
    records_.adopt_names(epoch, found(count), true, go_on_);
    std::vector<TierRemoval> removals;
    for (std::uint64_t i = 0; i < count; ++i) {
      const auto victim = records_.take_victim();
      ASSERT_TRUE(victim);
      records_.evicted(*victim);
      ASSERT_TRUE(records_.written({held_key(count + i), 8192}, {.request = 1}, epoch));
      if (i % 64 == 0) records_.take_removals(&removals);
    }
    EXPECT_GT(removals.size(), count - 64);
  }

  FakeClock clock_;
  RecordIndex records_{GetParam(), clock_};
  const std::atomic<bool> go_on_{false};
};

TEST_P(HeldRecordsTest, steps_under_the_lock_do_not_grow_with_the_records) {
  const auto many = static_cast<std::uint64_t>(rounds(1'000'000));
  EXPECT_LT(most_of_a_life(many / 10), kMostSteps);
  EXPECT_LT(most_of_a_life(many), kMostSteps);
}

TEST_P(HeldRecordsTest, no_list_grows_under_the_lock) {
  const auto many = static_cast<std::uint64_t>(rounds(200'000));
  const AllocationWatch watch;
  live(many);
  EXPECT_LT(watch.most(), kMostAllocated) << "scan, use and reset";
  EXPECT_GT(watch.most(), 0u) << "the control";
  evict(many);
  EXPECT_LT(watch.most(), kMostAllocated) << "eviction";
}

INSTANTIATE_TEST_SUITE_P(Policies, HeldRecordsTest, ::testing::Values("lru", "prefix"));

// The scheduler's thread adds uses and takes removals; other threads may be late to apply them.
TEST(HeldUsesTest, unapplied_uses_are_dropped_a_few_at_a_time) {
  FakeClock clock;
  RecordIndex records("lru", clock);
  const auto one = std::make_shared<std::vector<TierUse>>(1, TierUse{held_key(1), {}});
  for (std::size_t step = 0; step < RecordIndex::kMostUses - 1; ++step) {
    ASSERT_LT(steps_of([&] { records.used(one); }), kMostSteps);
  }
  const auto many = std::make_shared<std::vector<TierUse>>(RecordIndex::kMostUses, TierUse{held_key(2), {}});
  EXPECT_LE(steps_of([&] { records.used(many); }), RecordIndex::kMostUseLists);
}

TEST(HeldPresenceTest, steps_under_the_lock_do_not_grow_with_the_keys) {
  FakeClock clock;
  std::vector<ChunkKey> keys;
  for (int i = 0; i < rounds(600'000); ++i) keys.push_back(held_key(static_cast<std::uint64_t>(i)));
  PresenceCache presence(clock, std::chrono::seconds(1), std::max<std::size_t>(keys.size() * 5 / 6, 8));
  const StepWatch watch;
  std::vector<ChunkKey> asked;
  for (std::size_t at = 0; at < keys.size(); at += 64) {
    presence.begin_lookup(std::span(keys).subspan(at, std::min<std::size_t>(64, keys.size() - at)), 0,
                          &asked);
  }
  for (const ChunkKey& key : asked) presence.answered(key, true, 0);
  EXPECT_LT(steps_of([&] { presence.reset(); }), kMostSteps);
  std::vector<TierRemoval> removals;
  for (std::size_t calls = 0; calls < keys.size() / 1000 + 2; ++calls) {
    const std::size_t before = removals.size();
    presence.take_removals(&removals);
    EXPECT_LT(removals.size() - before, kMostSteps);
  }
  EXPECT_GT(removals.size(), keys.size() / 3) << "all that were not forgotten before";
  EXPECT_LT(watch.most(), kMostSteps);
}

TEST(HeldPresenceTest, no_list_grows_under_the_lock) {
  FakeClock clock;
  const auto many = static_cast<std::uint64_t>(rounds(200'000));
  PresenceCache presence(clock, std::chrono::seconds(1), 2 * many);
  for (std::uint64_t i = 0; i < many; ++i) presence.written(held_key(i), 0);
  presence.reset();
  std::vector<TierRemoval> removals;
  const AllocationWatch watch;
  for (std::uint64_t calls = 0; calls < many / 1000 + 2; ++calls) presence.take_removals(&removals);
  EXPECT_EQ(removals.size(), many);
  EXPECT_LT(watch.most(), kMostAllocated);
}

}  // namespace
}  // namespace kv_offload
