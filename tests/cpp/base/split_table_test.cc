// SPDX-License-Identifier: Apache-2.0
#include "base/split_table.h"

#include <gtest/gtest.h>

#include <map>
#include <random>

#include "base/segmented_vector.h"
#include "step_watch.h"
#include "test_iterations.h"

namespace kv_offload {
namespace {

using namespace testing;

// Some tag bits are equal in all tags, as with crafted names.
class SplitTableTest : public ::testing::TestWithParam<std::uint32_t> {};

TEST_P(SplitTableTest, agrees_with_a_map_for_tags_that_share_bits) {
  std::mt19937_64 random(5);
  std::vector<std::uint32_t> tags;  // by value
  for (int i = 0; i < 6000; ++i) tags.push_back(static_cast<std::uint32_t>(random()) & GetParam());
  SplitTable table;
  std::map<std::uint32_t, bool> known;
  const auto is = [](std::uint32_t value) { return [value](std::uint32_t other) { return value == other; }; };
  for (int i = 0; i < rounds(60000); ++i) {
    const auto value = static_cast<std::uint32_t>(random() % tags.size());
    ASSERT_EQ(table.find(tags[value], is(value)), known[value] ? value : SplitTable::kNone) << "call " << i;
    if (known[value] && random() % 8 < (i / 20000 % 2 == 0 ? 2u : 7u)) {
      table.erase(tags[value], is(value));
      known[value] = false;
    } else {
      EXPECT_EQ(table.find_or_add(tags[value], is(value), [&] { return value; }), value);
      known[value] = true;
    }
  }
  std::size_t size = 0;
  for (const auto& [value, here] : known) {
    size += here;
    EXPECT_EQ(table.find(tags[value], is(value)), here ? value : SplitTable::kNone);
  }
  EXPECT_EQ(table.size(), size);
}

INSTANTIATE_TEST_SUITE_P(Tags, SplitTableTest,
                         ::testing::Values(0xFFFFFFFFu, 0x00FFFFFFu, 0xFFF00000u, 0x000FF000u, 0x80000001u));

TEST(SplitTableTest, a_value_that_cannot_be_made_is_not_counted) {
  SplitTable table;
  const auto is_it = [](std::uint32_t) { return true; };
  const std::uint64_t steps = steps_of([&] {
    for (std::uint32_t i = 0; i < SplitTable::kCells; ++i)
      EXPECT_THROW(table.find_or_add(i, is_it, []() -> std::uint32_t { throw std::bad_alloc(); }),
                   std::bad_alloc);
  });
  EXPECT_EQ(table.size(), 0u);
  EXPECT_EQ(steps, 0u) << "the table grew";
  EXPECT_EQ(table.find_or_add(1, is_it, [] { return 7u; }), 7u);
  EXPECT_EQ(table.size(), 1u);
}

TEST(SplitTableGrowthTest, an_insert_moves_a_bounded_number_of_cells) {
  const auto many = static_cast<std::uint32_t>(rounds(10'000'000));
  SplitTable table;
  std::uint64_t most = 0, all = 0;
  for (std::uint32_t value = 0; value < many; ++value) {
    const auto tag = static_cast<std::uint32_t>(value * 0x9E3779B97F4A7C15ull >> 32);
    const std::uint64_t steps = steps_of([&] {
      table.find_or_add(
          tag, [&](auto other) { return other == value; }, [&] { return value; });
    });
    most = std::max(most, steps);
    all += steps;
  }
  EXPECT_LT(most, SplitTable::kCells);
  EXPECT_LT(all, 4 * std::uint64_t{many}) << "average cells moved per call";
  EXPECT_LT(table.longest_probe(), 200u);
}

TEST(SegmentedVectorTest, elements_never_move_and_start_as_zero) {
  struct Element {
    std::uint64_t number, other;
  };
  SegmentedVector<Element> vector;
  std::vector<const Element*> places;
  const auto many = static_cast<std::uint64_t>(rounds(300'000));
  for (std::uint64_t i = 0; i < many; ++i) {
    vector.push_back({i, i});
    places.push_back(&vector[i]);
  }
  vector.grow_to(10 * many);
  for (std::uint64_t i = 0; i < many; ++i) {
    ASSERT_EQ(&vector[i], places[i]);
    ASSERT_EQ(vector[i].number, i);
  }
  for (std::uint64_t i = many; i < 10 * many; i += 1000) ASSERT_EQ(vector[i].number + vector[i].other, 0u);
  vector.grow_to(1);
  EXPECT_EQ(vector.size(), 10 * many) << "the vector never shrinks";
  SegmentedVector<Element> taken = std::move(vector);
  EXPECT_EQ(&taken[many - 1], places[many - 1]);
}

}  // namespace
}  // namespace kv_offload
