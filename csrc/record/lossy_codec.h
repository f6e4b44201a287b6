// SPDX-License-Identifier: Apache-2.0
// LossyCodec: a codec with a bounded and measured loss for payloads of 16-bit floating-point K/V. It needs no
// model and no calibration, and knows nothing of layers, heads or positions:
//
//   - 64 neighbouring numbers share a step (group_quantizer.h), the largest that keeps the bound
//   - a channel of 16 groups that are a period apart (the same channel of the same head in 16 tokens) has a
//     class, by the magnitude of its integers; the encoder finds the period
//   - the integers are entropy-coded by the distribution of their class (row_coder.h), the steps and the
//     classes by zstd
//
// A bound holds for each group: the Euclidean norm of the difference is at most the bound times the norm of
// the group. The keys' bound applies to groups that contain a key, and to all groups if the layout is
// unknown. Groups of values only have the values' bound. A calibration lowers the bounds of sensitive groups
// (bound_factors.h); a decoder does not need it. A group for which no step keeps the bound is stored
// unchanged. After encoding, the encoder decodes the payload and measures the loss of every group; a payload
// over a bound is not encoded.
//
// docs/record-format.md specifies the encoded payload. Nothing in it is used as a size or an offset before it
// was checked.
//
// Threads: any, several at once, in any floating-point mode, which a call restores. The working memory of a
// call (about 3.4 MB) is kept for later calls.
#pragma once

#include <cstdint>
#include <memory>
#include <span>

#include "base/status.h"
#include "base/types.h"
#include "record/bound_factors.h"
#include "record/kv_runs.h"
#include "record/payload_codec.h"

namespace kv_offload {

// Relative errors (norm of the difference over norm of the original) of a payload, rounded up.
struct Loss {
  float keys = 0;    // largest error of a group that contains a key, or of any group if the layout is unknown
  float rms = 0;     // of the payload as a whole
  float values = 0;  // largest error of a group of values only
  bool operator==(const Loss&) const = default;
};

// The largest relative errors of a group that contains a key, and of a group of values only.
struct ErrorBounds {
  double keys = 0, values = 0;
  // Returns whether the loss is within them. False for NaN.
  bool allow(const Loss& loss) const;
  bool operator==(const ErrorBounds&) const = default;
};

class LossyCodec {
 public:
  // Possible bounds. Below the first, the integers of many groups would need more than 8 bits.
  static constexpr double kLeastError = 0.02, kMostError = 0.6;

  static constexpr bool handles(Element element) { return element != Element::kBytes; }
  // Rounds a loss or a bound up to float32, so that comparing the results compares the arguments.
  static float rounded_up(double error);

  // variant: index of an instruction set, below variants(). 0 is the fastest that this CPU supports. All
  // decode the same bits, and encode the same bytes.
  explicit LossyCodec(std::size_t variant = 0);
  ~LossyCodec();
  LossyCodec(const LossyCodec&) = delete;
  LossyCodec& operator=(const LossyCodec&) = delete;

  static std::size_t variants();
  const char* instructions() const;

  // Returns how much room encode() may need for these shards.
  static std::uint64_t encoded_bytes_at_most(std::span<const Shard> shards);
  // Encodes the unpadded shards in order and measures the loss. factors: lower the bounds of groups, but not
  // below kLeastError; null: none. *bytes: used bytes of `out`; 0: the loss exceeds a bound, the ratio is
  // below PayloadCodec::kMinRatio, or the factors do not fit the shards: encode without loss. REQUIRES:
  // handles(element), kLeastError <= bounds <= kMostError, out.size() >= encoded_bytes_at_most(shards).
  Status encode(std::span<const Shard> shards, Element element, const ErrorBounds& bounds, const KvRuns& runs,
                const BoundFactors* factors, std::span<std::byte> out, std::uint64_t* bytes, Loss* loss);
  // Fills the unpadded shards. kCorrupt: `in` does not encode exactly that many bytes; the shards then hold
  // garbage. REQUIRES: handles(element).
  Status decode(std::span<const std::byte> in, Element element, std::span<const Shard> shards);

 private:
  struct Contexts;
  const std::unique_ptr<Contexts> contexts_;
};

}  // namespace kv_offload
