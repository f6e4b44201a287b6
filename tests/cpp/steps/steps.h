// SPDX-License-Identifier: Apache-2.0
// Steps of the core, counted. The core of this program is compiled with a call at the beginning of each basic
// block (-fsanitize-coverage=trace-pc): each turn of each loop is a step, in the core's own code and in the
// templates of the standard library that it uses. Blocks of memory that are moved or filled count by the
// cache line. So a walk that grows with what is stored is seen wherever it is, without a clock.
#pragma once

#include <cstdint>
#include <utility>

namespace kv_offload::testing {

std::uint64_t steps();  // of this thread so far

template <typename Work>
std::uint64_t steps_of(Work&& work) {
  const std::uint64_t before = steps();
  std::forward<Work>(work)();
  return steps() - before;
}

std::uint64_t bytes_in_use();  // of the heap, by all threads

}  // namespace kv_offload::testing
