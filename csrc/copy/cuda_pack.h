// The pack kernels: cache pages (device memory) <-> pinned host memory or a
// staging buffer. CUDA only; everything that can be wrong about them is in
// pack_index.h, which the host tests run too.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "copy/pack_index.h"

namespace kv_offload {

// Threads of a block; with kPieceBytes, four 16-byte vectors each.
inline constexpr unsigned kPackThreads = 256;

// Enqueues one launch of at most `blocks` blocks. `pieces` is device memory
// that stays until the launch ended.
cudaError_t launch_pack(const PackPiece* pieces, std::uint64_t count, bool to_row, unsigned blocks,
                        cudaStream_t stream);

}  // namespace kv_offload
