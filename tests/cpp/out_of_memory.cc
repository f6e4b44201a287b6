// SPDX-License-Identifier: Apache-2.0
#include "out_of_memory.h"

#include <algorithm>
#include <cstdlib>
#include <new>
#include <utility>

namespace {

constexpr unsigned kNever = ~0u;
thread_local unsigned g_left = kNever;  // calls until one fails
thread_local bool g_failed = false;
thread_local std::size_t g_largest = 0;

void* allocate(std::size_t bytes) {
  g_largest = std::max(g_largest, bytes);
  if (g_left != kNever && g_left-- == 0) {
    g_left = kNever;
    g_failed = true;
    return nullptr;
  }
  return std::malloc(bytes == 0 ? 1 : bytes);
}

}  // namespace

// Replaces all operators except the array and aligned ones. They share malloc, so that any delete
// frees memory of any new.
void* operator new(std::size_t bytes) {
  void* const memory = allocate(bytes);
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}
void* operator new(std::size_t bytes, const std::nothrow_t&) noexcept { return allocate(bytes); }
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }
void operator delete(void* memory, const std::nothrow_t&) noexcept { std::free(memory); }

namespace kv_offload::testing {

FailingAllocation::FailingAllocation(unsigned after) {
  g_failed = false;
  g_left = after;
}
FailingAllocation::~FailingAllocation() { g_left = kNever; }
bool FailingAllocation::came() const { return g_failed; }

std::size_t take_largest_allocation() { return std::exchange(g_largest, 0); }

}  // namespace kv_offload::testing
