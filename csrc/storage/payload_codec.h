// PayloadCodec: a lossless codec for the payload of a record. Floating point K/V do not shrink as they are:
// their mantissas are noise. Their exponents are not; they are split off and entropy-coded, the rest is
// stored as it is.
//
// What is encoded says itself how long each of its parts is; it does not say of which shards it is: the
// record's header does. Nothing in it is used as a size or an offset before it was checked.
//
// Threads: any, several at once; contexts of the library are kept for the next call.
#pragma once

#include <cstdint>
#include <span>

#include "base/status.h"
#include "base/types.h"

namespace kv_offload {

// As in a record's header: numbers are never given to anything else.
enum class Codec : std::uint32_t { kRaw = 0, kSplitZstd = 1 };
// What the payload is made of.
enum class Element : std::uint32_t { kBytes = 0, kBf16 = 1, kFp16 = 2 };

class PayloadCodec {
 public:
  // Raw bytes over encoded bytes: less than that is not worth decoding.
  static constexpr double kMinRatio = 1.1;

  PayloadCodec();
  ~PayloadCodec();
  PayloadCodec(const PayloadCodec&) = delete;
  PayloadCodec& operator=(const PayloadCodec&) = delete;

  // How much room encode() may need for these shards.
  static std::uint64_t encoded_bytes_at_most(std::span<const Shard> shards);
  // The shards, unpadded, in order. *bytes: of `out` that were used; 0: it gains less than kMinRatio, and the
  // record is to be stored raw. REQUIRES: out.size() >= encoded_bytes_at_most(shards).
  Status encode(std::span<const Shard> shards, Element element, std::span<std::byte> out,
                std::uint64_t* bytes);
  // Fills the shards, unpadded. kCorrupt: `in` does not encode exactly that many bytes; the shards are
  // garbage then.
  Status decode(std::span<const std::byte> in, Element element, std::span<const Shard> shards);

 private:
  struct Contexts;
  Contexts* contexts_;
};

}  // namespace kv_offload
