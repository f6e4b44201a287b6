// AskFirst: does it pay to ask a store for a record before it is written?
//
// Asking saves the bytes of a record that another wrote since the look-up, and costs a round trip. Where
// others write the same prompts that is a bargain; where nobody does it is a tenth to a fifth of each write.
// So every write asks until a run of answers says that nobody does; then a few do, until one finds a record.
//
// What is sent without asking is never wrong, for who writes a record writes the same. Threads: any.
#pragma once

#include <atomic>
#include <cstdint>

namespace kv_offload {

class AskFirst {
 public:
  static constexpr std::uint32_t kRun = 16;   // answers "not there", one after the other
  static constexpr std::uint32_t kEvery = 8;  // of so many writes one asks then

  // Of the write that is about to begin.
  bool should_ask() {
    if (not_there_.load(std::memory_order_relaxed) < kRun) return true;
    return unasked_.fetch_add(1, std::memory_order_relaxed) % kEvery == kEvery - 1;
  }
  void answered(bool there) {
    if (there) return start_over();
    not_there_.fetch_add(1, std::memory_order_relaxed);
  }
  void start_over() { not_there_.store(0, std::memory_order_relaxed); }

 private:
  std::atomic<std::uint64_t> not_there_{0}, unasked_{0};
};

}  // namespace kv_offload
