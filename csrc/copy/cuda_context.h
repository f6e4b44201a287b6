// CudaContext: a device's primary context, kept for as long as this lives, and
// made current where a thread of somebody else calls CUDA. The runtime's own way,
// cudaSetDevice and back, makes a context (about 0.5 GB of device memory) on
// device 0 when the thread had none before. CUDA only.
//
// A thread of our own calls cudaSetDevice once instead and stays there.
//
// The runtime makes a context in the first call "which requires an active context";
// its manual does not say which those are. The constructor looks the driver's
// functions up before any context can be there: in the runtime of 13.0 that goes to
// the driver without the step that makes one (seen in its code; cudaGetDeviceCount
// goes without it, too). Everything else is asked inside a Scope.
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

  // Current on this thread until its end; then the thread is as it was. Calls
  // made although status() is a failure go to whatever device the thread has.
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
  // The driver is not linked: a node without one loads this library too.
  CUresult (*release_)(CUdevice) = nullptr;
  CUresult (*push_)(CUcontext) = nullptr;
  CUresult (*pop_)(CUcontext*) = nullptr;
};

}  // namespace kv_offload
