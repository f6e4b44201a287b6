// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <array>
#include <chrono>

#include "base/aligned_buffer.h"
#include "bench.h"
#include "copy/cuda_calibration.h"
#include "copy/cuda_check.h"
#include "copy/cuda_device.h"
#include "copy/cuda_pinning.h"
#include "decode_kernel.h"
#include "platform.h"

namespace kv_offload::bench {
namespace {

// The other copies of an engine in a step: a few dozen small buffers to the device, the
// sampled tokens to the host. Also the kernels that it launches.
constexpr std::array<std::uint64_t, 8> kSmallCopies = {2 << 10, 2 << 10, 4 << 10,  4 << 10,
                                                       8 << 10, 8 << 10, 32 << 10, 64 << 10};
constexpr std::uint64_t kSampled = 4 << 10;
constexpr unsigned kKernels = 32;
constexpr unsigned kBlocksPerSm = 4;  // of 512 threads: no SM has room for another

class Gpu final : public Platform {
 public:
  explicit Gpu(std::uint64_t bytes) : bytes_(bytes), area_(bytes), pinned_(area_.span(), {}) {
    cuda_require(cudaMalloc(reinterpret_cast<void**>(&cache_), bytes), "cudaMalloc");
    cuda_require(cudaMalloc(reinterpret_cast<void**>(&sink_), sizeof(unsigned)), "cudaMalloc");
    cuda_require(cudaMalloc(reinterpret_cast<void**>(&inputs_), kInputs), "cudaMalloc");
    cuda_require(cudaMallocHost(reinterpret_cast<void**>(&staged_), kInputs), "cudaMallocHost");
    for (cudaStream_t& stream : streams_) {
      cuda_require(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreate");
    }
    for (cudaEvent_t& event : events_) cuda_require(cudaEventCreateWithFlags(&event, 0), "cudaEventCreate");
    const CopierOptions defaults;
    options_.area = area_.span();
    options_.boundary = pinned_.piece_bytes();
    options_.kernel_blocks = defaults.kernel_blocks;
    options_.staging_bytes = defaults.staging_bytes / (kCopyLanes * kLaneSlots);
    limits_.staged_bytes = options_.staging_bytes;
    limits_.boundary = options_.boundary;
    table_ = calibrate_cuda(options_, limits_);
    cudaDeviceProp properties{};
    cuda_require(cudaGetDeviceProperties(&properties, 0), "cudaGetDeviceProperties");
    name_ = properties.name;
    sms_ = static_cast<unsigned>(properties.multiProcessorCount);
  }
  ~Gpu() override {
    (void)cudaDeviceSynchronize();
    for (const cudaStream_t stream : streams_) (void)cudaStreamDestroy(stream);
    for (const cudaEvent_t event : events_) (void)cudaEventDestroy(event);
    (void)cudaFree(cache_);
    (void)cudaFree(sink_);
    (void)cudaFree(inputs_);
    (void)cudaFreeHost(staged_);
  }
  std::string name() const override { return name_; }
  std::span<std::byte> cache() override { return {cache_, bytes_}; }
  std::span<std::byte> area() override { return area_.span(); }
  std::string table() const override { return table_.describe(); }
  const DeviceLimits& limits() const override { return limits_; }
  std::uintptr_t compute_stream() const override { return reinterpret_cast<std::uintptr_t>(streams_[2]); }
  std::unique_ptr<DeviceCopier> copier(const CacheLayout& layout, std::optional<CopyPath> path,
                                       const DeviceLimits& limits) override {
    CopierOptions options;
    options.layout = layout;
    options.area = area_.span();
    CudaDeviceOptions device = options_;
    device.staging_bytes = limits.staged_bytes;
    return std::make_unique<DeviceCopier>(options, std::make_unique<CudaDevice>(device),
                                          path ? single_path_table(*path) : table_, limits);
  }
  double link(CopyDirection direction, std::uint64_t bytes) override {
    const double begun = now();
    enqueue(direction, bytes, streams_[0]);
    cuda_require(cudaStreamSynchronize(streams_[0]), "link");
    return now() - begun;
  }
  double link_both(std::uint64_t store_bytes, std::uint64_t load_bytes) override {
    const double begun = now();
    enqueue(CopyDirection::kStore, store_bytes, streams_[0]);
    enqueue(CopyDirection::kLoad, load_bytes, streams_[1]);
    cuda_require(cudaStreamSynchronize(streams_[0]), "link");
    cuda_require(cudaStreamSynchronize(streams_[1]), "link");
    return now() - begun;
  }
  Step step() override {
    const cudaStream_t stream = streams_[2];
    record(0);
    std::uint64_t at = 0;
    for (const std::uint64_t bytes : kSmallCopies) {
      cuda_require(cudaMemcpyAsync(inputs_ + at, staged_ + at, bytes, cudaMemcpyHostToDevice, stream), "up");
      at += bytes;
    }
    record(1);
    const std::uint64_t part = bytes_ / kKernels / 16 * 16;
    for (unsigned i = 0; i < kKernels; ++i) {
      cuda_require(launch_decode(cache_ + i * part, part, sink_, kBlocksPerSm * sms_, stream), "kernel");
    }
    record(2);
    cuda_require(cudaMemcpyAsync(staged_, inputs_, kSampled, cudaMemcpyDeviceToHost, stream), "down");
    record(3);
    cuda_require(cudaStreamSynchronize(stream), "step");
    return {.copies = between(0, 1) + between(2, 3), .whole = between(0, 3)};
  }

 private:
  static constexpr std::uint64_t kInputs = 256 << 10;

  void record(std::size_t event) {
    cuda_require(cudaEventRecord(events_[event], streams_[2]), "cudaEventRecord");
  }
  double between(std::size_t first, std::size_t last) {
    float milliseconds = 0;
    cuda_require(cudaEventElapsedTime(&milliseconds, events_[first], events_[last]), "cudaEventElapsedTime");
    return static_cast<double>(milliseconds) / 1e3;
  }
  // In pieces, since the area is registered in pieces.
  void enqueue(CopyDirection direction, std::uint64_t bytes, cudaStream_t stream) {
    const bool store = direction == CopyDirection::kStore;
    for (std::uint64_t at = 0; at < bytes; at += pinned_.piece_bytes()) {
      const std::uint64_t part = std::min(bytes - at, pinned_.piece_bytes());
      std::byte* row = area_.data() + at;
      std::byte* cache = cache_ + at;
      cuda_require(cudaMemcpyAsync(store ? row : cache, store ? cache : row, part, cudaMemcpyDefault, stream),
                   "link");
    }
  }
  const std::uint64_t bytes_;
  AlignedBuffer area_;
  PinnedArea pinned_;
  std::byte* cache_ = nullptr;
  unsigned* sink_ = nullptr;
  std::byte* inputs_ = nullptr;
  std::byte* staged_ = nullptr;
  std::array<cudaEvent_t, 4> events_{};
  cudaStream_t streams_[3] = {};
  CudaDeviceOptions options_;
  DeviceLimits limits_;
  CopyTable table_;
  std::string name_;
  unsigned sms_ = 1;
};

}  // namespace

std::unique_ptr<Platform> make_gpu(std::uint64_t bytes) {
  int devices = 0;
  if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) {
    (void)cudaGetLastError();
    return nullptr;
  }
  return std::make_unique<Gpu>(bytes);
}

}  // namespace kv_offload::bench
