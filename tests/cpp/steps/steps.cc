// SPDX-License-Identifier: Apache-2.0
#include "steps/steps.h"

#include <malloc.h>

#include <cstddef>

namespace {
thread_local std::uint64_t g_steps = 0;
constexpr std::size_t kLine = 64;
}  // namespace

extern "C" {
void __sanitizer_cov_trace_pc() { ++g_steps; }

// The linker redirects the core's calls to these wrappers (--wrap).
void* __real_memcpy(void* to, const void* from, std::size_t bytes);
void* __real_memmove(void* to, const void* from, std::size_t bytes);
void* __real_memset(void* to, int value, std::size_t bytes);
void* __wrap_memcpy(void* to, const void* from, std::size_t bytes) {
  g_steps += bytes / kLine;
  return __real_memcpy(to, from, bytes);
}
void* __wrap_memmove(void* to, const void* from, std::size_t bytes) {
  g_steps += bytes / kLine;
  return __real_memmove(to, from, bytes);
}
void* __wrap_memset(void* to, int value, std::size_t bytes) {
  g_steps += bytes / kLine;
  return __real_memset(to, value, bytes);
}
}

namespace kv_offload::testing {

std::uint64_t steps() { return g_steps; }
std::uint64_t bytes_in_use() {
  const auto heap = ::mallinfo2();
  return heap.uordblks + heap.hblkhd;
}

}  // namespace kv_offload::testing
