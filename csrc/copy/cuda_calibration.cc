// SPDX-License-Identifier: Apache-2.0
#include "copy/cuda_calibration.h"

#include <chrono>
#include <memory>
#include <thread>
#include <utility>

#include "base/clock.h"
#include "copy/cuda_check.h"
#include "copy/cuda_context.h"

namespace kv_offload {
namespace {

constexpr std::uint64_t kScratchBytes = 32 << 20;  // the distance between pages is twice their size

// Device memory and pinned memory for the measurements.
class Scratch {
 public:
  Scratch() {
    cuda_require(cudaMalloc(reinterpret_cast<void**>(&cache_), kScratchBytes), "cudaMalloc (calibration)");
    const cudaError_t error = cudaMallocHost(reinterpret_cast<void**>(&rows_), kScratchBytes);
    if (error != cudaSuccess) {
      (void)cudaFree(cache_);
      cuda_require(error, "cudaMallocHost (calibration)");
    }
  }
  ~Scratch() {
    (void)cudaFree(cache_);
    (void)cudaFreeHost(rows_);
  }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  std::byte* cache() const { return cache_; }
  std::span<std::byte> rows() const { return {rows_, kScratchBytes}; }

 private:
  std::byte* cache_ = nullptr;
  std::byte* rows_ = nullptr;
};

// A group for each size of the table. Its pages are far enough apart that nothing merges.
CacheLayout layout_of(std::byte* cache) {
  CacheLayout layout;
  for (const std::uint64_t bytes : CopyTable::kSegmentBytes) {
    layout.groups.push_back({{static_cast<std::uint32_t>(layout.tensors.size()), bytes}});
    layout.tensors.push_back({cache, kScratchBytes / (2 * bytes), 2 * bytes});
  }
  return layout;
}

CopyJob job_of(CopyDirection direction, std::uint64_t segment_bytes, std::uint64_t total_bytes) {
  CopyJob job;
  job.direction = direction;
  const std::uint64_t blocks = total_bytes / segment_bytes;
  for (std::uint64_t i = 0; i < blocks; ++i) {
    job.block_ids.push_back(static_cast<std::int64_t>(i));
    job.rows.push_back(static_cast<RowId>(i * (segment_bytes / kPageBytes)));
  }
  for (const std::uint64_t bytes : CopyTable::kSegmentBytes) {
    job.group_sizes.push_back(bytes == segment_bytes ? static_cast<std::uint32_t>(blocks) : 0);
  }
  job.group_rows = job.group_sizes;
  job.block_indices.assign(job.group_sizes.size(), 0);
  return job;
}

// One path, run by the same copier as in production, with its scheduling, its limits and a thread that sleeps
// between polls.
class Runner {
 public:
  Runner(CopyPath path, const CacheLayout& layout, const CudaDeviceOptions& options,
         const DeviceLimits& limits)
      : copier_({.layout = layout, .area = options.area, .order_after_compute = false},
                std::make_unique<CudaDevice>(options), single_path_table(path), limits) {}

  CopyResult run(CopyJob job) {
    job.id = ++last_id_;
    copier_.submit(std::move(job));
    std::vector<CopyResult> results;
    // Not wait(), which makes the thread spin and allows more in flight.
    while ((results = copier_.poll()).empty()) std::this_thread::sleep_for(std::chrono::microseconds(50));
    return std::move(results[0]);
  }

 private:
  DeviceCopier copier_;
  std::uint64_t last_id_ = 0;
};

}  // namespace

CopyTable calibrate_cuda(const CudaDeviceOptions& options, const DeviceLimits& limits) {
  try {
    const CudaContext context(options.device);
    const CudaContext::Scope scope(context);
    cuda_require(scope.status());
    const CudaCaptureScope relaxed;
    const Scratch scratch;
    const SteadyClock clock;
    const Nanos begun = clock.now();
    const auto spent = [&] { return to_seconds(clock.now() - begun); };
    const CacheLayout layout = layout_of(scratch.cache());
    CudaDeviceOptions scratch_options = options;
    scratch_options.area = scratch.rows();
    std::array<std::unique_ptr<Runner>, kCopyPaths> runners;
    const auto measure = [&](CopyDirection direction, CopyPath path, std::uint64_t segment_bytes,
                             std::uint64_t total_bytes) -> double {
      if (path == CopyPath::kStaged && limits.staged_bytes == 0) return 0;
      std::unique_ptr<Runner>& runner = runners[static_cast<std::size_t>(path)];
      if (runner == nullptr) {
        // Only staged copies need staging, the largest allocation of a runner.
        scratch_options.staging_bytes = path == CopyPath::kStaged ? options.staging_bytes : 0;
        runner = std::make_unique<Runner>(path, layout, scratch_options, limits);
      }
      const CopyResult result = runner->run(job_of(direction, segment_bytes, total_bytes));
      if (result.status.is_ok()) return result.seconds;
      // A kernel may be missing; DMA is always available.
      if (path == CopyPath::kDma) throw_resource("{}", result.status.message());
      return 0;
    };
    CopyTable table = calibrate({.measure = measure, .spent = spent, .budget_seconds = 0.8});
    if (!table.measured) table.not_measured = "the time budget ended before the first copy";
    return table;
  } catch (const ResourceError& error) {
    CopyTable table = default_copy_table();
    table.not_measured = error.what();
    return table;
  }
}

}  // namespace kv_offload
