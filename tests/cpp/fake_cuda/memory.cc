// SPDX-License-Identifier: Apache-2.0
// Memory of the fake CUDA runtime: allocations, registrations and copies.
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <new>
#include <numeric>

#include "fake_cuda/machine.h"

namespace fake_cuda {
namespace {

// Uses the host allocator, so that AddressSanitizer sees out-of-bounds accesses. Fills the memory
// with noise, as device memory is not zeroed.
cudaError_t allocate(void** address, std::size_t bytes, Memory memory) {
  touch();
  if (bytes == 0) {
    *address = nullptr;
    return cudaSuccess;
  }
  *address = ::operator new (bytes, std::align_val_t{256});
  std::memset(*address, 0xA5, bytes);
  const std::unique_lock lock(machine().ranges_mutex);
  machine().ranges[reinterpret_cast<std::uintptr_t>(*address)] = {bytes, memory, current_device(), false};
  return cudaSuccess;
}

// Does not wait: operations that still use the memory are detected when they run.
cudaError_t forget(void* address, bool registered, cudaError_t otherwise) {
  if (address == nullptr) return cudaSuccess;
  const std::unique_lock lock(machine().ranges_mutex);
  const auto found = machine().ranges.find(reinterpret_cast<std::uintptr_t>(address));
  if (found == machine().ranges.end() || found->second.registered != registered) return fail(otherwise);
  if (!registered) ::operator delete (address, std::align_val_t{256});
  machine().ranges.erase(found);
  return cudaSuccess;
}

bool usable(Memory memory) { return memory == Memory::kDevice || memory == Memory::kPinned; }

// Runs a copy when the stream reaches it.
void copy_now(void* to, const void* from, std::size_t bytes, const void* taken = nullptr) {
  if (!usable(memory_at(to, bytes)) || !usable(memory_at(from, bytes))) {
    complain("a copy ran after its memory was freed or unregistered");
    return;
  }
  std::memcpy(to, taken != nullptr ? taken : from, bytes);
}

cudaError_t enqueue_copy(void* to, const void* from, std::size_t bytes, CUstream_st* stream,
                         bool source_at_any_time) {
  if (bytes == 0) return fail(cudaErrorInvalidValue);
  if (!usable(memory_at(to, bytes)) || !usable(memory_at(from, bytes))) {
    // CUDA treats the memory as pageable: it reads an address that may be unmapped, or waits.
    if (memory_at(to, bytes) == Memory::kPageable || memory_at(from, bytes) == Memory::kPageable) {
      complain("an asynchronous copy used memory that is not pinned");
    }
    return fail(cudaErrorInvalidValue);
  }
  if (source_at_any_time) {
    const auto* source = static_cast<const char*>(from);
    auto taken = std::make_shared<std::vector<char>>(source, source + bytes);
    stream->push({Operation::kCopy, [=] { copy_now(to, from, bytes, taken->data()); }});
  } else {
    stream->push({Operation::kCopy, [=] { copy_now(to, from, bytes); }});
  }
  return cudaSuccess;
}

}  // namespace
}  // namespace fake_cuda

using namespace fake_cuda;

extern "C" {

cudaError_t cudaMalloc(void** address, size_t bytes) {
  ENTER(true);
  return allocate(address, bytes, Memory::kDevice);
}
cudaError_t cudaMallocHost(void** address, size_t bytes) {
  ENTER(true);
  return allocate(address, bytes, Memory::kPinned);
}
cudaError_t cudaFree(void* address) {
  ENTER(true);
  touch();
  return forget(address, false, cudaErrorInvalidValue);
}
cudaError_t cudaFreeHost(void* address) {
  ENTER(true);
  touch();
  return forget(address, false, cudaErrorInvalidValue);
}
// The driver pins pages for writing unless it is told that the device only reads them.
static bool is_writable(void* address) {
  int ends[2];
  if (::pipe(ends) != 0) return true;
  const bool writable = ::write(ends[1], address, 1) == 1 && ::read(ends[0], address, 1) == 1;
  ::close(ends[0]);
  ::close(ends[1]);
  return writable;
}
cudaError_t cudaHostRegister(void* address, size_t bytes, unsigned flags) {
  ENTER(true);
  touch();
  const bool is_read_only = (flags & cudaHostRegisterReadOnly) != 0;
  if (is_read_only && !machine().read_only_registrable) return fail(cudaErrorNotSupported);
  if (!is_read_only && !is_writable(address)) return fail(cudaErrorInvalidValue);
  if (memory_at(address, bytes) != Memory::kPageable) return fail(cudaErrorHostMemoryAlreadyRegistered);
  const std::unique_lock lock(machine().ranges_mutex);
  machine().ranges[reinterpret_cast<std::uintptr_t>(address)] = {bytes, Memory::kPinned, current_device(),
                                                                 true};
  return cudaSuccess;
}
cudaError_t cudaHostUnregister(void* address) {
  ENTER(true);
  touch();
  return forget(address, true, cudaErrorHostMemoryNotRegistered);
}
cudaError_t cudaHostGetDevicePointer(void** device_address, void* address, unsigned) {
  ENTER();
  if (memory_at(address, 1) != Memory::kPinned) return fail(cudaErrorInvalidValue);
  *device_address = address;
  return cudaSuccess;
}
cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* address) {
  ENTER();
  touch();
  *attributes = {};
  const std::shared_lock lock(machine().ranges_mutex);
  const auto next = machine().ranges.upper_bound(reinterpret_cast<std::uintptr_t>(address));
  if (next == machine().ranges.begin()) return cudaSuccess;
  const auto& [start, range] = *std::prev(next);
  if (reinterpret_cast<std::uintptr_t>(address) >= start + range.bytes) return cudaSuccess;
  attributes->type = range.memory == Memory::kDevice ? cudaMemoryTypeDevice : cudaMemoryTypeHost;
  attributes->device = range.device;
  attributes->devicePointer = const_cast<void*>(address);
  return cudaSuccess;
}
cudaError_t cudaMemGetInfo(size_t* free, size_t* total) {
  ENTER();
  *total = std::size_t{1} << 36;
  *free = *total - device_bytes();
  return cudaSuccess;
}

cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind) {
  ENTER(true);
  touch();
  stream_of(nullptr)->drain();
  std::memcpy(to, from, bytes);
  return cudaSuccess;
}
cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind, cudaStream_t stream) {
  ENTER();
  return enqueue_copy(to, from, bytes, stream_of(stream), false);
}
cudaError_t cudaMemcpyBatchAsync(void* const* to, const void* const* from, const size_t* bytes, size_t count,
                                 cudaMemcpyAttributes* attributes, size_t* attribute_starts,
                                 size_t attribute_count, cudaStream_t stream) {
  ENTER();
  const bool valid = stream != nullptr && count != 0 && attribute_count == 1 && attribute_starts[0] == 0 &&
                     attributes->srcAccessOrder != cudaMemcpySrcAccessOrderInvalid;
  if (!valid || stream->capturing != 0) return fail(cudaErrorInvalidValue);
  std::vector<std::size_t> order(count);
  std::iota(order.begin(), order.end(), 0u);
  {
    const std::lock_guard lock(machine().mutex);
    std::shuffle(order.begin(), order.end(), machine().random);
    machine().batches.push_back({count, std::accumulate(bytes, bytes + count, std::size_t{0}),
                                 attributes->flags, attributes->srcAccessOrder,
                                 memory_at(from[0], 1) == Memory::kDevice});
  }
  const bool any = attributes->srcAccessOrder != cudaMemcpySrcAccessOrderStream;
  for (const std::size_t i : order) {
    const cudaError_t error = enqueue_copy(to[i], from[i], bytes[i], stream, any);
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}
cudaError_t cudaMemset(void* address, int value, size_t bytes) {
  ENTER(true);
  touch();
  stream_of(nullptr)->drain();
  std::memset(address, value, bytes);
  return cudaSuccess;
}
cudaError_t cudaMemsetAsync(void* address, int value, size_t bytes, cudaStream_t stream) {
  ENTER();
  stream_of(stream)->push({Operation::kOther, [=] { std::memset(address, value, bytes); }});
  return cudaSuccess;
}

}  // extern "C"
