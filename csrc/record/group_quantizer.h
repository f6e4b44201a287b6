// SPDX-License-Identifier: Apache-2.0
// Quantizes groups of 64 neighbouring floating-point numbers of 16 or 8 bits to integers of 8 bits with a
// common step, and restores them. The step of a group is a power of 2^(1/8), stored as a code of one byte.
// With weights, the step of a channel is that of the group times the weight of the channel.
//
// Restoring multiplies in float32 and rounds to the element type. It therefore gives the same bits on
// every machine; how the encoder chose the integers does not matter to it. The results for fp8 are constants
// in tables. REQUIRES: the calling thread rounds to nearest. LossyCodec ensures that.
//
// Threads: any; stateless.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "record/payload_codec.h"

namespace kv_offload {

inline constexpr std::size_t kQuantizedGroup = 64;  // numbers that share a step

// Step codes: 1..255; kExactGroup: the group is stored unchanged.
inline constexpr std::uint8_t kExactGroup = 0;
inline constexpr int kStepsPerOctave = 8;
inline constexpr int kCodeOfOne = 192;  // the code of step 1
// REQUIRES: code != kExactGroup.
float step_of(std::uint8_t code);

// The steps of the 64 channels of a group relative to that of the group: powers of 2.
struct ChannelWeights {
  static constexpr std::uint8_t kCodeOfOne = 8, kMostCode = 16;

  alignas(64) std::array<float, kQuantizedGroup> weights, inverses;
  float mean_square = 0;  // of the weights

  // codes: by channel; kCodeOfOne is the weight 1, the next one is 2. REQUIRES: none exceeds kMostCode.
  explicit ChannelWeights(const std::uint8_t* codes);
  // Writes only the weights, for restoring.
  static void write_weights(const std::uint8_t* codes, float* weights);
};

// Squared error and squared norm of a group, in double.
struct GroupError {
  double squared_error = 0, squared_norm = 0;
};

// Returns the bytes of a group.
constexpr std::size_t group_bytes_of(Element element) { return kQuantizedGroup * element_bytes(element); }

// numbers: kQuantizedGroup elements, little-endian, unaligned. element: not kBytes. weights: null: all 1.
// REQUIRES: they are null for fp8.
struct GroupQuantizer {
  // Returns the code of the largest step that the root mean square of a group reaches, or sometimes the one
  // before. 0: the group has zeros only, NaN, infinity, or extreme magnitudes.
  std::uint8_t (*size)(const std::byte* numbers, Element element);
  // Chooses a step for which the Euclidean norm of the difference is at most max_error times that of the
  // group, the largest near the predicted step, and fills q. Returns its code;
  // kExactGroup, with zeros in q, if there is none: the group has NaN or infinity, extreme magnitudes, or one
  // number that is too large for the step of the others.
  std::uint8_t (*quantize)(const std::byte* numbers, Element element, float max_error,
                           const ChannelWeights* weights, std::int8_t* q);
  // Reads q[64 * row + i] for each row and writes rows of numbers, `stride` bytes apart. Rows with
  // kExactGroup become zeros.
  void (*restore)(const std::int8_t* q, const std::uint8_t* codes, std::size_t rows, Element element,
                  const float* weights, std::byte* numbers, std::size_t stride);
  // Compares a group with its restored form.
  GroupError (*compare)(const std::byte* numbers, const std::byte* restored, Element element);
  const char* name;  // of the instruction set
};

// True if the CPU and the operating system support the variants with these instructions.
bool has_avx2();
bool has_avx512();

// Fills in the variants that this CPU supports, best first, and returns their number. The last one is plain
// C++. All choose the same steps and restore the same bits.
inline constexpr std::size_t kMostGroupQuantizers = 3;
std::size_t group_quantizers_known(GroupQuantizer (&ways)[kMostGroupQuantizers]);

// Sums over the groups of a payload.
struct GroupLosses {
  double largest = 0;  // of error / norm of one group
  double squared_error = 0, squared_norm = 0;
  // Adds a group, its restored form and the error between them. A group with NaN or infinity that changed has
  // an infinite loss.
  void add(const std::byte* numbers, const std::byte* restored, Element element, const GroupError& error);
};

}  // namespace kv_offload
