// SPDX-License-Identifier: Apache-2.0
// The shards of a row: the memory that a record of a chunk is written from or read into.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "base/types.h"
#include "memory/host_region.h"

namespace kv_offload {

// Returns the shards in the areas of this host, in their order. `shard_bytes`: per area of the engine, as in
// GroupGeometry. If this host has no bytes of the group (a pipeline stage without such layers), returns one
// byte of the row, which is unused, so that each host has a record of each chunk. REQUIRES: the row is inside
// the areas (see fits_area).
std::vector<Shard> shards_of_row(const HostRegion& region, RowId row,
                                 std::span<const std::uint64_t> shard_bytes, std::uint32_t shards_per_area);
// True if all shards of the row are inside the areas.
bool fits_area(const HostRegion& region, RowId row, std::span<const std::uint64_t> shard_bytes);

}  // namespace kv_offload
