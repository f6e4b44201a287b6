// Giving pages of a shared mapping their memory before anything depends on it.
// A full tmpfs answers a store with SIGBUS; here it becomes a Status.
//
// Private to memory/ and its tests.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>

#include "base/status.h"

namespace kv_offload {

// madvise, or what a test puts in its place; -1 and errno on failure.
using Advise = std::function<int(void* address, std::size_t bytes, int advice)>;
Advise system_advise();

struct Population {
  std::span<std::byte> range;     // page aligned; what is in it is kept
  int fd = -1;                    // the file behind it,
  std::uint64_t file_offset = 0;  // and where the range starts in it
  // Bytes that may be taken now; asked before each piece, so that a cgroup limit
  // refuses here and does not kill.
  std::function<std::uint64_t()> available;
  Advise advise = system_advise();
};

// On up to `threads` threads, in pieces; progress(done, total) from the calling
// thread now and then and at the end. The first failure stops it: no_space when
// memory or the tmpfs ran out (what was populated stays), io otherwise.
Status populate(const Population& population, unsigned threads,
                const std::function<void(std::uint64_t, std::uint64_t)>& progress);

}  // namespace kv_offload
