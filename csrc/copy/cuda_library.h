// SPDX-License-Identifier: Apache-2.0
// The interface between the core and the CUDA copier library: four C symbols. Needs no CUDA header.
//
// C++ structs cross this interface, so core and library must come from the same build. Both contain
// kCudaInterface, a hash over every member of those structs.
#pragma once

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <string_view>
#include <utility>

#include "copy/block_copier.h"

namespace kv_offload {

namespace cuda_interface {

// FNV-1a over the sizes and names of the types; the function's own name contains the type names.
template <typename... Types>
struct Members {
  static constexpr std::uint64_t mixed_into(std::uint64_t hash) {
    for (const char letter : std::string_view(__PRETTY_FUNCTION__)) {
      hash = (hash ^ static_cast<unsigned char>(letter)) * 0x100000001b3;
    }
    for (const std::size_t bytes : {sizeof(Types)...}) hash = (hash ^ bytes) * 0x100000001b3;
    return hash;
  }
};
template <typename Struct, typename... Types>
constexpr Members<Struct, Types...> list(const Struct&, const Types&...) {
  return {};
}

// A structured binding names as many members as the struct has. A new member does not compile until it is
// listed here, which changes the hash.
constexpr auto members(const CacheTensor& s) {
  const auto& [base, num_blocks, block_stride] = s;
  return list(s, base, num_blocks, block_stride);
}
constexpr auto members(const GroupRef& s) {
  const auto& [tensor, page_bytes] = s;
  return list(s, tensor, page_bytes);
}
constexpr auto members(const CacheLayout& s) {
  const auto& [tensors, groups, blocks_per_chunk, holds_states, shards_per_area, tail_blocks] = s;
  return list(s, tensors, groups, blocks_per_chunk, holds_states, shards_per_area, tail_blocks);
}
constexpr auto members(const CopierOptions& s) {
  const auto& [layout, area, window, threads, device, kernel_blocks, staging_bytes, calibrate, pin_progress,
               order_after_compute] = s;
  return list(s, layout, area, window, threads, device, kernel_blocks, staging_bytes, calibrate, pin_progress,
              order_after_compute);
}
constexpr auto members(const CopyJob& s) {
  const auto& [id, ticket, direction, expedited, compute_stream, block_ids, group_sizes, block_indices, rows,
               group_rows] = s;
  return list(s, id, ticket, direction, expedited, compute_stream, block_ids, group_sizes, block_indices,
              rows, group_rows);
}
constexpr auto members(const CopyResult& s) {
  const auto& [job_id, ticket, direction, status, failed_groups, bytes, segments, refused_batches, seconds] =
      s;
  return list(s, job_id, ticket, direction, status, failed_groups, bytes, segments, refused_batches, seconds);
}

template <typename... Structs>
constexpr std::uint64_t number_of(std::uint64_t version) {
  ((version = decltype(members(std::declval<const Structs&>()))::mixed_into(version)), ...);
  return version;
}

}  // namespace cuda_interface

inline constexpr char kCudaLibraryName[] = "libkv_offload_cuda.so";
// Increase this for changes that the member types do not show: a new virtual function of BlockCopier, a new
// order or meaning of members of the same type or of enum values, or new members of Status.
inline constexpr std::uint64_t kCudaInterfaceVersion = 4;
inline constexpr std::uint64_t kCudaInterface =
    cuda_interface::number_of<CacheTensor, GroupRef, CacheLayout, CopierOptions, CopyJob, CopyResult>(
        kCudaInterfaceVersion);
inline constexpr std::size_t kCudaMessageBytes = 1024;

// Returns the library's kCudaInterface.
using CudaInterface = std::uint64_t (*)();
inline constexpr char kCudaInterfaceSymbol[] = "kv_offload_cuda_interface";
// Returns null and writes a message on failure. No exception crosses the interface.
using CudaMakeCopier = BlockCopier* (*)(const CopierOptions* options, bool* callers_mistake, char* message,
                                        std::size_t capacity);
inline constexpr char kCudaMakeCopierSymbol[] = "kv_offload_cuda_make_copier";
// Writes "" if a device can be used, else the reason why not.
using CudaReason = void (*)(char* message, std::size_t capacity);
inline constexpr char kCudaReasonSymbol[] = "kv_offload_cuda_unavailable_reason";
// Returns the NUMA node of a device; -1 if there is none or it is unknown.
using CudaNumaNode = int (*)(int device);
inline constexpr char kCudaNumaNodeSymbol[] = "kv_offload_cuda_numa_node";

}  // namespace kv_offload
