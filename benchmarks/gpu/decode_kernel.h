// SPDX-License-Identifier: Apache-2.0
// A stand-in for a decode step: reads `bytes` of device memory with every SM.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

cudaError_t launch_decode(const void* weights, std::uint64_t bytes, unsigned* sink, unsigned blocks,
                          cudaStream_t stream);
