// SPDX-License-Identifier: Apache-2.0
#include "policy/id_table.h"

#include <gtest/gtest.h>

#include <map>
#include <random>
#include <vector>

namespace kv_offload {
namespace {

TEST(IdTable, agrees_with_a_map_under_random_calls) {
  std::mt19937_64 random(3);
  std::vector<ChunkId> ids;  // indexed by value
  for (int i = 0; i < 3000; ++i) ids.push_back(random() % 4 == 0 ? 1 + random() % 64 : random() | 1);
  const auto id_of = [&](std::uint32_t value) { return ids[value]; };
  IdTable table;
  std::map<ChunkId, std::uint32_t> known;
  for (int i = 0; i < 200000; ++i) {
    const auto value = static_cast<std::uint32_t>(random() % ids.size());
    const ChunkId id = ids[value];
    const auto found = known.find(id);
    ASSERT_EQ(table.find(id, id_of), found == known.end() ? IdTable::kNone : found->second) << "call " << i;
    // The table grows and shrinks in turns.
    if (found != known.end() && random() % 8 < (i / 20000 % 2 == 0 ? 2u : 7u)) {
      table.erase(id, id_of);
      known.erase(found);
    } else {
      const std::uint32_t expected = known.emplace(id, value).first->second;
      ASSERT_EQ(table.find_or_add(id, id_of, [&] { return value; }), expected) << "call " << i;
    }
    ASSERT_EQ(table.size(), known.size());
  }
}

// The ids differ in only a few bits.
TEST(IdTable, a_find_probes_fewer_than_100_cells) {
  for (const int shift : {0, 16, 24}) {
    std::vector<ChunkId> ids;
    const auto id_of = [&](std::uint32_t value) { return ids[value]; };
    IdTable table;
    for (std::uint64_t n = 1; n <= 100000; ++n) {
      ids.push_back(n << shift);
      table.find_or_add(ids.back(), id_of, [&] { return static_cast<std::uint32_t>(ids.size() - 1); });
    }
    EXPECT_LT(table.longest_probe(), 100u) << shift;
  }
}

TEST(IdTable, ids_selected_by_spare_bits_spread_over_the_table) {
  std::mt19937_64 random(4);
  std::vector<ChunkId> ids;
  const auto id_of = [&](std::uint32_t value) { return ids[value]; };
  IdTable table;
  while (ids.size() < IdTable::kIdsOfSpareBits) {
    const ChunkId id = random();
    if (IdTable::spare_bits(id) % 64 != 0) continue;
    ids.push_back(id);
    table.find_or_add(id, id_of, [&] { return static_cast<std::uint32_t>(ids.size() - 1); });
  }
  EXPECT_LT(table.longest_probe(), 200u);
}

}  // namespace
}  // namespace kv_offload
