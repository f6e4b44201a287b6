// BlockCopier: moves bytes between a rank's cache blocks and its area of the
// region, asynchronously. Two implementations, byte for byte equal: host_copier
// (threads and memcpy) and cuda_copier (streams and DMA), the latter in a
// library of its own.
//
// A load that was given rows of resident chunks cannot fail for storage reasons.
// A job always ends; one that failed names the groups that must never become a
// hit. Threads: one (the model runner's) calls everything but the inside.
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
  std::uint64_t refused_batches = 0;  // that the driver refused and that went one by one
  double seconds = 0;                 // from the first byte's start to the last one's end
};

struct CopierOptions {
  CacheLayout layout;
  std::span<std::byte> area;  // this rank's part of the region; outlives the copier
  unsigned threads = 2;       // host copier
  // The rest is for the CUDA copier.
  int device = -1;  // CUDA device ordinal
  // Blocks of a pack kernel, each on an SM of its own while it runs. On published
  // figures 8 blocks of 256 threads fill a PCIe 5 link; more take SMs from the model.
  unsigned kernel_blocks = 8;
  // Device memory for staged copies, 2 MiB for each of the 16 that can be in flight:
  // smaller ones are over before the thread looks again (device_copier.h). 0: none.
  std::uint64_t staging_bytes = 32 << 20;
  bool calibrate = true;  // measure the paths at start (below a second), else built-in rates
  // Bytes of the area that are pinned, of all; from the constructor's thread.
  std::function<void(std::uint64_t done, std::uint64_t total)> pin_progress{};
  // Tests only: false leaves out the wait for the compute stream.
  bool order_after_compute = true;
};

class BlockCopier {
 public:
  virtual ~BlockCopier() = default;  // waits for what runs
  // "host" or "cuda", and for info: which path is used when.
  virtual std::string describe() const = 0;
  // Never blocks on the copy. A plan that contradicts itself throws
  // InvalidArgument; anything else ends as a CopyResult.
  virtual void submit(CopyJob job) = 0;
  // Finished since the last call, in order of completion. Never blocks.
  virtual std::vector<CopyResult> poll() = 0;
  // Returns when the listed jobs no longer touch cache memory. Unknown and
  // finished ids are fine. Their results still come from poll().
  virtual void wait(std::span<const std::uint64_t> job_ids) = 0;
  virtual void close() = 0;
};

std::unique_ptr<BlockCopier> make_host_copier(const CopierOptions& options);
// Loads the CUDA library beside this one on first use. Throws ResourceError
// saying what is missing where there is none.
std::unique_ptr<BlockCopier> make_cuda_copier(const CopierOptions& options);
// "" when the CUDA copier can be loaded here, else why not.
std::string cuda_unavailable_reason();
// The NUMA node that a CUDA device hangs on; -1 when there is none or it is not
// told. Makes no context.
int cuda_numa_node(int device);
// Makes the CUDA copier of a device (-1: the current one) on a little memory of
// its own and says what it measured: which path is taken from which size. Throws
// as make_cuda_copier does.
std::string describe_cuda_copier(int device);

}  // namespace kv_offload
