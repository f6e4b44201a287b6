#include "copy/cuda_calibration.h"

#include <memory>
#include <thread>

#include "base/clock.h"
#include "copy/cuda_check.h"

namespace kv_offload {
namespace {

constexpr std::uint64_t kScratchBytes = 32 << 20;  // pages stand twice as far apart as they are long

// Device and pinned memory to measure on.
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

std::vector<CopySegment> pages(std::byte* cache, std::uint64_t segment_bytes, std::uint64_t total_bytes) {
  std::vector<CopySegment> segments;
  const std::uint64_t places = kScratchBytes / (2 * segment_bytes);
  for (std::uint64_t i = 0; i < total_bytes / segment_bytes; ++i) {
    segments.push_back({cache + i % places * 2 * segment_bytes, i * segment_bytes, segment_bytes});
  }
  return segments;
}

// Runs one job of sub-jobs as DeviceCopier would, and waits for it.
Status run(CudaDevice& device, CopyDirection direction, CopyPath path, std::vector<CopySegment> segments,
           const SplitLimits& split_limits) {
  const std::vector<SegmentRange> ranges = split(&segments, split_limits);
  std::array<bool, kLaneSlots> busy{};
  const auto free_up = [&](std::uint32_t slot) -> Status {
    bool done = !busy[slot];
    while (!done) {
      Status status = device.query(0, slot, &done);
      if (!status.is_ok()) return status;
      if (!done) std::this_thread::yield();
    }
    busy[slot] = false;
    return Status::ok();
  };
  for (std::size_t i = 0; i < ranges.size(); ++i) {
    const auto slot = static_cast<std::uint32_t>(i % kLaneSlots);
    if (Status status = free_up(slot); !status.is_ok()) return status;
    if (Status status =
            device.issue({.direction = direction,
                          .path = path,
                          .lane = 0,
                          .slot = slot,
                          .segments = std::span(segments).subspan(ranges[i].first, ranges[i].count)});
        !status.is_ok()) {
      return status;
    }
    busy[slot] = true;
  }
  for (std::uint32_t slot = 0; slot < kLaneSlots; ++slot) {
    if (Status status = free_up(slot); !status.is_ok()) return status;
  }
  return Status::ok();
}

}  // namespace

CopyTable calibrate_cuda(const CudaDeviceOptions& options, const DeviceLimits& limits) {
  const CudaDeviceScope scope(options.device);
  const CudaCaptureScope relaxed;
  const SteadyClock clock;
  const Nanos begun = clock.now();
  const auto spent = [&] { return to_seconds(clock.now() - begun); };
  try {
    const Scratch scratch;
    CudaDeviceOptions on_scratch = options;
    on_scratch.area = scratch.rows();
    CudaDevice device(on_scratch);
    const auto measure = [&](CopyDirection direction, CopyPath path, std::uint64_t segment_bytes,
                             std::uint64_t total_bytes) -> double {
      if (path == CopyPath::kStaged && limits.staged_bytes == 0) return 0;
      const SplitLimits split_limits = split_limits_for(path, limits);
      const std::vector<CopySegment> segments = pages(scratch.cache(), segment_bytes, total_bytes);
      const Nanos start = clock.now();
      if (!run(device, direction, path, segments, split_limits).is_ok()) return 0;
      return to_seconds(clock.now() - start);
    };
    (void)measure(CopyDirection::kStore, CopyPath::kKernel, 64 << 10, 1 << 20);  // loads the kernel's code
    return calibrate({.measure = measure, .spent = spent, .budget_seconds = 0.8});
  } catch (const ResourceError&) {
    return default_copy_table();
  }
}

}  // namespace kv_offload
