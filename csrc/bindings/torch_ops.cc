// SPDX-License-Identifier: Apache-2.0
// torch.ops.kv_offload.pack_blocks / unpack_blocks: the schemas and the CPU implementation. torch_ops_cuda.cc
// has the CUDA implementation; kv_offload/torch_ops.py has the meta one.
#include "bindings/torch_pages.h"
#include "copy/host_memcpy.h"

namespace kv_offload::torch_ops {
namespace {

constexpr std::int64_t kBytesPerTask = 256 << 10;

void move_pages(const std::vector<PackPiece>& pages, bool to_row) {
  if (pages.empty()) return;
  const auto grain = std::max<std::int64_t>(1, kBytesPerTask / static_cast<std::int64_t>(pages[0].bytes));
  torch::stable::parallel_for(0, static_cast<std::int64_t>(pages.size()), grain,
                              [&](std::int64_t begin, std::int64_t end) {
                                for (std::int64_t i = begin; i < end; ++i) {
                                  const PackPiece& page = pages[static_cast<std::size_t>(i)];
                                  std::byte* to = to_row ? page.row : page.cache;
                                  copy_bytes(to, to_row ? page.cache : page.row, page.bytes);
                                }
                              });
}

// caches -> packed
void pack_blocks(std::vector<Tensor> caches, Tensor block_ids, Tensor packed) {
  move_pages(list_pages(caches, block_ids, packed), true);
}

// packed -> caches
void unpack_blocks(Tensor packed, Tensor block_ids, std::vector<Tensor> caches) {
  move_pages(list_pages(caches, block_ids, packed), false);
}

}  // namespace
}  // namespace kv_offload::torch_ops

STABLE_TORCH_LIBRARY(kv_offload, library) {
  library.def("pack_blocks(Tensor[] caches, Tensor block_ids, Tensor(a!) packed) -> ()");
  library.def("unpack_blocks(Tensor packed, Tensor block_ids, Tensor(a!)[] caches) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(kv_offload, CPU, library) {
  library.impl("pack_blocks", TORCH_BOX(&kv_offload::torch_ops::pack_blocks));
  library.impl("unpack_blocks", TORCH_BOX(&kv_offload::torch_ops::unpack_blocks));
}
