// SPDX-License-Identifier: Apache-2.0
#include "backends/fs/catalog.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include "out_of_memory.h"

namespace kv_offload {
namespace {

ChunkKey numbered_key(int n) { return ChunkKey(fmt::format("{:08}--------", n) + std::string(4, '\0')); }

ChunkKey of_group(const ChunkKey& key, int group) {
  std::string bytes(key.bytes());
  bytes[bytes.size() - 2] = static_cast<char>(group >> 8);
  bytes[bytes.size() - 1] = static_cast<char>(group);
  return ChunkKey(bytes);
}

class FsCatalogTest : public testing::TestWithParam<std::string> {
 protected:
  FsCatalog catalog_{GetParam()};
  // Inserts a record of a prompt. A chunk's parent is the chunk of the previous number.
  void insert(int n, int head, std::uint32_t request) {
    const ChunkId parent = n == head ? 0 : chunk_id(numbered_key(n - 1));
    catalog_.insert({numbered_key(n), 8192}, {.parent = parent, .request = request});
  }
  std::size_t touched() {
    std::vector<FsCatalog::Record> records;
    EXPECT_FALSE(catalog_.take_touched(100, &records)) << "there are fewer";
    return records.size();
  }
  std::vector<int> drain() {
    std::vector<int> order;
    while (const auto victim = catalog_.take_victim()) {
      order.push_back(std::stoi(std::string(victim->key.bytes().substr(0, 8))));
    }
    return order;
  }
};

TEST_P(FsCatalogTest, a_prompt_written_from_its_end_is_evicted_from_its_end) {
  for (int n = 4; n >= 0; --n) insert(n, 0, 1);
  EXPECT_EQ(drain(), (std::vector<int>{4, 3, 2, 1, 0}));
}

TEST_P(FsCatalogTest, the_next_victim_belongs_to_the_request_that_used_it_last) {
  insert(0, 0, 1);
  EXPECT_TRUE(catalog_.next_is_of(1));
  catalog_.hit(numbered_key(0), {.request = 2}, Nanos(1));
  EXPECT_FALSE(catalog_.next_is_of(1));
  EXPECT_TRUE(catalog_.next_is_of(2));
  EXPECT_EQ(drain(), (std::vector<int>{0}));
  EXPECT_FALSE(catalog_.next_is_of(2)) << "the catalog is empty";
}

TEST_P(FsCatalogTest, a_record_that_finds_no_memory_is_not_known) {
  unsigned failures = 0;
  for (int n = 0; n < 200; ++n) {
    const ChunkKey key = of_group(numbered_key(n), n);
    const auto check = [&] {
      EXPECT_FALSE(catalog_.holds(key));
      EXPECT_EQ(catalog_.size(), static_cast<std::size_t>(n));
      EXPECT_EQ(catalog_.bytes(), 8192u * static_cast<unsigned>(n));
    };
    const EntryInfo info{.parent = n % 10 == 0 ? 0 : chunk_id(numbered_key(n - 1)),
                         .request = static_cast<std::uint32_t>(n / 10 + 1)};
    failures += testing::fail_each_allocation([&] { catalog_.insert({key, 8192}, info); }, check);
    EXPECT_TRUE(catalog_.holds(key));
  }
  EXPECT_GT(failures, 200u) << "each record has a new group";
  EXPECT_EQ(drain().size(), 200u);
  EXPECT_EQ(catalog_.bytes(), 0u);
}

TEST_P(FsCatalogTest, an_unordered_record_whose_use_finds_no_memory_can_be_evicted) {
  unsigned failures = 0;
  for (int n = 0; n < 90; ++n) {
    const ChunkKey key = numbered_key(n);
    catalog_.insert_unordered({key, 8192});
    const auto ref = n % 3 == 0 ? catalog_.begin_read(key) : std::nullopt;
    failures += testing::fail_each_allocation(
        [&] { catalog_.hit(key, {.request = 1}, Nanos(std::chrono::seconds(100))); },
        [&] { EXPECT_TRUE(catalog_.holds(key)); });
    if (ref) catalog_.end_read(*ref);
  }
  EXPECT_GT(failures, 1u);
  EXPECT_EQ(touched(), 90u);
  EXPECT_EQ(drain().size(), 90u);
}

TEST_P(FsCatalogTest, nothing_is_lost_when_all_is_handed_over_without_memory) {
  insert(0, 0, 1);
  FsCatalog all{GetParam()};
  {
    const testing::FailingAllocation next(0);
    catalog_.move_into(&all);
    EXPECT_FALSE(next.came());
  }
  EXPECT_EQ(catalog_.size(), 0u);
  EXPECT_EQ(all.size(), 1u);
  insert(1, 1, 1);
  EXPECT_EQ(drain(), (std::vector<int>{1}));
}

TEST_P(FsCatalogTest, a_record_is_not_evicted_while_it_is_read) {
  insert(0, 0, 1);
  const auto ref = catalog_.begin_read(numbered_key(0));
  EXPECT_EQ(catalog_.take_victim(), std::nullopt);
  catalog_.end_read(*ref);
  EXPECT_TRUE(catalog_.take_victim().has_value());
}

TEST_P(FsCatalogTest, a_hit_or_touch_is_written_back_at_most_once_a_minute) {
  insert(0, 0, 1);
  catalog_.hit(numbered_key(0), {.request = 2}, Nanos(std::chrono::seconds(100)));
  catalog_.touch(numbered_key(0), Nanos(std::chrono::seconds(101)));
  EXPECT_EQ(touched(), 1u);
  catalog_.hit(numbered_key(0), {.request = 3}, Nanos(std::chrono::seconds(110)));
  EXPECT_EQ(touched(), 0u);
  catalog_.touch(numbered_key(0), Nanos(std::chrono::seconds(161)));
  EXPECT_EQ(touched(), 1u);
}

TEST_P(FsCatalogTest, records_used_before_the_scan_keep_the_order_of_their_use) {
  for (const int n : {1, 0, 2}) catalog_.insert_unordered({numbered_key(n), 8192});
  catalog_.touch(numbered_key(0), Nanos(1));
  const auto ref = catalog_.begin_read(numbered_key(1));
  EXPECT_FALSE(catalog_.insert_in_order({numbered_key(0), 8192}));
  EXPECT_FALSE(catalog_.insert_in_order({numbered_key(1), 8192})) << "pinned: its read will place it";
  EXPECT_TRUE(catalog_.insert_in_order({numbered_key(2), 8192}));
  catalog_.end_read(*ref);
  EXPECT_EQ(catalog_.size(), 3u);
}

TEST_P(FsCatalogTest, a_record_that_is_read_and_used_before_the_scan_stays_pinned) {
  catalog_.insert_unordered({numbered_key(0), 8192});
  const auto ref = catalog_.begin_read(numbered_key(0));
  catalog_.hit(numbered_key(0), {.request = 1}, Nanos(1));
  EXPECT_EQ(catalog_.take_victim(), std::nullopt);
  catalog_.end_read(*ref);
  EXPECT_TRUE(catalog_.take_victim().has_value());
}

// A scan first lists the names and then reads the times, so it inserts each record twice.
TEST_P(FsCatalogTest, the_second_insertion_of_a_scan_does_not_count_as_a_use) {
  FsCatalog other(GetParam());
  constexpr int kRecords = 6 * 544, kPrompts = 3000, kMost = 4000;  // 544: whole rounds of learning
  for (int n = 0; n < kRecords; ++n) catalog_.insert_unordered({numbered_key(n), 8192});
  for (int n = 0; n < kRecords; ++n) {
    EXPECT_TRUE(catalog_.insert_in_order({numbered_key(n), 8192}));
    other.insert({numbered_key(n), 8192}, {});
  }
  // Each prompt is used a second time, long after the records that were there at the start.
  std::vector<ChunkKey> gone, gone_of_other;
  for (int request = 1; request < kPrompts; ++request) {
    for (FsCatalog* catalog : {&catalog_, &other}) {
      for (const int n : {kRecords + request, kRecords + request - 2000}) {
        const EntryInfo entry_info{.request = static_cast<std::uint32_t>(request)};
        catalog->hit(numbered_key(n), entry_info, Nanos(1));
        catalog->insert({numbered_key(n), 8192}, entry_info);
      }
      while (catalog->size() > kMost)
        (catalog == &other ? gone_of_other : gone).push_back(catalog->take_victim()->key);
    }
  }
  EXPECT_EQ(gone, gone_of_other);
}

INSTANTIATE_TEST_SUITE_P(FsCatalog, FsCatalogTest, testing::ValuesIn(eviction_policy_names()),
                         [](const auto& info) { return info.param; });

// At a start, lookups find names in any order; then the scan provides the order of use.
TEST(FsCatalogStart, a_record_found_by_lookup_gets_its_place_from_the_scan) {
  for (const std::string& policy : eviction_policy_names()) {
    FsCatalog catalog(policy);
    for (const int n : {2, 0, 3}) catalog.insert_unordered({numbered_key(n), 8192});
    for (int n = 0; n < 5; ++n) EXPECT_TRUE(catalog.insert_in_order({numbered_key(n), 8192})) << n;
    for (int n = 0; n < 5; ++n) EXPECT_EQ(catalog.take_victim()->key, numbered_key(n)) << policy;
  }
}

// Several threads write a prompt's records; the writes end in any order, mostly from the head.
TEST(FsCatalogPrefix, a_prompt_written_in_any_order_is_evicted_from_its_end) {
  FsCatalog catalog("prefix");
  for (const int n : {0, 2, 1, 4, 3}) {
    const ChunkId parent = n == 0 ? 0 : chunk_id(numbered_key(n - 1));
    catalog.insert({numbered_key(n), 8192}, {.parent = parent, .request = 1});
  }
  for (int n = 4; n >= 0; --n) EXPECT_EQ(catalog.take_victim()->key, numbered_key(n));
}

}  // namespace
}  // namespace kv_offload
