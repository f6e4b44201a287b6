// SPDX-License-Identifier: Apache-2.0
// Stand-in for the parts of the runtime header that nvcc adds. It is enough to compile a .cu file
// as C++ and to run its kernels as loops over grid and block. A kernel must not synchronise its
// threads: they run one after the other.
#pragma once

#include <functional>
#include <memory>
#include <tuple>
#include <utility>

#include "cuda_runtime_api.h"

#define __global__
#define __host__
#define __device__
#define __grid_constant__
#define __launch_bounds__(...)

struct uint3 {
  unsigned x, y, z;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};

// Indices of the grid thread that this host thread currently runs.
extern thread_local uint3 blockIdx, threadIdx;
extern thread_local dim3 gridDim, blockDim;

namespace fake_cuda {
// `run` executes one thread of the grid. `check` returns the problem with the arguments on that
// device, or "" if there is none. `parameter_bytes`: total size of all arguments.
cudaError_t launch(const cudaLaunchConfig_t& config, const void* kernel, std::size_t parameter_bytes,
                   std::function<const char*(int device)> check, std::function<void()> run);
cudaError_t load_kernel(cudaFuncAttributes* attributes, const void* kernel);
}  // namespace fake_cuda

template <typename... Declared, typename... Given>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Declared...),
                               Given&&... arguments) {
  // Copies the arguments at launch, as CUDA does.
  auto taken = std::make_shared<std::tuple<std::decay_t<Declared>...>>(std::forward<Given>(arguments)...);
  const auto check = [taken](int device) -> const char* {
    return std::apply(
        [device](const auto&... values) -> const char* {
          (void)device;
          // Argument-dependent lookup finds this check if the kernel's source defines one.
          if constexpr (requires { wrong_with_kernel_arguments(device, values...); }) {
            return wrong_with_kernel_arguments(device, values...);
          }
          return "";
        },
        *taken);
  };
  return fake_cuda::launch(*config, reinterpret_cast<const void*>(kernel),
                           (std::size_t{0} + ... + sizeof(std::decay_t<Declared>)), check,
                           [taken, kernel] { std::apply(kernel, *taken); });
}

template <typename... Declared>
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, void (*kernel)(Declared...)) {
  return fake_cuda::load_kernel(attributes, reinterpret_cast<const void*>(kernel));
}
