// SPDX-License-Identifier: Apache-2.0
// The length of random tests: shorter under a sanitizer, which finds memory errors rather than rare values,
// and where each step is about ten times slower; shortest under ThreadSanitizer, which finds races. Scaled by
// KV_OFFLOAD_SOAK=<factor> in the environment.
#pragma once

#include <algorithm>
#include <cstdlib>

namespace testing {}
namespace kv_offload::testing {
using namespace ::testing;  // so that testing::Test is gtest's inside kv_offload

#if !defined(__has_feature)  // Clang tests for sanitizers with this; g++ defines macros
#define __has_feature(feature) 0
#endif
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__) || __has_feature(address_sanitizer) || \
    __has_feature(thread_sanitizer)
inline constexpr bool kSanitized = true;
#else
inline constexpr bool kSanitized = false;
#endif
#if defined(__SANITIZE_THREAD__) || __has_feature(thread_sanitizer)
inline constexpr int kShorter = 40;
#else
inline constexpr int kShorter = kSanitized ? 20 : 1;
#endif

inline int rounds(int usual) {
  const char* text = std::getenv("KV_OFFLOAD_SOAK");
  const double factor = text == nullptr ? 1 : std::max(0.01, std::atof(text));
  return std::max(1, static_cast<int>(usual * factor / kShorter));
}

}  // namespace kv_offload::testing
