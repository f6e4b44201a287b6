// RankWorker: the worker-side twin of TieredCache. It ties one rank's copier to
// its area of the region: jobs in, results out, every ticket reported in the
// control page exactly once, failed or not, before the result is handed out.
//
// A store that fails is no error: its ticket keeps its keys from ever becoming a
// hit, as it does with the chunks that vLLM offered without some of their blocks. A load that fails is one:
// vLLM has no way to take it back and would compute on foreign bytes, so wait() and poll() throw until the
// process ends.
//
// Threads: one (the model runner's).
#pragma once

#include <cstdint>
#include <functional>
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
  // One line for an operator: what failed and what follows from it.
  using Log = std::function<void(const std::string& line)>;

  // The region is shared; metrics outlive this. Without a log, stderr.
  RankWorker(std::shared_ptr<HostRegion> region, std::uint32_t rank, std::unique_ptr<BlockCopier> copier,
             Metrics& metrics, Log log = {});
  ~RankWorker();  // close()

  // A job that contradicts itself, or whose copy fails, still ends as a result;
  // its ticket then names its chunks. Nothing is thrown.
  void submit(CopyJob job);
  // Finished jobs, tickets already reported. Throws ResourceError when a load failed.
  std::vector<CopyResult> poll();
  // Returns when the listed jobs no longer touch cache memory. Throws
  // ResourceError when a load failed.
  void wait(std::span<const std::uint64_t> job_ids);
  std::string describe() const;
  // Finishes what runs and reports every ticket. Idempotent.
  void close();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace kv_offload
