// How long random tests run: shorter under a sanitizer, whose steps cost ten times
// as much; longer with KV_OFFLOAD_SOAK=<factor> in the environment.
#pragma once

#include <algorithm>
#include <cstdlib>

namespace kv_offload::testing {

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
inline constexpr bool kSanitized = true;
#else
inline constexpr bool kSanitized = false;
#endif

inline int rounds(int usual) {
  const char* factor = std::getenv("KV_OFFLOAD_SOAK");
  const int soak = factor == nullptr ? 1 : std::max(1, std::atoi(factor));
  return kSanitized ? std::max(1, usual * soak / 8) : usual * soak;
}

}  // namespace kv_offload::testing
