// SPDX-License-Identifier: Apache-2.0
#include "record/huge_buffer.h"

#include <sys/mman.h>

#include <cstdint>

#include "base/types.h"

namespace kv_offload {
namespace {
constexpr std::size_t kHugePage = std::size_t{2} << 20;
}

HugeBuffer::HugeBuffer(std::size_t bytes) : size_(round_up(bytes, kHugePage)) {
  void* memory = ::mmap(nullptr, size_ + kHugePage, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) return;
  mapped_ = memory;
  data_ = reinterpret_cast<std::byte*>(round_up(reinterpret_cast<std::uintptr_t>(memory), kHugePage));
  (void)::madvise(data_, size_, MADV_HUGEPAGE);  // a hint: it may fail
  for (std::size_t at = 0; at < size_; at += kPageBytes)
    data_[at] = std::byte{0};  // page in now, or it counts as transfer time
}

HugeBuffer::~HugeBuffer() {
  if (mapped_ != nullptr) ::munmap(mapped_, size_ + kHugePage);
}

}  // namespace kv_offload
