// The pack kernels' own source, compiled as C++; each launch looks at its pieces
// first.
#include "copy/cuda_pack.h"
#include "cuda_on_threads/machine.h"

namespace kv_offload {

template <typename Pieces, typename... Rest>
const char* wrong_with_kernel_arguments(int device, const Pieces& pieces, const Rest&...) {
  using cuda_on_threads::Memory;
  for (std::uint32_t i = 0; i < pieces.count; ++i) {
    const PackPiece& piece = pieces.piece[i];
    const Memory cache = cuda_on_threads::memory_at(piece.cache, piece.bytes, device);
    const Memory row = cuda_on_threads::memory_at(piece.row, piece.bytes, device);
    if (cache == Memory::kOfAnotherDevice || row == Memory::kOfAnotherDevice) {
      return "a kernel ran on another device's memory";
    }
    if (cache != Memory::kDevice || (row != Memory::kDevice && row != Memory::kPinned)) {
      return "a kernel ran on memory that is not there (any more)";
    }
  }
  return "";
}

}  // namespace kv_offload

#include "copy/pack_kernels.cu"
