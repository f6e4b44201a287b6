// SPDX-License-Identifier: Apache-2.0
#include "memory/row_table.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>

#include "base/status.h"

namespace kv_offload {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

constexpr std::uint64_t kRowBytes = 2 * kPageBytes;
constexpr std::uint64_t kAreaBytes = 16 * kRowBytes;

class RowTableTest : public ::testing::Test {
 protected:
  RowTable open(const std::string& identity = "model") {
    return RowTable(memory_, kAreaBytes, kRowBytes, identity);
  }
  static RowTable::Row row(RowId id, const std::string& name) {
    return {id, ChunkKey(name + std::string(4, '\0')), 7, 16, -1, 0};
  }
  std::vector<RowId> ids(RowTable table) {
    std::vector<RowId> found;
    for (const RowTable::Row& row : table.rows()) found.push_back(row.row);
    return found;
  }

  std::vector<std::byte> bytes_ = std::vector<std::byte>(RowTable::bytes(kAreaBytes, kRowBytes) + kPageBytes);
  std::span<std::byte> memory_{
      reinterpret_cast<std::byte*>(round_up(reinterpret_cast<std::uintptr_t>(bytes_.data()), kPageBytes)),
      RowTable::bytes(kAreaBytes, kRowBytes)};
};

TEST_F(RowTableTest, the_next_table_reads_the_stored_rows) {
  open().put(row(4, "a"));
  const std::vector<RowTable::Row> found = open().rows();
  ASSERT_EQ(found.size(), 1u);
  EXPECT_EQ(found[0].row, 4u);
  EXPECT_EQ(found[0].key, row(4, "a").key);
  EXPECT_EQ(found[0].parent, 7u);
  EXPECT_EQ(found[0].depth, 16u);
  EXPECT_EQ(found[0].priority, -1);
  EXPECT_EQ(found[0].group, 0u);
}

TEST_F(RowTableTest, rows_are_ordered_by_last_use) {
  RowTable table = open();
  for (const RowId id : {2u, 0u, 6u}) table.put(row(id, "k"));
  table.use(2);
  EXPECT_THAT(ids(open()), ElementsAre(0u, 6u, 2u));
  open().put(row(8, "next"));  // the use counter continues
  EXPECT_THAT(ids(open()), ElementsAre(0u, 6u, 2u, 8u));
}

TEST_F(RowTableTest, erased_rows_do_not_reappear) {
  RowTable table = open();
  for (const RowId id : {0u, 2u}) table.put(row(id, "k"));
  table.erase(0);
  table.erase(4);
  table.use(0);  // its entry is still in memory
  EXPECT_THAT(ids(open()), ElementsAre(2u));
  table.clear();
  table.use(2);
  EXPECT_THAT(ids(open()), IsEmpty());
}

TEST_F(RowTableTest, a_table_of_another_identity_is_emptied) {
  open().put(row(0, "k"));
  EXPECT_THAT(ids(open("other weights")), IsEmpty());
  EXPECT_THAT(ids(open()), IsEmpty()) << "a cleared entry reappeared";
}

TEST_F(RowTableTest, a_damaged_entry_is_skipped) {
  RowTable table = open();
  for (const RowId id : {0u, 2u, 4u}) table.put(row(id, "k"));
  // Every byte of the second entry except its use counter.
  for (std::size_t i = 8; i < 88; ++i) {
    std::vector<std::byte> before(memory_.begin(), memory_.end());
    memory_[kPageBytes + 88 + i] ^= std::byte{1};
    EXPECT_THAT(ids(open()), ElementsAre(0u, 4u)) << "byte " << i;
    std::copy(before.begin(), before.end(), memory_.begin());
  }
}

TEST_F(RowTableTest, an_entry_copied_to_another_position_is_skipped) {
  RowTable table = open();
  table.put(row(2, "k"));
  std::memcpy(memory_.data() + kPageBytes + 3 * 88, memory_.data() + kPageBytes + 88, 88);
  EXPECT_THAT(ids(open()), ElementsAre(2u));
}

TEST_F(RowTableTest, a_row_may_start_at_any_page) {
  open().put(row(5, "k"));
  EXPECT_THAT(ids(open()), ElementsAre(5u));
}

TEST_F(RowTableTest, memory_of_another_size_is_refused) {
  EXPECT_THROW(RowTable(memory_.first(kPageBytes), kAreaBytes, kRowBytes, ""), InvalidArgument);
}

}  // namespace
}  // namespace kv_offload
