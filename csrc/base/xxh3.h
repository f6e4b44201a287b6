// XXH3 of libxxhash. If the library was built with its dispatcher (csrc/cmake/dependencies.cmake looks), the
// widest vectors of the CPU are chosen at the first call.
#pragma once

#ifdef KV_OFFLOAD_XXHASH_DISPATCH
#include <xxh_x86dispatch.h>
#else
#include <xxhash.h>
#endif
