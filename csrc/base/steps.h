// SPDX-License-Identifier: Apache-2.0
// Steps: counts work whose amount must not depend on the size of a table: cells moved, records visited,
// digests computed. Each thread has its own count. Tests compare the counts of single calls, and of single
// lock holds, at two sizes (tests/cpp/step_watch.h).
#pragma once

#include <cstdint>

namespace kv_offload {

inline thread_local std::uint64_t steps_done = 0;

inline void count_steps(std::uint64_t steps) { steps_done += steps; }

}  // namespace kv_offload
