// SPDX-License-Identifier: Apache-2.0
// Measures the speed of the host copier; for kv-offload doctor.
#pragma once

#include <cstdint>

namespace kv_offload {

// Returns bytes per second for copies between two buffers of `total_bytes` (in whole blocks of 2 MiB, at
// least one page) with `threads` threads: the best of a few passes after an uncounted warm-up pass. Throws
// InvalidArgument if total_bytes is 0.
double measure_copy(std::uint64_t total_bytes, unsigned threads);

}  // namespace kv_offload
