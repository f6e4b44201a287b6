// SPDX-License-Identifier: Apache-2.0
// Payloads for tests: typical K and V values, and values that should never occur.
#pragma once

#include <cmath>
#include <cstring>
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

inline Bytes bytes_of_numbers(const std::vector<std::uint16_t>& numbers, std::size_t bytes) {
  Bytes made(2 * numbers.size());
  for (std::size_t i = 0; i < made.size(); ++i) made[i] = static_cast<std::byte>(numbers[i / 2] >> i % 2 * 8);
  made.resize(bytes);
  return made;
}

enum class Payload { kKv, kNoise, kConstant, kZeros, kDenormal, kNan };
inline constexpr Payload kPayloads[] = {Payload::kKv,    Payload::kNoise,    Payload::kConstant,
                                        Payload::kZeros, Payload::kDenormal, Payload::kNan};

inline Bytes make_payload(Payload payload, Element element, std::size_t bytes, unsigned seed = 1) {
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
