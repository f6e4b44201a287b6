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

class Gpu final : public Platform {
 public:
  explicit Gpu(std::uint64_t bytes) : bytes_(bytes), area_(bytes), pinned_(area_.span(), {}) {
    cuda_require(cudaMalloc(reinterpret_cast<void**>(&cache_), bytes), "cudaMalloc");
    cuda_require(cudaMalloc(reinterpret_cast<void**>(&sink_), sizeof(unsigned)), "cudaMalloc");
    for (cudaStream_t& stream : streams_) {
      cuda_require(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreate");
    }
    options_.area = area_.span();
    options_.boundary = pinned_.piece_bytes();
    options_.staging_bytes = 512 << 10;
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
    (void)cudaFree(cache_);
    (void)cudaFree(sink_);
  }
  std::string name() const override { return name_; }
  std::span<std::byte> cache() override { return {cache_, bytes_}; }
  std::span<std::byte> area() override { return area_.span(); }
  std::string table() const override { return table_.describe(); }
  std::unique_ptr<DeviceCopier> copier(const CacheLayout& layout, std::optional<CopyPath> path) override {
    CopierOptions options;
    options.layout = layout;
    options.area = area_.span();
    return std::make_unique<DeviceCopier>(options, std::make_unique<CudaDevice>(options_),
                                          path ? single_path_table(*path) : table_, limits_);
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
  double decode_steps(int steps) override {
    const double begun = now();
    for (int i = 0; i < steps; ++i) {
      cuda_require(launch_decode(cache_, bytes_, sink_, 4 * sms_, streams_[2]), "decode kernel");
    }
    cuda_require(cudaStreamSynchronize(streams_[2]), "decode kernel");
    return now() - begun;
  }

 private:
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
