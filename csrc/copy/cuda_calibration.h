// Measures the copy paths of a device on scratch memory of its own: neither the
// caches nor the area are touched. CUDA only.
#pragma once

#include "copy/copy_path.h"
#include "copy/cuda_device.h"

namespace kv_offload {

// Bounded by a second; `limits` as the copier will use them. Takes 32 MiB of the
// device, 32 MiB of pinned memory and as much staging as will serve; where that
// is not to be had, the table is the built-in one and says why.
CopyTable calibrate_cuda(const CudaDeviceOptions& options, const DeviceLimits& limits);

}  // namespace kv_offload
