// SPDX-License-Identifier: Apache-2.0
// RankWorker: the worker-side counterpart of TieredCache. Connects one rank's copier to its area of the
// region: it accepts jobs and returns results. Every ticket is reported in the control page exactly once,
// failed or not, before its result is returned. A job that ends while a job kTicketSlots tickets before it
// runs is reported and returned after that one.
//
// A failed store is not an error: its ticket keeps its keys from ever becoming a hit, like chunks that vLLM
// offered without some of their blocks. A failed load is an error: vLLM cannot undo it and would compute with
// invalid data. Therefore wait() and poll() throw until the process ends.
//
// Without memory the calls throw std::bad_alloc. No result of a submitted job is lost then: later calls
// report and return it. But a submit() that throws may have lost its job, so the process must end.
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
  // Logs one line for an operator: what failed and the consequence.
  using Log = std::function<void(const std::string& line)>;

  // Shares the region; `metrics` must outlive this. Logs to stderr if `log` is empty.
  RankWorker(std::shared_ptr<HostRegion> region, std::uint32_t rank, std::unique_ptr<BlockCopier> copier,
             Metrics& metrics, Log log = {});
  ~RankWorker();  // calls close()

  // An inconsistent job or a failed copy also ends as a result, and its ticket marks its chunks as failed.
  // Throws nothing else than std::bad_alloc.
  void submit(CopyJob job);
  // Returns finished jobs; their tickets are already reported. Throws ResourceError if a load failed.
  std::vector<CopyResult> poll();
  // Returns when the listed jobs no longer touch cache memory. Throws ResourceError if a load failed.
  void wait(std::span<const std::uint64_t> job_ids);
  std::string describe() const;
  // Finishes running jobs and reports every ticket. Idempotent.
  void close();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace kv_offload
