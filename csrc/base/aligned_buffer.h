// SPDX-License-Identifier: Apache-2.0
// AlignedBuffer: page-aligned memory that O_DIRECT accepts. Move-only.
#pragma once

#include <cstddef>
#include <cstdlib>
#include <memory>
#include <new>
#include <span>

#include "base/types.h"

namespace kv_offload {

class AlignedBuffer {
 public:
  AlignedBuffer() = default;
  // Zeroed memory; `bytes` is rounded up to whole pages. Throws std::bad_alloc.
  explicit AlignedBuffer(std::size_t bytes) : size_(round_up(bytes, kPageBytes)) {
    void* memory = std::aligned_alloc(kPageBytes, size_);
    if (memory == nullptr) throw std::bad_alloc();
    std::memset(memory, 0, size_);
    data_.reset(static_cast<std::byte*>(memory));
  }
  std::byte* data() const { return data_.get(); }
  std::size_t size() const { return size_; }
  std::span<std::byte> span() const { return {data_.get(), size_}; }

 private:
  struct Free {
    void operator()(std::byte* p) const { std::free(p); }
  };
  std::unique_ptr<std::byte[], Free> data_;
  std::size_t size_ = 0;
};

}  // namespace kv_offload
