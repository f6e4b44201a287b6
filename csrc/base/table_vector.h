// SPDX-License-Identifier: Apache-2.0
// TableVector: a vector for tables with random access. Large ones use huge pages where the system offers them
// (madvise): with millions of entries on 4 KiB pages, every probe would also walk the page tables.
#pragma once

#include <sys/mman.h>

#include <cstddef>
#include <cstdlib>
#include <new>
#include <vector>

#include "base/types.h"

namespace kv_offload {

template <typename T>
struct HugePageAllocator {
  static constexpr std::size_t kHugePage = std::size_t{2} << 20;
  // True if rounding up to whole huge pages costs little memory.
  static constexpr bool pays(std::size_t bytes) {
    return bytes >= kHugePage && round_up(bytes, kHugePage) - bytes <= bytes / 8;
  }

  using value_type = T;
  HugePageAllocator() = default;
  template <typename U>
  HugePageAllocator(const HugePageAllocator<U>&) {}  // NOLINT: as allocators are

  T* allocate(std::size_t count) {
    if (count > static_cast<std::size_t>(-1) / 2 / sizeof(T)) throw std::bad_array_new_length();
    const std::size_t bytes = count * sizeof(T);
    if (!pays(bytes)) return static_cast<T*>(::operator new(bytes));
    void* const memory = std::aligned_alloc(kHugePage, round_up(bytes, kHugePage));
    if (memory == nullptr) throw std::bad_alloc();
    (void)::madvise(memory, round_up(bytes, kHugePage), MADV_HUGEPAGE);  // best effort
    return static_cast<T*>(memory);
  }
  void deallocate(T* memory, std::size_t count) {
    pays(count * sizeof(T)) ? std::free(memory) : ::operator delete(memory);
  }
  friend bool operator==(const HugePageAllocator&, const HugePageAllocator&) { return true; }
};

template <typename T>
using TableVector = std::vector<T, HugePageAllocator<T>>;

}  // namespace kv_offload
