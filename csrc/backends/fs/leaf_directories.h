// SPDX-License-Identifier: Apache-2.0
// LeafDirectories: the state of the leaf directories of one epoch: the disk space of each, and whether its
// name is durable.
//
// Invariant: the growth of a directory is reported once, to one caller. The first size seen counts as no
// growth.
//
// Threads: any. mutex_ guards everything. No other lock is taken while it is held, and no call waits for
// storage.
#pragma once

#include <algorithm>
#include <array>
#include <bitset>
#include <cstdint>

#include "backends/fs/layout.h"
#include "base/thread_annotations.h"

namespace kv_offload {

class LeafDirectories {
 public:
  // Sets the directory's current size. Returns the growth that was not reported yet.
  std::uint64_t update_size(std::uint32_t leaf, std::uint64_t bytes) EXCLUDES(mutex_) {
    const MutexLock lock(mutex_);
    std::uint32_t& known = bytes_[leaf];
    const std::uint64_t grown = known != 0 && bytes > known ? bytes - known : 0;
    known = static_cast<std::uint32_t>(bytes);
    return grown;
  }
  // Returns the bytes beyond the one page that each directory had when it was created.
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
  void set_durable(std::uint32_t leaf) EXCLUDES(mutex_) {
    const MutexLock lock(mutex_);
    durable_[leaf] = true;
  }

 private:
  mutable Mutex mutex_;
  std::array<std::uint32_t, layout::kLeaves> bytes_ GUARDED_BY(mutex_) = {};  // 0: unknown
  std::bitset<layout::kLeaves> durable_ GUARDED_BY(mutex_);                   // used with fsync: full
};

}  // namespace kv_offload
