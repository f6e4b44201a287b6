// SPDX-License-Identifier: Apache-2.0
// PinnedArea: registers a rank's area with CUDA for its lifetime. Several threads register the area in pieces
// concurrently. Registering also populates pages that are not populated yet, on the NUMA node given by the
// memory's own policy (HostRegion::prefer_node). CUDA only.
//
// A DMA must not cross two registrations: copies are split at multiples of piece_bytes().
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "copy/cuda_context.h"

namespace kv_offload {

struct PinOptions {
  int device = 0;
  std::uint64_t piece_bytes = 1ull << 30;  // at most 64 GiB; a multiple of 2 MiB
  unsigned threads = 4;
  bool read_only = false;  // the memory is mapped read-only, and the device only reads it
  std::function<void(std::uint64_t done, std::uint64_t total)> progress{};  // on the constructor's thread
};

class PinnedArea {
 public:
  // Throws ResourceError with the requested bytes and CUDA's error, and rethrows exceptions of the progress
  // function. Then nothing stays registered and no CUDA error stays pending.
  PinnedArea(std::span<std::byte> area, const PinOptions& options);
  ~PinnedArea();
  PinnedArea(const PinnedArea&) = delete;
  PinnedArea& operator=(const PinnedArea&) = delete;

  std::uint64_t piece_bytes() const { return piece_bytes_; }
  // True if kernels may use the host addresses unchanged.
  bool reachable_by_kernels() const { return reachable_; }

 private:
  std::span<std::byte> piece(std::size_t index) const;
  void register_pieces(const PinOptions& options);
  void check_kernel_access();
  void unregister();

  const CudaContext context_;
  std::span<std::byte> area_;
  int device_;
  std::uint64_t piece_bytes_;
  std::vector<char> registered_;  // by piece; not vector<bool>, because threads write it concurrently
  bool reachable_ = true;
};

// Returns the NUMA node of a device; -1 if there is none or it is unknown.
int numa_node_of(int device);

}  // namespace kv_offload
