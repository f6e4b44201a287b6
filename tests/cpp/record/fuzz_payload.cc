// SPDX-License-Identifier: Apache-2.0
// libFuzzer target for encoded payloads. Whatever is stored, decoding ends in the bytes of some payload or in
// kCorrupt, in all variants of the lossy codec the same. Decoded bytes survive encode() and decode()
// unchanged, or with the lossy codec within the bound of each group. Clang only (CMake: fuzz_payload). The
// first bytes of an input choose the codec, the element and the lengths of two shards.
#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <vector>

#include "record/lossy_codec.h"
#include "record/payload_codec.h"

namespace {

using kv_offload::Element, kv_offload::ErrorBounds, kv_offload::KvRuns, kv_offload::Loss, kv_offload::Shard;

// Bits of the sixth byte of an input.
constexpr unsigned kIsPayload = 0x80, kIsLong = 0x40, kIsLossy = 0x20, kHasWholeRuns = 0x10, kIsNoise = 0x08;

// Chooses runs of odd lengths, or runs of whole groups.
KvRuns runs_of(std::span<const std::byte> in) {
  const auto byte = [&](std::size_t at) {
    return at < in.size() ? std::to_integer<std::uint32_t>(in[at]) : 0U;
  };
  if (byte(2) % 2 == 0) return {128U << byte(0) % 4, 128U << byte(1) % 4};
  return {1 + byte(0), 1 + 4 * byte(1)};
}

// Repeats the input, or fills the shards with numbers between 2^-7 and 2^-5 (bfloat16), 1 and 2 (float16), or
// any of fp8.
void fill(std::span<const std::byte> in, bool is_noise, std::span<const Shard> shards) {
  std::uint32_t state = in.empty() ? 1 : std::to_integer<std::uint32_t>(in[0]) + 1;
  std::size_t number = 0;
  for (const Shard& shard : shards) {
    for (std::byte& byte : shard) {
      state = state * 1664525U + 1013904223U;
      const std::uint32_t noise = number % 2 == 0 ? state >> 24 : 0x3cU + (state >> 20 & 3U);
      if (is_noise) {
        byte = static_cast<std::byte>(noise);
      } else if (!in.empty()) {
        byte = in[number % in.size()];
      }
      ++number;
    }
  }
}

std::vector<std::byte> joined(std::span<const Shard> shards) {
  std::vector<std::byte> bytes;
  for (const Shard& shard : shards) bytes.insert(bytes.end(), shard.begin(), shard.end());
  return bytes;
}

std::size_t size_of(Element element) {
  return element == Element::kBf16 || element == Element::kFp16 ? 2 : 1;
}

double number_at(const std::byte* at, Element element) {
  if (size_of(element) == 1) {
    const unsigned byte = std::to_integer<unsigned>(*at), fp8 = byte & 0x7F;
    // The upper byte of a float16 is an e5m2. An e4m3 has one bit of exponent less.
    const bool is_e4m3 = element == Element::kE4m3;
    const std::uint16_t half = static_cast<std::uint16_t>(is_e4m3 ? fp8 << 7 : fp8 << 8);
    std::array<std::byte, 2> half_bytes;
    std::memcpy(half_bytes.data(), &half, sizeof half);
    const double size = is_e4m3 && fp8 == 0x7F ? NAN : number_at(half_bytes.data(), Element::kFp16);
    return (byte >= 0x80 ? -1 : 1) * size * (is_e4m3 ? 256 : 1);
  }
  std::uint16_t bits = 0;
  std::memcpy(&bits, at, sizeof bits);
  if (element == Element::kBf16) return std::bit_cast<float>(std::uint32_t{bits} << 16);
  const int exponent = bits >> 10 & 31, mantissa = bits & 1023;
  const double size = exponent == 31  ? (mantissa != 0 ? NAN : INFINITY)
                      : exponent == 0 ? std::ldexp(mantissa, -24)
                                      : std::ldexp(1024 + mantissa, exponent - 25);
  return bits >> 15 != 0 ? -size : size;
}

// Aborts unless each group of 64 elements keeps its bound and the stated losses are the largest. It looks at
// each byte of a group and shares no code with the codec.
void check_groups(const std::vector<std::byte>& before, const std::vector<std::byte>& after, Element element,
                  const ErrorBounds& bounds, const KvRuns& runs, bool is_known, const Loss& stated) {
  const std::size_t size = size_of(element), group = 64 * size;
  const std::size_t period = std::size_t{runs.key_bytes} + runs.value_bytes;
  double of_keys = 0, of_values = 0;
  std::size_t at = 0;
  for (; at + group <= before.size(); at += group) {
    if (std::memcmp(&before[at], &after[at], group) == 0) continue;
    bool has_keys = !is_known;
    for (std::size_t i = at; i < at + group; ++i) has_keys = has_keys || i % period < runs.key_bytes;
    double error = 0, norm = 0;
    for (std::size_t i = at; i < at + group; i += size) {
      const double old = number_at(&before[i], element), now = number_at(&after[i], element);
      error += (old - now) * (old - now);
      norm += old * old;
    }
    if (error == 0) continue;
    const double loss = std::sqrt(error / norm);
    if (!(loss <= (has_keys ? bounds.keys : bounds.values) * (1 + 1e-12))) std::abort();
    double& largest = has_keys ? of_keys : of_values;
    largest = std::max(largest, loss);
  }
  if (!std::equal(before.begin() + static_cast<std::ptrdiff_t>(at), before.end(),
                  after.begin() + static_cast<std::ptrdiff_t>(at)))
    std::abort();
  const auto is_rounded_up = [](float rounded, double loss) {
    return rounded >= loss * (1 - 1e-9) && rounded <= loss * (1 + 1e-6);
  };
  if (!is_rounded_up(stated.keys, of_keys) || !is_rounded_up(stated.values, of_values)) std::abort();
}

int decode_and_encode_with_loss(std::span<const std::byte> in, Element element, std::span<const Shard> shards,
                                bool is_payload) {
  using namespace kv_offload;
  static LossyCodec codec;
  static LossyCodec others[] = {LossyCodec(LossyCodec::variants() / 2),
                                LossyCodec(LossyCodec::variants() - 1)};
  if (!is_payload) {
    const Status status = codec.decode(in, element, shards);
    if (!status && status.kind() != StatusKind::kCorrupt) std::abort();
    for (LossyCodec& other : others) {
      const std::vector<std::byte> first = joined(shards);
      if (other.decode(in, element, shards).kind() != status.kind()) std::abort();
      if (status && joined(shards) != first) std::abort();
    }
    if (!status) return 0;
  }
  const std::vector<std::byte> before = joined(shards);
  const std::uint64_t room = LossyCodec::encoded_bytes_at_most(shards);
  const auto out = std::make_unique<std::byte[]>(room);
  std::uint64_t used = 0;
  Loss loss;
  constexpr ErrorBounds kBounds{0.05, 0.1};
  const KvRuns runs = runs_of(in);
  if (!codec.encode(shards, element, kBounds, runs, nullptr, {out.get(), room}, &used, &loss) || used > room)
    std::abort();
  for (LossyCodec& other : others) {
    const auto same = std::make_unique<std::byte[]>(room);
    std::uint64_t used_too = 0;
    Loss same_loss;
    if (!other.encode(shards, element, kBounds, runs, nullptr, {same.get(), room}, &used_too, &same_loss) ||
        used_too != used || !(same_loss == loss) || std::memcmp(same.get(), out.get(), used) != 0)
      std::abort();
  }
  if (used == 0) return 0;
  if (!kBounds.allow(loss)) std::abort();
  if (!codec.decode({out.get(), used}, element, shards)) std::abort();
  const bool is_known =
      std::ranges::all_of(shards, [&](const Shard& shard) { return shard.size() % runs.period() == 0; });
  check_groups(before, joined(shards), element, kBounds, runs, is_known, loss);
  return 0;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace kv_offload;
  constexpr std::size_t kHead = 6;
  if (size < kHead) return 0;
  static PayloadCodec codec;
  const auto element = static_cast<Element>(data[0] % 5);
  const unsigned flags = data[5];
  const auto bytes = std::make_unique<std::byte[]>(size - kHead);
  std::memcpy(bytes.get(), data + kHead, size - kHead);
  const std::span<const std::byte> in(bytes.get(), size - kHead);
  // Up to two blocks and a few bytes more, in buffers of exactly these lengths.
  const std::size_t unit = (flags & kHasWholeRuns) != 0 ? runs_of(in).period() : 1;
  const auto length = [&](std::size_t at) { return std::size_t{data[at]} | std::size_t{data[at + 1]} << 8; };
  const std::size_t first = (length(1) * (flags & kIsLong ? 4 : 1) / 4 + flags % 8) / unit * unit;
  const std::size_t second = length(3) / unit * unit;
  const auto one = std::make_unique<std::byte[]>(first), other = std::make_unique<std::byte[]>(second);
  const Shard shards[] = {{one.get(), first}, {other.get(), second}};

  const bool is_payload = (flags & kIsPayload) != 0;
  if (is_payload) fill(in, (flags & kIsNoise) != 0, shards);
  if ((flags & kIsLossy) != 0 && LossyCodec::handles(element))
    return decode_and_encode_with_loss(in, element, shards, is_payload);
  if (!is_payload) {
    if (const Status status = codec.decode(in, element, shards); !status) {
      if (status.kind() != StatusKind::kCorrupt) std::abort();
      return 0;
    }
  }
  const std::uint64_t room = PayloadCodec::encoded_bytes_at_most(shards);
  const auto out = std::make_unique<std::byte[]>(room);
  std::uint64_t used = 0;
  if (!codec.encode(shards, element, {out.get(), room}, &used) || used > room) std::abort();
  if (used == 0) return 0;
  const auto back = std::make_unique<std::byte[]>(first + second);
  const Shard all(back.get(), first + second);
  if (!codec.decode({out.get(), used}, element, {&all, 1})) std::abort();
  if (std::memcmp(back.get(), one.get(), first) != 0 ||
      std::memcmp(back.get() + first, other.get(), second) != 0)
    std::abort();
  return 0;
}
