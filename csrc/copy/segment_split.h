// Cutting a plan's segments to size: into sub-jobs that a queue takes turns
// with, into pieces that one block of a kernel moves at a time, into the runs of
// a row that one DMA moves. Pure.
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
  // No segment crosses a multiple of this area offset (pinned pieces are not
  // one registration); 0: none.
  std::uint64_t boundary = 0;
};
struct SegmentRange {
  std::size_t first = 0;
  std::size_t count = 0;
  std::uint64_t bytes = 0;
};
// Cuts segments in place and groups them, in order, into ranges within the limits.
std::vector<SegmentRange> split(std::vector<CopySegment>* segments, const SplitLimits& limits);

// Where the kernel's other side lies: the pinned area itself, or a staging
// buffer that holds the segments one after the other.
// Writes at most `capacity` pieces of at most kPieceBytes; returns how many, or
// capacity + 1 when they do not fit.
std::size_t cut_for_area(std::span<const CopySegment> segments, std::byte* area, PackPiece* pieces,
                         std::size_t capacity);

// One contiguous stretch of the area and where it lies in the staging buffer.
struct RowRun {
  std::uint64_t area_offset = 0;
  std::uint64_t staging_offset = 0;
  std::uint64_t bytes = 0;
};
// Segments adjacent in the area become one run, which starts in staging at the
// same offset modulo 16 as in the area, so that vectors stay aligned. No run
// crosses a multiple of `boundary` (0: none). REQUIRES: no segment does.
std::vector<RowRun> row_runs(std::span<const CopySegment> segments, std::uint64_t boundary);
// Staging bytes that the runs take.
std::uint64_t staging_bytes(std::span<const RowRun> runs);
std::size_t cut_for_staging(std::span<const CopySegment> segments, std::span<const RowRun> runs,
                            std::byte* staging, PackPiece* pieces, std::size_t capacity);

}  // namespace kv_offload
