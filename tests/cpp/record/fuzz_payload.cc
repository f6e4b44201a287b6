// SPDX-License-Identifier: Apache-2.0
// libFuzzer target for encoded payloads. Whatever is stored, decoding ends in the bytes of some payload or in
// kCorrupt. Decoded bytes survive encode() and decode() unchanged, or within the bound of the lossy codec.
// Clang only (CMake: fuzz_payload). The first bytes of an input choose the codec, the element and the lengths
// of two shards.
#include <cstdlib>
#include <cstring>
#include <memory>

#include "record/lossy_codec.h"
#include "record/payload_codec.h"

namespace {

// Checks that the lossy codec decodes its own output. Its measurement decides whether the bound holds.
int decode_and_encode_with_loss(std::span<const std::byte> in, kv_offload::Element element,
                                std::span<const kv_offload::Shard> shards, bool is_payload) {
  using namespace kv_offload;
  static LossyCodec codec;
  if (!is_payload) {
    if (const Status status = codec.decode(in, element, shards); !status) {
      if (status.kind() != StatusKind::kCorrupt) std::abort();
      return 0;
    }
  }
  const std::uint64_t room = LossyCodec::encoded_bytes_at_most(shards);
  const auto out = std::make_unique<std::byte[]>(room);
  std::uint64_t used = 0;
  Loss loss;
  constexpr ErrorBounds kBounds{0.05, 0.1};
  const KvRuns runs{in.empty() ? 0U : 2 * std::to_integer<std::uint32_t>(in[0]), 128};
  if (!codec.encode(shards, element, kBounds, runs, {out.get(), room}, &used, &loss) || used > room)
    std::abort();
  if (used == 0) return 0;
  if (!kBounds.allow(loss)) std::abort();
  if (!codec.decode({out.get(), used}, element, shards)) std::abort();
  return 0;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace kv_offload;
  constexpr std::size_t kHead = 6;
  if (size < kHead) return 0;
  static PayloadCodec codec;
  const auto element = static_cast<Element>(data[0] % 3);
  const auto length = [&](std::size_t at) { return std::size_t{data[at]} | std::size_t{data[at + 1]} << 8; };
  // Up to two blocks and a few bytes more, in buffers of exactly these lengths.
  const std::size_t first = length(1) * (data[5] & 0x40 ? 4 : 1) / 4 + data[5] % 8, second = length(3);
  const auto one = std::make_unique<std::byte[]>(first), other = std::make_unique<std::byte[]>(second);
  const Shard shards[] = {{one.get(), first}, {other.get(), second}};
  const auto in = std::make_unique<std::byte[]>(size - kHead);
  std::memcpy(in.get(), data + kHead, size - kHead);

  const bool is_payload = (data[5] & 0x80) != 0;
  if (is_payload) {  // repeats the input as the payload
    for (std::size_t at = 0; size > kHead && at < first; ++at) one[at] = in[at % (size - kHead)];
  }
  if ((data[5] & 0x20) != 0 && LossyCodec::handles(element))
    return decode_and_encode_with_loss({in.get(), size - kHead}, element, shards, is_payload);
  if (!is_payload) {
    if (const Status status = codec.decode({in.get(), size - kHead}, element, shards); !status) {
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
