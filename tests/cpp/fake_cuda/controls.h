// SPDX-License-Identifier: Apache-2.0
// A CUDA runtime on threads: the copier's own sources, unmodified, run on it
// without a GPU, a driver or a toolkit. It is as unkind as the contract allows:
// a stream is a thread with random delays, the copies of a batch run in any
// order, a source that may be read at any time is read at once, a queue is
// bounded, freeing and destroying wait for nothing, a thread that never chose a
// device is on device 0. It finds wrong order, wrong lifetimes, contexts on
// foreign devices, broken captures and error paths that lie; it says nothing
// about speed, device code or the driver's locks.
//
// main.cc gives every test a fresh machine and fails the test when something was
// done that CUDA does not allow, or when something was left behind. Here is what
// a test may do to the machine, and what it may ask. Any thread.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <vector>

namespace fake_cuda {

inline constexpr int kDevices = 2;

// ---- what main.cc does around every test
// A fresh machine; the seed decides delays and orders. REQUIRES: nothing is left of the last one.
void begin(std::uint64_t seed);
// Waits for all streams and says what was wrong, a sentence each.
std::vector<std::string> end();

// ---- what a test does
// The n-th call of this name from now (1: the next) has no effect and fails.
void plant(const std::string& call, std::uint64_t nth, cudaError_t error);
// The planted calls that have failed so far.
std::uint64_t planted_failures();
// From now on every call fails with `error` and nothing that is queued happens,
// as after an illegal address.
void lose_context(cudaError_t error);
// As no real one is: so that a test can clean up.
void find_context_again();
void set_driver_version(int version);  // 0: no driver
void set_batches_in_driver(bool there);
void set_queue_limit(std::size_t operations);  // of one stream; a call that finds it full waits
void set_kernels_loadable(bool loadable);

enum class Work { kCopy, kKernel };
// While one lives, copies (or kernels) wait in their streams and do not run.
class Hold {
 public:
  explicit Hold(Work work);
  ~Hold();  // release()
  Hold(const Hold&) = delete;
  Hold& operator=(const Hold&) = delete;
  // Returns once `count` streams have come to such work and stand.
  void until_standing(int count) const;
  void release();

 private:
  const Work work_;
  bool released_ = false;
};
// Returns when every stream is idle or stands (behind a hold, an event that did
// not come, a host function).
void settle();
// Returns after so many more calls of this name.
void until_called(const std::string& call, std::uint64_t more);

// ---- what a test asks
struct MadeStream {
  int device = 0;
  int priority = 0;
  bool non_blocking = false;
};
struct Batch {
  std::size_t copies = 0;
  std::size_t bytes = 0;
  unsigned flags = 0;
  cudaMemcpySrcAccessOrder order = cudaMemcpySrcAccessOrderInvalid;
  bool from_device = false;
};
struct Launch {
  unsigned blocks = 0;
  unsigned threads = 0;
  std::size_t parameter_bytes = 0;
};
std::vector<MadeStream> made_streams();
std::vector<Batch> batches();
std::vector<Launch> launches();
std::uint64_t single_copies();                 // calls of cudaMemcpyAsync
std::map<std::string, std::uint64_t> calls();  // by name, since begin()
std::set<int> contexts();                      // devices on which one was made
std::size_t live_ranges();                     // allocated or registered
std::size_t device_bytes();                    // allocated

}  // namespace fake_cuda
