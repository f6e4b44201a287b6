#include <cuda_runtime_api.h>

#include "copy/cuda_check.h"
#include "copy/cuda_pack.h"
#include "copy/pack_pages.h"
#include "copy/segment_split.h"

namespace kv_offload {
namespace {

// Pageable host memory would be an illegal address to a kernel, and the end of
// the process's CUDA context: better to ask first.
bool reachable(const void* address) {
  cudaPointerAttributes attributes{};
  if (cudaPointerGetAttributes(&attributes, address) != cudaSuccess) {
    (void)cudaGetLastError();
    return false;
  }
  return attributes.type != cudaMemoryTypeUnregistered && attributes.devicePointer == address;
}

std::string message(cudaError_t error, std::string_view what) {
  return error == cudaSuccess ? std::string() : cuda_status(error, what).message();
}

}  // namespace

std::string pack_pages_on_stream(std::span<const PackPiece> pages, bool to_row, unsigned blocks, int device,
                                 void* stream) {
  if (pages.empty()) return {};
  if (!reachable(pages.front().cache) || !reachable(pages.front().row)) {
    return "both sides must be memory of the device or pinned host memory";
  }
  std::vector<PackPiece> pieces;
  for (const PackPiece& page : pages) {
    for (std::uint64_t at = 0; at < page.bytes; at += kPieceBytes) {
      pieces.push_back({page.cache + at, page.row + at, std::min(kPieceBytes, page.bytes - at)});
    }
  }
  const CudaDeviceScope scope(device);
  auto* on = static_cast<cudaStream_t>(stream);
  void* descriptors = nullptr;
  const std::size_t bytes = pieces.size() * sizeof(PackPiece);
  cudaError_t error = cudaMallocAsync(&descriptors, bytes, on);
  if (error != cudaSuccess) return message(error, "cudaMallocAsync");
  // From pageable memory: read before the call returns.
  error = cudaMemcpyAsync(descriptors, pieces.data(), bytes, cudaMemcpyHostToDevice, on);
  if (error == cudaSuccess) {
    error = launch_pack(static_cast<const PackPiece*>(descriptors), pieces.size(), to_row, blocks, on);
  }
  std::string failed = message(error, "pack kernel");
  const std::string freed = message(cudaFreeAsync(descriptors, on), "cudaFreeAsync");
  return failed.empty() ? freed : failed;
}

}  // namespace kv_offload
