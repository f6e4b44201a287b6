// SPDX-License-Identifier: Apache-2.0
// Shared by both implementations of the torch operators: checks the tensors and lists the pages of the
// blocks. The pages are in the order of a row (copy/copy_plan.h): by block, and within a block by cache. Uses
// only libtorch's stable ABI, so that one binary works with every torch from 2.11 on.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <vector>

#include "copy/pack_index.h"

namespace kv_offload::torch_ops {

using torch::stable::Tensor;

// caches[i]: (num_blocks, elements), rows contiguous, any dtype, all on one device. block_ids: int32 or
// int64, one-dimensional, on the CPU. packed: contiguous, len(block_ids) * the sum of the caches' row bytes.
// Throws std::runtime_error (RuntimeError in Python) that names the invalid argument.
inline std::vector<PackPiece> list_pages(const std::vector<Tensor>& caches, const Tensor& block_ids,
                                         const Tensor& packed) {
  // Every check guards the raw pointers below.
  STD_TORCH_CHECK(!caches.empty(), "caches is empty");
  STD_TORCH_CHECK(block_ids.is_cpu() && block_ids.dim() == 1 && block_ids.is_contiguous(),
                  "block_ids must be a contiguous CPU tensor of one dimension");
  const bool wide = block_ids.scalar_type() == torch::headeronly::ScalarType::Long;
  STD_TORCH_CHECK(wide || block_ids.scalar_type() == torch::headeronly::ScalarType::Int,
                  "block_ids must be int32 or int64");
  std::int64_t num_blocks = caches[0].size(0);
  std::uint64_t block_bytes = 0;
  for (const Tensor& cache : caches) {
    STD_TORCH_CHECK(cache.dim() == 2 && (cache.size(1) == 1 || cache.stride(1) == 1),
                    "a cache must be (num_blocks, elements) with contiguous rows");
    STD_TORCH_CHECK(cache.size(0) <= 1 || cache.stride(0) >= cache.size(1), "the blocks of a cache overlap");
    // A block id must be valid in every cache.
    if (cache.size(0) < num_blocks) num_blocks = cache.size(0);
    block_bytes += static_cast<std::uint64_t>(cache.size(1)) * cache.element_size();
  }
  const std::int64_t count = block_ids.numel();
  STD_TORCH_CHECK(
      packed.is_contiguous() && static_cast<std::uint64_t>(packed.numel()) * packed.element_size() ==
                                    static_cast<std::uint64_t>(count) * block_bytes,
      "packed must be contiguous and hold ", count, " blocks of ", block_bytes, " bytes");

  std::vector<PackPiece> pages;
  pages.reserve(static_cast<std::size_t>(count) * caches.size());
  auto* row = static_cast<std::byte*>(packed.data_ptr());
  const void* ids = block_ids.data_ptr();
  for (std::int64_t i = 0; i < count; ++i) {
    const std::int64_t id =
        wide ? static_cast<const std::int64_t*>(ids)[i] : static_cast<const std::int32_t*>(ids)[i];
    STD_TORCH_CHECK(id >= 0 && id < num_blocks, "block id ", id, " is outside 0..", num_blocks - 1);
    for (const Tensor& cache : caches) {
      const std::uint64_t bytes = static_cast<std::uint64_t>(cache.size(1)) * cache.element_size();
      const std::uint64_t stride = static_cast<std::uint64_t>(cache.stride(0)) * cache.element_size();
      auto* page = static_cast<std::byte*>(cache.data_ptr()) + static_cast<std::uint64_t>(id) * stride;
      // A cache with empty rows has no page.
      if (bytes != 0) pages.push_back({page, row, bytes});
      row += bytes;
    }
  }
  return pages;
}

}  // namespace kv_offload::torch_ops
