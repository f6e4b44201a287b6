// SPDX-License-Identifier: Apache-2.0
#include "copy/cuda_pinning.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <cctype>
#include <condition_variable>
#include <fstream>
#include <mutex>
#include <thread>

#include "base/types.h"
#include "copy/cuda_check.h"

namespace kv_offload {
namespace {

// State shared by the pinning threads.
struct Pinning {
  std::atomic<std::size_t> next{0};
  std::mutex mutex;
  std::condition_variable changed;
  std::uint64_t done = 0;
  std::size_t running = 0;
  Status failure = Status::ok();
};

bool can_register_read_only(int device) {
  int is_supported = 0;
  const cudaError_t error =
      cudaDeviceGetAttribute(&is_supported, cudaDevAttrHostRegisterReadOnlySupported, device);
  if (error != cudaSuccess) (void)cudaGetLastError();
  return error == cudaSuccess && is_supported != 0;
}

}  // namespace

int numa_node_of(int device) {
  std::array<char, 32> bus{};
  if (cudaDeviceGetPCIBusId(bus.data(), static_cast<int>(bus.size()), device) != cudaSuccess) {
    (void)cudaGetLastError();
    return -1;
  }
  std::string id(bus.data());
  std::transform(id.begin(), id.end(), id.begin(), [](unsigned char c) { return std::tolower(c); });
  std::ifstream file("/sys/bus/pci/devices/" + id + "/numa_node");
  int node = -1;
  file >> node;
  return file ? node : -1;
}

PinnedArea::PinnedArea(std::span<std::byte> area, const PinOptions& options)
    : context_(options.device), area_(area), device_(options.device), piece_bytes_(options.piece_bytes) {
  registered_.assign((area_.size() + piece_bytes_ - 1) / piece_bytes_, 0);
  const CudaContext::Scope scope(context_);
  cuda_require(scope.status());
  const CudaCaptureScope relaxed;
  try {
    register_pieces(options);
  } catch (...) {
    unregister();
    throw;
  }
  check_kernel_access();
}

void PinnedArea::register_pieces(const PinOptions& options) {
  if (options.read_only && !can_register_read_only(device_))
    throw_resource("device {} or its driver cannot register memory that is mapped read-only", device_);
  const std::size_t pieces = registered_.size();
  Pinning pinning;
  const auto work = [&] {
    // Our own thread: sets its device once and ends with it.
    Status status = cuda_status(cudaSetDevice(device_), "cudaSetDevice");
    const CudaCaptureScope relaxed;
    while (status.is_ok()) {
      const std::size_t i = pinning.next++;
      if (i >= pieces) break;
      const std::span<std::byte> memory = piece(i);
      const unsigned flags = cudaHostRegisterPortable | cudaHostRegisterMapped |
                             (options.read_only ? cudaHostRegisterReadOnly : 0u);
      status = cuda_status(cudaHostRegister(memory.data(), memory.size(), flags), "cudaHostRegister");
      if (!status.is_ok()) break;
      registered_[i] = 1;
      const std::lock_guard lock(pinning.mutex);
      pinning.done += memory.size();
      pinning.changed.notify_all();
    }
    const std::lock_guard lock(pinning.mutex);
    if (!status.is_ok()) {
      pinning.next = pieces;  // stops all threads after their current piece
      pinning.failure = status;
    }
    --pinning.running;
    pinning.changed.notify_all();
  };
  std::vector<std::jthread> threads;  // joined in any case
  for (std::size_t i = 0; i < std::min<std::size_t>(std::max(options.threads, 1u), pieces); ++i) {
    const std::lock_guard lock(pinning.mutex);
    threads.emplace_back(work);
    ++pinning.running;
  }
  std::unique_lock lock(pinning.mutex);
  for (std::uint64_t reported = 0; pinning.running != 0 || reported != pinning.done;) {
    if (reported == pinning.done) pinning.changed.wait(lock);
    if (reported == pinning.done) continue;
    reported = pinning.done;
    if (!options.progress) continue;
    lock.unlock();
    try {
      options.progress(reported, area_.size());
    } catch (...) {
      pinning.next = pieces;
      throw;
    }
    lock.lock();
  }
  if (pinning.failure.is_ok()) return;
  throw_resource(
      "pinning {} of host memory failed after {}: {}; lower cpu_bytes_to_use, or raise the limit of locked "
      "memory (ulimit -l)",
      format_bytes(area_.size()), format_bytes(pinning.done), pinning.failure.message());
}

void PinnedArea::check_kernel_access() {
  for (std::size_t i = 0; i < registered_.size() && reachable_; ++i) {
    void* address = nullptr;
    const cudaError_t error = cudaHostGetDevicePointer(&address, piece(i).data(), 0);
    reachable_ = error == cudaSuccess && address == piece(i).data();
    if (error != cudaSuccess) (void)cudaGetLastError();
  }
}

PinnedArea::~PinnedArea() { unregister(); }

std::span<std::byte> PinnedArea::piece(std::size_t index) const {
  const std::uint64_t offset = index * piece_bytes_;
  return area_.subspan(offset, std::min<std::uint64_t>(piece_bytes_, area_.size() - offset));
}

void PinnedArea::unregister() {
  const CudaContext::Scope scope(context_);
  const CudaCaptureScope relaxed;
  for (std::size_t i = 0; i < registered_.size(); ++i) {
    if (registered_[i] != 0 && cudaHostUnregister(piece(i).data()) != cudaSuccess) (void)cudaGetLastError();
    registered_[i] = 0;
  }
}

}  // namespace kv_offload
