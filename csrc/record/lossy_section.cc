// SPDX-License-Identifier: Apache-2.0
#include "record/lossy_section.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <limits>

namespace kv_offload {
namespace {

constexpr std::size_t kGroup = kQuantizedGroup, kRows = kLossyTileRows;

// Periods that the encoder tries: groups of a token in the usual cache layouts, such as 2 (a head of 64
// channels, K and V) and 32 (8 heads of 128 channels).
constexpr std::uint8_t kPeriods[] = {1,  2,  3,  4,  5,  6,  7,  8,  9,  10, 12, 14, 15,
                                     16, 18, 20, 24, 28, 30, 32, 40, 48, 64, 80, 96, 128};

// Groups base + period * row, for the rows that the section has.
struct Tile {
  std::size_t base, rows;
};

// Magnitudes of the integers, by channel of a tile.
struct Magnitudes {
  std::array<std::uint16_t, kGroup> sums{};
  std::array<std::uint8_t, kGroup> largest{};
};

Magnitudes magnitudes_of(const std::int8_t* q, const Tile& tile, std::size_t period) {
  Magnitudes found;
  for (std::size_t row = 0; row < tile.rows; ++row) {
    const std::int8_t* const line = q + (tile.base + row * period) * kGroup;
    for (std::size_t channel = 0; channel < kGroup; ++channel) {
      const auto magnitude = static_cast<std::uint8_t>(std::abs(int{line[channel]}));
      found.sums[channel] = static_cast<std::uint16_t>(found.sums[channel] + magnitude);
      found.largest[channel] = std::max(found.largest[channel], magnitude);
    }
  }
  return found;
}

// Returns whether all bytes are below a limit, which is at most 128. Compares eight at once. REQUIRES: their
// number is a multiple of 8.
bool all_below(std::span<const std::uint8_t> bytes, std::uint8_t limit) {
  constexpr std::uint64_t kOnes = 0x0101010101010101, kHighest = 0x80 * kOnes;
  const std::uint64_t up = (0x80U - limit) * kOnes;
  std::uint64_t found = 0;
  for (std::size_t i = 0; i < bytes.size(); i += sizeof(std::uint64_t)) {
    std::uint64_t eight;
    std::memcpy(&eight, bytes.data() + i, sizeof(eight));
    found |= eight | (eight + up);  // a carry comes only from a byte that is too large
  }
  return (found & kHighest) == 0;
}

std::byte sum_of(std::byte a, std::byte b) {
  return static_cast<std::byte>(std::to_integer<unsigned>(a) + std::to_integer<unsigned>(b));
}

}  // namespace

std::size_t lossy_section_bytes(std::uint64_t left, std::size_t period, Element element) {
  if (left <= lossy_section_bytes_at_most(element)) return static_cast<std::size_t>(left);
  return kLossyGroups / (kRows * period) * kRows * period * group_bytes_of(element);
}

// The tiles of a section: blocks of kRows * period groups with one tile for each group of a token. The last
// block may have fewer rows, and fewer tiles.
class LossySection::Tiles {
 public:
  Tiles(std::size_t groups, std::size_t period)
      : period_(period),
        blocks_(groups / (kRows * period)),
        rest_(groups - blocks_ * kRows * period),
        size_(blocks_ * period + std::min(period, rest_)) {}
  std::size_t size() const { return size_; }
  std::size_t period() const { return period_; }
  Tile operator[](std::size_t i) const {
    const std::size_t block = i / period_, at = i % period_;
    return {block * kRows * period_ + at, block < blocks_ ? kRows : (rest_ - at + period_ - 1) / period_};
  }

 private:
  std::size_t period_, blocks_, rest_, size_;
};

// ---- encoding

std::optional<std::size_t> LossySection::encode_weights(const BoundFactors* factors, std::byte* out) {
  const std::span<const std::uint8_t> codes =
      factors != nullptr ? factors->weights() : std::span<const std::uint8_t>();
  weight_rows_ = codes.size() / kGroup;
  std::copy(codes.begin(), codes.end(), weights_.begin());
  std::fill_n(decoded_classes_.begin(), codes.size(), std::uint8_t{0});
  std::size_t stored = 0;
  if (weight_rows_ > 0) {
    const auto frame = frames.encode(std::as_bytes(codes), {out + kLossyWeightsHead, codes.size()});
    if (!frame) return std::nullopt;
    stored = *frame;
    if (stored == codes.size()) std::memcpy(out + kLossyWeightsHead, codes.data(), codes.size());
  }
  store_u32(out, weight_rows_);
  store_u32(out + 4, stored);
  return kLossyWeightsHead + stored;
}

void LossySection::quantize_group(const GroupQuantizer& quantizer, std::span<const std::byte> raw,
                                  Element element, std::size_t group) {
  codes_[group] = static_cast<std::byte>(
      quantizer.quantize(raw.data() + group * group_bytes_of(element), element, bounds.bounds[group],
                         bounds.weights_of(group), q_.data() + group * kGroup));
}

void LossySection::quantize(const GroupQuantizer& quantizer, std::span<const std::byte> raw, Element element,
                            std::size_t groups) {
  for (std::size_t group = 0; group < groups; ++group) quantize_group(quantizer, raw, element, group);
}

void LossySection::drop_weights(const GroupQuantizer& quantizer, std::span<const std::byte> raw,
                                Element element, std::size_t period) {
  const Tiles tiles(raw.size() / group_bytes_of(element), period);
  for (std::size_t number = 0; number < tiles.size(); ++number) {
    const Tile tile = tiles[number];
    bool keep = true;
    for (std::size_t row = 0; row < tile.rows; ++row) {
      const std::size_t group = tile.base + row * period;
      keep = keep && bounds.rows[group] == bounds.rows[tile.base] &&
             (bounds.rows[group] == 0 || codes_[group] != static_cast<std::byte>(kExactGroup));
    }
    for (std::size_t row = 0; row < tile.rows && !keep; ++row) {
      const std::size_t group = tile.base + row * period;
      bounds.rows[group] = 0;
      quantize_group(quantizer, raw, element, group);
    }
  }
}

std::size_t LossySection::find_period(std::size_t groups) const {
  // All periods look at nearly the same groups, because tokens differ more than periods.
  constexpr std::size_t kEnough = 1024;
  constexpr double kAsGood = 1.004;  // multiples of the period are as good, but have fewer whole tiles
  std::array<double, std::size(kPeriods)> bits{};
  std::array<bool, std::size(kPeriods)> keeps_weights{};
  double least = std::numeric_limits<double>::infinity();
  for (std::size_t i = 0; i < bits.size(); ++i) {
    const std::size_t period = kPeriods[i], looked_at = std::min(groups, std::max(kEnough, kRows * period));
    const std::size_t whole = looked_at / (kRows * period) * period;
    bits[i] = std::numeric_limits<double>::infinity();
    if (whole == 0) continue;
    const Tiles tiles(looked_at, period);
    bits[i] = 0;
    keeps_weights[i] = true;
    for (std::size_t tile = 0; tile < whole; ++tile) {
      for (std::size_t row = 1; row < kRows; ++row)
        keeps_weights[i] =
            keeps_weights[i] && bounds.rows[tiles[tile].base + row * period] == bounds.rows[tiles[tile].base];
      const Magnitudes found = magnitudes_of(q_.data(), tiles[tile], period);
      double product = 1;  // below 2^(11 * 64)
      for (const std::uint16_t sum : found.sums) product *= 1 + sum;
      bits[i] += std::log2(product);
    }
    bits[i] /= static_cast<double>(whole);
  }
  // Tiles whose groups have different weights would lose them.
  const bool some_keep = std::find(keeps_weights.begin(), keeps_weights.end(), true) != keeps_weights.end();
  for (std::size_t i = 0; i < bits.size(); ++i) {
    if (some_keep && !keeps_weights[i]) bits[i] = std::numeric_limits<double>::infinity();
    least = std::min(least, bits[i]);
  }
  if (least == 0 || least == std::numeric_limits<double>::infinity()) return 0;
  const auto best =
      std::find_if(bits.begin(), bits.end(), [&](double each) { return each <= kAsGood * least; });
  return kPeriods[static_cast<std::size_t>(best - bits.begin())];
}

void LossySection::refine_bounds(const GroupQuantizer& quantizer, std::span<const std::byte> raw,
                                 Element element, std::size_t period) {
  // In steps of 1/8 octave: a group that is smaller than the mean of its tile by more than kNear has its
  // bound lowered by the cube of the rest, and a larger one by the power 3/4.
  constexpr int kNear = 4, kMostLower = kCodeOfOne - 1;
  const std::size_t group_bytes = group_bytes_of(element);
  const Tiles tiles(raw.size() / group_bytes, period);
  for (std::size_t number = 0; number < tiles.size(); ++number) {
    const Tile tile = tiles[number];
    bool same_bound = true;
    std::array<int, kRows> sizes;
    int sum = 0, known = 0;
    for (std::size_t row = 0; row < tile.rows; ++row) {
      const std::size_t group = tile.base + row * period;
      same_bound = same_bound && bounds.bounds[group] == bounds.bounds[tile.base];
      sizes[row] = quantizer.size(raw.data() + group * group_bytes, element);
      sum += sizes[row];
      known += sizes[row] > 0 ? 1 : 0;
    }
    // A tile with several bounds has groups of several heads, whose sizes say nothing about tokens.
    if (!same_bound) continue;
    for (std::size_t row = 0; row < tile.rows; ++row) {
      if (sizes[row] == 0) continue;
      const int larger = sizes[row] - sum / known;
      const int lower = std::min(larger > 0 ? 3 * larger / 4 : 3 * (-larger - kNear), kMostLower);
      if (lower <= 0) continue;
      float& bound = bounds.bounds[tile.base + row * period];
      bound = std::max(bounds.least, bound * step_of(static_cast<std::uint8_t>(kCodeOfOne - lower)));
    }
  }
}

void LossySection::classify(const Tiles& tiles) {
  for (std::size_t tile = 0; tile < tiles.size(); ++tile) {
    const Magnitudes found = magnitudes_of(q_.data(), tiles[tile], tiles.period());
    for (std::size_t channel = 0; channel < kGroup; ++channel)
      classes_[tile * kGroup + channel] = class_of(found.sums[channel], found.largest[channel]);
  }
}

// Returns the states and the words.
std::span<const std::byte> LossySection::encode_integers(const LossyKernels& kernels, const Tiles& tiles) {
  RowStates states;
  states.fill(kFirstRowState);
  std::byte* const end = integers_.data() + integers_.size();
  std::byte* begin = end;
  for (std::size_t number = tiles.size(); number-- > 0;) {
    const Tile tile = tiles[number];
    begin = kernels.coder.encode(states, classes_.data() + number * kGroup, q_.data() + tile.base * kGroup,
                                 tile.rows, tiles.period() * kGroup, begin);
  }
  begin -= kLossyStateBytes;
  std::memcpy(begin, states.data(), kLossyStateBytes);
  return {begin, end};
}

std::optional<std::size_t> LossySection::encode(const LossyKernels& kernels, std::span<const std::byte> raw,
                                                Element element, std::size_t period, std::byte* out) {
  const std::size_t group_bytes = group_bytes_of(element), groups = raw.size() / group_bytes;
  const Tiles tiles(groups, period);
  classify(tiles);
  out[0] = static_cast<std::byte>(period);
  std::size_t used = kLossySectionHead, number = 0;
  const auto keep = [&](std::span<const std::byte> bytes) {
    if (!bytes.empty()) std::memcpy(out + used, bytes.data(), bytes.size());
    used += bytes.size();
  };
  // A part of its own length is not a frame.
  const auto keep_part = [&](std::span<const std::byte> content) {
    std::size_t stored = 0;
    if (!content.empty()) {
      const auto frame = frames.encode(content, {out + used, content.size()});
      if (!frame) return false;
      stored = *frame;
    }
    store_u32(out + 1 + 4 * number++, stored);
    if (stored == content.size()) {
      keep(content);
    } else {
      used += stored;
    }
    return true;
  };
  const auto difference = [](auto a, auto b) {
    return static_cast<std::byte>(std::uint8_t(a) - std::uint8_t(b));
  };
  for (std::size_t group = 0; group < groups; ++group)
    differences_[group] = group < period ? codes_[group] : difference(codes_[group], codes_[group - period]);
  if (!keep_part(std::span(differences_).first(groups))) return std::nullopt;
  const std::size_t with_rows = weight_rows_ > 0 ? tiles.size() : 0;
  for (std::size_t tile = 0; tile < with_rows; ++tile) {
    tile_rows_[tile] = bounds.rows[tiles[tile].base];
    const unsigned change = tile_rows_[tile] - (tile > 0 ? tile_rows_[tile - 1] : 0U);
    differences_[tile] = static_cast<std::byte>(change);
    differences_[with_rows + tile] = static_cast<std::byte>(change >> 8);
  }
  if (!keep_part(std::span(differences_).first(2 * with_rows))) return std::nullopt;
  std::copy_n(decoded_classes_.begin(), weight_rows_ * kGroup, encoded_classes_.begin());
  for (std::size_t tile = 0; tile < tiles.size(); ++tile) {
    const std::uint8_t* const classes = classes_.data() + tile * kGroup;
    std::byte* const differences = differences_.data() + tile * kGroup;
    std::memcpy(differences, classes, kGroup);
    if (tile >= with_rows || tile_rows_[tile] == 0) continue;
    std::uint8_t* const last = encoded_classes_.data() + (tile_rows_[tile] - 1) * kGroup;
    for (std::size_t channel = 0; channel < kGroup; ++channel)
      differences[channel] = difference(classes[channel], last[channel]);
    std::memcpy(last, classes, kGroup);
  }
  if (!keep_part(std::span(differences_).first(tiles.size() * kGroup))) return std::nullopt;
  const std::span<const std::byte> integers = encode_integers(kernels, tiles);
  store_u32(out + 1 + 4 * number, integers.size());
  keep(integers);
  for (std::size_t group = 0; group < groups; ++group) {
    if (codes_[group] == static_cast<std::byte>(kExactGroup))
      keep(raw.subspan(group * group_bytes, group_bytes));
  }
  keep(raw.subspan(groups * group_bytes));
  return used <= raw.size() ? used : 0;
}

// ---- decoding

const char* LossySection::decode_frame(std::span<const std::byte> stored, std::span<std::byte> content) {
  if (stored.size() > content.size() || stored.empty() != content.empty()) return "wrong length of a part";
  if (stored.size() < content.size()) return frames.decode(stored, content);
  std::copy(stored.begin(), stored.end(), content.begin());
  return nullptr;
}

const char* LossySection::decode_weights(std::span<const std::byte> in, Element element, std::uint64_t* at) {
  if (in.size() < kLossyWeightsHead) return "truncated in its weights";
  const std::size_t rows = load_u32(in.data()), stored = load_u32(in.data() + 4);
  if (rows > kMostWeightRows) return "too many rows of weights";
  if (rows > 0 && is_fp8(element)) return "fp8 has no weights";
  if (in.size() - kLossyWeightsHead < stored) return "truncated in its weights";
  const auto codes = std::span(weights_).first(rows * kGroup);
  if (const char* wrong = decode_frame(in.subspan(kLossyWeightsHead, stored), std::as_writable_bytes(codes)))
    return wrong;
  if (!all_below(codes, ChannelWeights::kMostCode + 1)) return "an impossible weight";
  weight_rows_ = rows;
  std::fill_n(decoded_classes_.begin(), rows * kGroup, std::uint8_t{0});
  *at += kLossyWeightsHead + stored;
  return nullptr;
}

// Adds up the rows of the tiles.
const char* LossySection::decode_rows(std::size_t tiles) {
  unsigned row = 0;
  for (std::size_t tile = 0; tile < tiles; ++tile) {
    row += std::to_integer<unsigned>(differences_[tile]) |
           std::to_integer<unsigned>(differences_[tiles + tile]) << 8;
    row &= 0xFFFF;
    if (row > weight_rows_) return "an unknown row of weights";
    tile_rows_[tile] = static_cast<std::uint16_t>(row);
  }
  return nullptr;
}

// in: the payload from the start of the integers, which are its first `stored` bytes.
const char* LossySection::decode_integers(const LossyKernels& kernels, const Tiles& tiles,
                                          std::span<const std::byte> in, std::size_t stored, Element element,
                                          std::byte* raw) {
  if (stored < kLossyStateBytes || stored > kMostIntegerBytes) return "wrong length of the integers";
  // The end is checked once per tile, so a tile may read past it.
  constexpr std::size_t kMostRead = RowCoder::most_read(kRows);
  const std::size_t group_bytes = group_bytes_of(element);
  const std::byte* at = in.data();
  if (in.size() - stored < kMostRead) {
    std::memcpy(integers_.data(), at, stored);
    std::memset(integers_.data() + stored, 0, kMostRead);
    at = integers_.data();
  }
  const std::byte* const end = at + stored;
  RowStates states;
  std::memcpy(states.data(), at, kLossyStateBytes);
  at += kLossyStateBytes;
  for (std::size_t number = 0; number < tiles.size(); ++number) {
    const Tile tile = tiles[number];
    // The CPU fetches the memory for the numbers while it decodes the integers.
    for (std::size_t row = 0; row < tile.rows; ++row)
      __builtin_prefetch(raw + (tile.base + row * tiles.period()) * group_bytes, 1);
    std::array<std::int8_t, kGroup * kRows> q;
    at = kernels.coder.decode(states, classes_.data() + number * kGroup, at, tile.rows, q.data());
    if (at > end) return "truncated in its integers";
    std::array<std::uint8_t, kRows> codes;
    for (std::size_t row = 0; row < tile.rows; ++row)
      codes[row] = std::to_integer<std::uint8_t>(codes_[tile.base + row * tiles.period()]);
    const std::size_t weights = weight_rows_ > 0 ? tile_rows_[number] : 0;
    alignas(64) std::array<float, kGroup> of_channels;
    if (weights > 0)
      ChannelWeights::write_weights(weights_.data() + (weights - 1) * kGroup, of_channels.data());
    kernels.quantizer.restore(q.data(), codes.data(), tile.rows, element,
                              weights > 0 ? of_channels.data() : nullptr, raw + tile.base * group_bytes,
                              tiles.period() * group_bytes);
  }
  const bool all_first =
      std::all_of(states.begin(), states.end(), [](std::uint32_t state) { return state == kFirstRowState; });
  return at == end && all_first ? nullptr : "damaged integers";
}

const char* LossySection::decode(const LossyKernels& kernels, std::size_t period,
                                 std::span<const std::byte> in, Element element, std::span<std::byte> raw,
                                 std::uint64_t* at) {
  const std::size_t group_bytes = group_bytes_of(element);
  const std::size_t groups = raw.size() / group_bytes, tail = raw.size() % group_bytes;
  const Tiles tiles(groups, period);
  // Lengths of the parts, the parts, the groups that are stored exactly, the tail. Each number is checked
  // before it is used: a record with a valid checksum can still be wrong.
  constexpr std::size_t kLengths = 4 * kLossyParts;
  if (in.size() < kLengths) return "truncated in its lengths";
  std::size_t lengths[kLossyParts], used = kLengths;
  for (std::size_t number = 0; number < kLossyParts; ++number) {
    lengths[number] = load_u32(in.data() + 4 * number);
    if (in.size() - used < lengths[number]) return "truncated";
    used += lengths[number];
  }
  const auto codes = std::span(codes_).first(groups);
  const auto classes = std::span(classes_).first(tiles.size() * kGroup);
  const std::size_t with_rows = weight_rows_ > 0 ? tiles.size() : 0;
  const auto rows = std::span(differences_).first(2 * with_rows);
  std::size_t begin = kLengths, number = 0;
  for (const auto content : {codes, rows, std::as_writable_bytes(classes)}) {
    if (const char* wrong = decode_frame(in.subspan(begin, lengths[number]), content)) return wrong;
    begin += lengths[number++];
  }
  for (std::size_t group = period; group < groups; ++group)
    codes[group] = sum_of(codes[group], codes[group - period]);
  if (const char* wrong = decode_rows(with_rows)) return wrong;
  for (std::size_t tile = 0; tile < with_rows; ++tile) {
    if (tile_rows_[tile] == 0) continue;
    std::uint8_t* const last = decoded_classes_.data() + (tile_rows_[tile] - 1) * kGroup;
    std::uint8_t* const of_tile = classes_.data() + tile * kGroup;
    for (std::size_t channel = 0; channel < kGroup; ++channel)
      last[channel] = static_cast<std::uint8_t>(last[channel] + of_tile[channel]);
    std::memcpy(of_tile, last, kGroup);
  }
  if (!all_below(classes, kRowClasses)) return "an unknown class";
  const auto exact =
      static_cast<std::size_t>(std::count(codes.begin(), codes.end(), static_cast<std::byte>(kExactGroup)));
  if (in.size() - used < exact * group_bytes + tail) return "truncated in its exact groups";
  const auto integers = in.subspan(begin);
  if (const char* wrong = decode_integers(kernels, tiles, integers, lengths[number], element, raw.data()))
    return wrong;
  const auto keep = [&](std::size_t to, std::size_t bytes) {
    std::memcpy(raw.data() + to, in.data() + used, bytes);
    used += bytes;
  };
  for (std::size_t group = 0; exact > 0 && group < groups; ++group) {
    if (codes[group] == static_cast<std::byte>(kExactGroup)) keep(group * group_bytes, group_bytes);
  }
  keep(groups * group_bytes, tail);
  *at += used;
  return nullptr;
}

}  // namespace kv_offload
