// SPDX-License-Identifier: Apache-2.0
#include "copy/segment_split.h"

#include <gtest/gtest.h>

#include <random>

namespace kv_offload {
namespace {

std::vector<CopySegment> draw_segments(std::mt19937_64& random, std::byte* cache, std::size_t count) {
  std::vector<CopySegment> segments;
  std::uint64_t offset = random() % 100;
  for (std::size_t i = 0; i < count; ++i) {
    const std::uint64_t bytes = 1 + random() % 50'000;
    segments.push_back({cache + random() % 1000, offset, bytes});
    offset += bytes + (random() % 2) * (random() % 5000);
  }
  return segments;
}

TEST(Split, split_keeps_every_byte_in_order_within_the_limits) {
  std::mt19937_64 random(8);
  std::vector<std::byte> cache(100'000);
  for (int i = 0; i < 300; ++i) {
    const std::vector<CopySegment> before = draw_segments(random, cache.data(), 1 + random() % 40);
    const SplitLimits limits{.max_bytes = 1 + random() % 60'000,
                             .max_segments = static_cast<std::uint32_t>(1 + random() % 10),
                             .boundary = random() % 3 == 0 ? 0 : 4096 * (1 + random() % 5)};
    std::vector<CopySegment> segments = before;
    const std::vector<SegmentRange> ranges = split(&segments, limits);
    std::size_t next = 0;
    for (const SegmentRange& range : ranges) {
      ASSERT_EQ(range.first, next);
      ASSERT_LE(range.count, limits.max_segments);
      ASSERT_LE(range.bytes, limits.max_bytes);
      ASSERT_GT(range.count, 0u);
      std::uint64_t bytes = 0;
      for (std::size_t s = range.first; s < range.first + range.count; ++s) bytes += segments[s].bytes;
      ASSERT_EQ(bytes, range.bytes);
      next += range.count;
    }
    ASSERT_EQ(next, segments.size());
    std::size_t at = 0;
    for (const CopySegment& whole : before) {
      for (std::uint64_t done = 0; done < whole.bytes; ++at) {
        const CopySegment& part = segments.at(at);
        ASSERT_EQ(part.cache, whole.cache + done);
        ASSERT_EQ(part.area_offset, whole.area_offset + done);
        if (limits.boundary != 0) {
          ASSERT_EQ(part.area_offset / limits.boundary,
                    (part.area_offset + part.bytes - 1) / limits.boundary);
        }
        done += part.bytes;
      }
    }
    ASSERT_EQ(at, segments.size());
  }
}

TEST(RowRuns, runs_are_disjoint_in_staging_and_keep_alignment) {
  std::mt19937_64 random(9);
  std::vector<std::byte> cache(100'000);
  for (int i = 0; i < 200; ++i) {
    std::vector<CopySegment> segments = draw_segments(random, cache.data(), 1 + random() % 40);
    const std::uint64_t boundary = i % 2 == 0 ? 0 : kPageBytes * (1 + random() % 5);
    (void)split(&segments, {.boundary = boundary});
    const std::vector<RowRun> runs = row_runs(segments, boundary);
    std::uint64_t end = 0;
    std::uint64_t bytes = 0;
    for (const RowRun& run : runs) {
      ASSERT_GE(run.staging_offset, end);
      ASSERT_EQ(run.staging_offset % 16, run.area_offset % 16);
      if (boundary != 0) {
        ASSERT_EQ(run.area_offset / boundary, (run.area_offset + run.bytes - 1) / boundary);
      }
      end = run.staging_offset + run.bytes;
      bytes += run.bytes;
    }
    ASSERT_EQ(staging_bytes(runs), end);
    ASSERT_LE(end, bytes + 32 * runs.size());
    std::uint64_t expected = 0;
    for (const CopySegment& segment : segments) expected += segment.bytes;
    ASSERT_EQ(bytes, expected);
  }
}

TEST(Pieces, pieces_beyond_the_capacity_are_counted_but_not_written) {
  std::vector<std::byte> cache(3 * kPieceBytes);
  std::vector<std::byte> area(3 * kPieceBytes);
  const std::vector<CopySegment> segments = {{cache.data(), 0, 2 * kPieceBytes + 1}};
  std::vector<PackPiece> pieces(4);
  EXPECT_EQ(cut_for_area(segments, area.data(), pieces.data(), 3), 3u);
  EXPECT_EQ(pieces[2].bytes, 1u);
  EXPECT_EQ(pieces[2].row, area.data() + 2 * kPieceBytes);
  pieces[2] = {};
  EXPECT_EQ(cut_for_area(segments, area.data(), pieces.data(), 2), 3u);
  EXPECT_EQ(pieces[2].cache, nullptr);
  const std::vector<RowRun> runs = row_runs(segments, 0);
  EXPECT_EQ(cut_for_staging(segments, runs, area.data(), pieces.data(), 2), 3u);
}

// Tests the kernels' indexing, thread by thread, for every alignment of both sides.
TEST(PackIndex, each_byte_is_moved_at_any_alignment_and_thread_count) {
  std::mt19937_64 random(10);
  std::vector<std::byte> from(80'000);
  for (std::byte& b : from) b = static_cast<std::byte>(random());
  for (int i = 0; i < 1500; ++i) {
    const std::uint64_t bytes = i % 3 == 0 ? random() % 70 : random() % (kPieceBytes + 1);
    const std::uint64_t source = i % 2 == 0 ? random() % 64 : random() % 4 * 16;
    const std::uint64_t target = i % 2 == 0 ? random() % 64 : random() % 4 * 16;
    const unsigned threads = 1 + random() % 300;
    std::vector<std::byte> got(kPieceBytes + 128, std::byte{0x5A});
    std::vector<std::byte> expected = got;
    std::copy_n(from.begin() + static_cast<std::ptrdiff_t>(source), bytes,
                expected.begin() + static_cast<std::ptrdiff_t>(target));
    for (unsigned t = 0; t < threads; ++t) {
      pack::move_piece(got.data() + target, from.data() + source, bytes, t, threads);
    }
    ASSERT_EQ(got, expected) << bytes << " bytes, " << source << " -> " << target << ", " << threads
                             << " threads";
  }
}

}  // namespace
}  // namespace kv_offload
