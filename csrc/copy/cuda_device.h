// CudaDevice: CopyDevice on one GPU. A lane is a non-blocking stream of our own
// (loads above flushed stores above stores, as far as the device has
// priorities) with a helper stream for staged copies; a slot has its end event,
// its descriptors and its piece of staging. Nothing here synchronises with the
// host but a failed issue(). CUDA only.
#pragma once

#include <cuda_runtime_api.h>

#include <array>
#include <cstdint>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "copy/copy_device.h"
#include "copy/cuda_memcpy.h"
#include "copy/device_copier.h"
#include "copy/pack_index.h"

namespace kv_offload {

struct CudaDeviceOptions {
  int device = 0;
  std::span<std::byte> area;   // pinned by the caller, for longer than this lives
  std::uint64_t boundary = 0;  // area offsets that no DMA may cross; 0: none
  unsigned kernel_blocks = 8;
  std::uint64_t staging_bytes = 0;    // per slot; 0: no staged copies
  std::uint32_t max_segments = 4096;  // of one copy
  std::uint64_t max_bytes = 8 << 20;  // of one copy
};

class CudaDevice final : public CopyDevice {
 public:
  // Throws ResourceError (no such device, no memory for descriptors or staging).
  explicit CudaDevice(const CudaDeviceOptions& options);
  // REQUIRES: no copy in flight.
  ~CudaDevice() override;

  std::string name() const override;
  Status mark(std::uintptr_t compute_stream, DeviceEvent* event) override;
  void release(DeviceEvent event) override;
  void enter_thread() override;
  Status issue(const DeviceCopy& copy) override;
  Status query(std::uint32_t lane, std::uint32_t slot, bool* done) override;

 private:
  struct Slot {
    cudaEvent_t ended = nullptr;
    cudaEvent_t half = nullptr;   // of a staged copy: its first half
    PackPiece* pieces = nullptr;  // pinned
    PackPiece* device_pieces = nullptr;
    std::byte* staging = nullptr;
  };
  struct Lane {
    cudaStream_t stream = nullptr;
    cudaStream_t helper = nullptr;
    std::array<Slot, kLaneSlots> slots;
  };

  void open();
  void close();
  void open_slot(Slot* slot);
  cudaError_t enqueue(const DeviceCopy& copy, const Lane& lane, const Slot& slot);
  cudaError_t enqueue_dma(const DeviceCopy& copy, const Lane& lane, const Slot& slot);
  cudaError_t enqueue_kernel(const DeviceCopy& copy, const Lane& lane, const Slot& slot);
  cudaError_t enqueue_staged(const DeviceCopy& copy, const Lane& lane, const Slot& slot);
  cudaError_t enqueue_runs(const DeviceCopy& copy, const Slot& slot, cudaStream_t stream);
  cudaError_t enqueue_pieces(const DeviceCopy& copy, const Slot& slot, std::size_t count,
                             cudaStream_t stream);

  const CudaDeviceOptions options_;
  const std::size_t piece_capacity_;
  std::array<Lane, kCopyLanes> lanes_;
  DmaBatch batch_;            // the issuing thread's
  std::vector<RowRun> runs_;  // of the staged copy being issued
  std::string name_;

  std::mutex mutex_;
  std::vector<cudaEvent_t> free_events_;  // under mutex_
};

}  // namespace kv_offload
