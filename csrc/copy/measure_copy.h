// How fast the host copier is here; for kv-offload doctor.
#pragma once

#include <cstdint>

namespace kv_offload {

// Bytes per second from one buffer of `total_bytes` (in whole blocks of 2 MiB, at least one page)
// to another with `threads` threads: the best of a few passes after a first one
// that is not counted. Throws InvalidArgument when there is nothing to copy.
double measure_copy(std::uint64_t total_bytes, unsigned threads);

}  // namespace kv_offload
