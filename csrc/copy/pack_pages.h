// SPDX-License-Identifier: Apache-2.0
// Runs the pack kernels on the caller's stream. Needs no CUDA header.
#pragma once

#include <span>
#include <string>

#include "copy/pack_index.h"

namespace kv_offload {

// Enqueues all pages on `stream` (a cudaStream_t) of `device`; never waits for them. Both sides must be
// memory of that device or pinned host memory, and the stream must not be under graph capture. `pages` is not
// kept. The caller must keep the memory that it refers to until the stream has reached that point. Returns
// "", or what failed; some of the pages may be enqueued then.
std::string pack_pages_on_stream(std::span<const PackPiece> pages, bool to_row, unsigned blocks, int device,
                                 void* stream);

}  // namespace kv_offload
