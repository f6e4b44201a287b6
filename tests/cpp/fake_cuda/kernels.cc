// SPDX-License-Identifier: Apache-2.0
// The source of the pack kernels, compiled as C++. Every launch checks its pieces first.
#include "copy/cuda_pack.h"
#include "fake_cuda/machine.h"

namespace kv_offload {

template <typename Pieces, typename... Rest>
const char* wrong_with_kernel_arguments(int device, const Pieces& pieces, const Rest&...) {
  using fake_cuda::Memory;
  for (std::uint32_t i = 0; i < pieces.count; ++i) {
    const PackPiece& piece = pieces.piece[i];
    const Memory cache = fake_cuda::memory_at(piece.cache, piece.bytes, device);
    const Memory row = fake_cuda::memory_at(piece.row, piece.bytes, device);
    if (cache == Memory::kOfAnotherDevice || row == Memory::kOfAnotherDevice) {
      return "a kernel accessed another device's memory";
    }
    if (cache != Memory::kDevice || (row != Memory::kDevice && row != Memory::kPinned)) {
      return "a kernel accessed memory that is not allocated";
    }
  }
  return "";
}

}  // namespace kv_offload

#include "copy/pack_kernels.cu"
