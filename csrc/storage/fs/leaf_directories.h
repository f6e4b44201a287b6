// LeafDirectories: what is known of the leaf directories of one generation: the bytes that each takes on
// disk, and whether its name is durable.
//
// Invariant: the growth of a directory is told once, to one caller; a size that was never seen is no growth.
//
// Threads: any. mutex_ guards all; no other lock is taken while it is held, and no call waits for storage.
#pragma once

#include <algorithm>
#include <array>
#include <bitset>
#include <cstdint>

#include "base/thread_annotations.h"
#include "storage/fs/layout.h"

namespace kv_offload {

class LeafDirectories {
 public:
  // It takes so many bytes now. Those that nobody was told of yet.
  std::uint64_t note_size(std::uint32_t leaf, std::uint64_t bytes) EXCLUDES(mutex_) {
    const MutexLock lock(mutex_);
    std::uint32_t& known = bytes_[leaf];
    const std::uint64_t grown = known != 0 && bytes > known ? bytes - known : 0;
    known = static_cast<std::uint32_t>(bytes);
    return grown;
  }
  // What they take beyond the one page that each had when it was made.
  std::uint64_t growth() const EXCLUDES(mutex_) {
    const MutexLock lock(mutex_);
    std::uint64_t sum = 0;
    for (const std::uint64_t bytes : bytes_) sum += bytes - std::min<std::uint64_t>(bytes, kPageBytes);
    return sum;
  }
  bool is_durable(std::uint32_t leaf) const EXCLUDES(mutex_) {
    const MutexLock lock(mutex_);
    return durable_[leaf];
  }
  void note_durable(std::uint32_t leaf) EXCLUDES(mutex_) {
    const MutexLock lock(mutex_);
    durable_[leaf] = true;
  }

 private:
  mutable Mutex mutex_;
  std::array<std::uint32_t, layout::kLeaves> bytes_ GUARDED_BY(mutex_) = {};  // 0: unknown
  std::bitset<layout::kLeaves> durable_ GUARDED_BY(mutex_);                   // with fsync: full
};

}  // namespace kv_offload
