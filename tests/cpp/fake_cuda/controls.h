// SPDX-License-Identifier: Apache-2.0
// A CUDA runtime built on threads. The copier's own sources run on it unmodified, without a GPU, a
// driver or a toolkit. It uses every freedom that the CUDA contract allows:
// - A stream is a thread with random delays.
// - The copies of a batch run in any order. A source that may be read at any time is read at once.
// - Queues are bounded. Freeing and destroying never wait.
// - A thread that never chose a device is on device 0.
//
// It finds wrong order, wrong lifetimes, contexts on other devices, broken captures and error paths
// that report success. It does not model speed, device code or the driver's locks.
//
// main.cc gives every test a fresh machine. It fails the test after any call that CUDA does not
// allow, or if a resource is left over. This header declares the controls and queries for tests.
// Any thread may call them.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <vector>

namespace fake_cuda {

inline constexpr int kDevices = 2;

// ---- called by main.cc around every test
// Starts a fresh machine; the seed decides delays and orders. REQUIRES: the previous machine has
// ended and left nothing over.
void begin(std::uint64_t seed);
// Waits for all streams and returns every violation found, one sentence each.
std::vector<std::string> end();

// ---- controls for tests
// Makes the n-th call of this name from now (1: the next) fail without any effect.
void plant(const std::string& call, std::uint64_t nth, cudaError_t error);
// Returns the number of planted failures that have occurred.
std::uint64_t planted_failures();
// From now on every call fails with `error` and no queued operation runs, as after an illegal
// address.
void lose_context(cudaError_t error);
// Restores the context so that a test can clean up. Real CUDA cannot do this.
void find_context_again();
void set_driver_version(int version);  // 0: no driver
void set_batches_in_driver(bool there);
void set_queue_limit(std::size_t operations);  // per stream; a call on a full queue waits
void set_kernels_loadable(bool loadable);
void set_read_only_registrable(bool registrable);  // memory that is mapped read-only

enum class Work { kCopy, kKernel };
// While an instance exists, copies (or kernels) wait in their streams and do not run.
class Hold {
 public:
  explicit Hold(Work work);
  ~Hold();  // release()
  Hold(const Hold&) = delete;
  Hold& operator=(const Hold&) = delete;
  // Returns once `count` streams are blocked by this hold.
  void until_standing(int count) const;
  void release();

 private:
  const Work work_;
  bool released_ = false;
};
// Returns when every stream is idle or blocked by a hold, an unreached event or a host function.
void settle();
// Returns after `more` further calls of this name.
void until_called(const std::string& call, std::uint64_t more);

// ---- queries for tests
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
std::set<int> contexts();                      // devices that have a context
std::size_t live_ranges();                     // allocated or registered
std::size_t device_bytes();                    // allocated

}  // namespace fake_cuda
