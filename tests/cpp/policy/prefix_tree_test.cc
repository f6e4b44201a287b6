// SPDX-License-Identifier: Apache-2.0
#include "policy/prefix_tree.h"

#include <gtest/gtest.h>

#include <map>
#include <random>

#include "out_of_memory.h"

namespace kv_offload {
namespace {

TEST(PrefixTree, children_are_counted_in_any_insertion_order) {
  PrefixTree tree;
  const auto child = tree.take(2, 1, 20);
  const auto parent = tree.take(1, 0, 10);  // after its child
  EXPECT_EQ(tree.parent(child), parent);
  EXPECT_EQ(tree.slot(parent), 10u);
  EXPECT_EQ(tree.children(parent), 1u);
  tree.leave(child);
  EXPECT_EQ(tree.children(parent), 0u);
}

TEST(PrefixTree, a_removed_parent_leaves_a_placeholder_until_reinserted) {
  PrefixTree tree;
  const auto parent = tree.take(1, 0, 10);
  const auto child = tree.take(2, 1, 20);
  tree.leave(parent);
  EXPECT_EQ(tree.slot(tree.parent(child)), PrefixTree::kNone);
  const auto again = tree.take(1, 0, 11);
  EXPECT_EQ(tree.parent(child), again);
  EXPECT_EQ(tree.children(again), 1u);
}

TEST(PrefixTree, a_parent_can_be_set_later_once) {
  PrefixTree tree;
  const auto child = tree.take(2, 0, 20), parent = tree.take(1, 0, 10);
  EXPECT_EQ(tree.parent(child), PrefixTree::kNone);
  tree.set_parent(child, 1);
  EXPECT_EQ(tree.parent(child), parent);
  for (const ChunkId again : {ChunkId{1}, ChunkId{7}, ChunkId{2}, ChunkId{0}}) tree.set_parent(child, again);
  EXPECT_EQ(tree.parent(child), parent);
  EXPECT_EQ(tree.children(parent), 1u);
  tree.leave(child);
  EXPECT_EQ(tree.children(parent), 0u);
  tree.leave(parent);
  EXPECT_EQ(tree.size(), 0u);
}

// A table grows when it gets its 33rd or 65th node: an entry's own, or its parent's.
TEST(PrefixTree, an_entry_that_finds_no_memory_is_not_taken) {
  for (const ChunkId alone : {ChunkId{0}, ChunkId{1000}}) {
    PrefixTree tree;
    std::vector<PrefixTree::Node> nodes;
    if (alone != 0) nodes.push_back(tree.take(alone, 0, 1000));
    unsigned failures = 0;
    for (ChunkId id = 1; id < 400; id += 2) {  // each with a new parent
      const std::size_t size = tree.size();
      PrefixTree::Node node = PrefixTree::kNone;
      failures += testing::fail_each_allocation([&] { node = tree.take(id, id + 1, static_cast<Slot>(id)); },
                                                [&] { EXPECT_EQ(tree.size(), size) << id; });
      ASSERT_NE(node, PrefixTree::kNone) << id;
      ASSERT_EQ(tree.slot(node), id);
      nodes.push_back(node);
    }
    EXPECT_GT(failures, 2u);
    for (const PrefixTree::Node node : nodes) tree.leave(node);
    EXPECT_EQ(tree.size(), 0u);
  }
}

TEST(PrefixTree, only_a_node_with_different_children_is_branched) {
  PrefixTree tree;
  const auto parent = tree.take(1, 0, 10);
  const auto only = tree.take(0x123456789ull << 20, 1, 20);
  tree.leave(only);
  tree.take(0x123456789ull << 20, 1, 20);
  EXPECT_FALSE(tree.branched(parent));
  tree.take(0x987654321ull << 20, 1, 21);
  EXPECT_TRUE(tree.branched(parent));
}

TEST(PrefixTree, id_zero_or_a_duplicate_id_gets_no_node) {
  PrefixTree tree;
  EXPECT_EQ(tree.take(0, 1, 1), PrefixTree::kNone);
  tree.take(5, 0, 1);
  EXPECT_EQ(tree.take(5, 0, 2), PrefixTree::kNone);
}

TEST(PrefixTree, removed_nodes_leave_nothing_under_random_calls) {
  std::mt19937_64 random(1);
  PrefixTree tree;
  std::map<ChunkId, std::pair<PrefixTree::Node, ChunkId>> known;  // id -> node, parent
  for (int i = 0; i < 50000; ++i) {
    const ChunkId id = (1 + random() % 300) << 16;
    if (const auto found = known.find(id); found != known.end()) {
      tree.leave(found->second.first);
      known.erase(found);
    } else {
      const ChunkId parent = random() % 4 == 0 ? 0 : (1 + random() % 300) << 16;
      known[id] = {tree.take(id, parent, static_cast<Slot>(id >> 16)), parent == id ? 0 : parent};
    }
    if (i % 500 != 0) continue;
    std::map<ChunkId, std::uint32_t> children;
    for (const auto& [child, entry] : known) ++children[entry.second];
    for (const auto& [node_id, entry] : known) {
      ASSERT_EQ(tree.slot(entry.first), node_id >> 16);
      ASSERT_EQ(tree.children(entry.first), children[node_id]) << "call " << i;
    }
  }
  for (const auto& [id, entry] : known) tree.leave(entry.first);
  EXPECT_EQ(tree.size(), 0u);
}

}  // namespace
}  // namespace kv_offload
