// SPDX-License-Identifier: Apache-2.0
// Batched DMA: one call for many copies if the driver supports it (CUDA 12.8 and newer), else one call per
// copy. CUDA only.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <vector>

namespace kv_offload {

// The arrays of a batch, which are reused. Not thread-safe.
class DmaBatch {
 public:
  // Detects whether the driver supports batched copies. Call it once, with the device's context current
  // (cuda_context.h explains why). Until then copies are not batched.
  void detect_batch_support();
  bool batched() const { return batched_; }
  // Returns the number of batches that the driver refused and that were enqueued one by one instead.
  std::uint64_t refused() const { return refused_; }

  void clear();
  void add(void* to, const void* from, std::size_t bytes);
  // Enqueues the added copies. `from_host`: the sources are host rows, which are not written while a copy
  // reads them, so the device may read ahead. After a failure some copies may still run.
  cudaError_t enqueue(bool from_host, cudaStream_t stream);

 private:
  cudaError_t enqueue_batch(bool from_host, cudaStream_t stream);
  cudaError_t enqueue_each(cudaStream_t stream);

  bool batched_ = false;
  std::uint64_t refused_ = 0;
  std::vector<void*> to_;
  std::vector<void*> from_;
  std::vector<std::size_t> bytes_;
};

}  // namespace kv_offload
