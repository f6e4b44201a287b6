// The pack kernels on a stream of somebody else's. No CUDA header is needed to
// include this.
#pragma once

#include <span>
#include <string>

#include "copy/pack_index.h"

namespace kv_offload {

// Enqueues all pages on `stream` (a cudaStream_t) of `device`; never waits for
// them. Both sides must be memory of that device or pinned host memory, and the
// stream must not be under graph capture. `pages` is not kept; the memory that it
// names is the caller's to keep until the stream has come there. "" or what failed;
// of many pages some may be enqueued then.
std::string pack_pages_on_stream(std::span<const PackPiece> pages, bool to_row, unsigned blocks, int device,
                                 void* stream);

}  // namespace kv_offload
