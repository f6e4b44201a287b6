// SPDX-License-Identifier: Apache-2.0
// HugeBuffer: buffer for a record in transit, in huge pages where the system has them. A device accepts it in
// few pieces.
#pragma once

#include <cstddef>

namespace kv_offload {

class HugeBuffer {
 public:
  explicit HugeBuffer(std::size_t bytes);  // data() is null if memory runs out
  ~HugeBuffer();
  HugeBuffer(const HugeBuffer&) = delete;
  HugeBuffer& operator=(const HugeBuffer&) = delete;
  std::byte* data() const { return data_; }
  std::size_t size() const { return size_; }

 private:
  std::size_t size_;
  void* mapped_ = nullptr;
  std::byte* data_ = nullptr;
};

}  // namespace kv_offload
