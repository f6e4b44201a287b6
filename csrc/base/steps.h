// Steps: a count of work whose amount must not depend on the size of a table: cells moved, records visited,
// digests computed. Each thread counts for itself. Tests compare the counts of single calls, and of single
// holds of a lock, at two sizes (tests/cpp/step_watch.h).
#pragma once

#include <cstdint>

namespace kv_offload {

inline thread_local std::uint64_t steps_done = 0;

inline void count_steps(std::uint64_t steps) { steps_done += steps; }

}  // namespace kv_offload
