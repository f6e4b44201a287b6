// SPDX-License-Identifier: Apache-2.0
// FullDisk: tracks a file system that is full although the tier is below its bound.
//
// Threads: any.
#pragma once

#include <atomic>
#include <cstdint>

namespace kv_offload {

class FullDisk {
 public:
  // Counts a write that found no room. Running total.
  void add_full_write() { times_.fetch_add(1); }
  std::uint64_t times() const { return times_.load(); }
  // Reports whether evicting records made room. The disk may be filled by another program, or the error may
  // not be a lack of space. Then no more records are evicted until a write succeeds, or until try_again().
  void set_eviction_helped(bool helped) {
    failed_evictions_.store(helped ? 0 : failed_evictions_.load() + 1);
  }
  bool eviction_helps() const { return failed_evictions_.load() < kMaxFailedEvictions; }
  void try_again() { failed_evictions_.store(0); }

 private:
  // Consecutive writes. Two concurrent ones may count as one.
  static constexpr unsigned kMaxFailedEvictions = 2;
  std::atomic<std::uint64_t> times_{0};
  std::atomic<unsigned> failed_evictions_{0};
};

}  // namespace kv_offload
