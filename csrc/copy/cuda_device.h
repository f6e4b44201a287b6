// SPDX-License-Identifier: Apache-2.0
// CudaDevice: CopyDevice on one GPU. A lane is our own non-blocking stream for DMA and kernels, plus a second
// one for the kernels of staged copies if there is staging. A slot has an end event and its own staging
// buffer. Only a failed issue() or query() synchronises with the host. CUDA only.
//
// All streams have the lowest priority. Priorities order kernel blocks, not copies. A pack kernel with a
// higher priority than the model would take SMs first and gain nothing, because it is bound by the link.
#pragma once

#include <cuda_runtime_api.h>

#include <array>
#include <cstdint>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "copy/copy_device.h"
#include "copy/cuda_context.h"
#include "copy/cuda_memcpy.h"
#include "copy/device_copier.h"
#include "copy/pack_index.h"

namespace kv_offload {

struct CudaDeviceOptions {
  int device = 0;
  std::span<std::byte> area;   // pinned by the caller; must outlive this
  std::uint64_t boundary = 0;  // no DMA may cross a multiple of this area offset; 0 = none
  unsigned kernel_blocks = 8;
  std::uint64_t staging_bytes = 0;  // per slot; 0 = no staged copies
};

class CudaDevice final : public CopyDevice {
 public:
  // Throws ResourceError (no such device, no memory for staging).
  explicit CudaDevice(const CudaDeviceOptions& options);
  // REQUIRES: no copy in flight.
  ~CudaDevice() override;

  std::string name() const override;
  Status mark(std::uintptr_t compute_stream, DeviceEvent* event) override;
  void release(DeviceEvent event) override;
  // True if the pack kernels can run here; otherwise only DMA is available.
  bool has_kernels() const { return has_kernels_; }
  void enter_thread() override;
  Status reached(DeviceEvent event, bool* done) override;
  Status issue(const DeviceCopy& copy) override;
  Status query(std::uint32_t lane, std::uint32_t slot, bool* done) override;
  std::uint64_t refused_batches() const override { return batch_.refused(); }

 private:
  struct Slot {
    cudaEvent_t ended = nullptr;
    cudaEvent_t half = nullptr;  // end of the first half of a staged copy
    std::byte* staging = nullptr;
  };
  struct Lane {
    cudaStream_t stream = nullptr;
    cudaStream_t helper = nullptr;  // null without staging
    std::array<Slot, kLaneSlots> slots;
  };

  void open();
  void close();
  void open_slot(Slot* slot);
  Status query_event(cudaEvent_t event, std::string_view what, bool* done);
  void wait_for(const Lane& lane);
  cudaError_t enqueue(const DeviceCopy& copy, const Lane& lane, const Slot& slot);
  cudaError_t enqueue_dma(const DeviceCopy& copy, const Lane& lane, const Slot& slot);
  cudaError_t enqueue_kernel(const DeviceCopy& copy, const Lane& lane, const Slot& slot);
  cudaError_t enqueue_staged(const DeviceCopy& copy, const Lane& lane, const Slot& slot);
  cudaError_t enqueue_runs(const DeviceCopy& copy, const Slot& slot, cudaStream_t stream);
  cudaError_t enqueue_pieces(const DeviceCopy& copy, cudaStream_t stream);
  // Resizes pieces_ for the pieces of these segments.
  void make_room(std::span<const CopySegment> segments);

  const CudaDeviceOptions options_;
  const CudaContext context_;
  std::array<Lane, kCopyLanes> lanes_;
  bool has_kernels_ = false;
  std::string name_;
  // Used by the issuing thread only:
  Status entered_ = Status::ok();
  DmaBatch batch_;
  std::vector<RowRun> runs_;       // of the staged copy being issued
  std::vector<PackPiece> pieces_;  // of the copy being issued
  std::size_t count_ = 0;          // pieces_ in use

  std::mutex mutex_;
  std::vector<cudaEvent_t> free_events_;  // under mutex_
};

}  // namespace kv_offload
