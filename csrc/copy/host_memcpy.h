// SPDX-License-Identifier: Apache-2.0
// copy_bytes: the memcpy of the host copier. Long runs bypass the CPU caches (non-temporal stores) if the
// machine supports it: a row is next read by a device or a disk, and a cache block by another core.
#pragma once

#include <cstddef>

namespace kv_offload {

// Runs of at least this length bypass the caches.
inline constexpr std::size_t kNonTemporalBytes = 32 << 10;

// Same, if a run is a KV head of a page and the whole page is written.
inline constexpr std::size_t kNonTemporalShardBytes = 2 << 10;

// Like memcpy; the bytes are visible to any thread that synchronises with the caller afterwards.
// `non_temporal_from`: minimum length of a run that bypasses the caches; >= 64.
void copy_bytes(std::byte* to, const std::byte* from, std::size_t bytes,
                std::size_t non_temporal_from = kNonTemporalBytes);

}  // namespace kv_offload
