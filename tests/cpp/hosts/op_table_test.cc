// SPDX-License-Identifier: Apache-2.0
#include "hosts/op_table.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <random>
#include <string>

#include "out_of_memory.h"

namespace kv_offload {
namespace {

struct NumberedOp {
  std::uint64_t number = 0;
  std::string text;
};
using NumberedOps = OpTable<NumberedOp>;

TEST(OpTableTest, finds_an_op_until_it_is_erased) {
  NumberedOps ops;
  EXPECT_EQ(ops.find(1), nullptr);
  NumberedOp& one = ops.add(1);
  one.number = 7;
  EXPECT_EQ(ops.find(1), &one);
  EXPECT_EQ(&ops.add(1), &one) << "it was there already";
  EXPECT_EQ(one.number, 7u);
  EXPECT_EQ(ops.size(), 1u);
  ops.erase(1);
  EXPECT_EQ(ops.find(1), nullptr);
  EXPECT_TRUE(ops.empty());
}

// A host may repeat a result, or make up the id of one.
TEST(OpTableTest, the_id_of_an_op_that_has_ended_does_not_name_the_op_that_uses_its_slot) {
  NumberedOps ops;
  NumberedOp* const before = &ops.add(1);
  before->number = 7;
  before->text = "old";
  ops.erase(1);
  NumberedOp* const after = &ops.add(2);
  EXPECT_EQ(after, before);
  EXPECT_EQ(after->number, 0u);
  EXPECT_EQ(after->text, "");
  EXPECT_EQ(ops.find(1), nullptr);
}

TEST(OpTableTest, ids_that_differ_only_in_bits_without_effect_on_their_cell_are_different) {
  NumberedOps ops;
  // Equal tags: the product with the odd factor of the hash has only the lowest 32 bits changed.
  const std::uint64_t inverse = [] {
    std::uint64_t x = 1;
    for (int i = 0; i < 6; ++i) x *= 2 - 0x9E3779B97F4A7C15ull * x;
    return x;
  }();
  for (std::uint64_t i = 1; i <= 100; ++i) ops.add(i * inverse).number = i;
  EXPECT_EQ(ops.size(), 100u);
  for (std::uint64_t i = 1; i <= 100; i += 2) ops.erase(i * inverse);
  for (std::uint64_t i = 1; i <= 100; ++i) {
    const NumberedOp* const found = ops.find(i * inverse);
    ASSERT_EQ(found != nullptr, i % 2 == 0) << i;
    if (found != nullptr) {
      EXPECT_EQ(found->number, i);
    }
  }
}

TEST(OpTableTest, does_what_a_map_does) {
  NumberedOps ops;
  std::map<OpId, NumberedOp*> expected;
  std::mt19937_64 random(1);
  OpId next = 0;
  for (int i = 0; i < 20'000; ++i) {
    // Grows to some thousand ops, and becomes empty, several times.
    const bool grows = i / 3000 % 2 == 0 ? random() % 8 != 0 : random() % 8 == 0;
    if (grows) {
      NumberedOp& made = ops.add(++next);
      made.number = next;
      expected.emplace(next, &made);
    } else if (!expected.empty()) {
      const auto at =
          std::next(expected.begin(),
                    static_cast<std::ptrdiff_t>(random() % std::min<std::size_t>(expected.size(), 4)));
      ops.erase(at->first);
      expected.erase(at);
    }
    ASSERT_EQ(ops.size(), expected.size());
  }
  EXPECT_FALSE(expected.empty());
  for (const auto& [id, op] : expected) {
    ASSERT_EQ(ops.find(id), op) << "it has moved";
    EXPECT_EQ(op->number, id);
  }
  std::vector<OpId> ids = ops.ids();
  std::sort(ids.begin(), ids.end());
  ASSERT_EQ(ids.size(), expected.size());
  EXPECT_TRUE(std::equal(ids.begin(), ids.end(), expected.begin(),
                         [](OpId id, const auto& one) { return id == one.first; }));
}

TEST(OpTableTest, frees_the_slots_of_many_ops_when_none_is_left) {
  NumberedOps ops;
  const auto add_and_erase = [&](OpId count) {
    for (OpId id = 1; id <= count; ++id) ops.add(id);
    for (OpId id = 1; id <= count; ++id) ops.erase(id);
    EXPECT_TRUE(ops.empty());
    // The slot that was released last is used next, unless all were freed.
    const std::size_t slots = ops.slots();
    ops.add(1);
    ops.erase(1);
    return slots;
  };
  EXPECT_EQ(add_and_erase(NumberedOps::kMostKept), NumberedOps::kMostKept);
  EXPECT_EQ(add_and_erase(NumberedOps::kMostKept + 1), 0u);
}

TEST(OpTableTest, ops_that_come_and_go_allocate_nothing) {
  NumberedOps ops;
  for (OpId id = 1; id <= 100; ++id) ops.add(id);
  for (OpId id = 1; id <= 100; ++id) ops.erase(id);
  const testing::FailingAllocation none(0);
  for (OpId id = 101; id <= 1000; ++id) {
    ops.add(id);
    if (id > 150) ops.erase(id - 50);
  }
  EXPECT_FALSE(none.came());
}

TEST(OpTableTest, memory_that_runs_out_changes_nothing) {
  NumberedOps ops;
  for (OpId id = 1; id <= 5000; ++id) {
    const unsigned failed = testing::fail_each_allocation([&] { ops.add(id).number = id; },
                                                          [&] {
                                                            ASSERT_EQ(ops.size(), id - 1);
                                                            ASSERT_EQ(ops.find(id), nullptr);
                                                          });
    ASSERT_LE(failed, 8u);
  }
  for (OpId id = 1; id <= 5000; ++id) ASSERT_EQ(ops.find(id)->number, id);
}

}  // namespace
}  // namespace kv_offload
