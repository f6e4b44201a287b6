// SPDX-License-Identifier: Apache-2.0
#include <cuda_runtime.h>

#include "copy/cuda_pack.h"

namespace kv_offload {
namespace {

template <unsigned Capacity>
__global__ void __launch_bounds__(kPackThreads)
    pack_kernel(const __grid_constant__ PackLaunch<Capacity> launch) {
  pack::move_pieces(launch.piece, launch.count, launch.to_row, blockIdx.x, gridDim.x, threadIdx.x,
                    blockDim.x);
}

template <unsigned Capacity>
cudaError_t launch_pieces(const PackPiece* pieces, std::uint32_t count, bool to_row, unsigned blocks,
                          cudaStream_t stream) {
  PackLaunch<Capacity> launch;
  for (std::uint32_t i = 0; i < count; ++i) launch.piece[i] = pieces[i];
  launch.count = count;
  launch.to_row = to_row;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(count < blocks ? count : blocks);
  config.blockDim = dim3(kPackThreads);
  config.stream = stream;
  return cudaLaunchKernelEx(&config, pack_kernel<Capacity>, launch);
}

}  // namespace

cudaError_t load_pack_kernels() {
  cudaFuncAttributes attributes{};
  const cudaError_t error = cudaFuncGetAttributes(&attributes, pack_kernel<kFewPieces>);
  return error != cudaSuccess ? error : cudaFuncGetAttributes(&attributes, pack_kernel<kMostPieces>);
}

cudaError_t launch_pack(const PackPiece* pieces, std::uint64_t count, bool to_row, unsigned blocks,
                        cudaStream_t stream) {
  while (count != 0) {
    const auto part = static_cast<std::uint32_t>(count < kMostPieces ? count : kMostPieces);
    const cudaError_t error = part <= kFewPieces
                                  ? launch_pieces<kFewPieces>(pieces, part, to_row, blocks, stream)
                                  : launch_pieces<kMostPieces>(pieces, part, to_row, blocks, stream);
    if (error != cudaSuccess) return error;
    pieces += part;
    count -= part;
  }
  return cudaSuccess;
}

}  // namespace kv_offload
