// SPDX-License-Identifier: Apache-2.0
// LossySection: encodes and decodes the sections of a lossy payload, one after the other: at most 4,096
// quantized groups each (group_quantizer.h). Also the working memory of a codec call, about 3.4 MB with its
// zstd contexts.
//
// One thread.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>

#include "record/bound_factors.h"
#include "record/group_quantizer.h"
#include "record/row_coder.h"
#include "record/zstd_frames.h"

namespace kv_offload {

// All of these are part of the format.
inline constexpr std::size_t kLossyGroups = 4096;  // of a section; its working set stays in the L2 cache
inline constexpr std::size_t kMostLossySectionBytes = kLossyGroups * 2 * kQuantizedGroup;
inline constexpr std::size_t kMostLossyPeriod = 128;
inline constexpr std::size_t kLossyTileRows = 16;  // groups of a tile
inline constexpr std::size_t kLossyParts = 4;      // step codes, rows of weights, classes, integers
inline constexpr std::size_t kLossySectionHead = 1 + 4 * kLossyParts;
inline constexpr std::size_t kLossyWeightsHead = 2 * 4;  // rows of the weights, their stored bytes
inline constexpr std::size_t kMostWeightBytes = kMostWeightRows * kQuantizedGroup;
inline constexpr std::size_t kLossyStateBytes = sizeof(RowStates);  // at the start of the integers

// Returns the most bytes of a section with numbers of this type.
constexpr std::size_t lossy_section_bytes_at_most(Element element) {
  return kLossyGroups * group_bytes_of(element);
}
// Returns the bytes of a section at the start of `left` bytes of payload: whole tiles, so that a section
// begins where a block of the cache does. REQUIRES: period is 1..kMostLossyPeriod.
std::size_t lossy_section_bytes(std::uint64_t left, std::size_t period, Element element);

// The bounds of the groups of a section.
struct SectionBounds {
  const BoundFactors* factors = nullptr;  // null: none
  float least = 0;                        // with factors: no bound becomes lower
  std::size_t groups = 0;
  std::array<float, kLossyGroups> bounds;
  std::array<std::uint16_t, kLossyGroups> rows;  // of the weights
  std::array<bool, kLossyGroups> are_values;

  // Returns null for row 0.
  const ChannelWeights* weights_of(std::size_t group) const {
    return rows[group] == 0 ? nullptr : &factors->weights_of(rows[group]);
  }
};

// One variant of the kernels of both kinds.
struct LossyKernels {
  GroupQuantizer quantizer{};
  RowCoder coder{};
};

class LossySection {
 public:
  // Bytes of the states and words that the integers of a section may need.
  static constexpr std::size_t kMostIntegerBytes = kLossyStateBytes + 2 * kLossyGroups * kQuantizedGroup;
  // Room that encode() and encode_weights() may need together.
  static constexpr std::size_t kMostNeeded = kLossyWeightsHead + kMostWeightBytes + kLossySectionHead +
                                             kLossyGroups * (1 + 2 + kQuantizedGroup) + kMostIntegerBytes +
                                             kMostLossySectionBytes;

  ZstdFrames frames;
  std::unique_ptr<LossySection> next;                             // for ContextPool
  std::array<std::byte, kMostLossySectionBytes> block, restored;  // scratch of the codec
  SectionBounds bounds;                                           // of the section to encode

  // Begin a payload with its weights. `out` has room for kMostNeeded. Returns the bytes used; nullopt: the
  // library failed.
  std::optional<std::size_t> encode_weights(const BoundFactors* factors, std::byte* out);
  // Adds the bytes read to *at. Returns null, or what is wrong.
  const char* decode_weights(std::span<const std::byte> in, Element element, std::uint64_t* at);

  // Lowers `bounds` of groups by their sizes within their tile. raw: as in encode(). REQUIRES: `bounds` has
  // factors.
  void refine_bounds(const GroupQuantizer& quantizer, std::span<const std::byte> raw, Element element,
                     std::size_t period);
  // Quantizes the first groups of these bytes within `bounds`, for find_period() and encode().
  void quantize(const GroupQuantizer& quantizer, std::span<const std::byte> raw, Element element,
                std::size_t groups);
  // Quantizes tiles again without weights if their groups have different ones, or if one of their groups has
  // no step. raw: as in encode(). REQUIRES: `bounds` has factors.
  void drop_weights(const GroupQuantizer& quantizer, std::span<const std::byte> raw, Element element,
                    std::size_t period);
  // find_period() looks at no more groups.
  static constexpr std::size_t kMostLookedAt = kLossyTileRows * kMostLossyPeriod;
  // Returns the period for which the magnitudes of a channel within a tile are most alike, from a few tiles.
  // 0: unknown, because their integers are zeros or there is no tile.
  std::size_t find_period(std::size_t groups) const;
  // Encodes these bytes, the first of those that were quantized, after all earlier sections were decoded
  // again. `out` has room for kMostNeeded. Returns the bytes used; 0: they would not become smaller; nullopt:
  // the library failed.
  std::optional<std::size_t> encode(const LossyKernels& kernels, std::span<const std::byte> raw,
                                    Element element, std::size_t period, std::byte* out);
  // Decodes a section of raw.size() bytes; `in` begins after its period. Adds the bytes read to *at. Returns
  // null, or what is wrong; raw then holds garbage.
  const char* decode(const LossyKernels& kernels, std::size_t period, std::span<const std::byte> in,
                     Element element, std::span<std::byte> raw, std::uint64_t* at);

 private:
  class Tiles;
  void quantize_group(const GroupQuantizer& quantizer, std::span<const std::byte> raw, Element element,
                      std::size_t group);
  void classify(const Tiles& tiles);
  std::span<const std::byte> encode_integers(const LossyKernels& kernels, const Tiles& tiles);
  const char* decode_frame(std::span<const std::byte> stored, std::span<std::byte> content);
  const char* decode_rows(std::size_t tiles);
  const char* decode_integers(const LossyKernels& kernels, const Tiles& tiles, std::span<const std::byte> in,
                              std::size_t stored, Element element, std::byte* raw);

  std::array<std::int8_t, kLossyGroups * kQuantizedGroup> q_;  // [group][channel]
  // The parts of a section before entropy coding.
  std::array<std::byte, kLossyGroups> codes_;
  std::array<std::uint8_t, kLossyGroups * kQuantizedGroup> classes_;  // [tile][channel]
  std::array<std::uint16_t, kLossyGroups> tile_rows_;
  std::array<std::byte, kLossyGroups * kQuantizedGroup> differences_;  // of a part, as they are stored
  // Of the payload: the weights, and the classes of the last tile of each row that was encoded or decoded.
  std::size_t weight_rows_ = 0;
  std::array<std::uint8_t, kMostWeightBytes> weights_, encoded_classes_, decoded_classes_;
  // The encoder writes the integers here from the end. The decoder copies them here if it could read beyond
  // the end of the payload.
  std::array<std::byte, RowCoder::kMostBelow + kMostIntegerBytes + RowCoder::most_read(kLossyTileRows)>
      integers_;
};

}  // namespace kv_offload
