// SPDX-License-Identifier: Apache-2.0
// The pack kernels: copy between cache pages (device memory) and pinned host memory or a staging buffer. CUDA
// only. All index arithmetic is in pack_index.h, which the host tests run too.
//
// The pieces are launch parameters. They need no memory that must be kept alive, and no copy that would queue
// after the loads on the copy engine.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "copy/pack_index.h"

namespace kv_offload {

// Threads per block; with kPieceBytes, four 16-byte vectors per thread.
inline constexpr unsigned kPackThreads = 256;
// Pieces per launch. Parameters cost time per byte and are limited to 32,764 bytes. Drivers of CUDA 12.0
// limit them to 4 KiB and load none of these kernels.
inline constexpr unsigned kFewPieces = 160;
inline constexpr unsigned kMostPieces = 1024;

template <unsigned Capacity>
struct PackLaunch {
  PackPiece piece[Capacity];
  std::uint32_t count;
  bool to_row;
};
static_assert(sizeof(PackLaunch<kFewPieces>) <= 4096 && sizeof(PackLaunch<kMostPieces>) <= 32764);

// Loads the kernels' code into the current context. Otherwise the first launch loads it, and may wait for all
// work submitted to the device.
cudaError_t load_pack_kernels();

// Enqueues all pieces, in launches of at most `blocks` blocks. `pieces` is copied before this returns. After
// a failure some launches may still run.
cudaError_t launch_pack(const PackPiece* pieces, std::uint64_t count, bool to_row, unsigned blocks,
                        cudaStream_t stream);

}  // namespace kv_offload
