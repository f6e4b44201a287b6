#include "copy/cuda_pack.h"

namespace kv_offload {
namespace {

__global__ void __launch_bounds__(kPackThreads)
    pack_kernel(const PackPiece* __restrict__ pieces, std::uint64_t count, bool to_row) {
  pack::move_pieces(pieces, count, to_row, blockIdx.x, gridDim.x, threadIdx.x, blockDim.x);
}

}  // namespace

cudaError_t launch_pack(const PackPiece* pieces, std::uint64_t count, bool to_row, unsigned blocks,
                        cudaStream_t stream) {
  if (count == 0) return cudaSuccess;
  const unsigned grid = count < blocks ? static_cast<unsigned>(count) : blocks;
  pack_kernel<<<grid, kPackThreads, 0, stream>>>(pieces, count, to_row);
  return cudaGetLastError();
}

}  // namespace kv_offload
