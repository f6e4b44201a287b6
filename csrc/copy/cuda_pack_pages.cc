// SPDX-License-Identifier: Apache-2.0
#include <cuda_runtime_api.h>

#include <vector>

#include "copy/cuda_check.h"
#include "copy/cuda_context.h"
#include "copy/cuda_pack.h"
#include "copy/pack_pages.h"
#include "copy/segment_split.h"

namespace kv_offload {
namespace {

// True if a kernel can access the address. Pageable host memory, and without peer access another device's
// memory, are illegal addresses for a kernel and would end the process's CUDA context. With unified
// addressing a device pointer has the same value everywhere, so only `device` identifies its owner.
bool reachable(const void* address, int device) {
  cudaPointerAttributes attributes{};
  if (cudaPointerGetAttributes(&attributes, address) != cudaSuccess) {
    (void)cudaGetLastError();
    return false;
  }
  if (attributes.type == cudaMemoryTypeDevice && attributes.device != device) return false;
  return attributes.type != cudaMemoryTypeUnregistered && attributes.devicePointer == address;
}

std::string message(cudaError_t error, std::string_view what) {
  return error == cudaSuccess ? std::string() : cuda_status(error, what).message();
}

}  // namespace

std::string pack_pages_on_stream(std::span<const PackPiece> pages, bool to_row, unsigned blocks, int device,
                                 void* stream) {
  if (pages.empty()) return {};
  try {
    const CudaContext context(device);
    const CudaContext::Scope scope(context);
    if (!scope.status().is_ok()) return scope.status().to_string();
    const CudaCaptureScope relaxed;  // a capture on another stream forbids this thread to load kernels
    auto* const on = static_cast<cudaStream_t>(stream);
    cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
    if (const cudaError_t error = cudaStreamIsCapturing(on, &capture); error != cudaSuccess) {
      return message(error, "the current stream");
    }
    if (capture != cudaStreamCaptureStatusNone) {
      return "blocks cannot be packed under graph capture: each replay would move the blocks of this call";
    }
    if (!reachable(pages.front().cache, device) || !reachable(pages.front().row, device)) {
      return fmt::format("both sides must be memory of CUDA device {} or pinned host memory", device);
    }
    std::vector<PackPiece> pieces;
    for (const PackPiece& page : pages) {
      for (std::uint64_t at = 0; at < page.bytes; at += kPieceBytes) {
        pieces.push_back({page.cache + at, page.row + at, std::min(kPieceBytes, page.bytes - at)});
      }
    }
    if (const cudaError_t error = load_pack_kernels(); error != cudaSuccess) {
      return message(error, "loading the pack kernels");
    }
    return message(launch_pack(pieces.data(), pieces.size(), to_row, blocks, on), "pack kernel");
  } catch (const ResourceError& error) {
    return error.what();
  }
}

}  // namespace kv_offload
