// Measures the copy paths of a device on scratch memory of its own: neither the
// caches nor the area are touched. CUDA only.
#pragma once

#include "copy/copy_path.h"
#include "copy/cuda_device.h"

namespace kv_offload {

// Bounded by a second; `limits` as the copier will use them. What cannot be
// measured (no memory for the scratch) leaves the built-in table.
CopyTable calibrate_cuda(const CudaDeviceOptions& options, const DeviceLimits& limits);

}  // namespace kv_offload
