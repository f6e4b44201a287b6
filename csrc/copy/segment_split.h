// SPDX-License-Identifier: Apache-2.0
// Splits a plan's segments: into sub-jobs for a queue, into pieces that a thread block copies at a time, and
// into row runs for one DMA each. Pure.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "copy/copy_plan.h"
#include "copy/pack_index.h"

namespace kv_offload {

struct SplitLimits {
  std::uint64_t max_bytes = 8 << 20;
  std::uint32_t max_segments = 4096;
  // No segment crosses a multiple of this area offset, because each pinned piece is its own registration. 0 =
  // none.
  std::uint64_t boundary = 0;
};
struct SegmentRange {
  std::size_t first = 0;
  std::size_t count = 0;
  std::uint64_t bytes = 0;
};
// Splits segments in place and groups them, in order, into ranges within the limits.
std::vector<SegmentRange> split(std::vector<CopySegment>* segments, const SplitLimits& limits);

// cut_for_area: the kernel's other side is the pinned area itself; cut_for_staging: it is a staging buffer
// that stores the segments one after the other. Writes at most `capacity` pieces of at most kPieceBytes.
// Returns the number of pieces, or capacity + 1 if they do not fit.
std::size_t cut_for_area(std::span<const CopySegment> segments, std::byte* area, PackPiece* pieces,
                         std::size_t capacity);

// A contiguous range of the area and its place in the staging buffer.
struct RowRun {
  std::uint64_t area_offset = 0;
  std::uint64_t staging_offset = 0;
  std::uint64_t bytes = 0;
};
// Merges segments that are adjacent in the area into runs. A run starts in staging at the same offset modulo
// 16 as in the area, so that vectors stay aligned. No run crosses a multiple of `boundary` (0 = none).
// REQUIRES: no segment crosses one.
std::vector<RowRun> row_runs(std::span<const CopySegment> segments, std::uint64_t boundary);
// Returns the staging bytes that the runs need.
std::uint64_t staging_bytes(std::span<const RowRun> runs);
std::size_t cut_for_staging(std::span<const CopySegment> segments, std::span<const RowRun> runs,
                            std::byte* staging, PackPiece* pieces, std::size_t capacity);

}  // namespace kv_offload
