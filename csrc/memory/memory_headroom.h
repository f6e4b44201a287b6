// Where memory_headroom() (host_region.h) looks. Private to memory/ and its tests.
#pragma once

#include <string>

#include "memory/host_region.h"

namespace kv_offload {

// As memory_headroom(), with /proc and the cgroup mounts found under `root`
// ("" = this system). What cannot be read does not limit; a shm directory that
// is not there throws ResourceError.
//
// cgroup: version 2 and 1, the process's own group and all above it, least
// limit - usage, where file pages do not count as usage (the kernel drops them
// before it refuses; shared memory is not among them).
MemoryHeadroom memory_headroom_under(const std::string& root, const std::string& shm_directory);

}  // namespace kv_offload
