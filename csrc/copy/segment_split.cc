// SPDX-License-Identifier: Apache-2.0
#include "copy/segment_split.h"

#include <algorithm>

namespace kv_offload {
namespace {

constexpr std::uint64_t kVector = 16;

// Returns the maximum length of a segment that starts at `offset`.
std::uint64_t reach(std::uint64_t offset, const SplitLimits& limits) {
  std::uint64_t bytes = limits.max_bytes;
  if (limits.boundary != 0) bytes = std::min(bytes, limits.boundary - offset % limits.boundary);
  return bytes;
}

bool fits(const CopySegment& segment, const SplitLimits& limits) {
  return segment.bytes <= reach(segment.area_offset, limits);
}

void split_long_segments(std::vector<CopySegment>* segments, const SplitLimits& limits) {
  if (std::all_of(segments->begin(), segments->end(),
                  [&](const CopySegment& segment) { return fits(segment, limits); })) {
    return;
  }
  std::vector<CopySegment> cut;
  cut.reserve(segments->size() * 2);
  for (CopySegment segment : *segments) {
    while (segment.bytes != 0) {
      const std::uint64_t bytes = std::min(segment.bytes, reach(segment.area_offset, limits));
      cut.push_back({segment.cache, segment.area_offset, bytes});
      segment.cache += bytes;
      segment.area_offset += bytes;
      segment.bytes -= bytes;
    }
  }
  *segments = std::move(cut);
}

// False if the pieces do not fit.
bool cut(std::byte* cache, std::byte* row, std::uint64_t bytes, PackPiece* pieces, std::size_t capacity,
         std::size_t* count) {
  for (std::uint64_t at = 0; at < bytes; at += kPieceBytes) {
    if (*count == capacity) return false;
    pieces[(*count)++] = {cache + at, row + at, std::min(kPieceBytes, bytes - at)};
  }
  return true;
}

}  // namespace

std::vector<SegmentRange> split(std::vector<CopySegment>* segments, const SplitLimits& limits) {
  split_long_segments(segments, limits);
  std::vector<SegmentRange> ranges;
  for (std::size_t i = 0; i < segments->size(); ++i) {
    const std::uint64_t bytes = (*segments)[i].bytes;
    if (ranges.empty() || ranges.back().bytes + bytes > limits.max_bytes ||
        ranges.back().count == limits.max_segments) {
      ranges.push_back({i, 0, 0});
    }
    ranges.back().count += 1;
    ranges.back().bytes += bytes;
  }
  return ranges;
}

std::size_t cut_for_area(std::span<const CopySegment> segments, std::byte* area, PackPiece* pieces,
                         std::size_t capacity) {
  std::size_t count = 0;
  for (const CopySegment& segment : segments) {
    if (!cut(segment.cache, area + segment.area_offset, segment.bytes, pieces, capacity, &count))
      return capacity + 1;
  }
  return count;
}

std::vector<RowRun> row_runs(std::span<const CopySegment> segments, std::uint64_t boundary) {
  std::vector<RowRun> runs;
  for (const CopySegment& segment : segments) {
    const bool at_boundary = boundary != 0 && segment.area_offset % boundary == 0;
    if (!runs.empty() && !at_boundary && runs.back().area_offset + runs.back().bytes == segment.area_offset) {
      runs.back().bytes += segment.bytes;
      continue;
    }
    const std::uint64_t end = staging_bytes(runs);
    runs.push_back(
        {segment.area_offset, round_up(end, kVector) + segment.area_offset % kVector, segment.bytes});
  }
  return runs;
}

std::uint64_t staging_bytes(std::span<const RowRun> runs) {
  return runs.empty() ? 0 : runs.back().staging_offset + runs.back().bytes;
}

std::size_t cut_for_staging(std::span<const CopySegment> segments, std::span<const RowRun> runs,
                            std::byte* staging, PackPiece* pieces, std::size_t capacity) {
  std::size_t count = 0;
  std::size_t run = 0;
  for (const CopySegment& segment : segments) {
    while (segment.area_offset >= runs[run].area_offset + runs[run].bytes) ++run;
    std::byte* place = staging + runs[run].staging_offset + (segment.area_offset - runs[run].area_offset);
    if (!cut(segment.cache, place, segment.bytes, pieces, capacity, &count)) return capacity + 1;
  }
  return count;
}

}  // namespace kv_offload
