// SPDX-License-Identifier: Apache-2.0
// The CUDA implementation of the operators in torch_ops.cc. It is a separate library, so that the CPU one
// loads where torch has no CUDA. The operators launch on torch's current stream and do not wait. The caller
// must keep pinned memory alive until they have run (kv_offload/torch_ops.py), because torch does not know
// that they use it.
#include <torch/csrc/inductor/aoti_torch/c/shim.h>

#include "bindings/torch_pages.h"
#include "copy/pack_pages.h"

namespace kv_offload::torch_ops {
namespace {

constexpr unsigned kBlocks = 32;  // no other work waits for these launches, so they may be wide

void move_pages(const std::vector<PackPiece>& pages, bool to_row, const Tensor& cache) {
  void* stream = nullptr;
  STD_TORCH_CHECK(aoti_torch_get_current_cuda_stream(cache.get_device_index(), &stream) == 0,
                  "torch has no current CUDA stream");
  const std::string error = pack_pages_on_stream(pages, to_row, kBlocks, cache.get_device_index(), stream);
  STD_TORCH_CHECK(error.empty(), error);
}

void check_device(const std::vector<Tensor>& caches) {
  for (const Tensor& cache : caches) {
    STD_TORCH_CHECK(cache.is_cuda() && cache.get_device_index() == caches[0].get_device_index(),
                    "all caches must be on one CUDA device");
  }
}

void pack_blocks(std::vector<Tensor> caches, Tensor block_ids, Tensor packed) {
  const std::vector<PackPiece> pages = list_pages(caches, block_ids, packed);
  check_device(caches);
  move_pages(pages, true, caches[0]);
}

void unpack_blocks(Tensor packed, Tensor block_ids, std::vector<Tensor> caches) {
  const std::vector<PackPiece> pages = list_pages(caches, block_ids, packed);
  check_device(caches);
  move_pages(pages, false, caches[0]);
}

}  // namespace
}  // namespace kv_offload::torch_ops

STABLE_TORCH_LIBRARY_IMPL(kv_offload, CUDA, library) {
  library.impl("pack_blocks", TORCH_BOX(&kv_offload::torch_ops::pack_blocks));
  library.impl("unpack_blocks", TORCH_BOX(&kv_offload::torch_ops::unpack_blocks));
}
