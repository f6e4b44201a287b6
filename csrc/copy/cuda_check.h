// CUDA's error codes as Status. CUDA only.
#pragma once

#include <cuda_runtime_api.h>

#include <string_view>

#include "base/status.h"

namespace kv_offload {

// Also clears the sticky copy of the error, which would otherwise surface in a
// later, innocent call of whoever shares this thread.
inline Status cuda_status(cudaError_t error, std::string_view what) {
  if (error == cudaSuccess) return Status::ok();
  (void)cudaGetLastError();
  return Status::error(StatusKind::kDevice,
                       fmt::format("{}: {} ({})", what, cudaGetErrorString(error), cudaGetErrorName(error)),
                       static_cast<int>(error));
}

// For construction.
inline void cuda_require(cudaError_t error, std::string_view what) {
  const Status status = cuda_status(error, what);
  if (!status.is_ok()) throw ResourceError(status.message());
}

// Makes `device` this thread's device, and gives the thread back as it was.
class CudaDeviceScope {
 public:
  explicit CudaDeviceScope(int device) {
    if (cudaGetDevice(&before_) != cudaSuccess) before_ = device;
    if (before_ != device) (void)cudaSetDevice(device);
    restore_ = before_ != device;
  }
  ~CudaDeviceScope() {
    if (restore_) (void)cudaSetDevice(before_);
  }
  CudaDeviceScope(const CudaDeviceScope&) = delete;
  CudaDeviceScope& operator=(const CudaDeviceScope&) = delete;

 private:
  int before_ = 0;
  bool restore_ = false;
};

// Our calls neither take part in a graph capture of this process nor break it.
class CudaCaptureScope {
 public:
  CudaCaptureScope() { (void)cudaThreadExchangeStreamCaptureMode(&mode_); }
  ~CudaCaptureScope() { (void)cudaThreadExchangeStreamCaptureMode(&mode_); }
  CudaCaptureScope(const CudaCaptureScope&) = delete;
  CudaCaptureScope& operator=(const CudaCaptureScope&) = delete;

 private:
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

}  // namespace kv_offload
