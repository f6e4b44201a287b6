// SPDX-License-Identifier: Apache-2.0
#include "copy/cuda_memcpy.h"

#if CUDART_VERSION < 12080
#error "The CUDA copier is built with CUDA 12.8 or newer"
#endif

namespace kv_offload {
namespace {

bool driver_has_batches() {
  void* entry = nullptr;
  cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
  const cudaError_t error =
      cudaGetDriverEntryPointByVersion("cuMemcpyBatchAsync", &entry, 12080, cudaEnableDefault, &found);
  if (error != cudaSuccess) (void)cudaGetLastError();
  return error == cudaSuccess && found == cudaDriverEntryPointSuccess && entry != nullptr;
}

}  // namespace

void DmaBatch::detect_batch_support() { batched_ = driver_has_batches(); }

cudaError_t DmaBatch::enqueue_batch(bool from_host, cudaStream_t stream) {
  cudaMemcpyAttributes attributes{};
  attributes.srcAccessOrder = from_host ? cudaMemcpySrcAccessOrderAny : cudaMemcpySrcAccessOrderStream;
  // From 13.1 on, the driver may otherwise copy with SMs, which the model needs.
  attributes.flags = cudaMemcpyFlagPreferOverlapWithCompute;
  std::size_t first = 0;
#if CUDART_VERSION >= 13000
  return cudaMemcpyBatchAsync(to_.data(), from_.data(), bytes_.data(), bytes_.size(), &attributes, &first, 1,
                              stream);
#else
  std::size_t failed = 0;
  return cudaMemcpyBatchAsync(to_.data(), from_.data(), bytes_.data(), bytes_.size(), &attributes, &first, 1,
                              &failed, stream);
#endif
}

void DmaBatch::clear() {
  to_.clear();
  from_.clear();
  bytes_.clear();
}

void DmaBatch::add(void* to, const void* from, std::size_t bytes) {
  to_.push_back(to);
  from_.push_back(const_cast<void*>(from));
  bytes_.push_back(bytes);
}

cudaError_t DmaBatch::enqueue(bool from_host, cudaStream_t stream) {
  if (bytes_.empty()) return cudaSuccess;
  if (batched_ && bytes_.size() > 1) {
    const cudaError_t error = enqueue_batch(from_host, stream);
    if (error == cudaSuccess) return error;
    // Copies of a refused batch that were enqueued are enqueued again, with the same bytes.
    (void)cudaGetLastError();
    ++refused_;
    if (error == cudaErrorNotSupported || error == cudaErrorCallRequiresNewerDriver) batched_ = false;
  }
  return enqueue_each(stream);
}

cudaError_t DmaBatch::enqueue_each(cudaStream_t stream) {
  for (std::size_t i = 0; i < bytes_.size(); ++i) {
    const cudaError_t error = cudaMemcpyAsync(to_[i], from_[i], bytes_[i], cudaMemcpyDefault, stream);
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

}  // namespace kv_offload
