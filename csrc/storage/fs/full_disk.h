// FullDisk: what writers know of a file system that has no room although the bound does.
//
// Threads: any.
#pragma once

#include <atomic>
#include <cstdint>

namespace kv_offload {

class FullDisk {
 public:
  // Writes that found no room. Running total.
  void note_full() { times_.fetch_add(1); }
  std::uint64_t times() const { return times_.load(); }
  // Whether room was found once records were evicted. What fills the disk may be another program, or the
  // error may be no lack of space: then nothing more is evicted until a write succeeds, or for a while
  // (try_again()).
  void note_evicted(bool helped) { in_vain_.store(helped ? 0 : in_vain_.load() + 1); }
  bool eviction_helps() const { return in_vain_.load() < kMostInVain; }
  void try_again() { in_vain_.store(0); }

 private:
  static constexpr unsigned kMostInVain = 2;  // writes in a row; two at once may count as one
  std::atomic<std::uint64_t> times_{0};
  std::atomic<unsigned> in_vain_{0};
};

}  // namespace kv_offload
