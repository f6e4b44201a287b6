// SPDX-License-Identifier: Apache-2.0
// The CUDA copier: a DeviceCopier over a CudaDevice over a pinned area, and the C symbols through which the
// core finds it (cuda_library.h).
#include <algorithm>
#include <cstring>
#include <map>

#include "copy/cuda_calibration.h"
#include "copy/cuda_check.h"
#include "copy/cuda_context.h"
#include "copy/cuda_device.h"
#include "copy/cuda_library.h"
#include "copy/cuda_pinning.h"
#include "copy/device_copier.h"

namespace kv_offload {
namespace {

// Check the addresses first: a kernel with an invalid address ends the process's CUDA context, and DMA would
// read it as plain host memory.
void require_device_memory(const CacheLayout& layout, int device) {
  for (std::size_t i = 0; i < layout.tensors.size(); ++i) {
    cudaPointerAttributes attributes{};
    cuda_require(cudaPointerGetAttributes(&attributes, layout.tensors[i].base), "cudaPointerGetAttributes");
    const bool there = attributes.type == cudaMemoryTypeDevice || attributes.type == cudaMemoryTypeManaged;
    if (!there || attributes.device != device) {
      throw_invalid("cache tensor {} is not memory of CUDA device {}", i, device);
    }
  }
}

class CudaCopier final : public BlockCopier {
 public:
  explicit CudaCopier(const CopierOptions& options)
      : device_(options.device),
        pinned_(options.area, {.device = options.device, .progress = options.pin_progress}),
        copier_(make(options, pinned_)) {}
  ~CudaCopier() override { close(); }

  std::string describe() const override { return copier_->describe(); }
  void submit(CopyJob job) override { copier_->submit(std::move(job)); }
  std::vector<CopyResult> poll() override { return copier_->poll(); }
  void wait(std::span<const std::uint64_t> job_ids) override { copier_->wait(job_ids); }
  void close() override { copier_->close(); }
  // Registers the area, which takes about 0.1 s per GiB. One thread leaves the driver's locks to the model.
  Status add_neighbour(std::span<std::byte> area) override {
    try {
      auto pinned =
          std::make_unique<PinnedArea>(area, PinOptions{.device = device_, .threads = 1, .read_only = true});
      if (pinned_.reachable_by_kernels() && !pinned->reachable_by_kernels())
        return Status::error(StatusKind::kDevice, "the device's kernels do not reach it");
      neighbours_.insert_or_assign(area.data(), std::move(pinned));
    } catch (const std::exception& error) {
      return Status::error(StatusKind::kDevice, error.what());
    }
    return Status::ok();
  }
  Status remove_neighbour(std::span<std::byte> area) override {
    neighbours_.erase(area.data());
    return Status::ok();
  }

 private:
  static std::unique_ptr<DeviceCopier> make(const CopierOptions& options, const PinnedArea& pinned) {
    CudaDeviceOptions device_options;
    device_options.device = options.device;
    device_options.area = options.area;
    device_options.boundary = pinned.piece_bytes();
    device_options.kernel_blocks = options.kernel_blocks;
    device_options.staging_bytes = options.staging_bytes / (kCopyLanes * kLaneSlots);
    if (device_options.staging_bytes < kPageBytes) device_options.staging_bytes = 0;  // smaller than a page
    DeviceLimits limits;
    limits.staged_bytes = device_options.staging_bytes;
    limits.boundary = pinned.piece_bytes();
    auto device = std::make_unique<CudaDevice>(device_options);
    CopyTable table = options.calibrate ? calibrate_cuda(device_options, limits) : default_copy_table();
    for (auto& paths : table.rates) {
      if (!device->has_kernels() || !pinned.reachable_by_kernels()) {
        paths[static_cast<std::size_t>(CopyPath::kKernel)].fill(0);
      }
      if (!device->has_kernels()) paths[static_cast<std::size_t>(CopyPath::kStaged)].fill(0);
    }
    return std::make_unique<DeviceCopier>(options, std::move(device), table, limits);
  }

  const int device_;
  PinnedArea pinned_;  // must outlive the copier that reads from it
  std::map<std::byte*, std::unique_ptr<PinnedArea>> neighbours_;  // like pinned_
  std::unique_ptr<DeviceCopier> copier_;
};

void write_message(std::string_view text, char* message, std::size_t capacity) {
  const std::size_t bytes = std::min(text.size(), capacity - 1);
  std::memcpy(message, text.data(), bytes);
  message[bytes] = '\0';
}

std::string version_text(int version) { return fmt::format("{}.{}", version / 1000, version % 1000 / 10); }

// Throws ResourceError with the reason if this process cannot use CUDA.
int count_devices() {
  int driver = 0;
  if (cudaDriverGetVersion(&driver) != cudaSuccess) (void)cudaGetLastError();
  if (driver == 0) throw ResourceError("no CUDA driver (libcuda.so.1) on this machine");
  // A driver supports builds for any minor version of its major version.
  if (driver / 1000 < CUDART_VERSION / 1000) {
    throw_resource(
        "the CUDA driver is for CUDA {} and this build for CUDA {}: update the driver, or install a build "
        "for CUDA {} (a build made with nvcc 12.8 supports drivers from CUDA 12.0 on; its kernels need 12.1)",
        version_text(driver), version_text(CUDART_VERSION), driver / 1000);
  }
  int devices = 0;
  cuda_require(cudaGetDeviceCount(&devices), "cudaGetDeviceCount");
  return devices;
}

std::unique_ptr<BlockCopier> make_copier(CopierOptions options) {
  options.layout.validate();
  if (options.kernel_blocks == 0) throw_invalid("kernel_blocks=0: the pack kernels need at least one block");
  const int devices = count_devices();
  if (options.device < 0) cuda_require(cudaGetDevice(&options.device), "cudaGetDevice");
  if (options.device >= devices) {
    throw_invalid("CUDA device {} does not exist: this process sees {} devices", options.device, devices);
  }
  const CudaContext context(options.device);
  const CudaContext::Scope scope(context);
  cuda_require(scope.status());
  const CudaCaptureScope relaxed;
  require_device_memory(options.layout, options.device);
  return std::make_unique<CudaCopier>(options);
}

}  // namespace
}  // namespace kv_offload

#define KVO_EXPORT extern "C" __attribute__((visibility("default")))

KVO_EXPORT std::uint64_t kv_offload_cuda_interface() { return kv_offload::kCudaInterface; }

KVO_EXPORT kv_offload::BlockCopier* kv_offload_cuda_make_copier(const kv_offload::CopierOptions* options,
                                                                bool* callers_mistake, char* message,
                                                                std::size_t capacity) {
  try {
    return kv_offload::make_copier(*options).release();
  } catch (const kv_offload::InvalidArgument& error) {
    *callers_mistake = true;
    kv_offload::write_message(error.what(), message, capacity);
  } catch (const std::exception& error) {
    kv_offload::write_message(error.what(), message, capacity);
  }
  return nullptr;
}

KVO_EXPORT void kv_offload_cuda_unavailable_reason(char* message, std::size_t capacity) {
  try {
    const int devices = kv_offload::count_devices();
    kv_offload::write_message(devices == 0 ? "no CUDA device is visible" : "", message, capacity);
  } catch (const std::exception& error) {
    kv_offload::write_message(error.what(), message, capacity);
  }
}

KVO_EXPORT int kv_offload_cuda_numa_node(int device) { return kv_offload::numa_node_of(device); }
