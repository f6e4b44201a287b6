// SPDX-License-Identifier: Apache-2.0
// Converts CUDA error codes to Status. CUDA only.
#pragma once

#include <cuda_runtime_api.h>

#include <string_view>

#include "base/status.h"

namespace kv_offload {

// True for errors after which every later call in this process's context fails: errors for which the CUDA
// header requires a process restart, and failed memory or links. CUDA 12.8, the oldest supported version,
// declares all of them.
inline bool context_is_lost(cudaError_t error) {
  switch (error) {
    // Memory or links failed.
    case cudaErrorECCUncorrectable:
    case cudaErrorNvlinkUncorrectable:
    case cudaErrorContained:
    // The context is destroyed or in an inconsistent state.
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

// Also clears the thread's copy of the error, which would otherwise surface in a later, unrelated call on
// this thread. CUDA's code appears only in the message: it is not an errno.
inline Status cuda_status(cudaError_t error, std::string_view what) {
  if (error == cudaSuccess) return Status::ok();
  (void)cudaGetLastError();
  return Status::error(
      StatusKind::kDevice,
      fmt::format("{}: {} ({} {}){}", what, cudaGetErrorString(error), cudaGetErrorName(error),
                  static_cast<int>(error),
                  context_is_lost(error) ? "; the CUDA context is lost: restart this process" : ""));
}

// For use in constructors.
inline void cuda_require(const Status& status) {
  if (!status.is_ok()) throw ResourceError(status.to_string());
}
inline void cuda_require(cudaError_t error, std::string_view what) {
  const Status status = cuda_status(error, what);
  if (!status.is_ok()) throw ResourceError(status.message());
}

// In this scope, our calls neither join nor break a graph capture of this process.
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
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;  // the previous mode, once exchanged
  const bool exchanged_;  // false: mode_ is still ours and must not be set on the thread
};

}  // namespace kv_offload
