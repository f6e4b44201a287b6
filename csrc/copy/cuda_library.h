// The seam between the core and the library of the CUDA copier: four C symbols.
// No CUDA header is needed to include this.
#pragma once

#include <cstddef>

namespace kv_offload {

class BlockCopier;
struct CopierOptions;

inline constexpr char kCudaLibraryName[] = "libkv_offload_cuda.so";
// Changes whenever BlockCopier, CopierOptions, CopyJob or CopyResult do: the two
// are built together or not used together.
inline constexpr int kCudaInterfaceVersion = 2;
inline constexpr std::size_t kCudaMessageBytes = 1024;

// The version the library was built with.
using CudaInterface = int (*)();
inline constexpr char kCudaInterfaceSymbol[] = "kv_offload_cuda_interface";
// Null and a message on failure; nothing is thrown across.
using CudaMakeCopier = BlockCopier* (*)(const CopierOptions* options, bool* callers_mistake, char* message,
                                        std::size_t capacity);
inline constexpr char kCudaMakeCopierSymbol[] = "kv_offload_cuda_make_copier";
// Writes "" when a device can be used, else why not.
using CudaReason = void (*)(char* message, std::size_t capacity);
inline constexpr char kCudaReasonSymbol[] = "kv_offload_cuda_unavailable_reason";
// The NUMA node that a device hangs on; -1 when there is none or it is not told.
using CudaNumaNode = int (*)(int device);
inline constexpr char kCudaNumaNodeSymbol[] = "kv_offload_cuda_numa_node";

}  // namespace kv_offload
