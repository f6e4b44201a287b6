// SPDX-License-Identifier: Apache-2.0
// LossySection: encodes and decodes one section of a lossy payload, at most 4,096 quantized groups
// (group_quantizer.h). Also the working memory of a codec call, about 2.5 MB with its zstd contexts.
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
#include "record/kv_runs.h"
#include "record/row_coder.h"
#include "record/zstd_frames.h"

namespace kv_offload {

// All of these are part of the format.
inline constexpr std::size_t kLossyGroups = 4096;  // of a section; its working set stays in the L2 cache
inline constexpr std::size_t kMostLossySectionBytes = kLossyGroups * 2 * kQuantizedGroup;
inline constexpr std::size_t kMostLossyPeriod = 128;
inline constexpr std::size_t kLossyTileRows = 16;  // groups of a tile
inline constexpr std::size_t kLossyParts = 3;      // step codes, classes, integers
inline constexpr std::size_t kLossySectionHead = 1 + 4 * kLossyParts;
inline constexpr std::size_t kLossyStateBytes = sizeof(RowStates);  // at the start of the integers

// Returns the most bytes of a section with numbers of this type.
constexpr std::size_t lossy_section_bytes_at_most(Element element) {
  return kLossyGroups * group_bytes_of(element);
}
// Returns the bytes of a section at the start of `left` bytes of payload: whole tiles, so that a section
// begins where a block of the cache does. REQUIRES: period is 1..kMostLossyPeriod.
std::size_t lossy_section_bytes(std::uint64_t left, std::size_t period, Element element);

// The bounds of the groups of a section.
struct GroupBounds {
  float keys = 0, values = 0;
  KvRuns runs;
  std::size_t group_bytes = 0;
  const BoundFactors* factors = nullptr;  // null: none
  std::size_t groups_of_shard = 0;        // with factors
  float least = 0;                        // with factors: no bound becomes lower
  std::uint64_t begin = 0;                // of the section in the payload

  // at: where a group begins, from the start of the section.
  bool is_values(std::size_t at) const { return runs.all_values(begin + at, group_bytes); }
  float of(std::size_t at) const {
    const float bound = is_values(at) ? values : keys;
    if (factors == nullptr) return bound;
    return std::max(least, bound * factors->of((begin + at) / group_bytes, groups_of_shard));
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
  // Room that encode() may need.
  static constexpr std::size_t kMostNeeded =
      kLossySectionHead + kLossyGroups * (1 + kQuantizedGroup) + kMostIntegerBytes + kMostLossySectionBytes;

  ZstdFrames frames;
  std::unique_ptr<LossySection> next;                             // for ContextPool
  std::array<std::byte, kMostLossySectionBytes> block, restored;  // scratch of the codec

  // Quantizes the groups of these bytes, for find_period() and encode().
  void quantize(const GroupQuantizer& quantizer, std::span<const std::byte> raw, Element element,
                const GroupBounds& bounds);
  // Returns the period for which the magnitudes of a channel within a tile are most alike, from a few tiles.
  // 0: unknown, because their integers are zeros or there is no tile.
  std::size_t find_period(std::size_t groups) const;
  // Lowers the bounds of groups that are much smaller than the mean of their tile, and quantizes them again.
  // Such tokens, among them the first one of a prompt, change the output of a model most. raw: as in
  // encode(). REQUIRES: the bounds have factors.
  void refine_small_groups(const GroupQuantizer& quantizer, std::span<const std::byte> raw, Element element,
                           const GroupBounds& bounds, std::size_t period);
  // Encodes these bytes, the first of those that were quantized. `out` has room for kMostNeeded. Returns the
  // bytes used; 0: they would not become smaller; nullopt: the library failed.
  std::optional<std::size_t> encode(const LossyKernels& kernels, std::span<const std::byte> raw,
                                    Element element, std::size_t period, std::byte* out);
  // Decodes a section of raw.size() bytes; `in` begins after its period. Adds the bytes read to *at. Returns
  // null, or what is wrong; raw then holds garbage.
  const char* decode(const LossyKernels& kernels, std::size_t period, std::span<const std::byte> in,
                     Element element, std::span<std::byte> raw, std::uint64_t* at);

 private:
  class Tiles;
  void classify(const Tiles& tiles);
  std::span<const std::byte> encode_integers(const LossyKernels& kernels, const Tiles& tiles);
  const char* decode_frame(std::span<const std::byte> stored, std::span<std::byte> content);
  const char* decode_integers(const LossyKernels& kernels, const Tiles& tiles, std::span<const std::byte> in,
                              std::size_t stored, Element element, std::byte* raw);

  std::array<std::int8_t, kLossyGroups * kQuantizedGroup> q_;  // [group][channel]
  // The parts of a section before entropy coding.
  std::array<std::byte, kLossyGroups> codes_;
  std::array<std::uint8_t, kLossyGroups * kQuantizedGroup> classes_;  // [tile][channel]
  // The encoder writes the integers here from the end. The decoder copies them here if it could read beyond
  // the end of the payload.
  std::array<std::byte, RowCoder::kMostBelow + kMostIntegerBytes + RowCoder::most_read(kLossyTileRows)>
      integers_;
};

}  // namespace kv_offload
