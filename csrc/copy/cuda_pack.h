// The pack kernels: cache pages (device memory) <-> pinned host memory or a
// staging buffer. CUDA only; everything that can be wrong about them is in
// pack_index.h, which the host tests run too.
//
// The pieces are parameters of the launch: they need no memory that somebody
// must keep, and no copy that would queue behind the loads on the copy engine.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "copy/pack_index.h"

namespace kv_offload {

// Threads of a block; with kPieceBytes, four 16-byte vectors each.
inline constexpr unsigned kPackThreads = 256;
// Pieces of one launch. Parameters cost time by the byte, and end at 32,764 bytes;
// on the drivers of CUDA 12.0 at 4 KiB, and those load none of these kernels.
inline constexpr unsigned kFewPieces = 160;
inline constexpr unsigned kMostPieces = 1024;

template <unsigned Capacity>
struct PackLaunch {
  PackPiece piece[Capacity];
  std::uint32_t count;
  bool to_row;
};
static_assert(sizeof(PackLaunch<kFewPieces>) <= 4096 && sizeof(PackLaunch<kMostPieces>) <= 32764);

// Loads the kernels' code into the current context. Otherwise the first launch
// does, and may wait for everything that the device was given.
cudaError_t load_pack_kernels();

// Enqueues all pieces, in launches of at most `blocks` blocks. They are copied
// before this returns. Of a failure some launches may be running.
cudaError_t launch_pack(const PackPiece* pieces, std::uint64_t count, bool to_row, unsigned blocks,
                        cudaStream_t stream);

}  // namespace kv_offload
