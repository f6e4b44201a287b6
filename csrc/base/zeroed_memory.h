// SPDX-License-Identifier: Apache-2.0
// ZeroedMemory: memory that is initially all zero bytes. Allocating a large piece takes the same time
// whatever its size, because its pages are created on first touch. Large pieces are offered huge pages: with
// millions of entries on 4 KiB pages, every probe would also walk the page tables.
#pragma once

#include <sys/mman.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <new>
#include <type_traits>
#include <utility>

#include "base/types.h"

namespace kv_offload {

class ZeroedMemory {
 public:
  ZeroedMemory() = default;
  // Throws bad_alloc.
  explicit ZeroedMemory(std::size_t bytes) : bytes_(bytes) {
    data_ = is_mapped() ? map(&bytes_) : std::memset(::operator new(bytes_), 0, bytes_);
    if (data_ == nullptr) throw std::bad_alloc();
  }
  ~ZeroedMemory() { is_mapped() ? static_cast<void>(::munmap(data_, bytes_)) : ::operator delete(data_); }
  ZeroedMemory(ZeroedMemory&& other) noexcept
      : data_(std::exchange(other.data_, nullptr)), bytes_(std::exchange(other.bytes_, 0)) {}
  ZeroedMemory& operator=(ZeroedMemory&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(bytes_, other.bytes_);
    return *this;
  }

  void* data() const { return data_; }

 private:
  static constexpr std::size_t kHugePage = std::size_t{2} << 20;
  // Clearing takes long for larger pieces.
  static constexpr std::size_t kMapped = std::size_t{128} << 10;
  bool is_mapped() const { return bytes_ >= kMapped; }
  static void* map(std::size_t* bytes) {
    *bytes = round_up(*bytes, kPageBytes);
    const std::size_t spare = *bytes >= kHugePage ? kHugePage : 0;  // to align the start to a huge page
    void* mapped =
        ::mmap(nullptr, *bytes + spare, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (mapped == MAP_FAILED) return nullptr;
    if (spare == 0) return mapped;
    auto* const begin = static_cast<std::byte*>(mapped);
    const std::size_t before = (kHugePage - reinterpret_cast<std::uintptr_t>(begin) % kHugePage) % kHugePage;
    if (before > 0) (void)::munmap(begin, before);
    if (before < spare) (void)::munmap(begin + before + *bytes, spare - before);
    (void)::madvise(begin + before, *bytes, MADV_HUGEPAGE);  // best effort
    return begin + before;
  }

  void* data_ = nullptr;
  std::size_t bytes_ = 0;
};

// A table of zero bytes. The memory of a large one is first touched where it is used, so that making it and
// freeing it take no time for its size.
template <typename T>
class ZeroedTable {
  static_assert(std::is_trivially_copyable_v<T> && std::is_trivially_destructible_v<T>);

 public:
  ZeroedTable() = default;
  explicit ZeroedTable(std::size_t size) : memory_(size * sizeof(T)), size_(size) {}
  T& operator[](std::size_t at) { return data()[at]; }
  const T& operator[](std::size_t at) const { return data()[at]; }
  std::size_t size() const { return size_; }
  void swap(ZeroedTable& other) noexcept {
    std::swap(memory_, other.memory_);
    std::swap(size_, other.size_);
  }

 private:
  T* data() const { return static_cast<T*>(memory_.data()); }

  ZeroedMemory memory_;
  std::size_t size_ = 0;
};

}  // namespace kv_offload
