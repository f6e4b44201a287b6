// Splits numbers of 16 bits, whose exponent lies below their sign, into two planes of bytes, and joins them
// again. Each number is turned left by one bit: its upper byte then is the exponent of a bf16, or the
// exponent of an fp16 and three bits of its mantissa; its lower byte is the rest, with the sign at its lowest
// bit.
//
// Threads: any; nothing is kept.
#pragma once

#include <cstddef>
#include <cstdint>

namespace kv_offload {

// None of the ranges overlap; none need be aligned.
struct SplitPlanes {
  // 2 * count bytes -> count bytes in each plane.
  void (*split)(const std::byte* numbers, std::size_t count, std::byte* upper, std::byte* lower);
  void (*join)(const std::byte* upper, const std::byte* lower, std::size_t count, std::byte* numbers);
  const char* name;  // of the instructions
};

// The ways that this processor knows, best first; the last is plain C++. All do the same.
inline constexpr std::size_t kMostSplitPlanes = 3;
std::size_t split_planes_known(SplitPlanes (&ways)[kMostSplitPlanes]);

}  // namespace kv_offload
