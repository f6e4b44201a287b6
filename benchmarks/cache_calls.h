// SPDX-License-Identifier: Apache-2.0
// Measures calls of a TieredCache, as vLLM's scheduler makes them, and prints a table of ratios.
#pragma once

#include <fmt/format.h>
#include <time.h>

#include <cstdlib>
#include <span>
#include <utility>
#include <vector>

#include "bench.h"
#include "cache/tiered_cache.h"

namespace kv_offload::bench {

// CPU seconds of the calling thread.
inline double thread_seconds() {
  timespec time{};
  ::clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
  return static_cast<double>(time.tv_sec) + static_cast<double>(time.tv_nsec) / 1e9;
}

inline std::vector<ChunkKey> keys_from(std::uint64_t first, std::uint32_t count) {
  std::vector<ChunkKey> keys;
  for (std::uint32_t i = 0; i < count; ++i) keys.push_back(key_of(first + i));
  return keys;
}

// CPU seconds per chunk. Ends the program if a lookup returns another result.
inline double look_up(TieredCache& cache, const RequestOptions& options, std::span<const ChunkKey> keys,
                      LookupResult expected) {
  const RequestHandle request = cache.begin_request("r", options);
  const double before = thread_seconds();
  for (const ChunkKey& key : keys) {
    if (cache.lookup(request, key) != expected) std::abort();
  }
  const double seconds = (thread_seconds() - before) / static_cast<double>(keys.size());
  cache.end_request(request);
  return seconds;
}

// One line of a table: the medians in `unit` seconds, and their ratio.
inline void print_line(const char* name, std::vector<double> baseline, std::vector<double> measured,
                       double unit, const char* unit_name) {
  const double before = median(std::move(baseline)), after = median(std::move(measured));
  fmt::print("{:<52} {:>9.1f} {:>9.1f} {:<9} {:.2f}\n", name, before / unit, after / unit, unit_name,
             after / before);
}

}  // namespace kv_offload::bench
