// SPDX-License-Identifier: Apache-2.0
// Internals of the thread-based CUDA runtime; see controls.h for its purpose.
//
// Lock order: the machine's lock, then a stream's lock. An operation that runs inside a stream
// takes neither; it only takes a shared lock on the ranges. ThreadSanitizer therefore sees two
// streams as ordered by events only.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <random>
#include <shared_mutex>
#include <thread>
#include <utility>

#include "fake_cuda/controls.h"

namespace fake_cuda {

// A position in a stream that other streams can wait for.
class Marker {
 public:
  void reach();
  bool reached() const;
  void wait() const;
  double seconds() const;  // the time at which it was reached

 private:
  mutable std::mutex mutex_;
  mutable std::condition_variable changed_;
  bool reached_ = false;
  std::chrono::steady_clock::time_point when_{};
};

struct Operation {
  enum Kind { kCopy, kKernel, kWait, kRecord, kOther /* host functions, memset */ } kind = kOther;
  std::function<void()> run;
  std::shared_ptr<Marker> waits_for{};  // kWait
};

enum class Memory { kDevice, kPinned, kPageable, kAcrossABorder, kOfAnotherDevice };

struct Range {
  std::size_t bytes = 0;
  Memory memory = Memory::kDevice;
  int device = 0;
  bool registered = false;  // by cudaHostRegister: the runtime does not own the bytes
};

struct Plant {
  std::uint64_t in = 0;  // remaining calls, including the failing one
  cudaError_t error = cudaSuccess;
};

}  // namespace fake_cuda

struct CUevent_st {
  int device = 0;
  std::mutex mutex{};
  std::shared_ptr<fake_cuda::Marker> last{};  // null: never recorded
  bool captured = false;
};

struct CUstream_st {
  CUstream_st(int device_, std::uint64_t seed);
  ~CUstream_st();  // runs all queued operations first
  // Waits while the queue is full.
  void push(fake_cuda::Operation operation);
  void drain();
  void stop();  // ends after all queued operations; does not wait
  // True if the stream is idle, or blocked by a hold or an unreached event.
  bool settled();

  const int device;
  std::atomic<bool> destroyed = false;
  std::atomic<int> capturing = 0;  // 0 no, 1 yes, 2 broken

 private:
  void run();
  void stand_and_run(const fake_cuda::Operation& operation);

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<fake_cuda::Operation> queue_;
  bool busy_ = false;
  bool stopping_ = false;
  bool in_host_function_ = false;
  std::shared_ptr<fake_cuda::Marker> standing_at_;  // the event that blocks the stream
  int standing_for_ = -1;                           // the hold that blocks it
  std::mt19937_64 random_;
  unsigned slowest_us_ = 0;
  std::thread thread_;
};

struct CUctx_st {
  int device = 0;
};
struct CUgraph_st {};

namespace fake_cuda {

// State of a hold.
struct Gate {
  std::mutex mutex{};
  std::condition_variable changed{};
  int holds = 0;
  int standing = 0;
  void pass();
};

struct Machine {
  std::mutex mutex;
  std::condition_variable called;
  std::mt19937_64 random;
  std::map<std::string, std::uint64_t> calls;
  std::map<std::string, Plant> plants;
  std::uint64_t planted_failures = 0;
  std::set<int> contexts;
  std::array<int, kDevices> retained{};
  std::vector<MadeStream> made_streams;
  std::vector<Batch> batches;
  std::vector<Launch> launches;
  std::vector<std::unique_ptr<CUstream_st>> streams;  // includes destroyed streams until end()
  std::set<cudaEvent_t> events;
  std::vector<std::unique_ptr<CUevent_st>> dead_events;
  std::set<const void*> loaded_kernels;
  std::vector<std::string> wrong;
  std::vector<CUstream_st*> global_captures;
  int driver_version = 13000;
  bool batches_in_driver = true;
  bool kernels_loadable = true;
  bool read_only_registrable = true;

  std::shared_mutex ranges_mutex;
  std::map<std::uintptr_t, Range> ranges;

  std::array<Gate, 2> gates;
  std::atomic<cudaError_t> lost = cudaSuccess;
  std::atomic<std::size_t> queue_limit = 1024;
};
Machine& machine();

void complain(std::string what);
// Every call starts with this: it counts the call, and fails if a failure is planted or the context
// is lost. `unsafe_in_capture`: the call may break a capture.
cudaError_t enter(const char* call, bool unsafe_in_capture = false);
// Stores the error for cudaGetLastError and returns it.
cudaError_t fail(cudaError_t error);

// Returns this thread's device. `touch` creates its context, as most calls do.
int current_device();
void touch();

// Returns the kind of memory; with a `device`, as that device's kernels see it. No device has peer
// access.
Memory memory_at(const void* address, std::size_t bytes, int device = -1);
CUstream_st* stream_of(cudaStream_t stream);  // null: the device's default stream

}  // namespace fake_cuda

#define ENTER(...)                                                                     \
  do {                                                                                 \
    const cudaError_t entered = fake_cuda::enter(__func__ __VA_OPT__(, ) __VA_ARGS__); \
    if (entered != cudaSuccess) return entered;                                        \
  } while (false)
