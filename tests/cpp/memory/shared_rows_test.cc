// SPDX-License-Identifier: Apache-2.0
#include "memory/shared_rows.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <random>

#include "base/status.h"
#include "test_iterations.h"

namespace kv_offload {
namespace {

constexpr std::uint64_t kTwoPages = 2 * kPageBytes;
constexpr std::uint32_t kRows = 16;
constexpr unsigned kReader = 5;

class SharedRowsTest : public ::testing::Test {
 protected:
  SharedRows open(const std::string& identity = "model") { return SharedRows(memory_, layout_, identity); }
  SharedRowsView view(const std::string& identity = "model") {
    return SharedRowsView(memory_, memory_.subspan(kPageBytes), layout_, identity);
  }
  static ChunkKey key(const std::string& name) { return ChunkKey(name + std::string(4, '\0')); }
  static void publish(SharedRows& rows, RowId row, const std::string& name) {
    rows.publish(row, key(name), 16, 1);
  }

  const SharedRowsLayout layout_ = SharedRowsLayout::of(kRows * kTwoPages, kTwoPages);
  std::vector<std::byte> bytes_ = std::vector<std::byte>(layout_.bytes + kPageBytes);
  std::span<std::byte> memory_{
      reinterpret_cast<std::byte*>(round_up(reinterpret_cast<std::uintptr_t>(bytes_.data()), kPageBytes)),
      layout_.bytes};
};

TEST_F(SharedRowsTest, a_reader_finds_published_rows) {
  SharedRows rows = open();
  for (RowId i = 0; i < kRows; ++i) publish(rows, 2 * i, "k" + std::to_string(i));
  const SharedRowsView reader = view();
  for (RowId i = 0; i < kRows; ++i) {
    const auto found = reader.find(key("k" + std::to_string(i)));
    ASSERT_TRUE(found) << i;
    EXPECT_EQ(found->row, 2 * i);
    EXPECT_EQ(found->depth, 16u);
    EXPECT_EQ(found->group, 1);
  }
  EXPECT_FALSE(reader.find(key("other")));
}

TEST_F(SharedRowsTest, a_withdrawn_row_is_not_found_and_the_others_are) {
  SharedRows rows = open();
  for (RowId i = 0; i < kRows; ++i) publish(rows, 2 * i, "k" + std::to_string(i));
  for (RowId i = 0; i < kRows; i += 2) EXPECT_TRUE(rows.withdraw(2 * i));
  for (RowId i = 0; i < kRows; ++i)
    EXPECT_EQ(view().find(key("k" + std::to_string(i))).has_value(), i % 2 == 1) << i;
}

TEST_F(SharedRowsTest, rows_that_change_their_keys_stay_findable) {
  SharedRows rows = open();
  std::mt19937_64 random(3);
  std::vector<std::string> names(kRows);
  for (int round = 0; round < 2000; ++round) {
    const auto i = static_cast<RowId>(random() % kRows);
    ASSERT_TRUE(rows.withdraw(2 * i));
    names[i] = "n" + std::to_string(round);
    publish(rows, 2 * i, names[i]);
    for (RowId other = 0; other < kRows; ++other) {
      const bool is_published = !names[other].empty();
      ASSERT_EQ(is_published && view().find(key(names[other])).has_value(), is_published) << round;
    }
  }
}

TEST_F(SharedRowsTest, filters_are_empty_when_no_row_is_published) {
  SharedRows rows = open();
  for (RowId i = 0; i < kRows; ++i) publish(rows, 2 * i, "k" + std::to_string(i));
  for (RowId i = 0; i < kRows; ++i) EXPECT_TRUE(rows.withdraw(2 * i));
  const auto buckets = memory_.subspan(layout_.buckets_offset, layout_.links_offset - layout_.buckets_offset);
  EXPECT_TRUE(std::ranges::all_of(buckets, [](std::byte one) { return one == std::byte{0}; }));
}

// With as many rows as buckets, each row reused many times: the filters then have the bits of withdrawn keys
// too.
TEST_F(SharedRowsTest, the_filter_has_each_published_key_and_few_others) {
  constexpr std::uint32_t kMany = 1024;
  const SharedRowsLayout layout = SharedRowsLayout::of(kMany * kTwoPages, kTwoPages);
  std::vector<std::byte> bytes(layout.bytes + kPageBytes);
  const std::span<std::byte> memory(
      reinterpret_cast<std::byte*>(round_up(reinterpret_cast<std::uintptr_t>(bytes.data()), kPageBytes)),
      layout.bytes);
  SharedRows rows(memory, layout, "model");
  const SharedRowsFilter filter =
      SharedRowsView(memory, memory.subspan(kPageBytes), layout, "model").filter();
  std::mt19937_64 random(5);
  const auto random_key = [&] {
    const std::uint64_t digest = random();
    return key(std::string(reinterpret_cast<const char*>(&digest), sizeof(digest)));
  };
  const auto may_have = [&](const ChunkKey& one) { return filter.may_have(ChunkKey::Hash{}(one)); };
  std::vector<ChunkKey> published(kMany);
  for (std::uint32_t i = 0; i < 20 * kMany; ++i) {
    const auto index = static_cast<RowId>(i < kMany ? i : random() % kMany);
    ASSERT_TRUE(rows.withdraw(2 * index));
    published[index] = random_key();
    rows.publish(2 * index, published[index], 16, 1);
    ASSERT_TRUE(may_have(published[index]));
  }
  EXPECT_TRUE(std::ranges::all_of(published, may_have));
  int others = 0;
  for (int i = 0; i < 10000; ++i) others += may_have(random_key()) ? 1 : 0;
  EXPECT_LT(others, 450);  // about 310; with one bit for each key, about 700
}

TEST_F(SharedRowsTest, keys_that_stay_do_not_fill_the_filters_of_their_buckets) {
  constexpr std::uint32_t kMany = 1024;
  const SharedRowsLayout layout = SharedRowsLayout::of(kMany * kTwoPages, kTwoPages);
  std::vector<std::byte> bytes(layout.bytes + kPageBytes);
  const std::span<std::byte> memory(
      reinterpret_cast<std::byte*>(round_up(reinterpret_cast<std::uintptr_t>(bytes.data()), kPageBytes)),
      layout.bytes);
  SharedRows rows(memory, layout, "model");
  const SharedRowsView reader(memory, memory.subspan(kPageBytes), layout, "model");
  std::mt19937_64 random(5);
  const auto random_key = [&] {
    const std::uint64_t digest = random();
    return key(std::string(reinterpret_cast<const char*>(&digest), sizeof(digest)));
  };
  std::vector<ChunkKey> published(kMany);
  for (std::uint32_t i = 0; i < 50 * kMany; ++i) {
    // A quarter of the rows stay, like those of a system prompt.
    const auto index = static_cast<RowId>(i < kMany ? i : kMany / 4 + random() % (kMany - kMany / 4));
    ASSERT_TRUE(rows.withdraw(2 * index));
    published[index] = random_key();
    rows.publish(2 * index, published[index], 16, 1);
  }
  const SharedRowsFilter filter = reader.filter();
  for (const ChunkKey& one : published) {
    ASSERT_TRUE(filter.may_have(ChunkKey::Hash{}(one)));
    ASSERT_TRUE(reader.find(one));
  }
  int others = 0;
  for (int i = 0; i < 10000; ++i) others += filter.may_have(ChunkKey::Hash{}(random_key())) ? 1 : 0;
  EXPECT_LT(others, 700);  // over 2,000 if filters only grow
}

TEST_F(SharedRowsTest, a_damaged_table_never_leads_its_owner_outside_of_it) {
  std::mt19937_64 random(9);
  for (int round = 0; round < 200; ++round) {
    SharedRows rows = open();
    for (RowId i = 0; i < kRows; ++i) publish(rows, 2 * i, "k" + std::to_string(i));
    for (std::uint64_t at = layout_.buckets_offset; at + 8 <= layout_.bytes; at += 8) {
      if (random() % 4 != 0) continue;
      const std::uint64_t word = random() >> random() % 64;
      std::memcpy(memory_.data() + at, &word, sizeof(word));
    }
    for (RowId i = 0; i < kRows; ++i) {
      (void)rows.withdraw(2 * i);
      publish(rows, 2 * i, "n" + std::to_string(i));
    }
  }
}

TEST_F(SharedRowsTest, a_pinned_row_may_not_be_reused_until_its_reader_unpins_it) {
  SharedRows rows = open();
  publish(rows, 4, "a");
  SharedRowsView reader = view();
  ASSERT_TRUE(reader.pin(kReader, *reader.find(key("a"))));
  EXPECT_FALSE(rows.withdraw(4));
  EXPECT_TRUE(rows.is_pinned(4));
  EXPECT_FALSE(rows.withdraw(4)) << "a second call must not release it";
  reader.unpin(kReader, 4);
  EXPECT_FALSE(rows.is_pinned(4));
  EXPECT_TRUE(rows.withdraw(4));
}

TEST_F(SharedRowsTest, a_row_that_was_withdrawn_or_reused_cannot_be_pinned) {
  SharedRows rows = open();
  publish(rows, 4, "a");
  SharedRowsView reader = view();
  const auto found = *reader.find(key("a"));
  ASSERT_TRUE(rows.withdraw(4));
  EXPECT_FALSE(reader.pin(kReader, found));
  publish(rows, 4, "a");  // the same key again, but the bytes changed meanwhile
  EXPECT_FALSE(reader.pin(kReader, found));
  EXPECT_FALSE(rows.is_pinned(4)) << "a failed pin stayed";
}

TEST_F(SharedRowsTest, a_closed_table_serves_nothing_and_its_pins_stay) {
  SharedRows rows = open();
  publish(rows, 0, "a");
  publish(rows, 2, "b");
  SharedRowsView reader = view();
  ASSERT_TRUE(reader.pin(kReader, *reader.find(key("a"))));
  const auto found = *reader.find(key("b"));
  rows.close();
  EXPECT_FALSE(reader.is_open());
  EXPECT_FALSE(reader.find(key("b")));
  EXPECT_FALSE(reader.pin(kReader, found));
  EXPECT_FALSE(rows.withdraw(0));
  EXPECT_TRUE(rows.withdraw(2));
}

TEST_F(SharedRowsTest, clearing_the_pins_of_one_reader_keeps_those_of_others) {
  SharedRows rows = open();
  publish(rows, 0, "a");
  publish(rows, 2, "b");
  SharedRowsView reader = view();
  ASSERT_TRUE(reader.pin(1, *reader.find(key("a"))));
  ASSERT_TRUE(reader.pin(2, *reader.find(key("a"))));
  ASSERT_TRUE(reader.pin(1, *reader.find(key("b"))));
  const auto readers = [&] { return rows.readers(0, rows.capacity()); };
  EXPECT_EQ(readers(), 0b110u);
  rows.clear_pins(1, 0, rows.capacity());
  EXPECT_EQ(readers(), 0b100u);
  EXPECT_TRUE(rows.withdraw(2));
  EXPECT_FALSE(rows.withdraw(0));
}

TEST_F(SharedRowsTest, the_owner_learns_once_that_a_reader_has_used_a_row) {
  SharedRows rows = open();
  publish(rows, 0, "a");
  SharedRowsView reader = view();
  EXPECT_FALSE(rows.take_use(0));
  ASSERT_TRUE(reader.pin(kReader, *reader.find(key("a"))));
  reader.unpin(kReader, 0);
  EXPECT_TRUE(rows.take_use(0));
  EXPECT_FALSE(rows.take_use(0));
}

TEST_F(SharedRowsTest, the_next_owner_starts_empty_and_respects_the_pins) {
  SharedRows first = open();
  publish(first, 0, "a");
  SharedRowsView reader = view();
  const auto found = *reader.find(key("a"));
  ASSERT_TRUE(reader.pin(kReader, found));
  SharedRows next = open();
  EXPECT_FALSE(reader.find(key("a")));
  EXPECT_FALSE(next.withdraw(0));
  publish(next, 2, "b");
  EXPECT_NE(view().find(key("b"))->version, found.version) << "versions were used twice";
}

TEST_F(SharedRowsTest, a_view_of_an_earlier_owner_finds_and_pins_nothing) {
  (void)open();
  SharedRowsView reader = view();
  SharedRows next = open();
  publish(next, 0, "a");
  EXPECT_FALSE(reader.is_open());
  EXPECT_FALSE(reader.find(key("a")));
  EXPECT_FALSE(reader.pin(kReader, *view().find(key("a"))));
  EXPECT_FALSE(next.is_pinned(0));
}

TEST_F(SharedRowsTest, the_next_owner_learns_which_rows_are_pinned) {
  SharedRows first = open();
  for (RowId i = 0; i < kRows; ++i) publish(first, 2 * i + i % 2, "k" + std::to_string(i));
  SharedRowsView reader = view();
  ASSERT_TRUE(reader.pin(kReader, *reader.find(key("k3"))));
  ASSERT_TRUE(reader.pin(kReader, *reader.find(key("k6"))));
  EXPECT_FALSE(first.withdraw(7));
  SharedRows next = open("other weights");
  std::vector<std::pair<RowId, std::uint32_t>> pinned;
  next.for_each_pinned([&](RowId id, std::uint32_t group) { pinned.emplace_back(id, group); });
  EXPECT_EQ(pinned, (std::vector<std::pair<RowId, std::uint32_t>>{{7, 1}, {12, 1}}));
}

TEST_F(SharedRowsTest, a_table_of_another_layout_is_made_anew_and_numbers_continue) {
  SharedRows first = open();
  for (RowId i = 0; i < kRows; ++i) publish(first, 2 * i, "k" + std::to_string(i));
  SharedRowsView reader = view();
  const auto found = *reader.find(key("k3"));
  ASSERT_TRUE(reader.pin(kReader, found));
  SharedRowsLayout other = SharedRowsLayout::of(kRows * kTwoPages / 2, kTwoPages);
  other.row_sizes = 1;
  EXPECT_FALSE(SharedRows::has_other_layout(memory_, layout_));
  const std::uint64_t first_id = first.id();
  EXPECT_EQ(open().id(), first_id);
  EXPECT_TRUE(SharedRows::has_other_layout(memory_, other));
  SharedRows next(memory_.first(other.bytes), other, "model");
  EXPECT_EQ(next.readers(0, next.capacity()), 0u);
  EXPECT_NE(next.id(), first_id);
  publish(next, 2, "b");
  EXPECT_FALSE(reader.is_open());
  const auto again = SharedRowsView(memory_, memory_.subspan(kPageBytes), other, "model").find(key("b"));
  ASSERT_TRUE(again);
  EXPECT_GT(again->version, found.version);
}

// A process of an earlier version may still write pins, which would be cleared.
TEST_F(SharedRowsTest, a_table_of_another_format_has_another_layout) {
  EXPECT_FALSE(SharedRows::has_other_layout(memory_, layout_)) << "no table";
  (void)open();
  memory_[0] ^= std::byte{1};  // the version, in the magic number
  EXPECT_TRUE(SharedRows::has_other_layout(memory_, layout_));
  EXPECT_THROW(view(), ResourceError);
}

TEST_F(SharedRowsTest, rows_of_more_than_64_gib_are_refused) {
  const std::uint64_t most = SharedRows::kMostRowPages * kPageBytes;
  const SharedRowsLayout layout = SharedRowsLayout::of(most, most);
  const SharedRowsLayout more = SharedRowsLayout::of(most + kPageBytes, most + kPageBytes);
  ASSERT_EQ(layout.bytes, more.bytes);
  ASSERT_LE(layout.bytes, memory_.size());
  SharedRows rows(memory_.first(layout.bytes), layout, "model");
  EXPECT_THROW(SharedRows(memory_.first(more.bytes), more, "model"), ResourceError);
}

TEST_F(SharedRowsTest, another_identity_size_or_no_table_is_refused) {
  EXPECT_THROW(view(), ResourceError);
  open();
  EXPECT_NO_THROW(view());
  EXPECT_THROW(view("other weights"), ResourceError);
  const SharedRowsLayout other = SharedRowsLayout::of(kRows * kTwoPages, kPageBytes);
  EXPECT_THROW(SharedRowsView(memory_, memory_.subspan(kPageBytes), other, "model"), ResourceError);
  EXPECT_THROW(SharedRowsView(memory_.first(kPageBytes), memory_.subspan(kPageBytes), layout_, "model"),
               ResourceError);
  EXPECT_THROW(SharedRows(memory_.first(kPageBytes), layout_, "model"), InvalidArgument);
}

// Whatever a table contains, a reader returns rows inside the area and ends. (AddressSanitizer finds reads
// outside of the table.)
TEST_F(SharedRowsTest, a_damaged_table_never_leads_outside_of_the_area) {
  std::mt19937_64 random(1);
  for (int round = 0; round < testing::rounds(3000); ++round) {
    SharedRows rows = open();
    for (RowId i = 0; i < kRows; ++i) publish(rows, 2 * i, "k" + std::to_string(i));
    SharedRowsView reader = view();
    for (int damage = 0; damage < 6; ++damage) {
      const std::size_t at =
          layout_.buckets_offset + 4 * (random() % ((layout_.bytes - layout_.buckets_offset) / 4));
      const std::uint32_t value = random() % 2 == 0 ? static_cast<std::uint32_t>(random())
                                                    : static_cast<std::uint32_t>(random() % (kRows + 2));
      std::memcpy(memory_.data() + at, &value, 4);
    }
    for (RowId i = 0; i < kRows; ++i) {
      const auto found = reader.find(key("k" + std::to_string(i)));
      if (!found) continue;
      ASSERT_LT(found->row, 2 * kRows);
      if (reader.pin(kReader, *found)) reader.unpin(kReader, found->row);
    }
    std::memset(memory_.data(), 0, memory_.size());
  }
}

TEST_F(SharedRowsTest, a_chain_that_is_a_ring_ends) {
  SharedRows rows = open();
  for (RowId i = 0; i < kRows; ++i) publish(rows, 2 * i, "k" + std::to_string(i));
  for (std::uint32_t i = 0; i < kRows; ++i) {
    const std::uint32_t self = i + 1;  // each entry is its own successor
    std::memcpy(memory_.data() + layout_.links_offset + 16 * self, &self, 4);
  }
  for (std::uint32_t i = 0; i < layout_.buckets; ++i) {
    const std::uint64_t chain = ~std::uint64_t{0} << 32 | (i % kRows + 1);  // a filter that passes all keys
    std::memcpy(memory_.data() + layout_.buckets_offset + 8 * i, &chain, 8);
  }
  EXPECT_FALSE(view().find(key("other")));
}

}  // namespace
}  // namespace kv_offload
