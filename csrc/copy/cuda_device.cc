#include "copy/cuda_device.h"

#include <algorithm>

#include "copy/cuda_check.h"
#include "copy/cuda_pack.h"

namespace kv_offload {
namespace {

#define KVO_TRY(call)                               \
  do {                                              \
    const cudaError_t kvo_error = (call);           \
    if (kvo_error != cudaSuccess) return kvo_error; \
  } while (false)

cudaEvent_t as_event(DeviceEvent event) { return reinterpret_cast<cudaEvent_t>(event); }

}  // namespace

CudaDevice::CudaDevice(const CudaDeviceOptions& options)
    : options_(options),
      piece_capacity_(options.max_segments + (options.max_bytes + kPieceBytes - 1) / kPieceBytes) {
  const CudaDeviceScope scope(options_.device);
  const CudaCaptureScope relaxed;
  try {
    open();
  } catch (...) {
    close();
    throw;
  }
}

CudaDevice::~CudaDevice() {
  const CudaDeviceScope scope(options_.device);
  const CudaCaptureScope relaxed;
  close();
  (void)cudaGetLastError();
}

void CudaDevice::open() {
  cudaDeviceProp properties{};
  cuda_require(cudaGetDeviceProperties(&properties, options_.device), "cudaGetDeviceProperties");
  name_ = fmt::format("{} (device {}, {} blocks for kernels, {})", properties.name, options_.device,
                      options_.kernel_blocks, batch_.batched() ? "batched DMA" : "DMA one by one");
  int least = 0;
  int greatest = 0;  // CUDA counts down: the greatest priority is the smallest number
  cuda_require(cudaDeviceGetStreamPriorityRange(&least, &greatest), "cudaDeviceGetStreamPriorityRange");
  for (std::uint32_t i = 0; i < kCopyLanes; ++i) {
    Lane& lane = lanes_[i];
    const int priority = std::min(least, greatest + static_cast<int>(i));
    cuda_require(cudaStreamCreateWithPriority(&lane.stream, cudaStreamNonBlocking, priority),
                 "cudaStreamCreate");
    cuda_require(cudaStreamCreateWithPriority(&lane.helper, cudaStreamNonBlocking, priority),
                 "cudaStreamCreate");
    for (Slot& slot : lane.slots) open_slot(&slot);
  }
}

void CudaDevice::open_slot(Slot* slot) {
  cuda_require(cudaEventCreateWithFlags(&slot->ended, cudaEventDisableTiming), "cudaEventCreate");
  cuda_require(cudaEventCreateWithFlags(&slot->half, cudaEventDisableTiming), "cudaEventCreate");
  const std::size_t bytes = piece_capacity_ * sizeof(PackPiece);
  cuda_require(cudaMallocHost(reinterpret_cast<void**>(&slot->pieces), bytes),
               "cudaMallocHost (descriptors)");
  cuda_require(cudaMalloc(reinterpret_cast<void**>(&slot->device_pieces), bytes), "cudaMalloc (descriptors)");
  if (options_.staging_bytes != 0) {
    cuda_require(cudaMalloc(reinterpret_cast<void**>(&slot->staging), options_.staging_bytes),
                 "cudaMalloc (staging)");
  }
}

void CudaDevice::close() {
  for (Lane& lane : lanes_) {
    for (Slot& slot : lane.slots) {
      if (slot.ended != nullptr) (void)cudaEventDestroy(slot.ended);
      if (slot.half != nullptr) (void)cudaEventDestroy(slot.half);
      if (slot.pieces != nullptr) (void)cudaFreeHost(slot.pieces);
      if (slot.device_pieces != nullptr) (void)cudaFree(slot.device_pieces);
      if (slot.staging != nullptr) (void)cudaFree(slot.staging);
    }
    if (lane.stream != nullptr) (void)cudaStreamDestroy(lane.stream);
    if (lane.helper != nullptr) (void)cudaStreamDestroy(lane.helper);
  }
  for (const cudaEvent_t event : free_events_) (void)cudaEventDestroy(event);
}

std::string CudaDevice::name() const { return name_; }

Status CudaDevice::mark(std::uintptr_t compute_stream, DeviceEvent* event) {
  const CudaDeviceScope scope(options_.device);
  const CudaCaptureScope relaxed;
  cudaEvent_t taken = nullptr;
  {
    const std::lock_guard lock(mutex_);
    if (!free_events_.empty()) {
      taken = free_events_.back();
      free_events_.pop_back();
    }
  }
  if (taken == nullptr) {
    Status made = cuda_status(cudaEventCreateWithFlags(&taken, cudaEventDisableTiming), "cudaEventCreate");
    if (!made.is_ok()) return made;
  }
  *event = reinterpret_cast<DeviceEvent>(taken);
  Status recorded = cuda_status(cudaEventRecord(taken, reinterpret_cast<cudaStream_t>(compute_stream)),
                                "cudaEventRecord on the compute stream");
  if (!recorded.is_ok()) {
    release(*event);
    *event = kNoEvent;
  }
  return recorded;
}

void CudaDevice::release(DeviceEvent event) {
  const std::lock_guard lock(mutex_);
  free_events_.push_back(as_event(event));
}

void CudaDevice::enter_thread() {
  (void)cudaSetDevice(options_.device);
  cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
  (void)cudaThreadExchangeStreamCaptureMode(&mode);
}

Status CudaDevice::issue(const DeviceCopy& copy) {
  const Lane& lane = lanes_[copy.lane];
  const Slot& slot = lane.slots[copy.slot];
  Status status = cuda_status(enqueue(copy, lane, slot), to_string(copy.path));
  if (status.is_ok()) return status;
  // Part of it may be running: its job must not end before that has.
  (void)cudaStreamSynchronize(lane.stream);
  (void)cudaStreamSynchronize(lane.helper);
  (void)cudaGetLastError();
  return status;
}

Status CudaDevice::query(std::uint32_t lane, std::uint32_t slot, bool* done) {
  const cudaError_t error = cudaEventQuery(lanes_[lane].slots[slot].ended);
  *done = error == cudaSuccess;
  if (error == cudaSuccess) return Status::ok();
  if (error == cudaErrorNotReady) {
    (void)cudaGetLastError();
    return Status::ok();
  }
  return cuda_status(error, "copy");
}

cudaError_t CudaDevice::enqueue(const DeviceCopy& copy, const Lane& lane, const Slot& slot) {
  switch (copy.path) {
    case CopyPath::kDma:
      return enqueue_dma(copy, lane, slot);
    case CopyPath::kKernel:
      return enqueue_kernel(copy, lane, slot);
    case CopyPath::kStaged:
      return enqueue_staged(copy, lane, slot);
  }
  return cudaErrorInvalidValue;
}

cudaError_t CudaDevice::enqueue_dma(const DeviceCopy& copy, const Lane& lane, const Slot& slot) {
  if (copy.after != kNoEvent) KVO_TRY(cudaStreamWaitEvent(lane.stream, as_event(copy.after), 0));
  const bool store = copy.direction == CopyDirection::kStore;
  batch_.clear();
  for (const CopySegment& segment : copy.segments) {
    std::byte* row = options_.area.data() + segment.area_offset;
    if (store) {
      batch_.add(row, segment.cache, segment.bytes);
    } else {
      batch_.add(segment.cache, row, segment.bytes);
    }
  }
  KVO_TRY(batch_.enqueue(!store, lane.stream));
  return cudaEventRecord(slot.ended, lane.stream);
}

cudaError_t CudaDevice::enqueue_kernel(const DeviceCopy& copy, const Lane& lane, const Slot& slot) {
  if (copy.after != kNoEvent) KVO_TRY(cudaStreamWaitEvent(lane.stream, as_event(copy.after), 0));
  const std::size_t count = cut_for_area(copy.segments, options_.area.data(), slot.pieces, piece_capacity_);
  KVO_TRY(enqueue_pieces(copy, slot, count, lane.stream));
  return cudaEventRecord(slot.ended, lane.stream);
}

// The kernel runs on the helper stream and the DMA on the lane's, so that one
// slot packs while another is on the link.
cudaError_t CudaDevice::enqueue_staged(const DeviceCopy& copy, const Lane& lane, const Slot& slot) {
  const bool store = copy.direction == CopyDirection::kStore;
  const cudaStream_t first = store ? lane.helper : lane.stream;
  const cudaStream_t second = store ? lane.stream : lane.helper;
  if (copy.after != kNoEvent) {
    KVO_TRY(cudaStreamWaitEvent(first, as_event(copy.after), 0));
    KVO_TRY(cudaStreamWaitEvent(second, as_event(copy.after), 0));
  }
  runs_ = row_runs(copy.segments, options_.boundary);
  if (staging_bytes(runs_) > options_.staging_bytes) return cudaErrorInvalidValue;
  const std::size_t count = cut_for_staging(copy.segments, runs_, slot.staging, slot.pieces, piece_capacity_);
  KVO_TRY(store ? enqueue_pieces(copy, slot, count, first) : enqueue_runs(copy, slot, first));
  KVO_TRY(cudaEventRecord(slot.half, first));
  KVO_TRY(cudaStreamWaitEvent(second, slot.half, 0));
  KVO_TRY(store ? enqueue_runs(copy, slot, second) : enqueue_pieces(copy, slot, count, second));
  return cudaEventRecord(slot.ended, second);
}

cudaError_t CudaDevice::enqueue_runs(const DeviceCopy& copy, const Slot& slot, cudaStream_t stream) {
  const bool store = copy.direction == CopyDirection::kStore;
  batch_.clear();
  for (const RowRun& run : runs_) {
    std::byte* row = options_.area.data() + run.area_offset;
    std::byte* place = slot.staging + run.staging_offset;
    if (store) {
      batch_.add(row, place, run.bytes);
    } else {
      batch_.add(place, row, run.bytes);
    }
  }
  return batch_.enqueue(!store, stream);
}

cudaError_t CudaDevice::enqueue_pieces(const DeviceCopy& copy, const Slot& slot, std::size_t count,
                                       cudaStream_t stream) {
  if (count > piece_capacity_) return cudaErrorInvalidValue;
  KVO_TRY(cudaMemcpyAsync(slot.device_pieces, slot.pieces, count * sizeof(PackPiece), cudaMemcpyHostToDevice,
                          stream));
  return launch_pack(slot.device_pieces, count, copy.direction == CopyDirection::kStore,
                     options_.kernel_blocks, stream);
}

}  // namespace kv_offload
