// SPDX-License-Identifier: Apache-2.0
// SegmentedVector: a vector whose elements never move. It grows by segments, each as long as all previous
// ones together. So adding one element costs the same at any size, also under a lock and on the scheduler
// thread. An element that was never written is all zero bytes.
#pragma once

#include <array>
#include <bit>
#include <cstddef>
#include <type_traits>
#include <utility>

#include "base/zeroed_memory.h"

namespace kv_offload {

template <typename T>
class SegmentedVector {
  static_assert(std::is_trivially_copyable_v<T> && std::is_trivially_destructible_v<T>);

 public:
  SegmentedVector() = default;
  SegmentedVector(SegmentedVector&& other) noexcept { swap(other); }
  SegmentedVector& operator=(SegmentedVector&& other) noexcept {
    swap(other);
    return *this;
  }

  T& operator[](std::size_t at) { return *address(at); }
  const T& operator[](std::size_t at) const { return *address(at); }
  std::size_t size() const { return size_; }
  bool empty() const { return size_ == 0; }
  // Grows to at least `size` elements; new ones are zero bytes. O(1). On bad_alloc nothing has changed.
  void grow_to(std::size_t size) {
    while (capacity() < size) {
      segments_[count_] = ZeroedMemory((kFirst << count_) * sizeof(T));
      data_[count_] = static_cast<T*>(segments_[count_].data());
      ++count_;
    }
    if (size > size_) size_ = size;
  }
  void push_back(const T& value) {
    grow_to(size_ + 1);
    *address(size_ - 1) = value;
  }

 private:
  // Elements of the first segment. Each further segment is twice as long as the one before it.
  static constexpr std::size_t kFirst = 64;
  static constexpr std::size_t kMostSegments = 32;

  std::size_t capacity() const { return (kFirst << count_) - kFirst; }
  T* address(std::size_t at) const {
    const std::size_t place = at + kFirst;
    const auto segment = static_cast<std::size_t>(std::bit_width(place / kFirst)) - 1;
    return data_[segment] + (place - (kFirst << segment));
  }
  void swap(SegmentedVector& other) noexcept {
    std::swap(segments_, other.segments_);
    std::swap(data_, other.data_);
    std::swap(count_, other.count_);
    std::swap(size_, other.size_);
  }

  std::array<ZeroedMemory, kMostSegments> segments_;
  std::array<T*, kMostSegments> data_{};  // of the segments
  std::size_t count_ = 0;                 // of the segments
  std::size_t size_ = 0;
};

}  // namespace kv_offload
