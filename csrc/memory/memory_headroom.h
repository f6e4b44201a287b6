// SPDX-License-Identifier: Apache-2.0
// The data sources of memory_headroom() (host_region.h). Private to memory/ and its tests.
#pragma once

#include <string>

#include "memory/host_region.h"

namespace kv_offload {

// Like memory_headroom(), with /proc and the cgroup mounts found under `root` ("" = this system). Unreadable
// values do not limit; a missing shm directory throws ResourceError.
//
// cgroup: versions 2 and 1, the process's own group and all its ancestors; the smallest limit - usage counts.
// File pages do not count as usage, because the kernel drops them before it refuses an allocation (shared
// memory is not among them).
MemoryHeadroom memory_headroom_under(const std::string& root, const std::string& shm_directory);

}  // namespace kv_offload
