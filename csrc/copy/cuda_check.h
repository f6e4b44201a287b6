// CUDA's error codes as Status. CUDA only.
#pragma once

#include <cuda_runtime_api.h>

#include <string_view>

#include "base/status.h"

namespace kv_offload {

// Errors after which every later call of this process's context fails: those of
// which the header says that the process must be started again, and memory or
// links that gave up. All are in the headers of CUDA 12.8, the oldest we build with.
inline bool context_is_lost(cudaError_t error) {
  switch (error) {
    case cudaErrorECCUncorrectable:
    case cudaErrorNvlinkUncorrectable:
    case cudaErrorContained:
    case cudaErrorIllegalAddress:
    case cudaErrorLaunchTimeout:
    case cudaErrorContextIsDestroyed:
    case cudaErrorAssert:
    case cudaErrorHardwareStackError:
    case cudaErrorIllegalInstruction:
    case cudaErrorMisalignedAddress:
    case cudaErrorInvalidAddressSpace:
    case cudaErrorInvalidPc:
    case cudaErrorLaunchFailure:
    case cudaErrorTensorMemoryLeak:
    case cudaErrorMpsClientTerminated:
    case cudaErrorExternalDevice:
      return true;
    default:
      return false;
  }
}

// Also clears the thread's copy of the error, which would otherwise surface in a
// later, innocent call of whoever shares this thread. CUDA's code is in the
// sentence only: it is no errno.
inline Status cuda_status(cudaError_t error, std::string_view what) {
  if (error == cudaSuccess) return Status::ok();
  (void)cudaGetLastError();
  return Status::error(
      StatusKind::kDevice,
      fmt::format("{}: {} ({} {}){}", what, cudaGetErrorString(error), cudaGetErrorName(error),
                  static_cast<int>(error),
                  context_is_lost(error) ? "; the CUDA context is lost and only a restart of this process "
                                           "brings it back"
                                         : ""));
}

// For construction.
inline void cuda_require(const Status& status) {
  if (!status.is_ok()) throw ResourceError(status.to_string());
}
inline void cuda_require(cudaError_t error, std::string_view what) {
  const Status status = cuda_status(error, what);
  if (!status.is_ok()) throw ResourceError(status.message());
}

// Our calls neither take part in a graph capture of this process nor break it.
class CudaCaptureScope {
 public:
  CudaCaptureScope() : exchanged_(cudaThreadExchangeStreamCaptureMode(&mode_) == cudaSuccess) {
    if (!exchanged_) (void)cudaGetLastError();
  }
  ~CudaCaptureScope() {
    if (exchanged_ && cudaThreadExchangeStreamCaptureMode(&mode_) != cudaSuccess) (void)cudaGetLastError();
  }
  CudaCaptureScope(const CudaCaptureScope&) = delete;
  CudaCaptureScope& operator=(const CudaCaptureScope&) = delete;

 private:
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;  // that of before, once exchanged
  const bool exchanged_;  // else mode_ is still ours, and to restore it would leave it to the thread
};

}  // namespace kv_offload
