// copy_bytes: the memcpy of the host copier. Long runs go past the caches
// (non-temporal stores) where the machine has them: a row is next read by a
// device or a disk, and a cache block by another core.
#pragma once

#include <cstddef>

namespace kv_offload {

// Runs at least this long are written past the caches.
inline constexpr std::size_t kNonTemporalBytes = 32 << 10;

// The same where a run is a KV head of a page, and the page is written as a whole.
inline constexpr std::size_t kNonTemporalShardBytes = 2 << 10;

// Like memcpy; visible to whoever synchronises with the caller afterwards.
// `non_temporal_from`: how long a run must be; >= 64.
void copy_bytes(std::byte* to, const std::byte* from, std::size_t bytes,
                std::size_t non_temporal_from = kNonTemporalBytes);

}  // namespace kv_offload
