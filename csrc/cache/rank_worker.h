// RankWorker: the worker-side twin of TieredCache. It ties one rank's copier to
// its area of the region: jobs in, results out, every ticket reported in the
// control page exactly once, failed or not, before the result is handed out.
//
// Threads: one (the model runner's).
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "copy/block_copier.h"
#include "memory/host_region.h"
#include "metrics/metrics.h"

namespace kv_offload {

class RankWorker {
 public:
  // The region, metrics and copier outlive nothing else; the region is shared.
  RankWorker(std::shared_ptr<HostRegion> region, std::uint32_t rank, std::unique_ptr<BlockCopier> copier,
             Metrics& metrics);
  ~RankWorker();

  // A job that contradicts itself, or whose copy fails, still ends as a result;
  // its ticket then names the failed groups. Nothing is thrown.
  void submit(CopyJob job);
  // Finished jobs, tickets already reported.
  std::vector<CopyResult> poll();
  void wait(std::span<const std::uint64_t> job_ids);
  std::string describe() const;
  void close();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace kv_offload
