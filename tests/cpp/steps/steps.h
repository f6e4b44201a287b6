// SPDX-License-Identifier: Apache-2.0
// Counts the steps of the core. This program's core is compiled with a call at the beginning of
// each basic block (-fsanitize-coverage=trace-pc). Each loop iteration is a step, in the core's own
// code and in the standard library templates that it uses. Moved or filled memory counts one step
// per cache line. A walk that grows with the number of stored chunks is therefore detected
// anywhere, without a clock.
#pragma once

#include <cstdint>
#include <utility>

namespace kv_offload::testing {

std::uint64_t steps();  // by this thread so far

template <typename Work>
std::uint64_t steps_of(Work&& work) {
  const std::uint64_t before = steps();
  std::forward<Work>(work)();
  return steps() - before;
}

std::uint64_t bytes_in_use();  // of the heap, for all threads

}  // namespace kv_offload::testing
