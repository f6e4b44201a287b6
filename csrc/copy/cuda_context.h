// SPDX-License-Identifier: Apache-2.0
// CudaContext: holds a device's primary context for its lifetime and makes it current when a foreign thread
// calls CUDA. The runtime's way, cudaSetDevice and back, would create a context on device 0 (about 0.5 GB of
// device memory) if the thread had none. CUDA only.
//
// Our own threads call cudaSetDevice once instead and keep that device.
//
// The runtime creates a context in the first call "which requires an active context"; its manual does not say
// which calls these are. The constructor looks up the driver's functions before any context can exist. In the
// runtime of 13.0, that lookup reaches the driver without the step that creates a context (seen in its code;
// cudaGetDeviceCount skips that step, too). All other calls are made inside a Scope.
#pragma once

#include <cuda.h>

#include "base/status.h"

namespace kv_offload {

class CudaContext {
 public:
  // Throws ResourceError (no such device, no memory for a context).
  explicit CudaContext(int device);
  ~CudaContext();
  CudaContext(const CudaContext&) = delete;
  CudaContext& operator=(const CudaContext&) = delete;

  // Makes the context current on this thread until the scope ends, then restores the thread's state. If
  // status() is a failure, calls go to whatever device the thread has.
  class Scope {
   public:
    explicit Scope(const CudaContext& context);
    ~Scope();
    Scope(const Scope&) = delete;
    Scope& operator=(const Scope&) = delete;
    const Status& status() const { return status_; }

   private:
    const CudaContext& context_;
    Status status_;
  };

 private:
  const int device_;
  CUcontext context_ = nullptr;
  // The driver is not linked, so that this library also loads on a node without one.
  CUresult (*release_)(CUdevice) = nullptr;
  CUresult (*push_)(CUcontext) = nullptr;
  CUresult (*pop_)(CUcontext*) = nullptr;
};

}  // namespace kv_offload
