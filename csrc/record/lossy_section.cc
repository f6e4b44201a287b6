// SPDX-License-Identifier: Apache-2.0
#include "record/lossy_section.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <limits>

#if defined(__x86_64__)
#include <emmintrin.h>
#endif

namespace kv_offload {
namespace {

constexpr std::size_t kGroup = kQuantizedGroup, kGroupBytes = kLossyGroupBytes, kRows = kLossyTileRows;

// Part of the format. Classes: 0, all zeros; 1..4, integers of -1..1; above, others. kPacked integers of
// classes 1..4 are in one byte.
constexpr std::size_t kTernaryClasses = 5, kPacked = 4;

// Periods that the encoder tries: groups of a token in the usual cache layouts, such as 2 (a head of 64
// channels, K and V) and 32 (8 heads of 128 channels).
constexpr std::uint8_t kPeriods[] = {1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 40, 48, 64, 80, 96, 128};

// Groups base + period * row, for the rows that the section has.
struct Tile {
  std::size_t base, rows;
};

// Only for the ratio: a decoder accepts any class for any integers.
std::size_t tile_class(std::size_t sum, bool is_ternary) {
  const auto octave = static_cast<std::size_t>(std::bit_width(sum));
  return is_ternary ? std::min<std::size_t>(octave, kTernaryClasses - 1)
                    : std::min(kTernaryClasses - 2 + octave, kLossyClasses - 1);
}

// Returns the bytes of the integers of one channel of a tile.
std::size_t channel_bytes(std::size_t kind, std::size_t rows) {
  if (kind == 0) return 0;
  return kind < kTernaryClasses ? (rows + kPacked - 1) / kPacked : rows;
}

// Of the channels of a tile.
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

// Four integers for each byte of a ternary class: 0, 1 and -1 for 0, 1 and 2.
constexpr std::array<std::array<std::int8_t, kPacked>, 256> kUnpacked = [] {
  std::array<std::array<std::int8_t, kPacked>, 256> all{};
  for (std::size_t packed = 0; packed < all.size(); ++packed) {
    for (std::size_t i = 0; i < kPacked; ++i) {
      const std::size_t code = packed >> 2 * i & 3;
      all[packed][i] = static_cast<std::int8_t>(code == 1 ? 1 : (code == 2 ? -1 : 0));
    }
  }
  return all;
}();

// in: 64 channels of 16 rows each; out: 16 rows of 64 channels.
void transpose_tile(const std::int8_t* in, std::int8_t* out) {
#if defined(__x86_64__)
  for (std::size_t from = 0; from < kGroup; from += kRows) {
    __m128i lines[kRows], shuffled[kRows];
    for (std::size_t i = 0; i < kRows; ++i)
      lines[i] = _mm_loadu_si128(reinterpret_cast<const __m128i*>(in + (from + i) * kRows));
    // Interleaving the first half of the lines with the second half four times transposes them.
    for (int round = 0; round < 4; ++round) {
      for (std::size_t i = 0; i < kRows / 2; ++i) {
        shuffled[2 * i] = _mm_unpacklo_epi8(lines[i], lines[i + kRows / 2]);
        shuffled[2 * i + 1] = _mm_unpackhi_epi8(lines[i], lines[i + kRows / 2]);
      }
      std::copy(std::begin(shuffled), std::end(shuffled), std::begin(lines));
    }
    for (std::size_t row = 0; row < kRows; ++row)
      _mm_storeu_si128(reinterpret_cast<__m128i*>(out + row * kGroup + from), lines[row]);
  }
#else
  for (std::size_t channel = 0; channel < kGroup; ++channel) {
    for (std::size_t row = 0; row < kRows; ++row) out[row * kGroup + channel] = in[channel * kRows + row];
  }
#endif
}

}  // namespace

std::size_t lossy_section_bytes(std::uint64_t left, std::size_t period) {
  if (left <= kLossySectionBytes) return static_cast<std::size_t>(left);
  return kLossyGroups / (kRows * period) * kRows * period * kGroupBytes;
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

std::span<std::byte> LossySection::stream(std::size_t number, std::size_t groups, std::size_t tiles) {
  if (number == 0) return std::span(codes_).first(groups);
  if (number == 1) return std::span(kinds_).first(tiles * kGroup);
  const std::size_t kind = number - 1;
  return std::span(integers_).subspan(begins_[kind], begins_[kind + 1] - begins_[kind]);
}

// Sets begins_ from kinds_. Returns false for an unknown class.
bool LossySection::place_classes(const Tiles& tiles) {
  std::array<std::size_t, kLossyClasses> sizes{};
  for (std::size_t tile = 0; tile < tiles.size(); ++tile) {
    const std::size_t rows = tiles[tile].rows;
    for (std::size_t channel = 0; channel < kGroup; ++channel) {
      const auto kind = std::to_integer<std::size_t>(kinds_[tile * kGroup + channel]);
      if (kind >= kLossyClasses) return false;
      sizes[kind] += channel_bytes(kind, rows);
    }
  }
  begins_[0] = begins_[1] = 0;
  for (std::size_t kind = 1; kind < kLossyClasses; ++kind) begins_[kind + 1] = begins_[kind] + sizes[kind];
  return true;
}

// ---- encoding

void LossySection::quantize(const GroupQuantizer& quantizer, std::span<const std::byte> raw, Element element,
                            const GroupBounds& bounds) {
  for (std::size_t group = 0; group < raw.size() / kGroupBytes; ++group) {
    const std::size_t at = group * kGroupBytes;
    codes_[group] = static_cast<std::byte>(
        quantizer.quantize(raw.data() + at, element, bounds.of(at), q_.data() + group * kGroup));
  }
}

std::size_t LossySection::find_period(std::size_t groups) const {
  constexpr std::size_t kSamples = 64, kChannelStep = 4;
  constexpr double kClearly = 0.97;  // multiples of the period are as good, but have fewer whole tiles
  std::size_t best = 1;
  double least = std::numeric_limits<double>::infinity();
  for (const std::size_t period : kPeriods) {
    if (kRows * period > groups) break;
    const Tiles tiles(groups, period);
    const std::size_t whole = groups / (kRows * period) * period;  // tiles with all rows
    double bits = 0;
    for (std::size_t sample = 0; sample < kSamples; ++sample) {
      const Tile tile = tiles[sample * 40503 % whole];  // of all heads: a plain stride may meet only one
      const Magnitudes found = magnitudes_of(q_.data(), tile, period);
      for (std::size_t channel = sample % kChannelStep; channel < kGroup; channel += kChannelStep)
        bits += std::log2(1.0F + static_cast<float>(found.sums[channel]));
    }
    if (bits < kClearly * least) {
      least = bits;
      best = period;
    }
  }
  return best;
}

void LossySection::classify(const Tiles& tiles) {
  for (std::size_t tile = 0; tile < tiles.size(); ++tile) {
    const Magnitudes found = magnitudes_of(q_.data(), tiles[tile], tiles.period());
    for (std::size_t channel = 0; channel < kGroup; ++channel) {
      kinds_[tile * kGroup + channel] =
          static_cast<std::byte>(tile_class(found.sums[channel], found.largest[channel] <= 1));
    }
  }
}

// Moves the integers of each channel of a tile to their class.
void LossySection::collect(const Tiles& tiles) {
  auto to = begins_;
  for (std::size_t number = 0; number < tiles.size(); ++number) {
    const Tile tile = tiles[number];
    std::array<std::int8_t, kGroup * kRows> columns;  // [channel][row]
    for (std::size_t row = 0; row < tile.rows; ++row) {
      const std::int8_t* const line = q_.data() + (tile.base + row * tiles.period()) * kGroup;
      for (std::size_t channel = 0; channel < kGroup; ++channel)
        columns[channel * kRows + row] = line[channel];
    }
    for (std::size_t channel = 0; channel < kGroup; ++channel) {
      const auto kind = std::to_integer<std::size_t>(kinds_[number * kGroup + channel]);
      if (kind == 0) continue;
      const std::int8_t* const column = columns.data() + channel * kRows;
      std::byte* const there = integers_.data() + to[kind];
      to[kind] += channel_bytes(kind, tile.rows);
      if (kind >= kTernaryClasses) {
        std::memcpy(there, column, tile.rows);
        continue;
      }
      std::memset(there, 0, channel_bytes(kind, tile.rows));
      for (std::size_t row = 0; row < tile.rows; ++row) {
        const unsigned code = column[row] < 0 ? 2 : static_cast<unsigned>(column[row]);
        there[row / kPacked] |= static_cast<std::byte>(code << 2 * (row % kPacked));
      }
    }
  }
}

std::optional<std::size_t> LossySection::encode(std::span<const std::byte> raw, std::size_t period,
                                                std::byte* out) {
  const std::size_t groups = raw.size() / kGroupBytes;
  const Tiles tiles(groups, period);
  classify(tiles);
  (void)place_classes(tiles);
  collect(tiles);
  out[0] = static_cast<std::byte>(period);
  std::size_t used = kLossySectionHead;
  for (std::size_t number = 0; number < kLossyStreams; ++number) {
    const std::span<std::byte> content = stream(number, groups, tiles.size());
    std::size_t stored = 0;
    if (!content.empty()) {
      const auto frame = frames.encode(content, {out + used, content.size()});
      if (!frame) return std::nullopt;
      stored = *frame;
      // A stream of its own length is not a frame.
      if (stored == content.size()) std::memcpy(out + used, content.data(), stored);
    }
    store_u32(out + 1 + 4 * number, stored);
    used += stored;
  }
  const auto keep = [&](std::size_t from, std::size_t bytes) {
    std::memcpy(out + used, raw.data() + from, bytes);
    used += bytes;
  };
  for (std::size_t group = 0; group < groups; ++group) {
    if (std::to_integer<std::uint8_t>(codes_[group]) == kExactGroup) keep(group * kGroupBytes, kGroupBytes);
  }
  keep(groups * kGroupBytes, raw.size() % kGroupBytes);
  return used <= raw.size() ? used : 0;
}

// ---- decoding

const char* LossySection::decode_streams(const Tiles& tiles, std::size_t groups,
                                         std::span<const std::byte> in, std::size_t* used) {
  if (in.size() < 4 * kLossyStreams) return "truncated in its lengths";
  *used = 4 * kLossyStreams;
  for (std::size_t number = 0; number < kLossyStreams; ++number) {
    // The lengths of the other streams follow from the classes.
    if (number == 2 && !place_classes(tiles)) return "an unknown class";
    const std::span<std::byte> content = stream(number, groups, tiles.size());
    const std::size_t stored = load_u32(in.data() + 4 * number);
    if (stored > content.size() || (stored == 0) != content.empty()) return "a stream of another length";
    if (in.size() - *used < stored) return "truncated";
    const auto there = in.subspan(*used, stored);
    *used += stored;
    if (stored == content.size()) {
      std::copy(there.begin(), there.end(), content.begin());
    } else if (const char* wrong = frames.decode(there, content)) {
      return wrong;
    }
  }
  return nullptr;
}

void LossySection::restore_tiles(const GroupQuantizer& quantizer, const Tiles& tiles, Element element,
                                 std::byte* raw) {
  auto from = begins_;
  for (std::size_t number = 0; number < tiles.size(); ++number) {
    const Tile tile = tiles[number];
    std::array<std::int8_t, kGroup * kRows> columns{}, rows;
    for (std::size_t channel = 0; channel < kGroup; ++channel) {
      const auto kind = std::to_integer<std::size_t>(kinds_[number * kGroup + channel]);
      if (kind == 0) continue;
      const std::byte* const there = integers_.data() + from[kind];
      const std::size_t bytes = channel_bytes(kind, tile.rows);
      from[kind] += bytes;
      std::int8_t* const column = columns.data() + channel * kRows;
      if (kind >= kTernaryClasses) {
        std::memcpy(column, there, bytes);
        continue;
      }
      for (std::size_t i = 0; i < bytes; ++i)
        std::memcpy(column + i * kPacked, kUnpacked[std::to_integer<std::size_t>(there[i])].data(), kPacked);
    }
    transpose_tile(columns.data(), rows.data());
    std::array<std::uint8_t, kRows> codes{};
    for (std::size_t row = 0; row < tile.rows; ++row)
      codes[row] = std::to_integer<std::uint8_t>(codes_[tile.base + row * tiles.period()]);
    quantizer.restore(rows.data(), codes.data(), tile.rows, element, raw + tile.base * kGroupBytes,
                      tiles.period() * kGroupBytes);
  }
}

const char* LossySection::decode(const GroupQuantizer& quantizer, std::size_t period,
                                 std::span<const std::byte> in, Element element, std::span<std::byte> raw,
                                 std::uint64_t* at) {
  const std::size_t groups = raw.size() / kGroupBytes;
  const Tiles tiles(groups, period);
  std::size_t used = 0;
  if (const char* wrong = decode_streams(tiles, groups, in, &used)) return wrong;
  const auto codes = std::span(codes_).first(groups);
  const auto exact =
      static_cast<std::size_t>(std::count(codes.begin(), codes.end(), static_cast<std::byte>(kExactGroup)));
  const std::size_t tail = raw.size() % kGroupBytes;
  if (in.size() - used < exact * kGroupBytes + tail) return "truncated in its exact groups";
  restore_tiles(quantizer, tiles, element, raw.data());
  const auto keep = [&](std::size_t to, std::size_t bytes) {
    std::memcpy(raw.data() + to, in.data() + used, bytes);
    used += bytes;
  };
  for (std::size_t group = 0; group < groups; ++group) {
    if (codes[group] == static_cast<std::byte>(kExactGroup)) keep(group * kGroupBytes, kGroupBytes);
  }
  keep(groups * kGroupBytes, tail);
  *at += used;
  return nullptr;
}

}  // namespace kv_offload
