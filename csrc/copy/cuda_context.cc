// SPDX-License-Identifier: Apache-2.0
#include "copy/cuda_context.h"

#include "copy/cuda_check.h"

namespace kv_offload {
namespace {

template <typename Function>
Function driver_function(const char* name) {
  constexpr unsigned kSince = 12000;  // driver version of the function variant that we use
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
  cuda_require(cudaGetDriverEntryPointByVersion(name, &function, kSince, cudaEnableDefault, &found), name);
  if (found != cudaDriverEntryPointSuccess || function == nullptr) {
    throw_resource("the CUDA driver has no {}", name);
  }
  return reinterpret_cast<Function>(function);
}

}  // namespace

CudaContext::CudaContext(int device) : device_(device) {
  int devices = 0;
  cuda_require(cudaGetDeviceCount(&devices), "cudaGetDeviceCount");  // also starts the driver
  using Retain = CUresult (*)(CUcontext*, CUdevice);
  const auto retain = driver_function<Retain>("cuDevicePrimaryCtxRetain");
  release_ = driver_function<decltype(release_)>("cuDevicePrimaryCtxRelease");
  push_ = driver_function<decltype(push_)>("cuCtxPushCurrent");
  pop_ = driver_function<decltype(pop_)>("cuCtxPopCurrent");
  // A device's ordinal is its CUdevice.
  if (const CUresult error = retain(&context_, device); error != CUDA_SUCCESS) {
    throw_resource("cuDevicePrimaryCtxRetain of device {}: error {}", device, static_cast<int>(error));
  }
}

CudaContext::~CudaContext() { (void)release_(device_); }

CudaContext::Scope::Scope(const CudaContext& context) : context_(context), status_(Status::ok()) {
  if (const CUresult error = context.push_(context.context_); error != CUDA_SUCCESS) {
    status_ = Status::error(StatusKind::kDevice,
                            fmt::format("cuCtxPushCurrent: error {}", static_cast<int>(error)));
  }
}

CudaContext::Scope::~Scope() {
  CUcontext popped = nullptr;
  if (status_.is_ok()) (void)context_.pop_(&popped);
}

}  // namespace kv_offload
