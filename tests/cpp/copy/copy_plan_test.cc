// SPDX-License-Identifier: Apache-2.0
#include "copy/copy_plan.h"

#include <gtest/gtest.h>

#include <chrono>
#include <cstring>

#include "base/refused_chunks.h"
#include "copy/copy_cases.h"

namespace kv_offload {
namespace {

using testing::CopyCase;
using testing::draw_case;
using testing::expected_after;
using testing::snapshot;

// These addresses are only compared, never dereferenced.
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

TEST(CopyPlan, random_jobs_match_the_reference_copy) {
  std::mt19937_64 random(20260731);
  for (int i = 0; i < 1500; ++i) {
    const auto direction = i % 2 == 0 ? CopyDirection::kStore : CopyDirection::kLoad;
    CopyCase c = draw_case(random, direction);
    const auto expected = expected_after(c);
    const CopyPlan plan =
        make_copy_plan(c.layout, c.area.size(), c.job, i % 3 == 0 ? CopyOrder::kPages : CopyOrder::kArea);
    run(c, plan);
    ASSERT_EQ(plan.failed_groups, 0u);
    ASSERT_TRUE(snapshot(c) == expected) << "case " << i;
  }
}

TEST(CopyPlan, segments_are_sorted_disjoint_and_merged) {
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

TEST(CopyPlan, a_gap_in_cache_or_area_splits_segments) {
  const CacheLayout padded = one_tensor(4096, 8192, 1);
  EXPECT_EQ(make_copy_plan(padded, 1 << 20, job_of(CopyDirection::kStore, {4, 5}, {10, 11})).segments.size(),
            2u);
  const CacheLayout dense = one_tensor(4096, 4096, 1);
  EXPECT_EQ(make_copy_plan(dense, 1 << 20, job_of(CopyDirection::kStore, {4, 5}, {10, 12})).segments.size(),
            2u);
  EXPECT_EQ(make_copy_plan(dense, 1 << 20, job_of(CopyDirection::kStore, {4, 6}, {10, 11})).segments.size(),
            2u);
}

TEST(CopyPlan, rows_in_reverse_order_are_merged_too) {
  const CacheLayout layout = one_tensor(4096, 4096, 1);
  const CopyPlan plan =
      make_copy_plan(layout, 1 << 20, job_of(CopyDirection::kLoad, {7, 6, 5}, {12, 11, 10}));
  ASSERT_EQ(plan.segments.size(), 1u);
  EXPECT_EQ(plan.segments[0].bytes, 3u * 4096);
}

TEST(CopyPlan, a_load_may_start_and_end_inside_a_chunk) {
  const CacheLayout layout = one_tensor(100, 128, 4);
  const CopyPlan plan = make_copy_plan(layout, 1 << 20, job_of(CopyDirection::kLoad, {1, 2, 3}, {0, 1}, 6));
  ASSERT_EQ(plan.segments.size(), 3u);
  EXPECT_EQ(plan.segments[0].area_offset, 200u);  // slot 2 of the first chunk
  EXPECT_EQ(plan.segments[1].area_offset, 300u);
  EXPECT_EQ(plan.segments[2].area_offset, 4096u);  // slot 0 of the second chunk
}

TEST(CopyPlan, a_store_that_lacks_blocks_fails_only_its_group) {
  CacheLayout layout = one_tensor(100, 128, 2);
  layout.groups.push_back({{0, 64}});
  CopyJob job{.id = 1, .direction = CopyDirection::kStore};
  job.block_ids = {1, 2, 3, 4, 5};  // the first group lacks one (null) block
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

CacheLayout of_tails(std::uint32_t blocks_per_chunk, std::uint32_t kept) {
  CacheLayout layout = one_tensor(100, 128, blocks_per_chunk);
  layout.tail_blocks = {kept};
  return layout;
}

TEST(CopyPlan, a_tail_row_holds_the_last_blocks_of_its_chunk) {
  const CacheLayout layout = of_tails(4, 2);
  EXPECT_EQ(layout.shard_bytes(0), 200u);
  const CopyPlan plan =
      make_copy_plan(layout, 1 << 20, job_of(CopyDirection::kStore, {1, 3, 5, 7, 9, 11}, {0, 1}, 2));
  EXPECT_EQ(plan.failed_groups, 0u);
  ASSERT_EQ(plan.segments.size(), 4u);
  EXPECT_EQ(plan.segments[0].cache, at(0x10000 + 1 * 128));
  EXPECT_EQ(plan.segments[0].area_offset, 0u);
  EXPECT_EQ(plan.segments[2].cache, at(0x10000 + 9 * 128));
  EXPECT_EQ(plan.segments[2].area_offset, 4096u);
}

TEST(CopyPlan, a_first_chunk_that_lacks_blocks_is_refused_alone) {
  for (const std::uint32_t kept : {0u, 3u}) {
    const CopyPlan plan = make_copy_plan(of_tails(4, kept), 1 << 20,
                                         job_of(CopyDirection::kStore, {1, 3, 5, 7, 9, 11}, {0, 1}, 2));
    EXPECT_EQ(plan.failed_groups, refused_first(0));
    EXPECT_EQ(plan.bytes, (kept == 0 ? 4 : kept) * 100u);
    EXPECT_EQ(plan.segments[0].area_offset, 4096u);
  }
}

TEST(CopyPlan, a_store_that_lacks_blocks_at_unknown_positions_is_refused) {
  const CopyPlan plan =
      make_copy_plan(of_tails(4, 2), 1 << 20, job_of(CopyDirection::kStore, {1, 3, 5, 7, 9}, {0, 1}, 2));
  EXPECT_EQ(plan.failed_groups, refused_group(0));
  EXPECT_TRUE(plan.segments.empty());
}

TEST(CopyPlan, a_rank_without_layers_of_a_group_refuses_no_chunk) {
  CacheLayout layout = one_tensor(100, 128, 4);
  layout.groups[0].clear();
  const CopyPlan plan = make_copy_plan(layout, 1 << 20, job_of(CopyDirection::kStore, {1, 3}, {0}, 2));
  EXPECT_EQ(plan.failed_groups, 0u);
  EXPECT_TRUE(plan.segments.empty());
}

TEST(CopyPlan, a_load_never_reads_blocks_that_rows_do_not_hold) {
  const CacheLayout layout = of_tails(4, 2);
  const CopyPlan plan = make_copy_plan(layout, 1 << 20, job_of(CopyDirection::kLoad, {9}, {2}, 7));
  ASSERT_EQ(plan.segments.size(), 1u);
  EXPECT_EQ(plan.segments[0].area_offset, 2u * 4096 + 100);
  EXPECT_THROW(make_copy_plan(layout, 1 << 20, job_of(CopyDirection::kLoad, {7, 8, 9}, {0}, 5)),
               InvalidArgument);
  EXPECT_THROW(make_copy_plan(layout, 1 << 20, job_of(CopyDirection::kLoad, {8, 9, 10}, {0, 1}, 6)),
               InvalidArgument);
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

TEST(CopyPlan, a_chunk_of_states_stores_only_its_last_block) {
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

TEST(CopyPlan, a_load_of_states_fills_only_each_chunks_last_block) {
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

// A cache with `heads` KV heads distributed over `ranks`. Every byte encodes its head, layer, block
// and offset.
struct SharedOut {
  static constexpr std::uint64_t kHeads = 4, kBlocks = 6, kLayers = 3, kBlocksPerChunk = 2;
  static constexpr std::uint64_t kHeadBytes = 720;  // per block and layer; a shard ends inside a page

  explicit SharedOut(std::uint64_t ranks) : ranks_(ranks), heads_(kHeads / ranks) {
    layout.blocks_per_chunk = kBlocksPerChunk;
    layout.shards_per_area = static_cast<std::uint32_t>(heads_);
    layout.groups.emplace_back();
    caches.assign(ranks * kLayers, std::vector<std::byte>(kBlocks * heads_ * kHeadBytes));
  }
  void compute() {
    for (std::uint64_t rank = 0; rank < ranks_; ++rank) {
      for (std::uint64_t layer = 0; layer < kLayers; ++layer) {
        auto& cache = caches[rank * kLayers + layer];
        for (std::uint64_t at = 0; at < cache.size(); ++at) {
          const std::uint64_t head = rank * heads_ + at / kHeadBytes % heads_;
          const std::uint64_t block = at / (kHeadBytes * heads_);
          const std::uint64_t place = ((head * kLayers + layer) * kBlocks + block) << 12 | at % kHeadBytes;
          cache[at] = static_cast<std::byte>((place + 1) * 0x9E3779B97F4A7C15ull >> 56);
        }
      }
    }
  }
  // Returns the areas of all ranks, concatenated.
  std::vector<std::byte> copy(CopyDirection direction, std::vector<std::byte> rows = {}) {
    const std::vector<std::int64_t> ids = {5, 0, 3, 2};
    const std::uint64_t chunks = ids.size() / kBlocksPerChunk;
    const std::uint64_t row = kHeads * round_up(kHeadBytes * kLayers * kBlocksPerChunk, kPageBytes);
    rows.resize(chunks * row);
    for (std::uint64_t rank = 0; rank < ranks_; ++rank) {
      layout.tensors.clear();
      layout.groups[0].clear();
      for (std::uint32_t layer = 0; layer < kLayers; ++layer) {
        auto& cache = caches[rank * kLayers + layer];
        layout.tensors.push_back({cache.data(), kBlocks, heads_ * kHeadBytes});
        layout.groups[0].push_back({layer, heads_ * kHeadBytes});
      }
      layout.validate();
      const std::uint64_t mine = row / ranks_;
      std::vector<RowId> row_ids;
      for (std::uint64_t chunk = 0; chunk < chunks; ++chunk)
        row_ids.push_back(static_cast<RowId>(chunk * mine / kPageBytes));
      const CopyPlan plan = make_copy_plan(layout, chunks * mine, job_of(direction, ids, row_ids));
      for (const CopySegment& segment : plan.segments) {
        // In a chunk's record, the rows of the ranks follow each other.
        const std::uint64_t chunk = segment.area_offset / mine;
        std::byte* in_row = rows.data() + chunk * row + rank * mine + segment.area_offset % mine;
        if (direction == CopyDirection::kStore) {
          std::memcpy(in_row, segment.cache, segment.bytes);
        } else {
          std::memcpy(segment.cache, in_row, segment.bytes);
        }
      }
    }
    return rows;
  }

  CacheLayout layout;
  std::vector<std::vector<std::byte>> caches;  // [rank][layer]

 private:
  std::uint64_t ranks_;
  std::uint64_t heads_;  // per rank
};

TEST(CopyPlan, canonical_rows_are_equal_for_1_2_and_4_ranks) {
  SharedOut one(1);
  one.compute();
  const std::vector<std::byte> rows = one.copy(CopyDirection::kStore);
  for (const std::uint64_t ranks : {1, 2, 4}) {
    SharedOut other(ranks);
    other.compute();
    EXPECT_TRUE(other.copy(CopyDirection::kStore) == rows) << ranks << " ranks";
    const auto computed = other.caches;
    for (auto& cache : other.caches) std::fill(cache.begin(), cache.end(), std::byte{0});
    EXPECT_FALSE(other.caches == computed);
    (void)other.copy(CopyDirection::kLoad, rows);
    EXPECT_TRUE(other.copy(CopyDirection::kStore) == rows)
        << ranks << " ranks load the rows that one rank stored";
  }
}

TEST(CopyPlan, page_order_reads_each_page_from_first_to_last_head) {
  CacheLayout layout = one_tensor(300, 512, 1);
  layout.shards_per_area = 3;
  const CopyJob job = job_of(CopyDirection::kStore, {1, 2}, {3, 0});
  const CopyPlan plan = make_copy_plan(layout, 1 << 20, job, CopyOrder::kPages);
  ASSERT_EQ(plan.segments.size(), 6u);
  for (std::uint64_t s = 0; s < 6; ++s) {
    const std::uint64_t block = s < 3 ? 2 : 1;  // the first row of the area
    EXPECT_EQ(plan.segments[s].cache, at(0x10000 + block * 512 + s % 3 * 100));
    EXPECT_EQ(plan.segments[s].area_offset, s * 4096);
    EXPECT_EQ(plan.segments[s].bytes, 100u);
  }
}

TEST(CopyPlan, a_row_of_several_shards_ends_with_its_last_shard) {
  CacheLayout layout = one_tensor(300, 300, 1);
  layout.shards_per_area = 3;
  EXPECT_EQ(layout.shard_bytes(0), 100u);
  EXPECT_EQ(layout.row_bytes(0), 2 * 4096u + 100);
  const auto plan = [&](std::uint64_t area, std::vector<RowId> rows) {
    return make_copy_plan(layout, area, job_of(CopyDirection::kStore, {1, 2}, std::move(rows)));
  };
  EXPECT_EQ(plan(5 * 4096 + 2 * 4096, {0, 3}).segments.size(), 6u);
  EXPECT_THROW(plan(5 * 4096 + 99, {0, 3}), InvalidArgument);
  EXPECT_THROW(plan(20 * 4096, {0, 2}), InvalidArgument) << "the shards overlap";
}

TEST(CopyPlan, an_empty_job_has_an_empty_plan) {
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

TEST(CopyPlan, block_ids_beyond_32_bits_are_addressed_correctly) {
  CacheLayout layout = one_tensor(1, 1, 1);
  layout.tensors[0].num_blocks = std::uint64_t{1} << 40;
  const std::int64_t id = (std::int64_t{1} << 39) + 5;
  const CopyPlan plan = make_copy_plan(layout, 1 << 20, job_of(CopyDirection::kLoad, {id}, {0}));
  EXPECT_EQ(plan.segments.at(0).cache, at(0x10000 + static_cast<std::uint64_t>(id)));
}

TEST(CopyPlan, an_inconsistent_job_is_refused) {
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

TEST(CacheLayout, an_invalid_layout_is_refused) {
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
  layout.groups.resize(32);
  EXPECT_THROW(layout.validate(), InvalidArgument);
  layout = one_tensor(100, 128, 1);
  layout.shards_per_area = 3;  // 3 does not divide a page of 100 bytes
  EXPECT_THROW(layout.validate(), InvalidArgument);
  layout.shards_per_area = 0;
  EXPECT_THROW(layout.validate(), InvalidArgument);
  layout = of_states(1);
  layout.holds_states = {true, false};
  EXPECT_THROW(layout.validate(), InvalidArgument);
}

}  // namespace
}  // namespace kv_offload
