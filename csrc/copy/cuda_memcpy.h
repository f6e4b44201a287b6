// Batched DMA: one call for many copies where runtime and driver have it
// (CUDA 12.8 and newer), else one call per copy. CUDA only.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <vector>

namespace kv_offload {

// The arrays of a batch, kept to be reused. Not thread-safe.
class DmaBatch {
 public:
  // Asks the driver once; `batched` is false where it has no batched copy.
  DmaBatch();
  bool batched() const { return batched_; }

  void clear();
  void add(void* to, const void* from, std::size_t bytes);
  // Enqueues what was added. `from_host`: sources are host rows, which nobody
  // writes while a copy reads them, so the device may read ahead.
  cudaError_t enqueue(bool from_host, cudaStream_t stream);

 private:
  cudaError_t enqueue_batch(bool from_host, cudaStream_t stream);
  cudaError_t enqueue_one_by_one(cudaStream_t stream);

  bool batched_ = false;
  std::vector<void*> to_;
  std::vector<void*> from_;
  std::vector<std::size_t> bytes_;
};

}  // namespace kv_offload
