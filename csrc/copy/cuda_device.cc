// SPDX-License-Identifier: Apache-2.0
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

CudaDevice::CudaDevice(const CudaDeviceOptions& options) : options_(options), context_(options.device) {
  const CudaContext::Scope scope(context_);
  cuda_require(scope.status());
  const CudaCaptureScope relaxed;
  try {
    open();
  } catch (...) {
    close();
    throw;
  }
}

CudaDevice::~CudaDevice() {
  const CudaContext::Scope scope(context_);
  const CudaCaptureScope relaxed;
  close();
  (void)cudaGetLastError();
}

void CudaDevice::open() {
  batch_.detect_batch_support();
  cudaDeviceProp properties{};
  cuda_require(cudaGetDeviceProperties(&properties, options_.device), "cudaGetDeviceProperties");
  const Status kernels = cuda_status(load_pack_kernels(), "loading the pack kernels");
  has_kernels_ = kernels.is_ok();
  name_ =
      fmt::format("{} (device {}, {}, {})", properties.name, options_.device,
                  has_kernels_ ? fmt::format("{} kernel blocks", options_.kernel_blocks) : kernels.message(),
                  batch_.batched() ? "batched DMA" : "DMA without batching");
  int least = 0;
  int greatest = 0;
  cuda_require(cudaDeviceGetStreamPriorityRange(&least, &greatest), "cudaDeviceGetStreamPriorityRange");
  for (Lane& lane : lanes_) {
    for (cudaStream_t* stream : {&lane.stream, &lane.helper}) {
      if (stream == &lane.helper && options_.staging_bytes == 0) continue;
      cuda_require(cudaStreamCreateWithPriority(stream, cudaStreamNonBlocking, least), "cudaStreamCreate");
    }
    for (Slot& slot : lane.slots) open_slot(&slot);
  }
}

void CudaDevice::open_slot(Slot* slot) {
  cuda_require(cudaEventCreateWithFlags(&slot->ended, cudaEventDisableTiming), "cudaEventCreate");
  cuda_require(cudaEventCreateWithFlags(&slot->half, cudaEventDisableTiming), "cudaEventCreate");
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
      if (slot.staging != nullptr) (void)cudaFree(slot.staging);
    }
    if (lane.stream != nullptr) (void)cudaStreamDestroy(lane.stream);
    if (lane.helper != nullptr) (void)cudaStreamDestroy(lane.helper);
  }
  for (const cudaEvent_t event : free_events_) (void)cudaEventDestroy(event);
}

std::string CudaDevice::name() const { return name_; }

Status CudaDevice::mark(std::uintptr_t compute_stream, DeviceEvent* event) {
  const CudaContext::Scope scope(context_);
  if (!scope.status().is_ok()) return scope.status();
  const CudaCaptureScope relaxed;
  auto* const stream = reinterpret_cast<cudaStream_t>(compute_stream);
  // An event recorded during a capture is a node in a graph, not a point in executed work.
  cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
  if (Status asked = cuda_status(cudaStreamIsCapturing(stream, &capture), "the compute stream");
      !asked.is_ok()) {
    return asked;
  }
  if (capture != cudaStreamCaptureStatusNone) {
    return Status::error(StatusKind::kDevice, "the compute stream is being captured into a graph");
  }
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
  Status recorded = cuda_status(cudaEventRecord(taken, stream), "cudaEventRecord on the compute stream");
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
  entered_ = cuda_status(cudaSetDevice(options_.device), "cudaSetDevice");
  cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
  const cudaError_t error = cudaThreadExchangeStreamCaptureMode(&mode);
  if (entered_.is_ok()) entered_ = cuda_status(error, "cudaThreadExchangeStreamCaptureMode");
}

Status CudaDevice::reached(DeviceEvent event, bool* done) {
  return query_event(as_event(event), "the compute stream", done);
}

Status CudaDevice::issue(const DeviceCopy& copy) {
  if (!entered_.is_ok()) return entered_;
  const Lane& lane = lanes_[copy.lane];
  Status status = cuda_status(enqueue(copy, lane, lane.slots[copy.slot]), to_string(copy.path));
  if (!status.is_ok()) wait_for(lane);
  return status;
}

Status CudaDevice::query(std::uint32_t lane, std::uint32_t slot, bool* done) {
  Status status = query_event(lanes_[lane].slots[slot].ended, "copy", done);
  if (!status.is_ok()) wait_for(lanes_[lane]);
  return status;
}

Status CudaDevice::query_event(cudaEvent_t event, std::string_view what, bool* done) {
  const cudaError_t error = cudaEventQuery(event);
  *done = error == cudaSuccess;
  if (error != cudaErrorNotReady) return cuda_status(error, what);
  (void)cudaGetLastError();
  return Status::ok();
}

// After a failure part of a copy may still run, and its job must not end before that. If the stream cannot be
// waited for, it is dead together with its context.
void CudaDevice::wait_for(const Lane& lane) {
  (void)cudaStreamSynchronize(lane.stream);
  if (lane.helper != nullptr) (void)cudaStreamSynchronize(lane.helper);  // null: the model's default stream
  (void)cudaGetLastError();
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
  make_room(copy.segments);
  count_ = cut_for_area(copy.segments, options_.area.data(), pieces_.data(), pieces_.size());
  KVO_TRY(enqueue_pieces(copy, lane.stream));
  return cudaEventRecord(slot.ended, lane.stream);
}

// The kernel runs on the helper stream and the DMA on the lane's stream, so that one slot packs while another
// uses the link.
cudaError_t CudaDevice::enqueue_staged(const DeviceCopy& copy, const Lane& lane, const Slot& slot) {
  const bool store = copy.direction == CopyDirection::kStore;
  const cudaStream_t first = store ? lane.helper : lane.stream;
  const cudaStream_t second = store ? lane.stream : lane.helper;
  runs_ = row_runs(copy.segments, options_.boundary);
  if (staging_bytes(runs_) > options_.staging_bytes) return cudaErrorInvalidValue;
  make_room(copy.segments);
  count_ = cut_for_staging(copy.segments, runs_, slot.staging, pieces_.data(), pieces_.size());
  KVO_TRY(store ? enqueue_pieces(copy, first) : enqueue_runs(copy, slot, first));
  KVO_TRY(cudaEventRecord(slot.half, first));
  KVO_TRY(cudaStreamWaitEvent(second, slot.half, 0));
  KVO_TRY(store ? enqueue_runs(copy, slot, second) : enqueue_pieces(copy, second));
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

cudaError_t CudaDevice::enqueue_pieces(const DeviceCopy& copy, cudaStream_t stream) {
  if (count_ > pieces_.size()) return cudaErrorInvalidValue;
  return launch_pack(pieces_.data(), count_, copy.direction == CopyDirection::kStore, options_.kernel_blocks,
                     stream);
}

void CudaDevice::make_room(std::span<const CopySegment> segments) {
  std::size_t pieces = segments.size();
  for (const CopySegment& segment : segments) pieces += segment.bytes / kPieceBytes;
  if (pieces_.size() < pieces) pieces_.resize(pieces);
}

}  // namespace kv_offload
