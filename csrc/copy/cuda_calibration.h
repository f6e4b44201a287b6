// SPDX-License-Identifier: Apache-2.0
// Measures the copy paths of a device on its own scratch memory; touches neither the caches nor the area.
// CUDA only.
#pragma once

#include "copy/copy_path.h"
#include "copy/cuda_device.h"

namespace kv_offload {

// Takes at most about a second. `limits`: the limits that the copier will use. Uses 32 MiB of device memory,
// 32 MiB of pinned memory and as much staging as the copier will use. If that memory is not available,
// returns the built-in table with the reason.
CopyTable calibrate_cuda(const CudaDeviceOptions& options, const DeviceLimits& limits);

}  // namespace kv_offload
