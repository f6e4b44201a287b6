// SPDX-License-Identifier: Apache-2.0
// Payloads for tests: typical K and V values, and values that should never occur.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "record/payload_codec.h"

namespace kv_offload::testing {

using Bytes = std::vector<std::byte>;

inline std::uint16_t bf16_of(float value) {
  std::uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return static_cast<std::uint16_t>(bits >> 16);
}

// Converts `value`, which must be within the range of normal fp16 numbers.
inline std::uint16_t fp16_of(float value) {
  std::uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return static_cast<std::uint16_t>((bits >> 16 & 0x8000) | ((bits >> 23 & 0xFF) - 112) << 10 |
                                    (bits >> 13 & 0x3FF));
}

// Returns the value of an fp8 number, independently of the codec.
inline double fp8_value(std::uint8_t bits, Element element) {
  const bool is_e4m3 = element == Element::kE4m3;
  const int mantissa_bits = is_e4m3 ? 3 : 2, bias = is_e4m3 ? 7 : 15;
  const int magnitude = bits & 0x7F, exponent = magnitude >> mantissa_bits;
  const int mantissa = magnitude & ((1 << mantissa_bits) - 1);
  const double sign = (bits & 0x80) != 0 ? -1 : 1;
  if (is_e4m3 ? magnitude == 0x7F : magnitude > 0x7C) return std::nan("");
  if (!is_e4m3 && magnitude == 0x7C) return sign * std::numeric_limits<double>::infinity();
  return sign * (exponent == 0
                     ? std::ldexp(mantissa, 1 - bias - mantissa_bits)
                     : std::ldexp((1 << mantissa_bits) + mantissa, exponent - bias - mantissa_bits));
}

// Returns the nearest finite fp8 number; ties go to the even one.
inline std::uint8_t fp8_of(double value, Element element) {
  static const auto numbers_of = [](Element each) {
    std::vector<double> numbers;
    for (std::uint8_t bits = 0; std::isfinite(fp8_value(bits, each)); ++bits)
      numbers.push_back(fp8_value(bits, each));
    return numbers;
  };
  static const std::vector<double> e4m3 = numbers_of(Element::kE4m3), e5m2 = numbers_of(Element::kE5m2);
  const std::vector<double>& numbers = element == Element::kE4m3 ? e4m3 : e5m2;
  const double magnitude = std::fabs(value);
  const auto above =
      static_cast<std::size_t>(std::lower_bound(numbers.begin(), numbers.end(), magnitude) - numbers.begin());
  std::size_t nearest = std::min(above, numbers.size() - 1);
  if (nearest > 0 && above < numbers.size()) {
    const double up = numbers[above] - magnitude, down = magnitude - numbers[above - 1];
    if (down < up || (down == up && above % 2 != 0)) nearest = above - 1;
  }
  return static_cast<std::uint8_t>(nearest | (std::signbit(value) ? 0x80 : 0));
}

inline Bytes bytes_of_numbers(const std::vector<std::uint16_t>& numbers, std::size_t bytes) {
  Bytes made(2 * numbers.size());
  for (std::size_t i = 0; i < made.size(); ++i) made[i] = static_cast<std::byte>(numbers[i / 2] >> i % 2 * 8);
  made.resize(bytes);
  return made;
}

enum class Payload { kKv, kNoise, kConstant, kZeros, kDenormal, kNan };
inline constexpr Payload kPayloads[] = {Payload::kKv,    Payload::kNoise,    Payload::kConstant,
                                        Payload::kZeros, Payload::kDenormal, Payload::kNan};

inline Bytes make_fp8_payload(Payload payload, Element element, std::size_t bytes, unsigned seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  Bytes made(bytes);
  for (std::size_t i = 0; i < bytes; ++i) {
    const auto noise = static_cast<unsigned>(random());
    unsigned number = 0;
    switch (payload) {
      case Payload::kKv:
        number = fp8_of(normal(random) * std::exp2(static_cast<float>(i % 64 % 5) - 2.0F), element);
        break;
      case Payload::kNoise:
        number = noise;
        break;
      case Payload::kConstant:
        number = 0x39;
        break;
      case Payload::kZeros:
        break;
      case Payload::kDenormal:
        number = noise & (element == Element::kE4m3 ? 0x87 : 0x83);
        break;
      case Payload::kNan:
        number = noise | (element == Element::kE4m3 ? 0x7F : 0x7C);
        break;
    }
    made[i] = static_cast<std::byte>(number);
  }
  return made;
}

inline Bytes make_payload(Payload payload, Element element, std::size_t bytes, unsigned seed = 1) {
  if (is_fp8(element)) return make_fp8_payload(payload, element, bytes, seed);
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  std::vector<std::uint16_t> numbers((bytes + 1) / 2);
  for (std::size_t i = 0; i < numbers.size(); ++i) {
    const auto noise = static_cast<std::uint16_t>(random());
    const bool half = element == Element::kFp16;
    switch (payload) {
      case Payload::kKv: {  // each channel has its own scale
        const float value = normal(random) * std::exp2(static_cast<float>(i % 64 % 5) - 2.0F);
        numbers[i] =
            half ? fp16_of(std::copysign(std::fmax(std::fabs(value), 1e-4F), value)) : bf16_of(value);
        break;
      }
      case Payload::kNoise:
        numbers[i] = noise;
        break;
      case Payload::kConstant:
        numbers[i] = half ? 0x3C01 : 0x3F81;
        break;
      case Payload::kZeros:
        numbers[i] = 0;
        break;
      case Payload::kDenormal:
        numbers[i] = noise & (half ? 0x83FF : 0x807F);
        break;
      case Payload::kNan:
        numbers[i] = noise | (half ? 0x7C00 : 0x7F80);
        break;
    }
  }
  return bytes_of_numbers(numbers, bytes);
}

}  // namespace kv_offload::testing
