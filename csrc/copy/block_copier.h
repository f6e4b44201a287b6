// SPDX-License-Identifier: Apache-2.0
// BlockCopier: copies bytes asynchronously between a rank's cache blocks and its area of the region. There
// are two implementations with byte-identical results: host_copier (threads and memcpy) and cuda_copier
// (streams and DMA), which is a separate library.
//
// A load from rows of resident chunks cannot fail for storage reasons. Every job ends; a failed job names the
// groups that must never become a hit.
//
// Threads: one (the model runner's) makes all calls.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "copy/copy_plan.h"

namespace kv_offload {

struct CopyResult {
  std::uint64_t job_id = 0;
  Ticket ticket = kNoTicket;
  CopyDirection direction = CopyDirection::kStore;
  Status status{};                  // kDevice on failure
  std::uint64_t failed_groups = 0;  // see base/refused_chunks.h
  std::uint64_t bytes = 0;
  std::uint64_t segments = 0;
  std::uint64_t refused_batches = 0;  // batches the driver refused; copied one by one instead
  double seconds = 0;                 // from the start of the first byte to the end of the last
};

struct CopierOptions {
  CacheLayout layout;
  std::span<std::byte> area;  // this rank's part of the region; must outlive the copier
  // The area and the places for areas of neighbours after it (HostRegion::window): loads may name rows there.
  // Empty: there are none.
  std::span<std::byte> window{};
  unsigned threads = 2;  // of the host copier
  // The remaining options are for the CUDA copier.
  int device = -1;  // CUDA device ordinal
  // Thread blocks of a pack kernel; each occupies one SM while it runs. By published figures, 8 blocks of 256
  // threads fill a PCIe 5 link; more blocks take SMs from the model.
  unsigned kernel_blocks = 8;
  // Device memory for staged copies: 2 MiB for each of the 16 copies that can be in flight. Smaller copies
  // would end before the thread polls again (device_copier.h). 0 = no staging.
  std::uint64_t staging_bytes = 32 << 20;
  bool calibrate = true;  // measure the paths at start (under a second); false = built-in rates
  // Reports pinned bytes out of the total bytes of the area. Called on the constructor's thread.
  std::function<void(std::uint64_t done, std::uint64_t total)> pin_progress{};
  // Tests only: false skips the wait for the compute stream.
  bool order_after_compute = true;
};

class BlockCopier {
 public:
  virtual ~BlockCopier() = default;  // waits for running copies
  // Returns "host" or "cuda", followed by information about which path is used when.
  virtual std::string describe() const = 0;
  // Never blocks on the copy. Throws InvalidArgument if the job contradicts itself; any other failure ends as
  // a CopyResult.
  virtual void submit(CopyJob job) = 0;
  // Returns the jobs finished since the last call, in order of completion. Never blocks.
  virtual std::vector<CopyResult> poll() = 0;
  // Returns when the listed jobs no longer touch cache memory. Unknown and finished ids are ignored. The
  // results are still returned by poll().
  virtual void wait(std::span<const std::uint64_t> job_ids) = 0;
  virtual void close() = 0;
  // Prepares a neighbour's area, which was mapped at its place in the window, for loads; ends that before it
  // is unmapped. Any thread, one at a time. REQUIRES: no load uses the area during the call.
  virtual Status add_neighbour(std::span<std::byte>) { return Status::ok(); }
  virtual Status remove_neighbour(std::span<std::byte>) { return Status::ok(); }
};

std::unique_ptr<BlockCopier> make_host_copier(const CopierOptions& options);
// Loads the CUDA library from this library's directory on first use. Throws ResourceError with the reason if
// the CUDA copier is not available.
std::unique_ptr<BlockCopier> make_cuda_copier(const CopierOptions& options);
// Returns "" if the CUDA copier can be loaded here, else the reason why not.
std::string cuda_unavailable_reason();
// Returns the NUMA node of a CUDA device; -1 if there is none or it is unknown. Creates no context.
int cuda_numa_node(int device);
// Creates the CUDA copier of a device (-1 = the current one) with a small temporary area. Returns its
// measurements: the path used from each segment size on. Throws like make_cuda_copier.
std::string describe_cuda_copier(int device);

}  // namespace kv_offload
