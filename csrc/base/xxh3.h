// XXH3, of libxxhash: by the widest vectors that the CPU has, which are looked for when it is first used, if
// the library was built with its dispatcher (csrc/cmake/dependencies.cmake looks).
#pragma once

#ifdef KV_OFFLOAD_XXHASH_DISPATCH
#include <xxh_x86dispatch.h>
#else
#include <xxhash.h>
#endif
