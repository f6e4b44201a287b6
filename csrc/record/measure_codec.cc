// SPDX-License-Identifier: Apache-2.0
#include "record/measure_codec.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <random>
#include <vector>

namespace kv_offload {
namespace {

constexpr std::size_t kBytes = std::size_t{1} << 20;
constexpr int kRounds = 5;  // the best one counts: other programs use this machine, too

// The upper halves of normally distributed floats.
std::vector<std::byte> numbers_like_kv() {
  std::vector<std::byte> bytes(kBytes);
  std::mt19937 random(1);
  std::normal_distribution<float> normal;
  for (std::size_t i = 0; i < kBytes; i += 2) {
    const float value = normal(random);
    std::uint32_t bits = 0;
    std::memcpy(&bits, &value, sizeof(bits));
    bytes[i] = static_cast<std::byte>(bits >> 16);
    bytes[i + 1] = static_cast<std::byte>(bits >> 24);
  }
  return bytes;
}

}  // namespace

CodecSpeed measure_codec() {
  const SteadyClock clock;
  PayloadCodec codec;
  std::vector<std::byte> raw = numbers_like_kv();
  const Shard shard(raw);
  std::vector<std::byte> out(PayloadCodec::encoded_bytes_at_most({&shard, 1}));
  CodecSpeed best;
  for (int round = 0; round < kRounds; ++round) {
    std::uint64_t used = 0;
    const Nanos began = clock.now();
    if (!codec.encode({&shard, 1}, Element::kBf16, out, &used) || used == 0) return {};
    const Nanos encoded = clock.now();
    if (!codec.decode({out.data(), used}, Element::kBf16, {&shard, 1})) return {};
    const Nanos decoded = clock.now();
    best.encode = std::max(best.encode, kBytes / std::max(to_seconds(encoded - began), 1e-9));
    best.decode = std::max(best.decode, kBytes / std::max(to_seconds(decoded - encoded), 1e-9));
  }
  return best;
}

std::string advice(const CodecSpeed& codec, double read_bytes_per_second, double write_bytes_per_second) {
  CompressionOptions options{.compress = Compress::kAuto, .elements = {Element::kBf16}};
  if (codec.encode > 0 && codec.decode > 0) options.expected = codec;
  CompressionChoice choice(options);
  for (unsigned i = 0; i < CompressionChoice::kMinOps; ++i) {
    if (write_bytes_per_second > 0) choice.moved(OpKind::kWrite, kBytes, kBytes / write_bytes_per_second);
  }
  for (unsigned i = 0; i < CompressionChoice::kMinOps + CompressionChoice::kOpsPerDecision; ++i) {
    if (read_bytes_per_second > 0) choice.moved(OpKind::kRead, kBytes, kBytes / read_bytes_per_second);
  }
  return choice.reason();
}

}  // namespace kv_offload
