// SPDX-License-Identifier: Apache-2.0
#include "record/whole_record.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstring>
#include <new>
#include <utility>

#include "base/types.h"

namespace kv_offload {
namespace {
constexpr std::size_t kHugePage = std::size_t{2} << 20;
}

void WholeRecord::begin(const RecordHeader& header, std::span<const std::byte> page) {
  header_ = header;
  size_ = 0;
  append(page);
}

std::span<std::byte> WholeRecord::room(std::size_t most) {
  most = std::min(most, left());
  reserve(most);
  return {memory_.get() + size_, most};
}

void WholeRecord::append(std::span<const std::byte> more) {
  more = more.first(std::min(more.size(), left()));
  if (more.empty()) return;
  const bool in_place = more.data() == memory_.get() + size_ && more.size() <= capacity_ - size_;
  if (!in_place) {
    reserve(more.size());
    std::memcpy(memory_.get() + size_, more.data(), more.size());
  }
  size_ += more.size();
}

// The memory is not zeroed: bytes() holds only what arrived.
void WholeRecord::reserve(std::size_t more) {
  if (size_ + more <= capacity_) return;
  const auto most = static_cast<std::size_t>(header_.record_bytes());
  const std::size_t larger = round_up(std::min(most, std::max(size_ + more, 2 * capacity_)), kPageBytes);
  // A device accepts huge pages in few pieces.
  const bool is_huge = larger >= kHugePage;
  std::unique_ptr<std::byte[], Free> memory(
      static_cast<std::byte*>(std::aligned_alloc(is_huge ? kHugePage : kPageBytes, larger)));
  if (memory == nullptr) throw std::bad_alloc();
  if (is_huge) (void)::madvise(memory.get(), larger, MADV_HUGEPAGE);  // a hint: it may fail
  if (size_ > 0) std::memcpy(memory.get(), memory_.get(), size_);
  memory_ = std::move(memory);
  capacity_ = larger;
}

}  // namespace kv_offload
