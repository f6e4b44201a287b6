// The CUDA copier: DeviceCopier over a CudaDevice over a pinned area, and the C
// symbols by which the core finds it (cuda_library.h).
#include <algorithm>
#include <cstring>

#include "copy/cuda_calibration.h"
#include "copy/cuda_check.h"
#include "copy/cuda_device.h"
#include "copy/cuda_library.h"
#include "copy/cuda_pinning.h"
#include "copy/device_copier.h"

namespace kv_offload {
namespace {

class CudaCopier final : public BlockCopier {
 public:
  explicit CudaCopier(const CopierOptions& options)
      : pinned_(options.area, {.device = options.device, .progress = options.pin_progress}),
        copier_(make(options, pinned_)) {}
  ~CudaCopier() override { close(); }

  std::string describe() const override { return copier_->describe(); }
  void submit(CopyJob job) override { copier_->submit(std::move(job)); }
  std::vector<CopyResult> poll() override { return copier_->poll(); }
  void wait(std::span<const std::uint64_t> job_ids) override { copier_->wait(job_ids); }
  void close() override { copier_->close(); }

 private:
  static std::unique_ptr<DeviceCopier> make(const CopierOptions& options, const PinnedArea& pinned) {
    CudaDeviceOptions device;
    device.device = options.device;
    device.area = options.area;
    device.boundary = pinned.piece_bytes();
    device.kernel_blocks = options.kernel_blocks;
    device.staging_bytes = options.staging_bytes / (kCopyLanes * kLaneSlots);
    DeviceLimits limits;
    limits.staged_bytes = device.staging_bytes;
    limits.boundary = pinned.piece_bytes();
    device.max_bytes = limits.sub_job_bytes;
    device.max_segments = limits.sub_job_segments;
    CopyTable table = options.calibrate ? calibrate_cuda(device, limits) : default_copy_table();
    if (!pinned.reachable_by_kernels()) {
      for (auto& paths : table.rates) paths[static_cast<std::size_t>(CopyPath::kKernel)].fill(0);
    }
    return std::make_unique<DeviceCopier>(options, std::make_unique<CudaDevice>(device), table, limits);
  }

  PinnedArea pinned_;  // first: it outlives what copies from it
  std::unique_ptr<DeviceCopier> copier_;
};

void write_message(std::string_view text, char* message, std::size_t capacity) {
  const std::size_t bytes = std::min(text.size(), capacity - 1);
  std::memcpy(message, text.data(), bytes);
  message[bytes] = '\0';
}

// Throws ResourceError saying what keeps this process from CUDA.
int count_devices() {
  int driver = 0;
  if (cudaDriverGetVersion(&driver) != cudaSuccess) (void)cudaGetLastError();
  if (driver == 0) throw ResourceError("no CUDA driver (libcuda.so.1) on this machine");
  if (driver / 1000 < CUDART_VERSION / 1000) {
    throw_resource(
        "the CUDA driver is for CUDA {}.{} and this build for CUDA {}.{}: update the driver, or build with "
        "an older nvcc",
        driver / 1000, driver % 1000 / 10, CUDART_VERSION / 1000, CUDART_VERSION % 1000 / 10);
  }
  int devices = 0;
  cuda_require(cudaGetDeviceCount(&devices), "cudaGetDeviceCount");
  return devices;
}

std::unique_ptr<BlockCopier> make_copier(CopierOptions options) {
  options.layout.validate();
  const int devices = count_devices();
  if (options.device < 0) cuda_require(cudaGetDevice(&options.device), "cudaGetDevice");
  if (options.device >= devices) {
    throw_invalid("device {} is not there: this process sees {} CUDA devices", options.device, devices);
  }
  const CudaDeviceScope scope(options.device);
  const CudaCaptureScope relaxed;
  return std::make_unique<CudaCopier>(options);
}

}  // namespace
}  // namespace kv_offload

#define KVO_EXPORT extern "C" __attribute__((visibility("default")))

KVO_EXPORT int kv_offload_cuda_interface() { return kv_offload::kCudaInterfaceVersion; }

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
