// SPDX-License-Identifier: Apache-2.0
// The first call of each of our threads: sets its name and its share of the CPU.
#pragma once

#include <cstdint>

namespace kv_offload {

enum class CpuShare : std::uint8_t {
  kFull,        // other threads wait for its work
  kBackground,  // nothing waits: it yields to the engine's threads while all cores are busy
};

// A nice value: next to a thread of nice 0 on one core, such a thread gets a tenth of the core (sched(7):
// weights 110 and 1024). It is never starved, which matters because it may hold a lock that the scheduler
// thread wants next.
inline constexpr int kBackgroundNice = 10;

// Applies to the calling thread. `name` has at most 15 bytes and appears in top -H and /proc. A thread cannot
// raise its share again without a privilege, so it keeps the share for life.
void begin_thread(const char* name, CpuShare share);

}  // namespace kv_offload
