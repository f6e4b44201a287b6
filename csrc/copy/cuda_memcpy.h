// Batched DMA: one call for many copies where the driver has it (CUDA 12.8 and
// newer), else one call per copy. CUDA only.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <vector>

namespace kv_offload {

// The arrays of a batch, kept to be reused. Not thread-safe.
class DmaBatch {
 public:
  // Whether it has batched copies: call it once, with the device's context current
  // (cuda_context.h says why). Until then, and where it has none, there are none.
  void ask_driver();
  bool batched() const { return batched_; }
  // Batches that the driver refused and that were enqueued one by one instead.
  std::uint64_t refused() const { return refused_; }

  void clear();
  void add(void* to, const void* from, std::size_t bytes);
  // Enqueues what was added. `from_host`: sources are host rows, which nobody
  // writes while a copy reads them, so the device may read ahead. Of a failure
  // some copies may be running.
  cudaError_t enqueue(bool from_host, cudaStream_t stream);

 private:
  cudaError_t enqueue_batch(bool from_host, cudaStream_t stream);
  cudaError_t enqueue_one_by_one(cudaStream_t stream);

  bool batched_ = false;
  std::uint64_t refused_ = 0;
  std::vector<void*> to_;
  std::vector<void*> from_;
  std::vector<std::size_t> bytes_;
};

}  // namespace kv_offload
