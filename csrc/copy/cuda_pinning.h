// PinnedArea: a rank's area registered with CUDA for as long as this lives. The
// area is registered in pieces by several threads at once, which also populates
// what is not populated yet, where the memory's own policy puts it
// (HostRegion::prefer_node). CUDA only.
//
// A DMA must not cross two registrations: copies are cut at multiples of
// piece_bytes().
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
  std::function<void(std::uint64_t done, std::uint64_t total)> progress{};  // from the constructor's thread
};

class PinnedArea {
 public:
  // Throws ResourceError naming the bytes asked and what CUDA said, and what the
  // progress function throws; then nothing stays registered and no CUDA error
  // stays behind.
  PinnedArea(std::span<std::byte> area, const PinOptions& options);
  ~PinnedArea();
  PinnedArea(const PinnedArea&) = delete;
  PinnedArea& operator=(const PinnedArea&) = delete;

  std::uint64_t piece_bytes() const { return piece_bytes_; }
  // Whether kernels may use the host addresses as they are.
  bool reachable_by_kernels() const { return reachable_; }

 private:
  std::span<std::byte> piece(std::size_t index) const;
  void register_pieces(const PinOptions& options);
  void look_whether_kernels_reach_it();
  void unregister();

  const CudaContext context_;
  std::span<std::byte> area_;
  int device_;
  std::uint64_t piece_bytes_;
  std::vector<char> registered_;  // by piece; not vector<bool>, threads write it side by side
  bool reachable_ = true;
};

// The NUMA node a device hangs on; -1 when there is none or it is not told.
int numa_node_of(int device);

}  // namespace kv_offload
