// SPDX-License-Identifier: Apache-2.0
#include "memory/row_shards.h"

#include <algorithm>

namespace kv_offload {
namespace {

// The areas of this host: [first, end).
struct Areas {
  explicit Areas(const HostRegion& region) : first(region.first_area()), end(first + region.local_areas()) {}
  std::uint32_t first, end;
};

}  // namespace

std::vector<Shard> shards_of_row(const HostRegion& region, RowId row,
                                 std::span<const std::uint64_t> shard_bytes, std::uint32_t shards_per_area) {
  std::vector<Shard> shards;
  const Areas areas(region);
  for (std::uint32_t area = areas.first; area < areas.end; ++area) {
    const std::uint64_t bytes = shard_bytes[area];
    if (bytes == 0) continue;
    const auto pages = static_cast<RowId>(round_up(bytes, kPageBytes) / kPageBytes);
    for (std::uint32_t i = 0; i < shards_per_area; ++i)
      shards.push_back(region.shard(area, row + i * pages, bytes));
  }
  if (shards.empty()) shards.push_back(region.shard(areas.first, row, 1));
  return shards;
}

bool fits_area(const HostRegion& region, RowId row, std::span<const std::uint64_t> shard_bytes) {
  const Areas areas(region);
  std::uint64_t most = 1;
  for (std::uint32_t area = areas.first; area < areas.end; ++area) most = std::max(most, shard_bytes[area]);
  const std::uint64_t begin = row * std::uint64_t{kPageBytes}, end = region.area_bytes();
  return begin < end && round_up(most, kPageBytes) <= end - begin;
}

}  // namespace kv_offload
