// SPDX-License-Identifier: Apache-2.0
// A kernel that is bound by device memory, as decoding is.
#include "decode_kernel.h"

#include <cuda_runtime.h>

namespace {

__global__ void read_all(const uint4* data, std::uint64_t count, unsigned* sink) {
  unsigned sum = 0;
  const std::uint64_t stride = std::uint64_t{gridDim.x} * blockDim.x;
  for (std::uint64_t i = std::uint64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < count; i += stride) {
    const uint4 value = data[i];
    sum += value.x ^ value.y ^ value.z ^ value.w;
  }
  if (sum == 0xFFFFFFFFu) *sink = sum;  // never, but the compiler cannot know
}

}  // namespace

cudaError_t launch_decode(const void* weights, std::uint64_t bytes, unsigned* sink, unsigned blocks,
                          cudaStream_t stream) {
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(blocks);
  config.blockDim = dim3(512);
  config.stream = stream;
  return cudaLaunchKernelEx(&config, read_all, static_cast<const uint4*>(weights),
                            static_cast<std::uint64_t>(bytes / sizeof(uint4)), sink);
}
