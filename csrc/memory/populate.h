// SPDX-License-Identifier: Apache-2.0
// Allocates the pages of a shared mapping before anything depends on them. A store to a full tmpfs raises
// SIGBUS; here it becomes a Status.
//
// Private to memory/ and its tests.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>

#include "base/status.h"

namespace kv_offload {

// madvise, or a test's replacement; -1 and errno on failure.
using Advise = std::function<int(void* address, std::size_t bytes, int advice)>;
Advise system_advise();

struct Population {
  std::span<std::byte> range;     // page aligned; its contents are preserved
  int fd = -1;                    // the mapped file,
  std::uint64_t file_offset = 0;  // and where the range starts in it
  // Returns the bytes that may be allocated now. Called before each piece, so that a cgroup limit is reported
  // here and does not kill the process.
  std::function<std::uint64_t()> available;
  Advise advise = system_advise();
};

// Enters pages that exist in the page tables of this process, without a fault per page. False: this kernel
// cannot (before 5.14), or the file has become shorter.
bool enter_in_page_tables(std::span<std::byte> range);

// Populates the range on up to `threads` threads, in pieces. Calls progress(done, total) on the calling
// thread from time to time and at the end. Stops at the first failure: kNoSpace if memory or the tmpfs ran
// out (populated pages stay), kIo otherwise.
Status populate(const Population& population, unsigned threads,
                const std::function<void(std::uint64_t, std::uint64_t)>& progress);

}  // namespace kv_offload
