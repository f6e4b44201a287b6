#include "copy/copy_plan.h"

#include <gtest/gtest.h>

#include <chrono>
#include <cstring>

#include "copy/copy_cases.h"

namespace kv_offload {
namespace {

using testing::CopyCase;
using testing::draw_case;
using testing::expected_after;
using testing::snapshot;

// Addresses are only compared here, never read.
std::byte* at(std::uint64_t address) { return reinterpret_cast<std::byte*>(address); }

CacheLayout one_tensor(std::uint64_t page, std::uint64_t stride, std::uint32_t blocks_per_chunk) {
  return {.tensors = {{at(0x10000), 1000, stride}},
          .groups = {{{0, page}}},
          .blocks_per_chunk = blocks_per_chunk};
}

CopyJob job_of(CopyDirection direction, std::vector<std::int64_t> ids, std::vector<RowId> rows,
               std::uint64_t first = 0) {
  CopyJob job{.id = 7, .direction = direction};
  job.group_sizes = {static_cast<std::uint32_t>(ids.size())};
  job.group_rows = {static_cast<std::uint32_t>(rows.size())};
  job.block_indices = {first};
  job.block_ids = std::move(ids);
  job.rows = std::move(rows);
  return job;
}

void run(const CopyCase& c, const CopyPlan& plan) {
  for (const CopySegment& s : plan.segments) {
    std::byte* row = const_cast<std::byte*>(c.area.data()) + s.area_offset;
    if (c.job.direction == CopyDirection::kStore) {
      std::memcpy(row, s.cache, s.bytes);
    } else {
      std::memcpy(s.cache, row, s.bytes);
    }
  }
}

TEST(CopyPlan, agrees_with_the_plain_reference_everywhere) {
  std::mt19937_64 random(20260731);
  for (int i = 0; i < 1500; ++i) {
    const auto direction = i % 2 == 0 ? CopyDirection::kStore : CopyDirection::kLoad;
    CopyCase c = draw_case(random, direction);
    const auto expected = expected_after(c);
    const CopyPlan plan = make_copy_plan(c.layout, c.area.size(), c.job);
    run(c, plan);
    ASSERT_EQ(plan.failed_groups, 0u);
    ASSERT_TRUE(snapshot(c) == expected) << "case " << i;
  }
}

TEST(CopyPlan, segments_are_sorted_apart_and_merged_as_far_as_both_sides_allow) {
  std::mt19937_64 random(5);
  for (int i = 0; i < 500; ++i) {
    const CopyCase c = draw_case(random, i % 2 == 0 ? CopyDirection::kStore : CopyDirection::kLoad);
    const CopyPlan plan = make_copy_plan(c.layout, c.area.size(), c.job);
    std::uint64_t bytes = 0;
    for (std::size_t s = 0; s < plan.segments.size(); ++s) {
      const CopySegment& segment = plan.segments[s];
      bytes += segment.bytes;
      ASSERT_LE(segment.area_offset + segment.bytes, c.area.size());
      if (s == 0) continue;
      const CopySegment& before = plan.segments[s - 1];
      const std::uint64_t end = before.area_offset + before.bytes;
      ASSERT_LE(end, segment.area_offset);
      ASSERT_FALSE(end == segment.area_offset && before.cache + before.bytes == segment.cache);
    }
    ASSERT_EQ(bytes, plan.bytes);
  }
}

TEST(CopyPlan, adjacent_blocks_in_adjacent_rows_are_one_segment) {
  const CacheLayout layout = one_tensor(4096, 4096, 2);
  const CopyPlan plan =
      make_copy_plan(layout, 1 << 20, job_of(CopyDirection::kStore, {4, 5, 6, 7}, {10, 12}));
  ASSERT_EQ(plan.segments.size(), 1u);
  EXPECT_EQ(plan.segments[0].cache, at(0x10000 + 4 * 4096));
  EXPECT_EQ(plan.segments[0].area_offset, 10u * 4096);
  EXPECT_EQ(plan.segments[0].bytes, 4u * 4096);
}

TEST(CopyPlan, a_gap_on_either_side_ends_the_run) {
  const CacheLayout padded = one_tensor(4096, 8192, 1);
  EXPECT_EQ(make_copy_plan(padded, 1 << 20, job_of(CopyDirection::kStore, {4, 5}, {10, 11})).segments.size(),
            2u);
  const CacheLayout dense = one_tensor(4096, 4096, 1);
  EXPECT_EQ(make_copy_plan(dense, 1 << 20, job_of(CopyDirection::kStore, {4, 5}, {10, 12})).segments.size(),
            2u);
  EXPECT_EQ(make_copy_plan(dense, 1 << 20, job_of(CopyDirection::kStore, {4, 6}, {10, 11})).segments.size(),
            2u);
}

TEST(CopyPlan, rows_given_backwards_merge_all_the_same) {
  const CacheLayout layout = one_tensor(4096, 4096, 1);
  const CopyPlan plan =
      make_copy_plan(layout, 1 << 20, job_of(CopyDirection::kLoad, {7, 6, 5}, {12, 11, 10}));
  ASSERT_EQ(plan.segments.size(), 1u);
  EXPECT_EQ(plan.segments[0].bytes, 3u * 4096);
}

TEST(CopyPlan, a_load_may_start_late_and_end_early) {
  const CacheLayout layout = one_tensor(100, 128, 4);
  const CopyPlan plan = make_copy_plan(layout, 1 << 20, job_of(CopyDirection::kLoad, {1, 2, 3}, {0, 1}, 6));
  ASSERT_EQ(plan.segments.size(), 3u);
  EXPECT_EQ(plan.segments[0].area_offset, 200u);  // slot 2 of the first chunk
  EXPECT_EQ(plan.segments[1].area_offset, 300u);
  EXPECT_EQ(plan.segments[2].area_offset, 4096u);  // slot 0 of the second
}

TEST(CopyPlan, a_store_that_does_not_fill_its_chunks_fails_its_group_alone) {
  CacheLayout layout = one_tensor(100, 128, 2);
  layout.groups.push_back({{0, 64}});
  CopyJob job{.id = 1, .direction = CopyDirection::kStore};
  job.block_ids = {1, 2, 3, 4, 5};  // the first group lacks a (null) block
  job.group_sizes = {3, 2};
  job.block_indices = {0, 8};
  job.rows = {0, 1, 2};
  job.group_rows = {2, 1};
  const CopyPlan plan = make_copy_plan(layout, 1 << 20, job);
  EXPECT_EQ(plan.failed_groups, 1u);
  ASSERT_EQ(plan.segments.size(), 2u);
  EXPECT_EQ(plan.segments[0].area_offset, 2u * 4096);
  EXPECT_EQ(plan.bytes, 128u);
}

TEST(CopyPlan, a_store_that_starts_inside_a_chunk_fails) {
  const CacheLayout layout = one_tensor(100, 128, 2);
  EXPECT_EQ(make_copy_plan(layout, 1 << 20, job_of(CopyDirection::kStore, {1, 2}, {0}, 3)).failed_groups, 1u);
  EXPECT_EQ(make_copy_plan(layout, 1 << 20, job_of(CopyDirection::kStore, {1, 2}, {0, 1}, 3)).failed_groups,
            1u);
  EXPECT_EQ(make_copy_plan(layout, 1 << 20, job_of(CopyDirection::kStore, {}, {0})).failed_groups, 1u);
}

CacheLayout of_states(std::uint32_t blocks_per_chunk) {
  CacheLayout layout = one_tensor(100, 128, blocks_per_chunk);
  layout.holds_states = {true};
  return layout;
}

TEST(CopyPlan, of_a_chunk_of_states_the_last_is_kept_alone_and_fills_a_row_of_one_block) {
  const CacheLayout layout = of_states(4);
  EXPECT_EQ(layout.shard_bytes(0), 100u);
  for (const auto direction : {CopyDirection::kStore, CopyDirection::kLoad}) {
    const CopyPlan plan = make_copy_plan(layout, 1 << 20, job_of(direction, {9}, {2}, 7));
    EXPECT_EQ(plan.failed_groups, 0u);
    ASSERT_EQ(plan.segments.size(), 1u);
    EXPECT_EQ(plan.segments[0].cache, at(0x10000 + 9 * 128));
    EXPECT_EQ(plan.segments[0].area_offset, 2u * 4096);
    EXPECT_EQ(plan.segments[0].bytes, 100u);
  }
}

TEST(CopyPlan, a_load_of_states_fills_the_last_block_of_each_chunk_and_no_other) {
  const CopyPlan plan =
      make_copy_plan(of_states(2), 1 << 20, job_of(CopyDirection::kLoad, {3, 4, 5, 6}, {0, 1}, 8));
  ASSERT_EQ(plan.segments.size(), 2u);
  EXPECT_EQ(plan.segments[0].cache, at(0x10000 + 4 * 128));
  EXPECT_EQ(plan.segments[1].cache, at(0x10000 + 6 * 128));
  EXPECT_EQ(plan.bytes, 200u);
}

TEST(CopyPlan, a_store_of_states_that_are_not_the_last_of_their_chunks_fails) {
  using enum CopyDirection;
  const CacheLayout layout = of_states(4);
  EXPECT_EQ(make_copy_plan(layout, 1 << 20, job_of(kStore, {9}, {0}, 6)).failed_groups, 1u);
  EXPECT_EQ(make_copy_plan(layout, 1 << 20, job_of(kStore, {8, 9}, {0}, 6)).failed_groups, 1u);
  EXPECT_EQ(make_copy_plan(layout, 1 << 20, job_of(kStore, {}, {0})).failed_groups, 1u);
  EXPECT_EQ(make_copy_plan(layout, 1 << 20, job_of(kStore, {7, 9}, {0, 1}, 3)).failed_groups, 0u);
  EXPECT_THROW(make_copy_plan(layout, 1 << 20, job_of(kLoad, {8}, {0}, 6)), InvalidArgument);
  EXPECT_THROW(make_copy_plan(layout, 1 << 20, job_of(kLoad, {8, 9}, {0}, 7)), InvalidArgument);
  EXPECT_TRUE(make_copy_plan(layout, 1 << 20, job_of(kLoad, {}, {})).segments.empty());
}

TEST(CopyPlan, an_empty_job_is_an_empty_plan) {
  const CacheLayout layout = one_tensor(100, 128, 2);
  const CopyPlan plan = make_copy_plan(layout, 1 << 20, job_of(CopyDirection::kLoad, {}, {}, 3));
  EXPECT_TRUE(plan.segments.empty());
  EXPECT_EQ(plan.failed_groups, 0u);
}

TEST(CopyPlan, a_rank_without_a_group_copies_nothing_for_it) {
  CacheLayout layout = one_tensor(100, 128, 1);
  layout.groups.emplace_back();
  CopyJob job{.id = 1, .direction = CopyDirection::kStore};
  job.block_ids = {1, 2};
  job.group_sizes = {1, 1};
  job.block_indices = {0, 0};
  job.rows = {0, 1};
  job.group_rows = {1, 1};
  const CopyPlan plan = make_copy_plan(layout, 1 << 20, job);
  EXPECT_EQ(plan.segments.size(), 1u);
  EXPECT_EQ(plan.failed_groups, 0u);
}

TEST(CopyPlan, block_ids_beyond_32_bits_are_addresses_all_the_same) {
  CacheLayout layout = one_tensor(1, 1, 1);
  layout.tensors[0].num_blocks = std::uint64_t{1} << 40;
  const std::int64_t id = (std::int64_t{1} << 39) + 5;
  const CopyPlan plan = make_copy_plan(layout, 1 << 20, job_of(CopyDirection::kLoad, {id}, {0}));
  EXPECT_EQ(plan.segments.at(0).cache, at(0x10000 + static_cast<std::uint64_t>(id)));
}

TEST(CopyPlan, refuses_what_contradicts_itself) {
  const CacheLayout layout = one_tensor(4096, 4096, 2);
  const auto plan = [&](CopyJob job) { return make_copy_plan(layout, 10 * 4096, job); };
  using enum CopyDirection;
  EXPECT_THROW(plan(job_of(kStore, {1, 1000}, {0})), InvalidArgument);  // id out of range
  EXPECT_THROW(plan(job_of(kStore, {1, -1}, {0})), InvalidArgument);
  EXPECT_THROW(plan(job_of(kStore, {1, 2}, {9})), InvalidArgument);  // row ends outside the area
  EXPECT_THROW(plan(job_of(kStore, {1, 2}, {kNoRow})), InvalidArgument);
  EXPECT_THROW(plan(job_of(kStore, {1, 2, 3, 4}, {0, 1})), InvalidArgument);  // rows overlap
  EXPECT_THROW(plan(job_of(kLoad, {1, 2, 3}, {0})), InvalidArgument);         // too few rows
  EXPECT_THROW(plan(job_of(kLoad, {1, 2}, {0, 2})), InvalidArgument);         // too many rows
  EXPECT_THROW(plan(job_of(kLoad, {}, {0})), InvalidArgument);
  CopyJob job = job_of(kStore, {1, 2}, {0});
  job.group_sizes = {3};
  EXPECT_THROW(plan(job), InvalidArgument);
  job = job_of(kStore, {1, 2}, {0});
  job.group_rows = {2};
  EXPECT_THROW(plan(job), InvalidArgument);
  job = job_of(kStore, {1, 2}, {0});
  job.group_sizes = {2, 0};
  EXPECT_THROW(plan(job), InvalidArgument);
}

TEST(CacheLayout, refuses_what_is_not_a_cache) {
  EXPECT_NO_THROW(one_tensor(100, 128, 1).validate());
  EXPECT_THROW(one_tensor(129, 128, 1).validate(), InvalidArgument);  // page beyond the stride
  EXPECT_THROW(one_tensor(0, 128, 1).validate(), InvalidArgument);
  EXPECT_THROW(one_tensor(100, 128, 0).validate(), InvalidArgument);
  CacheLayout layout = one_tensor(100, 128, 1);
  layout.groups[0][0].tensor = 1;
  EXPECT_THROW(layout.validate(), InvalidArgument);
  layout = one_tensor(100, 128, 1);
  layout.tensors[0].base = nullptr;
  EXPECT_THROW(layout.validate(), InvalidArgument);
  layout = one_tensor(100, 128, 1);
  layout.groups.resize(65);
  EXPECT_THROW(layout.validate(), InvalidArgument);
  layout = of_states(1);
  layout.holds_states = {true, false};
  EXPECT_THROW(layout.validate(), InvalidArgument);
}

}  // namespace
}  // namespace kv_offload
