// The seam between the core and the library of the CUDA copier: four C symbols.
// No CUDA header is needed to include this.
//
// Structs of C++ pass through it, so the two are built together or not used
// together: both have kCudaInterface compiled in, which is made of every member
// of those structs.
#pragma once

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <string_view>
#include <utility>

#include "copy/block_copier.h"

namespace kv_offload {

namespace cuda_interface {

// FNV-1a of the types' names, which this function's own name lists, and sizes.
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

// A binding names as many members as the struct has: with one more this does not
// compile until it is listed, and the number is another one then.
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
  const auto& [layout, area, threads, device, kernel_blocks, staging_bytes, calibrate, pin_progress,
               order_after_compute] = s;
  return list(s, layout, area, threads, device, kernel_blocks, staging_bytes, calibrate, pin_progress,
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
// To be raised for what the members' types do not show: another virtual function of
// BlockCopier, another order or meaning of members of one type or of an enum's
// values, members of Status.
inline constexpr std::uint64_t kCudaInterfaceVersion = 3;
inline constexpr std::uint64_t kCudaInterface =
    cuda_interface::number_of<CacheTensor, GroupRef, CacheLayout, CopierOptions, CopyJob, CopyResult>(
        kCudaInterfaceVersion);
inline constexpr std::size_t kCudaMessageBytes = 1024;

// kCudaInterface of the library.
using CudaInterface = std::uint64_t (*)();
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
