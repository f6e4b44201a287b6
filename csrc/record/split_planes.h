// SPDX-License-Identifier: Apache-2.0
// Splits 16-bit floating-point numbers (the exponent follows the sign bit) into two byte planes, and joins
// them again. Each number is rotated left by one bit. Its upper byte is then the exponent of a bf16, or the
// exponent of an fp16 and three bits of its mantissa. Its lower byte is the rest, with the sign in the lowest
// bit.
//
// Threads: any; stateless.
#pragma once

#include <cstddef>
#include <cstdint>

namespace kv_offload {

// The ranges must not overlap; they may be unaligned.
struct SplitPlanes {
  // 2 * count bytes -> count bytes in each plane.
  void (*split)(const std::byte* numbers, std::size_t count, std::byte* upper, std::byte* lower);
  void (*join)(const std::byte* upper, const std::byte* lower, std::size_t count, std::byte* numbers);
  const char* name;  // of the instruction set
};

// Fills in the variants that this CPU supports, best first, and returns their number. The last one is plain
// C++. All give the same result.
inline constexpr std::size_t kMostSplitPlanes = 3;
std::size_t split_planes_known(SplitPlanes (&ways)[kMostSplitPlanes]);

}  // namespace kv_offload
