// SPDX-License-Identifier: Apache-2.0
#include "fake_cuda/machine.h"

#include <fmt/format.h>

#include <algorithm>

namespace fake_cuda {
namespace {

thread_local cudaError_t last_error = cudaSuccess;
thread_local std::vector<int> context_stack;  // this thread's stack of devices
thread_local cudaStreamCaptureMode capture_mode = cudaStreamCaptureModeGlobal;

CUctx_st primary_contexts[kDevices] = {{0}, {1}};

// Counts the call and returns the planted error, if any. REQUIRES: the machine's lock is held.
cudaError_t count(const char* call) {
  Machine& m = machine();
  ++m.calls[call];
  m.called.notify_all();
  const auto planted = m.plants.find(call);
  if (planted == m.plants.end() || --planted->second.in != 0) return cudaSuccess;
  const cudaError_t error = planted->second.error;
  m.plants.erase(planted);
  ++m.planted_failures;
  return error;
}

// The driver functions that csrc/copy looks up by name. They do not set the runtime's last error,
// and a lost context can still be made current.
CUresult retain(CUcontext* context, CUdevice device) {
  const std::lock_guard lock(machine().mutex);
  if (count("cuDevicePrimaryCtxRetain") != cudaSuccess) return CUDA_ERROR_INVALID_VALUE;
  machine().contexts.insert(device);
  ++machine().retained[static_cast<std::size_t>(device)];
  *context = &primary_contexts[device];
  return CUDA_SUCCESS;
}
CUresult release(CUdevice device) {
  const std::lock_guard lock(machine().mutex);
  if (--machine().retained[static_cast<std::size_t>(device)] < 0) {
    machine().wrong.push_back("a context was released that had not been retained");
  }
  return CUDA_SUCCESS;
}
CUresult push(CUcontext context) {
  const std::lock_guard lock(machine().mutex);
  if (count("cuCtxPushCurrent") != cudaSuccess) return CUDA_ERROR_INVALID_VALUE;
  context_stack.push_back(context->device);
  return CUDA_SUCCESS;
}
CUresult pop(CUcontext* context) {
  if (context_stack.empty()) {
    complain("a context was popped that had not been pushed");
    return CUDA_ERROR_INVALID_VALUE;
  }
  *context = &primary_contexts[context_stack.back()];
  context_stack.pop_back();
  return CUDA_SUCCESS;
}
void batch_copy() {}

}  // namespace

Machine& machine() {
  static Machine machine;
  return machine;
}

void complain(std::string what) {
  const std::lock_guard lock(machine().mutex);
  machine().wrong.push_back(std::move(what));
}

cudaError_t fail(cudaError_t error) { return last_error = error; }

cudaError_t enter(const char* call, bool unsafe_in_capture) {
  Machine& m = machine();
  const std::lock_guard lock(m.mutex);
  if (const cudaError_t planted = count(call); planted != cudaSuccess) return fail(planted);
  if (const cudaError_t lost = m.lost; lost != cudaSuccess) return fail(lost);
  if (unsafe_in_capture && capture_mode != cudaStreamCaptureModeRelaxed && !m.global_captures.empty()) {
    for (CUstream_st* stream : m.global_captures) stream->capturing = 2;
    m.wrong.push_back(fmt::format("{} broke a graph capture elsewhere", call));
    return fail(cudaErrorStreamCaptureUnsupported);
  }
  return cudaSuccess;
}

int current_device() { return context_stack.empty() ? 0 : context_stack.back(); }

void touch() {
  if (context_stack.empty()) context_stack.push_back(0);
  const std::lock_guard lock(machine().mutex);
  machine().contexts.insert(current_device());
}

Memory memory_at(const void* address, std::size_t bytes, int device) {
  const std::shared_lock lock(machine().ranges_mutex);
  const auto& ranges = machine().ranges;
  const auto first = reinterpret_cast<std::uintptr_t>(address);
  const auto next = ranges.upper_bound(first);
  if (next != ranges.begin()) {
    const auto& [start, range] = *std::prev(next);
    if (first < start + range.bytes) {
      if (first + bytes > start + range.bytes) return Memory::kAcrossABorder;
      const bool foreign = range.memory == Memory::kDevice && device >= 0 && range.device != device;
      return foreign ? Memory::kOfAnotherDevice : range.memory;
    }
  }
  return next != ranges.end() && next->first < first + bytes ? Memory::kAcrossABorder : Memory::kPageable;
}

// ---- controls

void begin(std::uint64_t seed) {
  Machine& m = machine();
  const std::lock_guard lock(m.mutex);
  m.random.seed(seed);
  m.calls.clear();
  m.plants.clear();
  m.planted_failures = 0;
  m.contexts.clear();
  m.retained = {};
  m.made_streams.clear();
  m.batches.clear();
  m.launches.clear();
  m.loaded_kernels.clear();
  m.wrong.clear();
  m.global_captures.clear();
  m.driver_version = 13000;
  m.batches_in_driver = true;
  m.kernels_loadable = true;
  m.read_only_registrable = true;
  m.lost = cudaSuccess;
  m.queue_limit = 1024;
  last_error = cudaSuccess;
  capture_mode = cudaStreamCaptureModeGlobal;
}

std::vector<std::string> end() {
  Machine& m = machine();
  std::vector<std::unique_ptr<CUstream_st>> streams;
  {
    const std::lock_guard lock(m.mutex);
    streams = std::exchange(m.streams, {});
    for (const auto& stream : streams) {
      if (!stream->destroyed) m.wrong.push_back("a stream was not destroyed");
    }
    if (!m.events.empty()) m.wrong.push_back(fmt::format("{} events were not destroyed", m.events.size()));
    for (const cudaEvent_t event : m.events) m.dead_events.emplace_back(event);
    m.events.clear();
  }
  streams.clear();  // queued operations run first
  const std::lock_guard lock(m.mutex);
  m.dead_events.clear();
  const std::unique_lock ranges_lock(m.ranges_mutex);
  if (!m.ranges.empty()) {
    m.wrong.push_back(fmt::format("{} memory ranges are still allocated or registered", m.ranges.size()));
  }
  for (const auto& [start, range] : m.ranges) {
    if (!range.registered) ::operator delete (reinterpret_cast<void*>(start), std::align_val_t{256});
  }
  m.ranges.clear();
  if (capture_mode != cudaStreamCaptureModeGlobal) {
    m.wrong.push_back("the capture mode of the test's thread was not restored");
  }
  for (const int count : m.retained) {
    if (count > 0) m.wrong.push_back("a primary context was retained and not released");
  }
  return std::exchange(m.wrong, {});
}

void plant(const std::string& call, std::uint64_t nth, cudaError_t error) {
  const std::lock_guard lock(machine().mutex);
  machine().plants[call] = {nth, error};
}
std::uint64_t planted_failures() {
  const std::lock_guard lock(machine().mutex);
  return machine().planted_failures;
}
void lose_context(cudaError_t error) { machine().lost = error; }
void find_context_again() {
  settle();  // the queued operations have been dropped
  machine().lost = cudaSuccess;
}
void set_driver_version(int version) { machine().driver_version = version; }
void set_batches_in_driver(bool there) { machine().batches_in_driver = there; }
void set_queue_limit(std::size_t operations) { machine().queue_limit = operations; }
void set_kernels_loadable(bool loadable) { machine().kernels_loadable = loadable; }
void set_read_only_registrable(bool registrable) { machine().read_only_registrable = registrable; }

void until_called(const std::string& call, std::uint64_t more) {
  std::unique_lock lock(machine().mutex);
  const std::uint64_t goal = machine().calls[call] + more;
  machine().called.wait(lock, [&] { return machine().calls[call] >= goal; });
}

std::vector<MadeStream> made_streams() {
  const std::lock_guard lock(machine().mutex);
  return machine().made_streams;
}
std::vector<Batch> batches() {
  const std::lock_guard lock(machine().mutex);
  return machine().batches;
}
std::vector<Launch> launches() {
  const std::lock_guard lock(machine().mutex);
  return machine().launches;
}
std::map<std::string, std::uint64_t> calls() {
  const std::lock_guard lock(machine().mutex);
  return machine().calls;
}
std::uint64_t single_copies() { return calls()["cudaMemcpyAsync"]; }
std::set<int> contexts() {
  const std::lock_guard lock(machine().mutex);
  return machine().contexts;
}
std::size_t live_ranges() {
  const std::shared_lock lock(machine().ranges_mutex);
  return machine().ranges.size();
}
std::size_t device_bytes() {
  const std::shared_lock lock(machine().ranges_mutex);
  std::size_t bytes = 0;
  for (const auto& [start, range] : machine().ranges) {
    if (range.memory == Memory::kDevice) bytes += range.bytes;
  }
  return bytes;
}

}  // namespace fake_cuda

// ---- devices, contexts, errors
using namespace fake_cuda;

extern "C" {

cudaError_t cudaDriverGetVersion(int* version) {
  *version = machine().driver_version;
  return cudaSuccess;
}
cudaError_t cudaGetDeviceCount(int* count) {
  ENTER();
  *count = kDevices;
  return cudaSuccess;
}
cudaError_t cudaGetDevice(int* device) {
  ENTER();
  *device = current_device();
  return cudaSuccess;
}
cudaError_t cudaSetDevice(int device) {
  ENTER();
  if (device < 0 || device >= kDevices) return fail(cudaErrorInvalidDevice);
  if (context_stack.empty()) context_stack.push_back(device);
  context_stack.back() = device;
  touch();
  return cudaSuccess;
}
cudaError_t cudaPeekAtLastError() { return last_error; }
cudaError_t cudaGetLastError() { return std::exchange(last_error, machine().lost.load()); }
const char* cudaGetErrorString(cudaError_t error) {
  thread_local char text[32];
  *fmt::format_to_n(text, sizeof(text) - 1, "error {}", static_cast<int>(error)).out = '\0';
  return text;
}
const char* cudaGetErrorName(cudaError_t) { return "cudaErrorOnThreads"; }
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
  ENTER();
  if (device < 0 || device >= kDevices) return fail(cudaErrorInvalidDevice);
  if (attribute != cudaDevAttrHostRegisterReadOnlySupported) return fail(cudaErrorInvalidValue);
  *value = machine().read_only_registrable ? 1 : 0;
  return cudaSuccess;
}
cudaError_t cudaDeviceGetPCIBusId(char* id, int capacity, int device) {
  ENTER();
  *fmt::format_to_n(id, capacity - 1, "FFFF:0{}:00.0", device).out = '\0';
  return cudaSuccess;
}
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int device) {
  ENTER();
  if (device < 0 || device >= kDevices) return fail(cudaErrorInvalidDevice);
  *properties = {};
  *fmt::format_to_n(properties->name, 255, "a GPU on threads").out = '\0';
  properties->multiProcessorCount = 4;
  return cudaSuccess;
}
cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  ENTER();
  touch();
  *least = 0;
  *greatest = -5;
  return cudaSuccess;
}
cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
  ENTER();
  touch();
  std::swap(*mode, capture_mode);
  return cudaSuccess;
}
cudaError_t cudaGetDriverEntryPointByVersion(const char* symbol, void** function, unsigned,
                                             unsigned long long, cudaDriverEntryPointQueryResult* result) {
  ENTER();
  const std::map<std::string, void*> functions = {
      {"cuDevicePrimaryCtxRetain", reinterpret_cast<void*>(&retain)},
      {"cuDevicePrimaryCtxRelease", reinterpret_cast<void*>(&release)},
      {"cuCtxPushCurrent", reinterpret_cast<void*>(&push)},
      {"cuCtxPopCurrent", reinterpret_cast<void*>(&pop)},
      {"cuMemcpyBatchAsync", machine().batches_in_driver ? reinterpret_cast<void*>(&batch_copy) : nullptr},
  };
  const auto found = functions.find(symbol);
  const bool of_contexts = std::string_view(symbol).starts_with("cuCtx") ||
                           std::string_view(symbol).starts_with("cuDevicePrimaryCtx");
  if (context_stack.empty() && !of_contexts) {
    complain("a driver function was looked up without a context: this may create one");
  }
  *function = found == functions.end() ? nullptr : found->second;
  *result = *function != nullptr ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
  return cudaSuccess;
}

}  // extern "C"
