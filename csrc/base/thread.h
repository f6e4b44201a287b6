// What each of our threads does first: it takes a name and its share of the CPU.
#pragma once

#include <cstdint>

namespace kv_offload {

enum class CpuShare : std::uint8_t {
  kFull,        // somebody waits for what the thread does
  kBackground,  // nobody waits: it gives way to the engine's threads while all cores are busy
};

// A nice value: beside a thread of nice 0 on one core, such a thread gets a tenth of it (sched(7): weights
// 110 and 1024). It is never starved: it may hold a lock that the scheduler's thread wants next.
inline constexpr int kBackgroundNice = 10;

// For the calling thread. `name` has at most 15 bytes and is what top -H and /proc show. The share cannot be
// raised again without a privilege, so a thread keeps it for life.
void begin_thread(const char* name, CpuShare share);

}  // namespace kv_offload
