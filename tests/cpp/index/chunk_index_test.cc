#include "index/chunk_index.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <map>
#include <random>

namespace kv_offload {
namespace {

ChunkKey key_of(std::string_view name, std::uint32_t group = 0) {
  std::string bytes = fmt::format("{:-<16}", name);
  for (int shift = 24; shift >= 0; shift -= 8) bytes.push_back(static_cast<char>(group >> shift));
  return ChunkKey(bytes);
}

class ChunkIndexTest : public testing::Test {
 protected:
  ChunkIndex index_{make_eviction_policy("lru", 4), 4};
  RowId next_row_ = 100;

  Slot fill(std::string_view name) {
    return index_.insert(key_of(name), 0, next_row_++, {}, ChunkState::kFilling);
  }
  Slot store(std::string_view name) {
    const Slot slot = fill(name);
    index_.make_resident(slot, ChunkOrigin::kStore);
    return slot;
  }
  ChunkEntry* find(std::string_view name) { return index_.find(key_of(name)); }
};

TEST_F(ChunkIndexTest, WhatWasNeverInsertedIsAbsent) { EXPECT_EQ(find("a"), nullptr); }

TEST_F(ChunkIndexTest, AnInsertedChunkIsFoundWithItsRowAndOnePin) {
  const Slot slot = fill("a");
  ChunkEntry* entry = find("a");
  ASSERT_NE(entry, nullptr);
  EXPECT_EQ(entry->row, 100u);
  EXPECT_EQ(entry->pins, 1u);
  EXPECT_EQ(entry->state, ChunkState::kFilling);
  EXPECT_EQ(index_.slot_of(entry), slot);
  EXPECT_EQ(index_.pinned(), 1u);
}

TEST_F(ChunkIndexTest, TheSameHashInAnotherGroupIsAnotherChunk) {
  fill("a");
  EXPECT_EQ(index_.find(key_of("a", 1)), nullptr);
}

TEST_F(ChunkIndexTest, AFillingChunkIsNoVictimAndAResidentOneIs) {
  const Slot slot = fill("a");
  EXPECT_EQ(index_.victim(), std::nullopt);
  index_.make_resident(slot, ChunkOrigin::kStore);
  EXPECT_EQ(index_.victim(), slot);
  EXPECT_EQ(index_.pinned(), 0u);
}

TEST_F(ChunkIndexTest, AHoldersOwnChunksAreSparedAndKeepTheirPlace) {
  const Slot own = store("own"), later = store("later"), other = store("other");
  index_.access(own, 7, 0);
  index_.access(later, 7, 0);
  index_.access(other, 8, 0);
  EXPECT_EQ(index_.victim(7), other);
  EXPECT_EQ(index_.victim(), own);
  EXPECT_EQ(index_.victim(8), own);
  index_.erase(other);
  EXPECT_EQ(index_.victim(7), std::nullopt);
  EXPECT_EQ(index_.victim(), own);
}

TEST_F(ChunkIndexTest, AnEntryKeepsTheHighestPriorityOfThoseThatUsedIt) {
  const Slot slot = store("a");
  index_.access(slot, 7, 1);
  index_.access(slot, 8, -1);
  EXPECT_EQ(index_.about(index_.at(slot)).priority, 1);
  EXPECT_EQ(index_.about(index_.at(slot)).request, 8u);
}

TEST_F(ChunkIndexTest, PinsOfWaitersOutliveTheFetchThatBroughtTheChunk) {
  const Slot slot = index_.insert(key_of("a"), 0, 1, {}, ChunkState::kFetching);
  index_.pin(slot);
  index_.make_resident(slot, ChunkOrigin::kTier);
  EXPECT_EQ(index_.victim(), std::nullopt);
  index_.unpin(slot);
  EXPECT_EQ(index_.victim(), slot);
}

TEST_F(ChunkIndexTest, PinsAreCounted) {
  const Slot slot = store("a");
  index_.pin(slot);
  index_.pin(slot);
  index_.unpin(slot);
  EXPECT_EQ(index_.victim(), std::nullopt);
  index_.unpin(slot);
  EXPECT_EQ(index_.victim(), slot);
}

TEST_F(ChunkIndexTest, AnErasedChunkIsAbsentAndItsSlotIsUsedAgain) {
  const Slot slot = store("a");
  index_.erase(slot);
  EXPECT_EQ(find("a"), nullptr);
  EXPECT_EQ(index_.size(), 0u);
  EXPECT_EQ(fill("b"), slot);
}

TEST_F(ChunkIndexTest, SlotsAreReusedInTheOrderTheyWereFreed) {
  const Slot a = store("a");
  const Slot b = store("b");
  const Slot c = store("c");
  for (const Slot slot : {b, c, a}) index_.erase(slot);
  EXPECT_EQ(fill("x"), b);
  EXPECT_EQ(fill("y"), c);
  EXPECT_EQ(fill("z"), a);
}

TEST_F(ChunkIndexTest, AnAccessProtectsFromEviction) {
  const Slot a = store("a");
  const Slot b = store("b");
  index_.access(a, 1, 0);
  EXPECT_EQ(index_.victim(), b);
}

TEST_F(ChunkIndexTest, AgreesWithAMapUnderRandomInsertsAndErases) {
  // Keys from few hash heads, so that probe runs are long and wrap around.
  std::mt19937 random(11);
  std::map<std::string, RowId> model;
  for (int i = 0; i < 200000; ++i) {
    const std::string name = fmt::format("{}", random() % 700);
    const ChunkEntry* entry = find(name);
    const auto known = model.find(name);
    ASSERT_EQ(entry != nullptr, known != model.end()) << name << " at call " << i;
    if (entry == nullptr) {
      model[name] = next_row_;
      index_.make_resident(fill(name), ChunkOrigin::kStore);
    } else {
      ASSERT_EQ(entry->row, known->second);
      if (random() % 2 == 0) {
        index_.erase(index_.slot_of(entry));
        model.erase(known);
      }
    }
    ASSERT_EQ(index_.size(), model.size());
  }
  std::size_t seen = 0;
  index_.for_each([&](Slot slot, ChunkEntry& entry) {
    ++seen;
    EXPECT_EQ(index_.find(entry.key), &entry);
    EXPECT_EQ(index_.slot_of(&entry), slot);
  });
  EXPECT_EQ(seen, model.size());
}

}  // namespace
}  // namespace kv_offload
