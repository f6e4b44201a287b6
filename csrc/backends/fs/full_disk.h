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
  void on_full() { times_.fetch_add(1); }
  std::uint64_t times() const { return times_.load(); }
  // Reports whether evicting records made room. The disk may be filled by another program, or the error may
  // not be a lack of space. Then no more records are evicted until a write succeeds, or until try_again().
  void on_evicted(bool helped) { in_vain_.store(helped ? 0 : in_vain_.load() + 1); }
  bool eviction_helps() const { return in_vain_.load() < kMostInVain; }
  void try_again() { in_vain_.store(0); }

 private:
  static constexpr unsigned kMostInVain = 2;  // consecutive writes; two concurrent ones may count as one
  std::atomic<std::uint64_t> times_{0};
  std::atomic<unsigned> in_vain_{0};
};

}  // namespace kv_offload
