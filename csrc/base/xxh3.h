// SPDX-License-Identifier: Apache-2.0
// XXH3 from libxxhash. If the library was built with its dispatcher (csrc/cmake/dependencies.cmake checks),
// the first call selects the widest vectors of the CPU.
#pragma once

#ifdef KV_OFFLOAD_XXHASH_DISPATCH
#include <xxh_x86dispatch.h>
#else
#include <xxhash.h>
#endif
