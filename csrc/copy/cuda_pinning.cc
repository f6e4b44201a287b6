#include "copy/cuda_pinning.h"

#include <linux/mempolicy.h>
#include <sys/syscall.h>
#include <unistd.h>

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

// Pages that are not there yet will come from this node; the others stay where
// they are. A hint: a kernel that refuses it changes nothing but speed.
void prefer_node(std::span<std::byte> area, int node) {
  constexpr int kBits = 1024;
  if (node < 0 || node >= kBits) return;
  std::array<unsigned long, kBits / (8 * sizeof(unsigned long))> mask{};
  mask[static_cast<std::size_t>(node) / (8 * sizeof(unsigned long))] |=
      1ul << (static_cast<std::size_t>(node) % (8 * sizeof(unsigned long)));
  (void)syscall(SYS_mbind, area.data(), area.size(), MPOL_PREFERRED, mask.data(), kBits, 0);
}

}  // namespace

int cuda_numa_node(int device) {
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
    : area_(area), device_(options.device), piece_bytes_(options.piece_bytes) {
  prefer_node(area_, cuda_numa_node(device_));
  const std::size_t pieces = (area_.size() + piece_bytes_ - 1) / piece_bytes_;
  registered_.assign(pieces, 0);
  std::atomic<std::size_t> next{0};
  std::mutex mutex;
  std::condition_variable changed;
  std::uint64_t done = 0;
  std::size_t running =
      std::min<std::size_t>(std::max(options.threads, 1u), std::max<std::size_t>(pieces, 1));
  cudaError_t failure = cudaSuccess;

  const auto work = [&] {
    const CudaDeviceScope scope(device_);
    const CudaCaptureScope relaxed;
    cudaError_t error = cudaSuccess;
    for (std::size_t i = next++; i < pieces && error == cudaSuccess; i = next++) {
      const std::span<std::byte> memory = piece(i);
      error =
          cudaHostRegister(memory.data(), memory.size(), cudaHostRegisterPortable | cudaHostRegisterMapped);
      if (error != cudaSuccess) break;
      registered_[i] = 1;
      const std::lock_guard lock(mutex);
      done += memory.size();
      changed.notify_all();
    }
    if (error != cudaSuccess) {
      (void)cudaGetLastError();
      next = pieces;  // nobody starts another piece
    }
    const std::lock_guard lock(mutex);
    if (error != cudaSuccess) failure = error;
    --running;
    changed.notify_all();
  };
  std::vector<std::thread> threads;
  for (std::size_t i = 0, count = running; i < count; ++i) threads.emplace_back(work);
  {
    std::unique_lock lock(mutex);
    while (running != 0) {
      changed.wait(lock);
      if (options.progress) options.progress(done, area_.size());
    }
  }
  for (std::thread& thread : threads) thread.join();
  if (failure != cudaSuccess) {
    unregister();
    throw_resource(
        "pinning {} of host memory failed after {}: {} ({}); lower cpu_bytes_to_use, or raise the limit "
        "of locked memory (ulimit -l)",
        format_bytes(area_.size()), format_bytes(done), cudaGetErrorString(failure),
        cudaGetErrorName(failure));
  }
  for (std::size_t i = 0; i < pieces && reachable_; ++i) {
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
  const CudaDeviceScope scope(device_);
  const CudaCaptureScope relaxed;
  for (std::size_t i = 0; i < registered_.size(); ++i) {
    if (registered_[i] != 0 && cudaHostUnregister(piece(i).data()) != cudaSuccess) (void)cudaGetLastError();
    registered_[i] = 0;
  }
}

}  // namespace kv_offload
