// SPDX-License-Identifier: Apache-2.0
// PayloadCodec: a lossless codec for the payload of a record. Floating-point K/V hardly compress directly,
// because their mantissas are noise. Their exponents do compress: they are split off and entropy-coded, and
// the rest is stored unchanged.
//
// The encoded payload states the length of each of its parts. It does not name its shards; the record's
// header does. Nothing in it is used as a size or an offset before it was checked.
//
// Threads: any, several at once; the library's contexts are kept for later calls.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "base/status.h"
#include "base/types.h"

namespace kv_offload {

// Values of the record header: never reuse a number.
// 2 and 3 were lossy codecs that were never published.
enum class Codec : std::uint32_t { kRaw = 0, kSplitZstd = 1, kLossy = 4 };
// Number format of the payload. kE4m3 has no infinity (torch's float8_e4m3fn); kE5m2 has.
enum class Element : std::uint32_t { kBytes = 0, kBf16 = 1, kFp16 = 2, kE4m3 = 3, kE5m2 = 4 };

// True for numbers of 16 bits. All other elements are bytes to PayloadCodec.
constexpr bool is_16_bit(Element element) { return element == Element::kBf16 || element == Element::kFp16; }
constexpr bool is_fp8(Element element) { return element == Element::kE4m3 || element == Element::kE5m2; }
constexpr std::size_t element_bytes(Element element) { return is_16_bit(element) ? 2 : 1; }

class PayloadCodec {
 public:
  // Raw over encoded bytes: a smaller ratio is not worth decoding.
  static constexpr double kMinRatio = 1.1;

  PayloadCodec();
  ~PayloadCodec();
  PayloadCodec(const PayloadCodec&) = delete;
  PayloadCodec& operator=(const PayloadCodec&) = delete;

  // Returns how much room encode() may need for these shards.
  static std::uint64_t encoded_bytes_at_most(std::span<const Shard> shards);
  // Encodes the unpadded shards in order. *bytes: used bytes of `out`; 0: the ratio is below kMinRatio, store
  // the record raw. REQUIRES: out.size() >= encoded_bytes_at_most(shards).
  Status encode(std::span<const Shard> shards, Element element, std::span<std::byte> out,
                std::uint64_t* bytes);
  // Fills the unpadded shards. kCorrupt: `in` does not encode exactly that many bytes; the shards then hold
  // garbage.
  Status decode(std::span<const std::byte> in, Element element, std::span<const Shard> shards);

 private:
  struct Contexts;
  Contexts* contexts_;
};

}  // namespace kv_offload
