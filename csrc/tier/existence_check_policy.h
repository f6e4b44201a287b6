// SPDX-License-Identifier: Apache-2.0
// ExistenceCheckPolicy: decides whether to check that a record is missing before writing it.
//
// The check saves the transfer of a record that another process wrote since the lookup, and costs a round
// trip. It pays off where other processes write the same prompts; elsewhere it costs a tenth to a fifth of
// each write. So every write checks until a run of checks finds no record. Then only a few writes check,
// until one of them finds a record.
//
// Skipping the check is safe: every writer of a key writes the same bytes. Threads: any.
#pragma once

#include <atomic>
#include <cstdint>

namespace kv_offload {

class ExistenceCheckPolicy {
 public:
  static constexpr std::uint32_t kMissesToSkip = 16;  // consecutive checks that found no record
  static constexpr std::uint32_t kCheckInterval = 8;  // after that, one of this many writes checks

  // True if the next write should check first.
  bool should_check() {
    if (missing_in_a_row_.load(std::memory_order_relaxed) < kMissesToSkip) return true;
    return unchecked_.fetch_add(1, std::memory_order_relaxed) % kCheckInterval == kCheckInterval - 1;
  }
  void record_result(bool exists) {
    if (exists) return restart();
    missing_in_a_row_.fetch_add(1, std::memory_order_relaxed);
  }
  void restart() { missing_in_a_row_.store(0, std::memory_order_relaxed); }

 private:
  std::atomic<std::uint64_t> missing_in_a_row_{0}, unchecked_{0};
};

}  // namespace kv_offload
