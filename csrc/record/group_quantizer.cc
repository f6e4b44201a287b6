// SPDX-License-Identifier: Apache-2.0
#include "record/group_quantizer.h"

#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>

namespace kv_offload {
namespace {

static_assert(std::endian::native == std::endian::little, "numbers are loaded as they are stored");

constexpr std::size_t kLanes = 16;          // sums that run in parallel, for vector instructions
constexpr float kLargestInteger = 127.49F;  // before rounding
constexpr int kMostStepsAway = 12;          // from the nominal step
// The bound of a search in float32, so that rounding of the sums never exceeds the bound in double.
constexpr float kSearchMargin = 0.9999F;

#define KV_OFFLOAD_INLINE inline __attribute__((always_inline))

KV_OFFLOAD_INLINE float of_bf16(std::uint32_t bits) { return std::bit_cast<float>(bits << 16); }

KV_OFFLOAD_INLINE std::uint32_t to_bf16(float value) {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  return (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
}

// No operand or result is a subnormal float32: a thread may treat those as zeros (DAZ and FTZ, which some
// libraries set).
KV_OFFLOAD_INLINE float of_fp16(std::uint32_t bits) {
  const std::uint32_t magnitude = bits & 0x7FFF;
  const std::uint32_t normal = (magnitude << 13) + (112U << 23);
  const std::uint32_t small =
      std::bit_cast<std::uint32_t>(static_cast<float>(static_cast<std::int32_t>(magnitude)) * 0x1p-24F);
  const std::uint32_t found =
      magnitude >= 0x7C00 ? magnitude << 13 | 0x7F800000 : (magnitude < 0x0400 ? small : normal);
  return std::bit_cast<float>(found | (bits & 0x8000) << 16);
}

KV_OFFLOAD_INLINE std::uint32_t to_fp16(float value) {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  const std::uint32_t magnitude = bits & 0x7FFFFFFF;
  // Adding 0.5 rounds numbers below 2^-14 to multiples of 2^-24, in the lowest bits of the sum.
  const std::uint32_t small = std::bit_cast<std::uint32_t>(std::bit_cast<float>(magnitude) + 0.5F) -
                              std::bit_cast<std::uint32_t>(0.5F);
  const std::uint32_t normal = (magnitude - (112U << 23) + 0xFFF + (magnitude >> 13 & 1)) >> 13;
  constexpr std::uint32_t kInfinity = 0x7C00, kFromHere = 0x477FF000;  // 65520 rounds to infinity
  const std::uint32_t rounded =
      magnitude >= kFromHere ? kInfinity : (magnitude < 0x38800000 ? small : normal);
  return rounded | (bits >> 16 & 0x8000);
}

template <Element kElement>
KV_OFFLOAD_INLINE float value_of(std::uint32_t bits) {
  return kElement == Element::kBf16 ? of_bf16(bits) : of_fp16(bits);
}

template <Element kElement>
KV_OFFLOAD_INLINE std::uint32_t number_of(float value) {
  return kElement == Element::kBf16 ? to_bf16(value) : to_fp16(value);
}

// 2^(i/8), rounded to float32: part of the format.
constexpr std::array<float, kStepsPerOctave> kRoots = {0x1p0F,        0x1.172b84p0F, 0x1.306fep0F,
                                                       0x1.4bfdaep0F, 0x1.6a09e6p0F, 0x1.8ace54p0F,
                                                       0x1.ae89fap0F, 0x1.d5818ep0F};

constexpr std::array<float, 256> kSteps = [] {
  std::array<float, 256> steps{};
  for (int code = 1; code < 256; ++code) {
    float step = kRoots[static_cast<std::size_t>(code % kStepsPerOctave)];
    for (int octave = code / kStepsPerOctave; octave < kCodeOfOne / kStepsPerOctave; ++octave) step /= 2;
    for (int octave = kCodeOfOne / kStepsPerOctave; octave < code / kStepsPerOctave; ++octave) step *= 2;
    steps[static_cast<std::size_t>(code)] = step;
  }
  return steps;
}();

using Values = std::array<float, kQuantizedGroup>;

// Returns value / step, rounded to an integer, ties to even. REQUIRES: it is less than 2^22.
KV_OFFLOAD_INLINE float integer_of(float value, float inverse_step) {
  constexpr float kRounding = 0x1.8p23F;  // the sum has no bits for fractions
  return (value * inverse_step + kRounding) - kRounding;
}

// Returns the squared error of this step. Writes no integers, so that the loop has one type for the compiler
// to vectorize.
template <Element kElement>
KV_OFFLOAD_INLINE float try_step(const Values& values, float step) {
  const float inverse = 1 / step;
  float sums[kLanes] = {};
  for (std::size_t from = 0; from < kQuantizedGroup; from += kLanes) {
    for (std::size_t lane = 0; lane < kLanes; ++lane) {
      const float value = values[from + lane];
      const float integer = integer_of(value, inverse);
      const float difference = value_of<kElement>(number_of<kElement>(integer * step)) - value;
      sums[lane] += difference * difference;
    }
  }
  float sum = 0;
  for (const float part : sums) sum += part;
  return sum;
}

template <Element kElement>
KV_OFFLOAD_INLINE std::uint8_t quantize_group(const std::byte* numbers, float max_error, std::int8_t* q) {
  std::array<std::uint16_t, kQuantizedGroup> bits;
  std::memcpy(bits.data(), numbers, sizeof(bits));
  Values values;
  float sums[kLanes] = {};
  for (std::size_t from = 0; from < kQuantizedGroup; from += kLanes) {
    for (std::size_t lane = 0; lane < kLanes; ++lane) {
      const float value = value_of<kElement>(bits[from + lane]);
      values[from + lane] = value;
      sums[lane] += value * value;
    }
  }
  // The order of magnitudes is that of their bits.
  std::uint16_t largest_bits = 0;
  for (const std::uint16_t each : bits) {
    const auto magnitude = static_cast<std::uint16_t>(each & 0x7FFF);
    largest_bits = magnitude > largest_bits ? magnitude : largest_bits;
  }
  const float largest = value_of<kElement>(largest_bits);
  float norm = 0;
  for (const float part : sums) norm += part;
  std::memset(q, 0, kQuantizedGroup);
  if (norm == 0) {
    // Squares of tiny numbers are zero, too: only zeros are coded as zeros.
    return largest_bits == 0 ? 1 : kExactGroup;
  }
  if (!(norm <= std::numeric_limits<float>::max())) return kExactGroup;  // NaN, too
  const float bound = norm * max_error * max_error * kSearchMargin;
  // Rounding to multiples of a step has a mean square error of step^2 / 12.
  const float nominal = std::sqrt(norm * (12.0F / kQuantizedGroup)) * max_error;
  if (nominal < kSteps[1] / 16) return kExactGroup;
  const int guess = static_cast<int>(std::floor(std::log2(nominal) * kStepsPerOctave)) + kCodeOfOne;
  const auto fits = [&](int code) __attribute__((always_inline)) {
    if (code < 1 || code > 255) return false;
    const float step = kSteps[static_cast<std::size_t>(code)];
    return largest <= kLargestInteger * step && try_step<kElement>(values, step) <= bound;
  };
  // Mostly the nominal step or a neighbour of it fits. The error need not grow with each larger step; the
  // chosen one was tried.
  int code = guess, up = 1;
  if (!fits(code)) {
    up = -1;
    while (guess - code < kMostStepsAway && !fits(--code)) {
    }
    if (guess - code >= kMostStepsAway) return kExactGroup;
  }
  while (up > 0 && code - guess < kMostStepsAway && fits(code + 1)) ++code;
  const float inverse = 1 / kSteps[static_cast<std::size_t>(code)];
  for (std::size_t i = 0; i < kQuantizedGroup; ++i)
    q[i] = static_cast<std::int8_t>(static_cast<std::int32_t>(integer_of(values[i], inverse)));
  return static_cast<std::uint8_t>(code);
}

template <Element kElement>
KV_OFFLOAD_INLINE void restore_rows(const std::int8_t* q, const std::uint8_t* codes, std::size_t rows,
                                    std::byte* numbers, std::size_t stride) {
  for (std::size_t row = 0; row < rows; ++row) {
    if (codes[row] == kExactGroup) continue;
    const float step = kSteps[codes[row]];
    std::array<std::uint16_t, kQuantizedGroup> bits;
    for (std::size_t i = 0; i < kQuantizedGroup; ++i)
      bits[i] = static_cast<std::uint16_t>(
          number_of<kElement>(static_cast<float>(q[kQuantizedGroup * row + i]) * step));
    std::memcpy(numbers + row * stride, bits.data(), sizeof(bits));
  }
}

KV_OFFLOAD_INLINE std::uint8_t quantize_any(const std::byte* numbers, Element element, float max_error,
                                            std::int8_t* q) {
  return element == Element::kBf16 ? quantize_group<Element::kBf16>(numbers, max_error, q)
                                   : quantize_group<Element::kFp16>(numbers, max_error, q);
}

KV_OFFLOAD_INLINE void restore_any(const std::int8_t* q, const std::uint8_t* codes, std::size_t rows,
                                   Element element, std::byte* numbers, std::size_t stride) {
  if (element == Element::kBf16) {
    restore_rows<Element::kBf16>(q, codes, rows, numbers, stride);
  } else {
    restore_rows<Element::kFp16>(q, codes, rows, numbers, stride);
  }
}

std::uint8_t quantize_plain(const std::byte* numbers, Element element, float max_error, std::int8_t* q) {
  return quantize_any(numbers, element, max_error, q);
}
void restore_plain(const std::int8_t* q, const std::uint8_t* codes, std::size_t rows, Element element,
                   std::byte* numbers, std::size_t stride) {
  restore_any(q, codes, rows, element, numbers, stride);
}

#if defined(__x86_64__)
// Restoring is faster with the instructions of every x86-64.
__attribute__((target("avx2"))) std::uint8_t quantize_avx2(const std::byte* numbers, Element element,
                                                           float max_error, std::int8_t* q) {
  return quantize_any(numbers, element, max_error, q);
}
#endif

#undef KV_OFFLOAD_INLINE

}  // namespace

float step_of(std::uint8_t code) { return kSteps[code]; }

std::size_t group_quantizers_known(GroupQuantizer (&ways)[kMostGroupQuantizers]) {
  std::size_t known = 0;
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx2")) ways[known++] = {quantize_avx2, restore_plain, "avx2"};
#endif
  ways[known++] = {quantize_plain, restore_plain, "plain"};
  return known;
}

void GroupLosses::add(const std::byte* numbers, const std::byte* restored, Element element) {
  constexpr std::size_t kBytes = 2 * kQuantizedGroup;
  const bool same = std::memcmp(numbers, restored, kBytes) == 0;
  double error = 0, norm = 0;
  bool all_zero = true;
  for (std::size_t i = 0; i < kBytes; i += 2) {
    std::uint16_t before, after;
    std::memcpy(&before, numbers + i, 2);
    std::memcpy(&after, restored + i, 2);
    const bool bf16 = element == Element::kBf16;
    const double value = bf16 ? of_bf16(before) : of_fp16(before);
    const double difference = (bf16 ? of_bf16(after) : of_fp16(after)) - value;
    error += difference * difference;
    norm += value * value;
    all_zero = all_zero && ((before | after) & 0x7FFF) == 0;
  }
  if (same) {
    if (std::isfinite(norm)) squared_norm += norm;
    return;
  }
  if (all_zero) return;  // the signs of zeros
  const double loss = norm > 0 ? std::sqrt(error / norm) : std::numeric_limits<double>::infinity();
  largest = std::isfinite(loss) ? std::fmax(largest, loss) : std::numeric_limits<double>::infinity();
  squared_error += error;
  squared_norm += norm;
}

}  // namespace kv_offload
