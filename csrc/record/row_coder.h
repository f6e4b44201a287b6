// SPDX-License-Identifier: Apache-2.0
// RowCoder: entropy-codes the integers of quantized groups by interleaved rANS, as docs/record-format.md
// specifies. A row is the 64 integers of a group. Each of its 64 channels has a state of its own, and a class
// that selects one of 12 fixed distributions. Vector instructions therefore decode all channels of a row at
// once, in the order in which they are stored.
//
// Threads: any; stateless.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "record/group_quantizer.h"

namespace kv_offload {

// All of these are part of the format.
inline constexpr std::size_t kRowChannels = kQuantizedGroup;
inline constexpr std::size_t kRowClasses = 12;
inline constexpr std::uint32_t kFirstRowState = 1U << 16;  // of the encoder; the decoder ends with it

using RowStates = std::array<std::uint32_t, kRowChannels>;

// Returns the largest magnitude that integers of a class may have. REQUIRES: row_class < kRowClasses.
std::uint8_t largest_of_class(std::size_t row_class);
// Returns the class of a channel. sum, largest: of the magnitudes of its integers in a tile.
std::uint8_t class_of(std::size_t sum, std::uint8_t largest);

struct RowCoder {
  // Decodes rows of 64 integers each into q. classes: one for each channel. Advances the states and returns
  // the end of the words read. Any states and words are valid: damaged input yields other integers. REQUIRES:
  // each class < kRowClasses; most_read(rows) bytes from `words` are readable.
  const std::byte* (*decode)(RowStates& states, const std::uint8_t* classes, const std::byte* words,
                             std::size_t rows, std::int8_t* q);
  // Encodes rows of 64 integers each, `stride` integers apart, the last row first: a decoder reads them in
  // order. Writes words downwards from `end` and returns their begin, which is at most 128 bytes lower for
  // each row. May change kMostBelow bytes below it. REQUIRES: no magnitude exceeds largest_of_class() of its
  // channel.
  std::byte* (*encode)(RowStates& states, const std::uint8_t* classes, const std::int8_t* q, std::size_t rows,
                       std::size_t stride, std::byte* end);
  const char* name;  // of the instruction set

  static constexpr std::size_t most_read(std::size_t rows) { return 2 * kRowChannels * rows + 32; }
  static constexpr std::size_t kMostBelow = 16;
};

// Fills in the variants that this CPU supports, best first, and returns their number. The last one is plain
// C++. All decode the same integers, and encode the same words. The order is that of
// group_quantizers_known().
inline constexpr std::size_t kMostRowCoders = kMostGroupQuantizers;
std::size_t row_coders_known(RowCoder (&ways)[kMostRowCoders]);

}  // namespace kv_offload
