// SPDX-License-Identifier: Apache-2.0
#include "cache/row_provider.h"

#include "cache/parts.h"

namespace kv_offload {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

class RowProviderTest : public ::testing::Test {
 protected:
  void make(PartsOptions options) { parts_ = std::make_unique<SupplyParts>(std::move(options)); }
  SupplyParts& parts() {
    if (!parts_) make({});
    return *parts_;
  }
  void fill() {
    for (const char* name : {"a", "b", "c", "d"}) slots_[name] = parts().resident(name);
  }
  RowId take(std::uint32_t request = 1) { return parts().row_provider.take(0, request, &evicted_); }

  std::unique_ptr<SupplyParts> parts_;
  std::map<std::string, Slot> slots_;
  std::vector<ChunkKey> evicted_;
};

TEST_F(RowProviderTest, a_free_row_is_used_before_any_eviction) {
  parts().resident("a");
  EXPECT_NE(take(), kNoRow);
  EXPECT_THAT(evicted_, IsEmpty());
}

TEST_F(RowProviderTest, the_next_victim_is_evicted_for_its_row) {
  fill();
  parts().chunks.pin(slots_["a"]);
  EXPECT_NE(take(), kNoRow);
  EXPECT_THAT(evicted_, ElementsAre(key_of("b")));
  EXPECT_EQ(parts().key_history.eviction_reason(key_of("b")),
            static_cast<std::uint8_t>(MissReason::kEvicted));
  parts().row_provider.flush_metrics();
  parts().row_provider.flush_metrics();
  EXPECT_EQ(parts().metrics.value("kv_offload_evicted_bytes_total", {"cpu"}), kPageBytes);
}

TEST_F(RowProviderTest, no_chunk_is_evicted_for_one_that_is_expected_later) {
  parts().chunks.set_now(100);
  fill();
  for (const auto& [name, slot] : slots_) parts().chunks.set_return(slot, 120);
  EXPECT_EQ(parts().row_provider.take(0, 1, &evicted_, 121), kNoRow);
  EXPECT_THAT(evicted_, IsEmpty());
  EXPECT_NE(parts().row_provider.take(0, 1, &evicted_, 119), kNoRow);
  EXPECT_NE(parts().row_provider.take(0, 1, &evicted_, 0), kNoRow);  // unknown
  parts().chunks.set_now(120);                                       // the others are overdue
  EXPECT_NE(parts().row_provider.take(0, 1, &evicted_, 121), kNoRow);
}

// The forgotten chunk is far from those that allocate() checks.
TEST_F(RowProviderTest, a_forgotten_chunk_makes_room_before_any_eviction) {
  constexpr std::size_t kRows = 4 * HostChunks::kCheckedAtOnce;
  make({.rows = kRows});
  HostChunks& chunks = parts().chunks;
  std::vector<Slot> slots;
  for (std::size_t i = 0; i < kRows; ++i) slots.push_back(parts().resident(fmt::format("{}", i)));
  for (std::size_t i = 0; i + 1 < kRows; ++i) chunks.discard(slots[i]);
  chunks.forget();
  for (std::size_t i = 0; i + 1 < kRows; ++i) parts().resident(fmt::format("next{}", i));
  ASSERT_EQ(chunks.forgotten(), 1u);
  EXPECT_NE(take(), kNoRow);
  EXPECT_THAT(evicted_, IsEmpty());
  EXPECT_EQ(chunks.resident(), kRows - 1);
  EXPECT_EQ(chunks.forgotten(), 0u);
}

TEST_F(RowProviderTest, a_request_does_not_evict_its_own_chunks) {
  fill();
  for (const auto& [name, slot] : slots_) parts().chunks.access(slot, 1, 0);
  EXPECT_EQ(take(1), kNoRow);
  EXPECT_NE(take(2), kNoRow);
}

TEST_F(RowProviderTest, an_eviction_reports_the_last_use_to_the_tier) {
  parts().record("a");
  fill();
  take();
  EXPECT_GT(parts().tier->records.at(key_of("a")).used, 0u);
}

TEST_F(RowProviderTest, queued_writes_are_cancelled_when_nothing_else_is_left) {
  fill();
  for (const auto& [name, slot] : slots_) parts().ops.write(0, {&slot, 1});
  EXPECT_NE(take(), kNoRow);
  EXPECT_EQ(parts().tier->queued_writes(), 0u);
}

TEST_F(RowProviderTest, running_writes_are_not_awaited) {
  fill();
  for (const auto& [name, slot] : slots_) parts().ops.write(0, {&slot, 1});
  for (int i = 0; i < 4; ++i) parts().tier->start(OpKind::kWrite);
  EXPECT_EQ(take(), kNoRow);
}

TEST_F(RowProviderTest, chunks_being_written_before_eviction_are_skipped) {
  PartsOptions options;
  options.cache.tiers = {{.write_policy = WritePolicy::kOnEvict}};
  make(std::move(options));
  fill();
  // Writes pin all chunks. The writes are shed and not queued again.
  EXPECT_NE(take(), kNoRow);
  EXPECT_THAT(evicted_, ElementsAre(key_of("a")));
  EXPECT_EQ(parts().tier->queued_writes(), 0u);
}

TEST_F(RowProviderTest, unwritten_evicted_chunks_are_counted_even_for_a_whole_slab) {
  PartsOptions options{.rows = 64, .shard_bytes = {4096, 65536}};
  options.cache.tiers = {{.write_policy = WritePolicy::kOnEvict}};
  make(std::move(options));
  for (RowId row = parts().chunks.allocate(0); row != kNoRow; row = parts().chunks.allocate(0)) {
    const ChunkKey key = key_of(fmt::format("s{}", row));
    parts().chunks.finish_store(parts().chunks.insert_filling(key, 0, row, {}, kNoTicket));
  }
  parts().tier->switch_off();
  parts().ops.poll();
  EXPECT_NE(parts().row_provider.take(1, 1, &evicted_), kNoRow);
  EXPECT_GT(evicted_.size(), 1u);
  EXPECT_EQ(parts().metrics.value("kv_offload_dropped_bytes_total", {"fs", "pressure"}),
            static_cast<double>(evicted_.size()) * 4096);
}

}  // namespace
}  // namespace kv_offload
