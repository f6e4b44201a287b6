// SPDX-License-Identifier: Apache-2.0
#include "memory/bit_tree.h"

#include <gtest/gtest.h>

#include <random>
#include <set>

namespace kv_offload {
namespace {

std::size_t expected_first(const std::set<std::size_t>& members, std::size_t from) {
  const auto found = members.lower_bound(from);
  return found == members.end() ? BitTree::kNone : *found;
}

TEST(BitTree, agrees_with_a_set_at_every_size_around_a_word) {
  std::mt19937 random(1);
  for (const std::size_t size : {1u, 2u, 63u, 64u, 65u, 4095u, 4096u, 4097u, 300'000u}) {
    BitTree tree(size, false);
    std::set<std::size_t> members;
    for (int i = 0; i < 2000; ++i) {
      const std::size_t member = random() % size;
      if (random() % 2 == 0) {
        tree.insert(member);
        members.insert(member);
      } else {
        tree.erase(member);
        members.erase(member);
      }
      const std::size_t from = random() % (size + 1);
      ASSERT_EQ(tree.first(from), expected_first(members, from)) << size;
      ASSERT_EQ(tree.first(), expected_first(members, 0)) << size;
      ASSERT_EQ(tree.empty(), members.empty());
      ASSERT_EQ(tree.contains(member), members.contains(member));
    }
  }
}

TEST(BitTree, a_full_tree_contains_each_index_once) {
  for (const std::size_t size : {1u, 64u, 65u, 4096u, 4097u}) {
    BitTree tree(size, true);
    std::size_t count = 0;
    for (std::size_t i = tree.first(); i != BitTree::kNone; i = tree.first(i + 1)) ++count;
    EXPECT_EQ(count, size);
  }
  EXPECT_TRUE(BitTree().empty());
}

}  // namespace
}  // namespace kv_offload
