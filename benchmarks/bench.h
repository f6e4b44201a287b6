// SPDX-License-Identifier: Apache-2.0
// Shared by the C++ benchmarks: the clock, medians, and keys in vLLM's form.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

#include "base/types.h"

namespace kv_offload::bench {

// Returns the seconds of the steady clock.
inline double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// Returns the upper one of the two middle values if their number is even. REQUIRES: at least one value.
inline double median(std::vector<double> values) {
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

// Returns the key of group 0 with this number.
inline ChunkKey key_of(std::uint64_t number) {
  std::uint64_t words[4];
  std::uint64_t state = number;
  for (std::uint64_t& word : words) {  // splitmix64: as evenly distributed as digests
    state += 0x9E3779B97F4A7C15ull;
    std::uint64_t mixed = (state ^ state >> 30) * 0xBF58476D1CE4E5B9ull;
    mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EBull;
    word = mixed ^ mixed >> 31;
  }
  std::string bytes(reinterpret_cast<const char*>(words), sizeof(words));
  bytes.append(4, '\0');
  return ChunkKey(bytes);
}

}  // namespace kv_offload::bench
