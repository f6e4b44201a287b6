// SPDX-License-Identifier: Apache-2.0
// Streams, events, kernels and captures of the fake CUDA runtime.
#include <cuda_runtime.h>
#include <fmt/format.h>

#include <algorithm>

#include "fake_cuda/machine.h"

thread_local uint3 blockIdx, threadIdx;
thread_local dim3 gridDim, blockDim;

namespace fake_cuda {

void Marker::reach() {
  const std::lock_guard lock(mutex_);
  reached_ = true;
  when_ = std::chrono::steady_clock::now();
  changed_.notify_all();
}
bool Marker::reached() const {
  const std::lock_guard lock(mutex_);
  return reached_;
}
void Marker::wait() const {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return reached_; });
}

double Marker::seconds() const {
  const std::lock_guard lock(mutex_);
  return std::chrono::duration<double>(when_.time_since_epoch()).count();
}

void Gate::pass() {
  std::unique_lock lock(mutex);
  if (holds == 0) return;
  ++standing;
  changed.notify_all();
  changed.wait(lock, [&] { return holds == 0; });
  --standing;
}

Hold::Hold(Work work) : work_(work) {
  Gate& gate = machine().gates[static_cast<std::size_t>(work_)];
  const std::lock_guard lock(gate.mutex);
  ++gate.holds;
}
Hold::~Hold() { release(); }
void Hold::until_standing(int count) const {
  Gate& gate = machine().gates[static_cast<std::size_t>(work_)];
  std::unique_lock lock(gate.mutex);
  gate.changed.wait(lock, [&] { return gate.standing >= count; });
}
void Hold::release() {
  if (std::exchange(released_, true)) return;
  Gate& gate = machine().gates[static_cast<std::size_t>(work_)];
  const std::lock_guard lock(gate.mutex);
  --gate.holds;
  gate.changed.notify_all();
}

void settle() {
  for (int calm = 0; calm < 2;) {  // twice in a row: progress of one stream may unblock another
    std::vector<CUstream_st*> streams;
    {
      const std::lock_guard lock(machine().mutex);
      for (const auto& stream : machine().streams) streams.push_back(stream.get());
    }
    const bool settled =
        std::all_of(streams.begin(), streams.end(), [](CUstream_st* stream) { return stream->settled(); });
    calm = settled ? calm + 1 : 0;
    if (!settled) std::this_thread::yield();
  }
}

CUstream_st* stream_of(cudaStream_t stream) {
  if (stream != nullptr) {
    if (stream->destroyed) complain("a stream was used after it was destroyed");
    return stream;
  }
  static CUstream_st defaults[kDevices] = {{0, 1}, {1, 2}};
  return &defaults[current_device()];
}

cudaError_t load_kernel(cudaFuncAttributes* attributes, const void* kernel) {
  ENTER();
  if (!machine().kernels_loadable) return fail(cudaErrorNotSupported);
  *attributes = {1024};
  const std::lock_guard lock(machine().mutex);
  machine().loaded_kernels.insert(kernel);
  return cudaSuccess;
}

cudaError_t launch(const cudaLaunchConfig_t& config, const void* kernel, std::size_t parameter_bytes,
                   std::function<const char*(int device)> check, std::function<void()> run) {
  ENTER();
  CUstream_st* stream = stream_of(config.stream);
  const unsigned blocks = config.gridDim.x;
  const unsigned threads = config.blockDim.x;
  if (blocks == 0 || threads == 0 || threads > 1024) return fail(cudaErrorInvalidConfiguration);
  if (parameter_bytes > 32764) return fail(cudaErrorInvalidValue);
  if (stream->device != current_device()) return fail(cudaErrorInvalidResourceHandle);
  {
    const std::lock_guard lock(machine().mutex);
    machine().launches.push_back({blocks, threads, parameter_bytes});
    if (machine().loaded_kernels.insert(kernel).second) {
      machine().wrong.emplace_back(
          "a kernel was loaded by its launch, which may synchronise the whole device");
    }
  }
  stream->push({Operation::kKernel, [=] {
                  if (const char* wrong = check(stream->device); *wrong != '\0') {
                    complain(wrong);
                    machine().lost = cudaErrorIllegalAddress;
                    return;
                  }
                  gridDim = config.gridDim;
                  blockDim = config.blockDim;
                  // Backwards: no order may be relied on.
                  for (unsigned block = blocks; block-- > 0;) {
                    for (unsigned thread = threads; thread-- > 0;) {
                      blockIdx = {block, 0, 0};
                      threadIdx = {thread, 0, 0};
                      run();
                    }
                  }
                }});
  return cudaSuccess;
}

}  // namespace fake_cuda

using namespace fake_cuda;

CUstream_st::CUstream_st(int device_, std::uint64_t seed) : device(device_), random_(seed) {
  constexpr unsigned kSlowest[] = {0, 20, 60, 400};
  slowest_us_ = kSlowest[random_() % 4];
  thread_ = std::thread([this] { run(); });
}

CUstream_st::~CUstream_st() {
  stop();
  thread_.join();
}

void CUstream_st::push(Operation operation) {
  if (capturing != 0) return;  // the operation would be part of the graph
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return queue_.size() < machine().queue_limit; });
  queue_.push_back(std::move(operation));
  changed_.notify_all();
}

void CUstream_st::drain() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return queue_.empty() && !busy_; });
}

void CUstream_st::stop() {
  const std::lock_guard lock(mutex_);
  stopping_ = true;
  changed_.notify_all();
}

bool CUstream_st::settled() {
  const std::lock_guard lock(mutex_);
  if (queue_.empty() && !busy_) return true;
  if (in_host_function_) return true;
  if (standing_at_ != nullptr) return !standing_at_->reached();
  if (standing_for_ < 0) return false;
  Gate& gate = machine().gates[static_cast<std::size_t>(standing_for_)];
  const std::lock_guard gate_lock(gate.mutex);
  return gate.holds > 0;
}

void CUstream_st::run() {
  std::unique_lock lock(mutex_);
  while (true) {
    changed_.wait(lock, [&] { return stopping_ || !queue_.empty(); });
    if (queue_.empty()) return;
    const Operation operation = std::move(queue_.front());
    queue_.pop_front();
    busy_ = true;
    in_host_function_ = operation.kind == Operation::kOther;
    standing_at_ = operation.waits_for;
    if (operation.kind == Operation::kCopy) standing_for_ = static_cast<int>(Work::kCopy);
    if (operation.kind == Operation::kKernel) standing_for_ = static_cast<int>(Work::kKernel);
    const unsigned delay = random_() % 2 == 0 || slowest_us_ == 0 ? 0 : random_() % slowest_us_;
    lock.unlock();
    if (delay != 0) std::this_thread::sleep_for(std::chrono::microseconds(delay));
    stand_and_run(operation);
    lock.lock();
    busy_ = false;
    in_host_function_ = false;
    standing_at_ = nullptr;
    standing_for_ = -1;
    changed_.notify_all();
  }
}

void CUstream_st::stand_and_run(const Operation& operation) {
  if (operation.kind == Operation::kWait) operation.waits_for->wait();
  if (operation.kind == Operation::kCopy) machine().gates[static_cast<std::size_t>(Work::kCopy)].pass();
  if (operation.kind == Operation::kKernel) machine().gates[static_cast<std::size_t>(Work::kKernel)].pass();
  const bool moves = operation.kind == Operation::kCopy || operation.kind == Operation::kKernel;
  if (operation.run && !(moves && machine().lost != cudaSuccess)) operation.run();
}

extern "C" {

cudaError_t cudaStreamCreateWithPriority(cudaStream_t* made, unsigned flags, int priority) {
  ENTER();
  touch();
  const std::lock_guard lock(machine().mutex);
  const int device = current_device();
  machine().streams.push_back(std::make_unique<CUstream_st>(device, machine().random()));
  machine().made_streams.push_back({device, priority, (flags & cudaStreamNonBlocking) != 0});
  *made = machine().streams.back().get();
  return cudaSuccess;
}
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* made, unsigned flags) {
  return cudaStreamCreateWithPriority(made, flags, 0);
}
cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  ENTER();
  stream_of(stream)->destroyed = true;
  stream->stop();  // queued operations still run
  return cudaSuccess;
}
cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  ENTER(true);
  stream_of(stream)->drain();
  return cudaSuccess;
}
cudaError_t cudaDeviceSynchronize() {
  ENTER(true);
  touch();
  std::vector<CUstream_st*> streams = {stream_of(nullptr)};
  {
    const std::lock_guard lock(machine().mutex);
    for (const auto& stream : machine().streams) {
      if (stream->device == current_device()) streams.push_back(stream.get());
    }
  }
  for (CUstream_st* stream : streams) stream->drain();
  return cudaSuccess;
}
cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void* data) {
  ENTER();
  stream_of(stream)->push({Operation::kOther, [=] { function(data); }});
  return cudaSuccess;
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* made, unsigned) {
  ENTER();
  touch();
  *made = new CUevent_st{.device = current_device()};
  const std::lock_guard lock(machine().mutex);
  machine().events.insert(*made);
  return cudaSuccess;
}
cudaError_t cudaEventDestroy(cudaEvent_t event) {
  ENTER();
  const std::lock_guard lock(machine().mutex);
  if (machine().events.erase(event) == 0) return fail(cudaErrorInvalidResourceHandle);
  machine().dead_events.emplace_back(event);
  return cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  ENTER();
  CUstream_st* on = stream_of(stream);
  if (event->device != on->device) return fail(cudaErrorInvalidResourceHandle);
  const auto marker = std::make_shared<Marker>();
  {
    const std::lock_guard lock(event->mutex);
    event->last = marker;
    event->captured = on->capturing != 0;
  }
  on->push({Operation::kRecord, [marker] { marker->reach(); }});
  return cudaSuccess;
}
cudaError_t cudaEventQuery(cudaEvent_t event) {
  ENTER(true);
  const std::lock_guard lock(event->mutex);
  if (event->captured) {
    complain("an event of a graph capture was queried");
    return fail(cudaErrorCapturedEvent);
  }
  return event->last == nullptr || event->last->reached() ? cudaSuccess : fail(cudaErrorNotReady);
}
cudaError_t cudaEventElapsedTime(float* ms, cudaEvent_t start, cudaEvent_t end) {
  ENTER();
  const std::scoped_lock lock(start->mutex, end->mutex);
  const bool there = start->last != nullptr && end->last != nullptr;
  if (!there || !start->last->reached() || !end->last->reached()) return fail(cudaErrorNotReady);
  *ms = static_cast<float>((end->last->seconds() - start->last->seconds()) * 1e3);
  return cudaSuccess;
}
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
  ENTER();
  const std::lock_guard lock(event->mutex);
  if (event->captured) {
    complain("a stream was drawn into a graph capture");
    return fail(cudaErrorStreamCaptureIsolation);
  }
  if (event->last != nullptr) stream_of(stream)->push({Operation::kWait, {}, event->last});
  return cudaSuccess;
}

cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status) {
  ENTER();
  *status = static_cast<cudaStreamCaptureStatus>(stream_of(stream)->capturing.load());
  return cudaSuccess;
}
cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode mode) {
  ENTER();
  stream->capturing = 1;
  const std::lock_guard lock(machine().mutex);
  if (mode == cudaStreamCaptureModeGlobal) machine().global_captures.push_back(stream);
  return cudaSuccess;
}
cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph) {
  ENTER();
  const bool broken = stream->capturing.exchange(0) == 2;
  const std::lock_guard lock(machine().mutex);
  std::erase(machine().global_captures, stream);
  *graph = broken ? nullptr : new CUgraph_st;
  return broken ? fail(cudaErrorStreamCaptureInvalidated) : cudaSuccess;
}
cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
  ENTER();
  delete graph;
  return cudaSuccess;
}

}  // extern "C"
