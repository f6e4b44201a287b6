// SPDX-License-Identifier: Apache-2.0
#include "record/group_quantizer.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <type_traits>
#include <utility>

#if defined(__x86_64__)
#if !defined(__clang__)
// immintrin.h raises false warnings for AVX-512 (GCC bug 105593).
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
#include <cpuid.h>
#include <immintrin.h>
#endif

// All variants round alike: no multiplication is fused with an addition. g++ needs an option
// (CMakeLists.txt).
#if defined(__clang__)
#pragma clang fp contract(off)
#endif

namespace kv_offload {
namespace {

static_assert(std::endian::native == std::endian::little, "numbers are loaded as they are stored");

constexpr float kLargestInteger = 127;
constexpr float kImpossibleStep = std::numeric_limits<float>::infinity();  // of a step that is impossible
constexpr int kMostStepsAway = 12;                                         // from the nominal step
constexpr float kFarBelow = 0.85F;  // times the bound: the next step usually keeps it, too
// The bound of a search in float32, so that rounding of the sums never exceeds the bound in double.
constexpr float kSearchMargin = 0.9999F;

#define KV_OFFLOAD_INLINE inline __attribute__((always_inline))
#define KV_OFFLOAD_AVX2 __attribute__((target("avx2,f16c")))
#if defined(__clang__)
#define KV_OFFLOAD_UNROLL _Pragma("unroll")
#define KV_OFFLOAD_AVX512 __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,f16c")))
#else
#define KV_OFFLOAD_UNROLL _Pragma("GCC unroll 8")
#define KV_OFFLOAD_AVX512 \
  __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,f16c,prefer-vector-width=512")))
#endif

KV_OFFLOAD_INLINE float of_bf16(std::uint32_t bits) { return std::bit_cast<float>(bits << 16); }

KV_OFFLOAD_INLINE constexpr std::uint32_t to_bf16(float value) {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  return (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
}

// Without a branch, so that loops are vectorized.
KV_OFFLOAD_INLINE constexpr std::uint32_t chosen(bool condition, std::uint32_t yes, std::uint32_t no) {
  const std::uint32_t mask = 0U - static_cast<std::uint32_t>(condition);
  return (yes & mask) | (no & ~mask);
}

// A format with fewer bits of exponent than float32.
template <std::uint32_t kMantissaBits, std::uint32_t kBias, std::uint32_t kFirstSpecialCode,
          std::uint32_t kLargestCode>
struct SmallFloat {
  static constexpr std::uint32_t kShift = 23 - kMantissaBits;        // to the mantissa of float32
  static constexpr std::uint32_t kRebias = (127 - kBias) << 23;      // to the exponent of float32
  static constexpr std::uint32_t kFirstSpecial = kFirstSpecialCode;  // infinity, or NaN if there is none
  static constexpr std::uint32_t kLargest = kLargestCode;            // of the numbers that rounding gives
  static constexpr std::uint32_t kFirstNormal = 1U << kMantissaBits;
  static constexpr float kSmallestNormal = std::bit_cast<float>((128 - kBias) << 23);
  static constexpr float kUnit = std::bit_cast<float>((128 - kBias - kMantissaBits) << 23);  // of subnormals
};

template <Element kElement>
struct FormatOf;
// Numbers beyond the largest one round to infinity in fp16, and to 448 in e4m3. No product of a step and an
// integer is that large in e5m2.
template <>
struct FormatOf<Element::kFp16> : SmallFloat<10, 15, 0x7C00, 0x7C00> {};
template <>
struct FormatOf<Element::kE4m3> : SmallFloat<3, 7, 0x7F, 0x7E> {};
template <>
struct FormatOf<Element::kE5m2> : SmallFloat<2, 15, 0x7C, 0x7B> {};

template <Element kElement>
using Bits = std::conditional_t<is_16_bit(kElement), std::uint16_t, std::uint8_t>;
template <Element kElement>
constexpr std::uint32_t kMagnitude = is_16_bit(kElement) ? 0x7FFF : 0x7F;  // all bits but the sign
template <Element kElement>
constexpr std::uint32_t kSignShift = is_16_bit(kElement) ? 16 : 24;  // to the sign of float32

// No operand or result is a subnormal float32: a thread may treat those as zeros (DAZ and FTZ, which some
// libraries set).
template <Element kElement>
KV_OFFLOAD_INLINE float value_of(std::uint32_t bits) {
  if constexpr (kElement == Element::kBf16) {
    return of_bf16(bits);
  } else {
    using Format = FormatOf<kElement>;
    const std::uint32_t magnitude = bits & kMagnitude<kElement>;
    const std::uint32_t normal = (magnitude << Format::kShift) + Format::kRebias;
    const std::uint32_t small = std::bit_cast<std::uint32_t>(
        static_cast<float>(static_cast<std::int32_t>(magnitude)) * Format::kUnit);
    const std::uint32_t finite = chosen(magnitude < Format::kFirstNormal, small, normal);
    const std::uint32_t found =
        chosen(magnitude >= Format::kFirstSpecial, magnitude << Format::kShift | 0x7F800000, finite);
    return std::bit_cast<float>(found | (bits & (kMagnitude<kElement> + 1)) << kSignShift<kElement>);
  }
}

template <Element kElement>
KV_OFFLOAD_INLINE constexpr std::uint32_t number_of(float value) {
  if constexpr (kElement == Element::kBf16) {
    return to_bf16(value);
  } else {
    using Format = FormatOf<kElement>;
    const auto bits = std::bit_cast<std::uint32_t>(value);
    const std::uint32_t magnitude = bits & 0x7FFFFFFF;
    // The sum's lowest bit is the unit of subnormal numbers, so it rounds to multiples of that.
    constexpr float kRounds = Format::kUnit * 0x1p23F;
    const std::uint32_t small = std::bit_cast<std::uint32_t>(std::bit_cast<float>(magnitude) + kRounds) -
                                std::bit_cast<std::uint32_t>(kRounds);
    constexpr std::uint32_t kBelowHalf = (1U << (Format::kShift - 1)) - 1;
    const std::uint32_t normal =
        (magnitude - Format::kRebias + kBelowHalf + (magnitude >> Format::kShift & 1)) >> Format::kShift;
    const std::uint32_t rounded =
        chosen(magnitude < std::bit_cast<std::uint32_t>(Format::kSmallestNormal), small, normal);
    return chosen(rounded > Format::kLargest, Format::kLargest, rounded) |
           (bits >> kSignShift<kElement> & (kMagnitude<kElement> + 1));
  }
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

// The fp8 numbers of the integers 0..127, for each step code. In parts, because compilers limit the length of
// one constant evaluation.
using RestoredFp8 = std::array<std::uint8_t, 128>;
constexpr std::size_t kPartCodes = 32;
template <Element kElement, std::size_t kPart>
constexpr std::array<RestoredFp8, kPartCodes> kRestoredPart = [] {
  std::array<RestoredFp8, kPartCodes> part{};
  for (std::size_t i = 0; i < part.size(); ++i) {
    const float step = kSteps[kPart * kPartCodes + i];
    for (std::size_t integer = 0; integer < part[i].size(); ++integer)
      part[i][integer] = static_cast<std::uint8_t>(number_of<kElement>(static_cast<float>(integer) * step));
  }
  return part;
}();
constexpr std::size_t kParts = kSteps.size() / kPartCodes;
using RestoredParts = std::array<std::array<RestoredFp8, kPartCodes>, kParts>;
template <Element kElement, std::size_t... kPart>
constexpr RestoredParts joined(std::index_sequence<kPart...> /*parts*/) {
  return {kRestoredPart<kElement, kPart>...};
}
template <Element kElement>
alignas(64) constexpr RestoredParts kRestoredFp8 = joined<kElement>(std::make_index_sequence<kParts>());

using Values = std::array<float, kQuantizedGroup>;

constexpr float kRounding = 0x1.8p23F;  // a sum with it has no bits for fractions

// Returns value / step, rounded to an integer, ties to even. REQUIRES: it is less than 2^22.
KV_OFFLOAD_INLINE float integer_of(float value, float inverse_step) {
  return (value * inverse_step + kRounding) - kRounding;
}

// The inverse steps; 0 for kExactGroup.
constexpr std::array<float, 256> kInverseSteps = [] {
  std::array<float, 256> inverse{};
  for (std::size_t code = 1; code < inverse.size(); ++code) inverse[code] = 1 / kSteps[code];
  return inverse;
}();

// The roots that a mantissa with these highest bits may exceed.
constexpr unsigned kIndexBits = 7;
constexpr std::array<std::uint8_t, 1 << kIndexBits> kRootsBelow = [] {
  std::array<std::uint8_t, 1 << kIndexBits> below{};
  for (std::size_t i = 0; i < below.size(); ++i) {
    for (std::size_t root = 1; root < kRoots.size(); ++root)
      below[i] += 1 + static_cast<float>(i) / below.size() >= kRoots[root] ? 1 : 0;
  }
  return below;
}();

// Returns the largest code whose step is at most this, or sometimes the one before. REQUIRES: a positive
// normal number.
KV_OFFLOAD_INLINE int code_near(float step) {
  const auto bits = std::bit_cast<std::uint32_t>(step);
  return (static_cast<int>(bits >> 23) - 127) * kStepsPerOctave + kCodeOfOne +
         kRootsBelow[bits >> (23 - kIndexBits) & (kRootsBelow.size() - 1)];
}

template <typename Parts>
KV_OFFLOAD_INLINE auto sum_of_8(const Parts& parts) {
  return ((parts[0] + parts[4]) + (parts[2] + parts[6])) + ((parts[1] + parts[5]) + (parts[3] + parts[7]));
}

// In halves, not in order, so that vector instructions add.
KV_OFFLOAD_INLINE float sum_of(std::array<float, kQuantizedGroup>& parts) {
  static_assert(kQuantizedGroup == 64);
  for (std::size_t i = 0; i < 32; ++i) parts[i] += parts[i + 32];
  for (std::size_t i = 0; i < 16; ++i) parts[i] += parts[i + 16];
  for (std::size_t i = 0; i < 8; ++i) parts[i] += parts[i + 8];
  return sum_of_8(parts);
}

// The numbers of a group in the registers of an instruction set; here plain C++.
template <Element kElement, bool kWeighted>
struct PlainGroup {
  Values values;
  float largest = 0;  // divided by its weight
  const ChannelWeights* weights;

  KV_OFFLOAD_INLINE explicit PlainGroup(const std::byte* numbers, const ChannelWeights* of_channels = nullptr)
      : weights(of_channels) {
    std::array<Bits<kElement>, kQuantizedGroup> bits;
    std::memcpy(bits.data(), numbers, sizeof(bits));
    for (std::size_t i = 0; i < kQuantizedGroup; ++i) values[i] = value_of<kElement>(bits[i]);
    if constexpr (kWeighted) {
      for (std::size_t i = 0; i < kQuantizedGroup; ++i) {
        const float each = std::fabs(divided(i));
        largest = each > largest ? each : largest;
      }
      return;
    }
    // The order of magnitudes is that of their bits.
    Bits<kElement> most = 0;
    for (const Bits<kElement> each : bits) {
      const auto magnitude = static_cast<Bits<kElement>>(each & kMagnitude<kElement>);
      most = magnitude > most ? magnitude : most;
    }
    largest = value_of<kElement>(most);
  }
  KV_OFFLOAD_INLINE float divided(std::size_t i) const {
    return kWeighted ? values[i] * weights->inverses[i] : values[i];
  }
  KV_OFFLOAD_INLINE float step_of_channel(float step, std::size_t i) const {
    return kWeighted ? step * weights->weights[i] : step;
  }
  KV_OFFLOAD_INLINE float norm() const {
    Values squares;
    for (std::size_t i = 0; i < kQuantizedGroup; ++i) squares[i] = values[i] * values[i];
    return sum_of(squares);
  }
  // Returns the squared error of a step; infinity if an integer would be too large.
  KV_OFFLOAD_INLINE float error_of(float step, float inverse) const {
    Values errors;
    for (std::size_t i = 0; i < kQuantizedGroup; ++i) {
      const float integer = integer_of(divided(i), inverse);
      const float difference =
          value_of<kElement>(number_of<kElement>(integer * step_of_channel(step, i))) - values[i];
      errors[i] = difference * difference;
    }
    return integer_of(largest, inverse) <= kLargestInteger ? sum_of(errors) : kImpossibleStep;
  }
  // Compares the group with its restored form. Sums eight lanes, like the variants with vectors.
  KV_OFFLOAD_INLINE GroupError error_of(const PlainGroup& restored) const {
    double errors[8] = {}, norms[8] = {};
    for (std::size_t from = 0; from < kQuantizedGroup; from += 8) {
      for (std::size_t lane = 0; lane < 8; ++lane) {
        const double value = values[from + lane], difference = restored.values[from + lane] - value;
        errors[lane] += difference * difference;
        norms[lane] += value * value;
      }
    }
    return {sum_of_8(errors), sum_of_8(norms)};
  }
  // No integer is below -127, even where a thread rounds downwards.
  KV_OFFLOAD_INLINE void store(float inverse, std::int8_t* q) const {
    for (std::size_t i = 0; i < kQuantizedGroup; ++i)
      q[i] = static_cast<std::int8_t>(
          std::max(-127, static_cast<std::int32_t>(integer_of(divided(i), inverse))));
  }
  // Looks up the numbers of a group of fp8 and adds the signs of the integers.
  KV_OFFLOAD_INLINE static void restore(const RestoredFp8& table, const std::int8_t* q, std::byte* numbers) {
    for (std::size_t i = 0; i < kQuantizedGroup; ++i) {
      const int integer = q[i];
      numbers[i] = static_cast<std::byte>(table[static_cast<std::size_t>(std::abs(integer)) % table.size()] |
                                          (integer & 0x80));
    }
  }
};

#if defined(__x86_64__)

// For rounding to fp8 by an addition. REQUIRES: the product is less than 2^40.
constexpr int kExponentBits = 0x7F800000;
template <Element kElement>
constexpr float kRoundsFp8 = 1.5F * static_cast<float>(1U << FormatOf<kElement>::kShift);
template <Element kElement>
constexpr float kLargestFp8 = std::bit_cast<float>((FormatOf<kElement>::kLargest
                                                    << FormatOf<kElement>::kShift) +
                                                   FormatOf<kElement>::kRebias);

// These sum in the order of sum_of_8().
KV_OFFLOAD_AVX2 inline double sum_of_lanes(__m256d low, __m256d high) {
  const __m256d four = _mm256_add_pd(low, high);
  const __m128d two = _mm_add_pd(_mm256_castpd256_pd128(four), _mm256_extractf128_pd(four, 1));
  return _mm_cvtsd_f64(_mm_add_sd(two, _mm_unpackhi_pd(two, two)));
}
KV_OFFLOAD_AVX2 inline float sum_of_lanes(__m256 parts) {
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(parts), _mm256_extractf128_ps(parts, 1));
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}

template <Element kElement, bool kWeighted>
struct Avx2Group {
  static constexpr std::size_t kVectors = 8;
  __m256 values[kVectors];
  __m256 largest;  // divided by their weights
  const ChannelWeights* weights;

  KV_OFFLOAD_AVX2 static __m256 absolute(__m256 value) {
    return _mm256_andnot_ps(_mm256_set1_ps(-0.0F), value);
  }
  KV_OFFLOAD_AVX2 static __m256 integers(__m256 value, __m256 inverse) {
    const __m256 rounding = _mm256_set1_ps(kRounding);
    return _mm256_sub_ps(_mm256_add_ps(_mm256_mul_ps(value, inverse), rounding), rounding);
  }
  KV_OFFLOAD_AVX2 static __m256 rounded(__m256 value) {
    if constexpr (kElement == Element::kFp16)
      return _mm256_cvtph_ps(_mm256_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
    if constexpr (is_fp8(kElement)) {
      // The sum's lowest bit is the unit of numbers with this exponent.
      const __m256 exponent =
          _mm256_max_ps(_mm256_and_ps(value, _mm256_castsi256_ps(_mm256_set1_epi32(kExponentBits))),
                        _mm256_set1_ps(FormatOf<kElement>::kSmallestNormal));
      const __m256 rounds = _mm256_mul_ps(exponent, _mm256_set1_ps(kRoundsFp8<kElement>));
      const __m256 nearest = _mm256_sub_ps(_mm256_add_ps(value, rounds), rounds);
      const __m256 largest_number = _mm256_set1_ps(kLargestFp8<kElement>);
      return _mm256_max_ps(_mm256_min_ps(nearest, largest_number),
                           _mm256_sub_ps(_mm256_setzero_ps(), largest_number));
    }
    const __m256i bits = _mm256_castps_si256(value);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i up = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7FFF)), odd);
    return _mm256_castsi256_ps(_mm256_and_si256(up, _mm256_set1_epi32(static_cast<int>(0xFFFF0000))));
  }
  KV_OFFLOAD_AVX2 static float sum(const __m256 (&parts)[kVectors]) {
    return sum_of_8(
        _mm256_add_ps(_mm256_add_ps(_mm256_add_ps(parts[0], parts[4]), _mm256_add_ps(parts[2], parts[6])),
                      _mm256_add_ps(_mm256_add_ps(parts[1], parts[5]), _mm256_add_ps(parts[3], parts[7]))));
  }

  KV_OFFLOAD_AVX2 explicit Avx2Group(const std::byte* numbers, const ChannelWeights* of_channels = nullptr)
      : weights(of_channels) {
    largest = _mm256_setzero_ps();
    KV_OFFLOAD_UNROLL
    for (std::size_t i = 0; i < kVectors; ++i) {
      values[i] = loaded(numbers + element_bytes(kElement) * 8 * i);
      largest = _mm256_max_ps(largest, absolute(divided(i)));
    }
  }
  KV_OFFLOAD_AVX2 __m256 divided(std::size_t i) const {
    return kWeighted ? _mm256_mul_ps(values[i], _mm256_load_ps(weights->inverses.data() + 8 * i)) : values[i];
  }
  KV_OFFLOAD_AVX2 __m256 steps_of_channels(__m256 steps, std::size_t i) const {
    return kWeighted ? _mm256_mul_ps(steps, _mm256_load_ps(weights->weights.data() + 8 * i)) : steps;
  }
  KV_OFFLOAD_AVX2 static __m256 loaded(const std::byte* numbers) {
    if constexpr (is_16_bit(kElement)) {
      const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(numbers));
      return kElement == Element::kFp16
                 ? _mm256_cvtph_ps(bits)
                 : _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
    }
    const __m128i bits = _mm_cvtepu8_epi16(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(numbers)));
    if constexpr (kElement == Element::kE5m2) return _mm256_cvtph_ps(_mm_slli_epi16(bits, 8));
    // Read as fp16, these bits are the number times 2^-8.
    const __m128i magnitude = _mm_and_si128(bits, _mm_set1_epi16(0x7F));
    const __m128i nan = _mm_cmpeq_epi16(magnitude, _mm_set1_epi16(0x7F));
    const __m128i sign = _mm_slli_epi16(_mm_xor_si128(bits, magnitude), 8);
    const __m128i number = _mm_or_si128(_mm_slli_epi16(magnitude, 7), _mm_srli_epi16(nan, 1));
    return _mm256_mul_ps(_mm256_cvtph_ps(_mm_or_si128(sign, number)), _mm256_set1_ps(0x1p8F));
  }
  KV_OFFLOAD_AVX2 float norm() const {
    __m256 squares[kVectors];
    KV_OFFLOAD_UNROLL
    for (std::size_t i = 0; i < kVectors; ++i) squares[i] = _mm256_mul_ps(values[i], values[i]);
    return sum(squares);
  }
  KV_OFFLOAD_AVX2 float error_of(float step, float inverse) const {
    const __m256 steps = _mm256_set1_ps(step), inverses = _mm256_set1_ps(inverse);
    __m256 errors[kVectors];
    KV_OFFLOAD_UNROLL
    for (std::size_t i = 0; i < kVectors; ++i) {
      const __m256 restored =
          rounded(_mm256_mul_ps(integers(divided(i), inverses), steps_of_channels(steps, i)));
      const __m256 difference = _mm256_sub_ps(restored, values[i]);
      errors[i] = _mm256_mul_ps(difference, difference);
    }
    const __m256 too_large =
        _mm256_cmp_ps(integers(largest, inverses), _mm256_set1_ps(kLargestInteger), _CMP_GT_OQ);
    return _mm256_movemask_ps(too_large) == 0 ? sum(errors) : kImpossibleStep;
  }
  KV_OFFLOAD_AVX2 GroupError error_of(const Avx2Group& restored) const {
    __m256d errors[2] = {_mm256_setzero_pd(), _mm256_setzero_pd()};
    __m256d norms[2] = {_mm256_setzero_pd(), _mm256_setzero_pd()};
    KV_OFFLOAD_UNROLL
    for (std::size_t i = 0; i < kVectors; ++i) {
      const __m128 before[2] = {_mm256_castps256_ps128(values[i]), _mm256_extractf128_ps(values[i], 1)};
      const __m128 after[2] = {_mm256_castps256_ps128(restored.values[i]),
                               _mm256_extractf128_ps(restored.values[i], 1)};
      KV_OFFLOAD_UNROLL
      for (std::size_t half = 0; half < 2; ++half) {
        const __m256d value = _mm256_cvtps_pd(before[half]);
        const __m256d difference = _mm256_sub_pd(_mm256_cvtps_pd(after[half]), value);
        errors[half] = _mm256_add_pd(errors[half], _mm256_mul_pd(difference, difference));
        norms[half] = _mm256_add_pd(norms[half], _mm256_mul_pd(value, value));
      }
    }
    return {sum_of_lanes(errors[0], errors[1]), sum_of_lanes(norms[0], norms[1])};
  }
  KV_OFFLOAD_AVX2 void store(float inverse, std::int8_t* q) const {
    const __m256 inverses = _mm256_set1_ps(inverse);
    KV_OFFLOAD_UNROLL
    for (std::size_t i = 0; i < kVectors; i += 4) {
      __m256i parts[4];
      KV_OFFLOAD_UNROLL
      for (std::size_t part = 0; part < 4; ++part)
        parts[part] = _mm256_cvtps_epi32(integers(divided(i + part), inverses));
      const __m256i bytes =
          _mm256_packs_epi16(_mm256_packs_epi32(parts[0], parts[1]), _mm256_packs_epi32(parts[2], parts[3]));
      const __m256i in_order = _mm256_permutevar8x32_epi32(bytes, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(q + 8 * i),
                          _mm256_max_epi8(in_order, _mm256_set1_epi8(-127)));
    }
  }
  // Shuffles look up 16 entries by bits 0..3 of an integer, and ignore bits 4..6: blends choose by those.
  KV_OFFLOAD_AVX2 static void restore(const RestoredFp8& table, const std::int8_t* q, std::byte* numbers) {
    const __m256i low = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(q));
    const __m256i high = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(q + 32));
    const __m256i magnitudes[2] = {_mm256_abs_epi8(low), _mm256_abs_epi8(high)};
    const __m256i signs[2] = {_mm256_and_si256(low, _mm256_set1_epi8(-128)),
                              _mm256_and_si256(high, _mm256_set1_epi8(-128))};
    // Most groups have no integer above 31.
    const bool is_small =
        _mm256_testz_si256(_mm256_or_si256(magnitudes[0], magnitudes[1]), _mm256_set1_epi8(0x60)) != 0;
    const auto pair = [&](std::size_t at, __m256i magnitude) KV_OFFLOAD_AVX2 {
      const auto* const entries = reinterpret_cast<const __m128i*>(table.data() + at);
      const __m256i first = _mm256_broadcastsi128_si256(_mm_load_si128(entries));
      const __m256i second = _mm256_broadcastsi128_si256(_mm_load_si128(entries + 1));
      return _mm256_blendv_epi8(_mm256_shuffle_epi8(first, magnitude), _mm256_shuffle_epi8(second, magnitude),
                                _mm256_slli_epi16(magnitude, 3));
    };
    KV_OFFLOAD_UNROLL
    for (std::size_t half = 0; half < 2; ++half) {
      const __m256i magnitude = magnitudes[half];
      __m256i found = pair(0, magnitude);
      if (!is_small) {
        const __m256i bit5 = _mm256_slli_epi16(magnitude, 2), bit6 = _mm256_slli_epi16(magnitude, 1);
        const __m256i below_64 = _mm256_blendv_epi8(found, pair(32, magnitude), bit5);
        const __m256i above = _mm256_blendv_epi8(pair(64, magnitude), pair(96, magnitude), bit5);
        found = _mm256_blendv_epi8(below_64, above, bit6);
      }
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(numbers + 32 * half),
                          _mm256_or_si256(found, signs[half]));
    }
  }
};

template <Element kElement, bool kWeighted>
struct Avx512Group {
  static constexpr std::size_t kVectors = 4;
  __m512 values[kVectors];
  __m512 largest;  // divided by their weights
  const ChannelWeights* weights;

  KV_OFFLOAD_AVX512 static __m512 integers(__m512 value, __m512 inverse) {
    const __m512 rounding = _mm512_set1_ps(kRounding);
    return _mm512_sub_ps(_mm512_add_ps(_mm512_mul_ps(value, inverse), rounding), rounding);
  }
  KV_OFFLOAD_AVX512 static __m512 rounded(__m512 value) {
    if constexpr (kElement == Element::kFp16)
      return _mm512_cvtph_ps(_mm512_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
    if constexpr (is_fp8(kElement)) {
      const __m512 exponent =
          _mm512_max_ps(_mm512_and_ps(value, _mm512_castsi512_ps(_mm512_set1_epi32(kExponentBits))),
                        _mm512_set1_ps(FormatOf<kElement>::kSmallestNormal));
      const __m512 rounds = _mm512_mul_ps(exponent, _mm512_set1_ps(kRoundsFp8<kElement>));
      const __m512 nearest = _mm512_sub_ps(_mm512_add_ps(value, rounds), rounds);
      const __m512 largest_number = _mm512_set1_ps(kLargestFp8<kElement>);
      return _mm512_max_ps(_mm512_min_ps(nearest, largest_number),
                           _mm512_sub_ps(_mm512_setzero_ps(), largest_number));
    }
    const __m512i bits = _mm512_castps_si512(value);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i up = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7FFF)), odd);
    return _mm512_castsi512_ps(_mm512_and_si512(up, _mm512_set1_epi32(static_cast<int>(0xFFFF0000))));
  }
  KV_OFFLOAD_AVX512 static float sum(const __m512 (&parts)[kVectors]) {
    const __m512 all = _mm512_add_ps(_mm512_add_ps(parts[0], parts[2]), _mm512_add_ps(parts[1], parts[3]));
    return sum_of_lanes(_mm256_add_ps(_mm512_castps512_ps256(all), _mm512_extractf32x8_ps(all, 1)));
  }

  KV_OFFLOAD_AVX512 explicit Avx512Group(const std::byte* numbers,
                                         const ChannelWeights* of_channels = nullptr)
      : weights(of_channels) {
    largest = _mm512_setzero_ps();
    KV_OFFLOAD_UNROLL
    for (std::size_t i = 0; i < kVectors; ++i) {
      values[i] = loaded(numbers + element_bytes(kElement) * 16 * i);
      largest = _mm512_max_ps(largest, _mm512_abs_ps(divided(i)));
    }
  }
  KV_OFFLOAD_AVX512 __m512 divided(std::size_t i) const {
    return kWeighted ? _mm512_mul_ps(values[i], _mm512_load_ps(weights->inverses.data() + 16 * i))
                     : values[i];
  }
  KV_OFFLOAD_AVX512 __m512 steps_of_channels(__m512 steps, std::size_t i) const {
    return kWeighted ? _mm512_mul_ps(steps, _mm512_load_ps(weights->weights.data() + 16 * i)) : steps;
  }
  KV_OFFLOAD_AVX512 static __m512 loaded(const std::byte* numbers) {
    if constexpr (is_16_bit(kElement)) {
      const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(numbers));
      return kElement == Element::kFp16
                 ? _mm512_cvtph_ps(bits)
                 : _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
    }
    const __m256i bits = _mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(numbers)));
    if constexpr (kElement == Element::kE5m2) return _mm512_cvtph_ps(_mm256_slli_epi16(bits, 8));
    const __m256i magnitude = _mm256_and_si256(bits, _mm256_set1_epi16(0x7F));
    const __m256i nan = _mm256_cmpeq_epi16(magnitude, _mm256_set1_epi16(0x7F));
    const __m256i sign = _mm256_slli_epi16(_mm256_xor_si256(bits, magnitude), 8);
    const __m256i number = _mm256_or_si256(_mm256_slli_epi16(magnitude, 7), _mm256_srli_epi16(nan, 1));
    return _mm512_mul_ps(_mm512_cvtph_ps(_mm256_or_si256(sign, number)), _mm512_set1_ps(0x1p8F));
  }
  KV_OFFLOAD_AVX512 float norm() const {
    __m512 squares[kVectors];
    KV_OFFLOAD_UNROLL
    for (std::size_t i = 0; i < kVectors; ++i) squares[i] = _mm512_mul_ps(values[i], values[i]);
    return sum(squares);
  }
  KV_OFFLOAD_AVX512 float error_of(float step, float inverse) const {
    const __m512 steps = _mm512_set1_ps(step), inverses = _mm512_set1_ps(inverse);
    __m512 errors[kVectors];
    KV_OFFLOAD_UNROLL
    for (std::size_t i = 0; i < kVectors; ++i) {
      const __m512 restored =
          rounded(_mm512_mul_ps(integers(divided(i), inverses), steps_of_channels(steps, i)));
      const __m512 difference = _mm512_sub_ps(restored, values[i]);
      errors[i] = _mm512_mul_ps(difference, difference);
    }
    const __mmask16 too_large =
        _mm512_cmp_ps_mask(integers(largest, inverses), _mm512_set1_ps(kLargestInteger), _CMP_GT_OQ);
    return too_large == 0 ? sum(errors) : kImpossibleStep;
  }
  KV_OFFLOAD_AVX512 GroupError error_of(const Avx512Group& restored) const {
    __m512d errors = _mm512_setzero_pd(), norms = _mm512_setzero_pd();
    KV_OFFLOAD_UNROLL
    for (std::size_t i = 0; i < kVectors; ++i) {
      const __m256 before[2] = {_mm512_castps512_ps256(values[i]), _mm512_extractf32x8_ps(values[i], 1)};
      const __m256 after[2] = {_mm512_castps512_ps256(restored.values[i]),
                               _mm512_extractf32x8_ps(restored.values[i], 1)};
      KV_OFFLOAD_UNROLL
      for (std::size_t half = 0; half < 2; ++half) {
        const __m512d value = _mm512_cvtps_pd(before[half]);
        const __m512d difference = _mm512_sub_pd(_mm512_cvtps_pd(after[half]), value);
        errors = _mm512_add_pd(errors, _mm512_mul_pd(difference, difference));
        norms = _mm512_add_pd(norms, _mm512_mul_pd(value, value));
      }
    }
    const auto sum = [](__m512d parts) KV_OFFLOAD_AVX512 {
      return sum_of_lanes(_mm512_castpd512_pd256(parts), _mm512_extractf64x4_pd(parts, 1));
    };
    return {sum(errors), sum(norms)};
  }
  KV_OFFLOAD_AVX512 void store(float inverse, std::int8_t* q) const {
    KV_OFFLOAD_UNROLL
    for (std::size_t i = 0; i < kVectors; ++i) {
      const __m512i integer = _mm512_cvtps_epi32(integers(divided(i), _mm512_set1_ps(inverse)));
      const __m128i bytes = _mm_max_epi8(_mm512_cvtepi32_epi8(integer), _mm_set1_epi8(-127));
      _mm_storeu_si128(reinterpret_cast<__m128i*>(q + 16 * i), bytes);
    }
  }
  // As with AVX2.
  KV_OFFLOAD_AVX512 static void restore(const RestoredFp8& table, const std::int8_t* q, std::byte* numbers) {
    const __m512i integers = _mm512_loadu_si512(q), magnitude = _mm512_abs_epi8(integers);
    const __mmask64 bit4 = _mm512_movepi8_mask(_mm512_slli_epi16(magnitude, 3));
    const auto pair = [&](std::size_t at) KV_OFFLOAD_AVX512 {
      const auto* const entries = reinterpret_cast<const __m128i*>(table.data() + at);
      const __m512i first = _mm512_broadcast_i32x4(_mm_load_si128(entries));
      const __m512i second = _mm512_broadcast_i32x4(_mm_load_si128(entries + 1));
      return _mm512_mask_shuffle_epi8(_mm512_shuffle_epi8(first, magnitude), bit4, second, magnitude);
    };
    __m512i found = pair(0);
    if (_mm512_test_epi8_mask(magnitude, _mm512_set1_epi8(0x60)) != 0) {
      const __mmask64 bit5 = _mm512_movepi8_mask(_mm512_slli_epi16(magnitude, 2));
      const __mmask64 bit6 = _mm512_movepi8_mask(_mm512_slli_epi16(magnitude, 1));
      const __m512i above = _mm512_mask_mov_epi8(pair(64), bit5, pair(96));
      found = _mm512_mask_mov_epi8(_mm512_mask_mov_epi8(found, bit5, pair(32)), bit6, above);
    }
    const __m512i sign = _mm512_and_si512(integers, _mm512_set1_epi8(-128));
    _mm512_storeu_si512(numbers, _mm512_or_si512(found, sign));
  }
};

#endif

template <Element kElement>
bool all_zeros(const std::byte* numbers) {
  std::array<Bits<kElement>, kQuantizedGroup> bits;
  std::memcpy(bits.data(), numbers, sizeof(bits));
  return std::all_of(bits.begin(), bits.end(),
                     [](Bits<kElement> each) { return (each & kMagnitude<kElement>) == 0; });
}

template <template <Element, bool> typename Group, Element kElement>
KV_OFFLOAD_INLINE std::uint8_t size_of_group(const std::byte* numbers) {
  const float size = std::sqrt(Group<kElement, false>(numbers).norm() * (1.0F / kQuantizedGroup));
  if (!(size >= kSteps[1] && size < kSteps[255])) return 0;  // NaN, too
  return static_cast<std::uint8_t>(code_near(size));
}

template <template <Element, bool> typename Group, Element kElement, bool kWeighted>
KV_OFFLOAD_INLINE std::uint8_t quantize_group(const std::byte* numbers, float max_error,
                                              const ChannelWeights* weights, std::int8_t* q) {
  const Group<kElement, kWeighted> group(numbers, weights);
  const float norm = group.norm();
  const float bound = norm * max_error * max_error * kSearchMargin;
  // Rounding to multiples of a step has a mean square error of step^2 / 12.
  float mean_square_of_step = norm * (12.0F / kQuantizedGroup);
  if constexpr (kWeighted) mean_square_of_step /= weights->mean_square;
  const float nominal = std::sqrt(mean_square_of_step) * max_error;
  if (!(nominal >= kSteps[1] / 16 && nominal < kSteps[255] && norm > 0)) {  // NaN and infinity, too
    std::memset(q, 0, kQuantizedGroup);
    // Squares of tiny numbers are zero, too: only zeros are coded as zeros.
    return all_zeros<kElement>(numbers) ? 1 : kExactGroup;
  }
  const int guess = code_near(nominal);
  const auto error_of = [&](int code) __attribute__((always_inline)) {
    if ((code < 1) | (code > 255)) return kImpossibleStep;
    return group.error_of(kSteps[static_cast<std::size_t>(code)],
                          kInverseSteps[static_cast<std::size_t>(code)]);
  };
  // Usually the nominal step or the next one fits. Both are tried, because a branch between them would be
  // mispredicted.
  const float error = error_of(guess), error_above = error_of(guess + 1);
  int code = guess + int{error_above <= bound};
  if (!((error <= bound) | (error_above <= bound))) {
    do {
      if (guess - --code >= kMostStepsAway) {
        std::memset(q, 0, kQuantizedGroup);
        return kExactGroup;
      }
    } while (!(error_of(code) <= bound));
  } else if (error_above <= kFarBelow * bound) {
    // The error need not grow with each larger step; the chosen one was tried.
    while (code - guess < kMostStepsAway && error_of(code + 1) <= bound) ++code;
  }
  group.store(kInverseSteps[static_cast<std::size_t>(code)], q);
  return static_cast<std::uint8_t>(code);
}

template <template <Element, bool> typename Group, Element kElement, bool kWeighted>
KV_OFFLOAD_INLINE void restore_rows(const std::int8_t* q, const std::uint8_t* codes, std::size_t rows,
                                    const float* weights, std::byte* numbers, std::size_t stride) {
  for (std::size_t row = 0; row < rows; ++row) {
    if constexpr (is_fp8(kElement)) {
      Group<kElement, false>::restore(
          kRestoredFp8<kElement>[codes[row] / kPartCodes][codes[row] % kPartCodes], q + kQuantizedGroup * row,
          numbers + row * stride);
      continue;
    }
    const float step = kSteps[codes[row]];
    std::array<Bits<kElement>, kQuantizedGroup> bits;
    for (std::size_t i = 0; i < kQuantizedGroup; ++i) {
      const float of_channel = kWeighted ? step * weights[i] : step;
      bits[i] = static_cast<Bits<kElement>>(
          number_of<kElement>(static_cast<float>(q[kQuantizedGroup * row + i]) * of_channel));
    }
    std::memcpy(numbers + row * stride, bits.data(), sizeof(bits));
  }
}

// Calls a function template of a group and an element; the arguments follow.
#define KV_OFFLOAD_BY_ELEMENT(call, Group, element, ...)                            \
  if ((element) == Element::kE4m3) return call<Group, Element::kE4m3>(__VA_ARGS__); \
  if ((element) == Element::kE5m2) return call<Group, Element::kE5m2>(__VA_ARGS__); \
  if ((element) == Element::kFp16) return call<Group, Element::kFp16>(__VA_ARGS__); \
  return call<Group, Element::kBf16>(__VA_ARGS__)

template <template <Element, bool> typename Group, Element kElement>
KV_OFFLOAD_INLINE std::uint8_t quantize_any(const std::byte* numbers, float max_error,
                                            const ChannelWeights* weights, std::int8_t* q) {
  if constexpr (is_16_bit(kElement)) {
    if (weights != nullptr) return quantize_group<Group, kElement, true>(numbers, max_error, weights, q);
  }
  return quantize_group<Group, kElement, false>(numbers, max_error, nullptr, q);
}

template <template <Element, bool> typename Group, Element kElement>
KV_OFFLOAD_INLINE void restore_any(const std::int8_t* q, const std::uint8_t* codes, std::size_t rows,
                                   const float* weights, std::byte* numbers, std::size_t stride) {
  if constexpr (is_16_bit(kElement)) {
    if (weights != nullptr)
      return restore_rows<Group, kElement, true>(q, codes, rows, weights, numbers, stride);
  }
  restore_rows<Group, kElement, false>(q, codes, rows, nullptr, numbers, stride);
}

template <template <Element, bool> typename Group, Element kElement>
KV_OFFLOAD_INLINE GroupError compare_any(const std::byte* numbers, const std::byte* restored) {
  return Group<kElement, false>(numbers).error_of(Group<kElement, false>(restored));
}

// A variant: restoring is the same C++, compiled for these instructions.
#define KV_OFFLOAD_VARIANT(name, Group, attributes)                                                   \
  attributes std::uint8_t size_##name(const std::byte* numbers, Element element) {                    \
    KV_OFFLOAD_BY_ELEMENT(size_of_group, Group, element, numbers);                                    \
  }                                                                                                   \
  attributes std::uint8_t quantize_##name(const std::byte* numbers, Element element, float max_error, \
                                          const ChannelWeights* weights, std::int8_t* q) {            \
    KV_OFFLOAD_BY_ELEMENT(quantize_any, Group, element, numbers, max_error, weights, q);              \
  }                                                                                                   \
  attributes void restore_##name(const std::int8_t* q, const std::uint8_t* codes, std::size_t rows,   \
                                 Element element, const float* weights, std::byte* numbers,           \
                                 std::size_t stride) {                                                \
    KV_OFFLOAD_BY_ELEMENT(restore_any, Group, element, q, codes, rows, weights, numbers, stride);     \
  }                                                                                                   \
  attributes GroupError compare_##name(const std::byte* numbers, const std::byte* restored,           \
                                       Element element) {                                             \
    KV_OFFLOAD_BY_ELEMENT(compare_any, Group, element, numbers, restored);                            \
  }

KV_OFFLOAD_VARIANT(plain, PlainGroup, )
#if defined(__x86_64__)
KV_OFFLOAD_VARIANT(avx2, Avx2Group, KV_OFFLOAD_AVX2)
KV_OFFLOAD_VARIANT(avx512, Avx512Group, KV_OFFLOAD_AVX512)
#endif

#undef KV_OFFLOAD_VARIANT
#undef KV_OFFLOAD_BY_ELEMENT
#undef KV_OFFLOAD_INLINE
#undef KV_OFFLOAD_UNROLL
#undef KV_OFFLOAD_AVX2
#undef KV_OFFLOAD_AVX512

}  // namespace

float step_of(std::uint8_t code) { return kSteps[code]; }

void ChannelWeights::write_weights(const std::uint8_t* codes, float* weights) {
  for (std::size_t i = 0; i < kQuantizedGroup; ++i)
    weights[i] = std::bit_cast<float>((127U + codes[i] - kCodeOfOne) << 23);
}

ChannelWeights::ChannelWeights(const std::uint8_t* codes) {
  write_weights(codes, weights.data());
  Values squares;
  for (std::size_t i = 0; i < kQuantizedGroup; ++i) {
    inverses[i] = 1 / weights[i];
    squares[i] = weights[i] * weights[i];
  }
  mean_square = sum_of(squares) / kQuantizedGroup;
}

#if defined(__x86_64__)
bool has_avx2() {
  unsigned ignored, features = 0;  // __builtin_cpu_supports() of older compilers does not know F16C
  (void)__get_cpuid(1, &ignored, &ignored, &features, &ignored);
  return __builtin_cpu_supports("avx2") != 0 && __builtin_cpu_supports("popcnt") != 0 &&
         (features & bit_F16C) != 0;
}
bool has_avx512() {
  return has_avx2() && __builtin_cpu_supports("avx512f") != 0 && __builtin_cpu_supports("avx512bw") != 0 &&
         __builtin_cpu_supports("avx512dq") != 0 && __builtin_cpu_supports("avx512vl") != 0;
}
#else
bool has_avx2() { return false; }
bool has_avx512() { return false; }
#endif

std::size_t group_quantizers_known(GroupQuantizer (&ways)[kMostGroupQuantizers]) {
  std::size_t known = 0;
#if defined(__x86_64__)
  if (has_avx512()) ways[known++] = {size_avx512, quantize_avx512, restore_avx512, compare_avx512, "avx512"};
  if (has_avx2()) ways[known++] = {size_avx2, quantize_avx2, restore_avx2, compare_avx2, "avx2"};
#endif
  ways[known++] = {size_plain, quantize_plain, restore_plain, compare_plain, "plain"};
  return known;
}

void GroupLosses::add(const std::byte* numbers, const std::byte* restored, Element element,
                      const GroupError& error) {
  const std::size_t size = element_bytes(element), bytes = kQuantizedGroup * size;
  if (!(error.squared_error > 0)) {  // NaN, too
    if (std::memcmp(numbers, restored, bytes) == 0) {
      if (std::isfinite(error.squared_norm)) squared_norm += error.squared_norm;
      return;
    }
    bool all_zero = true;
    for (std::size_t i = 0; i < bytes; ++i) {
      // The last byte of a number has its sign.
      const auto sign = static_cast<std::byte>(i % size == size - 1 ? 0x80 : 0);
      all_zero = all_zero && ((numbers[i] | restored[i]) & ~sign) == std::byte{0};
    }
    if (all_zero) return;  // the signs of zeros
  }
  const double loss = error.squared_norm > 0 ? std::sqrt(error.squared_error / error.squared_norm)
                                             : std::numeric_limits<double>::infinity();
  largest = std::isfinite(loss) ? std::fmax(largest, loss) : std::numeric_limits<double>::infinity();
  squared_error += error.squared_error;
  squared_norm += error.squared_norm;
}

}  // namespace kv_offload
