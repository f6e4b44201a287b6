// SPDX-License-Identifier: Apache-2.0
#include "record/lossy_codec.h"

#include <algorithm>
#include <cfenv>
#include <cmath>
#include <cstring>
#include <limits>
#include <optional>
#include <utility>
#include <vector>

#include "record/context_pool.h"
#include "record/group_quantizer.h"
#include "record/lossy_section.h"
#include "record/row_coder.h"
#include "record/shard_blocks.h"

namespace kv_offload {
namespace {

Status damaged_section(std::uint64_t at, const char* what) {
  return Status::error(StatusKind::kCorrupt, fmt::format("lossy payload, section at byte {}: {}", at, what));
}

Status no_memory_for_section() {
  return Status::error(StatusKind::kUnavailable,
                       "cannot compress or decompress a lossy record: out of memory");
}

// Sets the floating-point environment of a program's start, and restores the previous one at its end. Threads
// may have another one: libraries set the rounding mode, or flush subnormal numbers to zero.
class DefaultFloats {
 public:
  DefaultFloats() {
    (void)std::fegetenv(&before_);
    (void)std::fesetenv(FE_DFL_ENV);
  }
  ~DefaultFloats() { (void)std::fesetenv(&before_); }
  DefaultFloats(const DefaultFloats&) = delete;
  DefaultFloats& operator=(const DefaultFloats&) = delete;

 private:
  std::fenv_t before_;
};

// Losses by the bound that applies.
struct Losses {
  GroupLosses of_keys, of_values;
};

double rms_of(const Losses& losses) {
  const double error = losses.of_keys.squared_error + losses.of_values.squared_error;
  const double norm = losses.of_keys.squared_norm + losses.of_values.squared_norm;
  return norm > 0 ? std::sqrt(error / norm) : 0;
}

// The bounds of the groups of a payload before the encoder lowers them by their sizes.
class PayloadBounds {
 public:
  PayloadBounds(std::span<const Shard> shards, Element element, const ErrorBounds& bounds, const KvRuns& runs,
                const BoundFactors* factors)
      : keys_(static_cast<float>(bounds.keys)),
        values_(static_cast<float>(bounds.values)),
        group_bytes_(group_bytes_of(element)),
        runs_(runs.in(shards)),
        factors_(factors) {
    if (factors_ != nullptr) begins_ = factors_->begins_of(shards, element);
  }
  bool fit() const { return factors_ == nullptr || !begins_.empty(); }
  // Sets the bounds of a section. begin: in the payload. REQUIRES: fit().
  void fill(SectionBounds& section, std::uint64_t begin, std::size_t bytes) const {
    section.factors = factors_;
    section.least = static_cast<float>(LossyCodec::kLeastError);
    section.groups = bytes / group_bytes_;
    std::uint64_t in_payload = begin / group_bytes_;
    std::size_t shard = 0;
    for (std::size_t group = 0; group < section.groups; ++group, ++in_payload) {
      const bool are_values = runs_.all_values(begin + group * group_bytes_, group_bytes_);
      section.are_values[group] = are_values;
      section.bounds[group] = are_values ? values_ : keys_;
      section.rows[group] = 0;
      if (factors_ == nullptr) continue;
      while (in_payload >= begins_[shard + 1]) ++shard;
      const BoundFactors::OfGroup& of_group = factors_->of(shard, in_payload - begins_[shard]);
      section.bounds[group] = std::max(section.least, section.bounds[group] * of_group.factor);
      section.rows[group] = of_group.row;
    }
  }

 private:
  float keys_, values_;
  std::size_t group_bytes_;
  KvRuns runs_;
  const BoundFactors* factors_;
  std::vector<std::uint64_t> begins_;  // of the shards, in groups
};

}  // namespace

bool ErrorBounds::allow(const Loss& loss) const {
  return loss.keys <= LossyCodec::rounded_up(keys) && loss.values <= LossyCodec::rounded_up(values);
}

struct LossyCodec::Contexts {
  LossyKernels kernels;
  ContextPool<LossySection> pool;

  // Encodes the section at the current block within its bounds, measures it, and moves past it. *period: of
  // the payload; 0: not found yet. Returns the bytes used; nullopt if the library fails.
  std::optional<std::size_t> encode(LossySection& section, ShardBlocks& blocks, Element element,
                                    std::size_t* period, std::byte* out, Losses* losses) const;
  // Decodes an encoded section and adds its loss.
  void measure(LossySection& section, std::span<const std::byte> raw, std::span<const std::byte> encoded,
               Element element, Losses* losses) const;
  // Decodes the section at *at of `in` into the current block, and moves both past it.
  Status decode(LossySection& section, ShardBlocks& blocks, Element element, std::span<const std::byte> in,
                std::uint64_t* at) const;
};

float LossyCodec::rounded_up(double error) {
  const auto nearest = static_cast<float>(error);
  return static_cast<double>(nearest) < error
             ? std::nextafter(nearest, std::numeric_limits<float>::infinity())
             : nearest;
}

std::size_t LossyCodec::variants() {
  RowCoder coders[kMostRowCoders];
  return row_coders_known(coders);
}

LossyCodec::LossyCodec(std::size_t variant) : contexts_(std::make_unique<Contexts>()) {
  GroupQuantizer quantizers[kMostGroupQuantizers];
  RowCoder coders[kMostRowCoders];
  (void)group_quantizers_known(quantizers);
  (void)row_coders_known(coders);
  contexts_->kernels = {quantizers[variant], coders[variant]};
}

const char* LossyCodec::instructions() const { return contexts_->kernels.coder.name; }

LossyCodec::~LossyCodec() = default;

std::uint64_t LossyCodec::encoded_bytes_at_most(std::span<const Shard> shards) {
  const std::uint64_t bytes = unpadded_bytes(shards);
  // A byte for each section, which has at least half of the possible groups unless it is the last one. The
  // sections of fp8 are the shortest.
  return bytes + bytes / (lossy_section_bytes_at_most(Element::kE4m3) / 2) + 1 + LossySection::kMostNeeded;
}

std::optional<std::size_t> LossyCodec::Contexts::encode(LossySection& section, ShardBlocks& blocks,
                                                        Element element, std::size_t* period, std::byte* out,
                                                        Losses* losses) const {
  std::span<const std::byte> raw(blocks.place(), blocks.bytes());
  const bool has_factors = section.bounds.factors != nullptr;
  const std::size_t groups = section.bounds.groups;
  const auto quantize = [&](std::size_t first) { section.quantize(kernels.quantizer, raw, element, first); };
  if (!has_factors) quantize(groups);
  if (*period == 0) {
    if (has_factors) quantize(std::min(groups, LossySection::kMostLookedAt));
    *period = section.find_period(groups);
  }
  const std::size_t used_period = std::max(*period, std::size_t{1});
  const auto whole_tiles = raw.first(lossy_section_bytes(blocks.left(), used_period, element));
  if (has_factors) {
    section.refine_bounds(kernels.quantizer, whole_tiles, element, used_period);
    quantize(whole_tiles.size() / group_bytes_of(element));
    section.drop_weights(kernels.quantizer, whole_tiles, element, used_period);
  }
  const auto encoded = section.encode(kernels, whole_tiles, element, used_period, out);
  if (!encoded) return std::nullopt;
  std::size_t used = *encoded;
  if (used > 0) {
    raw = whole_tiles;
    measure(section, raw, {out, used}, element, losses);
  } else {
    out[0] = std::byte{0};
    std::memcpy(out + 1, raw.data(), raw.size());
    used = 1 + raw.size();
  }
  blocks.limit(raw.size());
  blocks.next();
  return used;
}

void LossyCodec::Contexts::measure(LossySection& section, std::span<const std::byte> raw,
                                   std::span<const std::byte> encoded, Element element,
                                   Losses* losses) const {
  const auto restored = std::span(section.restored).first(raw.size());
  const auto period = std::to_integer<std::size_t>(encoded[0]);
  std::uint64_t read = 1;
  const char* const wrong = section.decode(kernels, period, encoded.subspan(1), element, restored, &read);
  const std::size_t group_bytes = group_bytes_of(element), groups = raw.size() / group_bytes,
                    whole = groups * group_bytes;
  if (wrong != nullptr || read != encoded.size() ||
      std::memcmp(raw.data() + whole, restored.data() + whole, raw.size() - whole) != 0)
    losses->of_keys.largest = std::numeric_limits<double>::infinity();
  for (std::size_t group = 0; group < groups; ++group) {
    const std::size_t at = group * group_bytes;
    GroupLosses& of_its_bound = section.bounds.are_values[group] ? losses->of_values : losses->of_keys;
    const GroupError error = kernels.quantizer.compare(raw.data() + at, restored.data() + at, element);
    of_its_bound.add(raw.data() + at, restored.data() + at, element, error);
    const double bound = section.bounds.factors != nullptr ? section.bounds.bounds[group] : 1;
    if (error.squared_error > bound * bound * error.squared_norm)
      of_its_bound.largest = std::numeric_limits<double>::infinity();
  }
}

Status LossyCodec::encode(std::span<const Shard> shards, Element element, const ErrorBounds& bounds,
                          const KvRuns& runs, const BoundFactors* factors, std::span<std::byte> out,
                          std::uint64_t* bytes, Loss* loss) {
  *bytes = 0;
  const PayloadBounds of_payload(shards, element, bounds, runs, factors);
  if (!of_payload.fit()) return {};
  const DefaultFloats while_encoding;
  auto section = contexts_->pool.take();
  if (section == nullptr || !section->frames.can_encode() || !section->frames.can_decode())
    return no_memory_for_section();
  std::size_t period = 0;
  Losses losses;
  ShardBlocks blocks(shards, lossy_section_bytes_at_most(element), section->block.data());
  const std::uint64_t payload = blocks.left();
  auto encoded = section->encode_weights(factors, out.data());
  std::uint64_t used = encoded.value_or(0);
  while (encoded && blocks.left() > 0) {
    blocks.limit(lossy_section_bytes_at_most(element));
    blocks.gather();
    of_payload.fill(section->bounds, payload - blocks.left(), blocks.bytes());
    encoded = contexts_->encode(*section, blocks, element, &period, out.data() + used, &losses);
    used += encoded.value_or(0);
  }
  contexts_->pool.give_back(std::move(section));
  if (!encoded) return no_memory_for_section();
  const double keys = losses.of_keys.largest, values = losses.of_values.largest;
  if (!(keys <= bounds.keys && values <= bounds.values) ||
      static_cast<double>(used) * PayloadCodec::kMinRatio > static_cast<double>(payload))
    return {};
  *loss = {.keys = rounded_up(keys), .values = rounded_up(values)};
  // The rounding of the sums may exceed the largest.
  loss->rms = std::min(rounded_up(rms_of(losses)), std::max(loss->keys, loss->values));
  *bytes = used;
  return {};
}

Status LossyCodec::Contexts::decode(LossySection& section, ShardBlocks& blocks, Element element,
                                    std::span<const std::byte> in, std::uint64_t* at) const {
  const std::uint64_t begin = *at;
  if (begin == in.size()) return damaged_section(begin, "it is missing");
  const auto period = std::to_integer<std::size_t>(in[begin]);
  if (period > kMostLossyPeriod) return damaged_section(begin, "an impossible period");
  blocks.limit(period == 0 ? lossy_section_bytes_at_most(element)
                           : lossy_section_bytes(blocks.left(), period, element));
  const std::span<std::byte> raw(blocks.place(), blocks.bytes());
  *at += 1;
  if (period != 0) {
    const char* const wrong = section.decode(kernels, period, in.subspan(*at), element, raw, at);
    if (wrong != nullptr) return damaged_section(begin, wrong);
  } else {
    if (in.size() - *at < raw.size()) return damaged_section(begin, "truncated");
    std::memcpy(raw.data(), in.data() + *at, raw.size());
    *at += raw.size();
  }
  blocks.scatter();
  blocks.next();
  return {};
}

Status LossyCodec::decode(std::span<const std::byte> in, Element element, std::span<const Shard> shards) {
  const DefaultFloats while_decoding;
  auto section = contexts_->pool.take();
  if (section == nullptr || !section->frames.can_decode()) return no_memory_for_section();
  std::uint64_t at = 0;
  Status status;
  if (const char* const wrong = section->decode_weights(in, element, &at)) status = damaged_section(0, wrong);
  ShardBlocks blocks(shards, lossy_section_bytes_at_most(element), section->block.data());
  while (status && blocks.left() > 0) status = contexts_->decode(*section, blocks, element, in, &at);
  contexts_->pool.give_back(std::move(section));
  if (status && at != in.size()) return damaged_section(at, "extra bytes after the last section");
  return status;
}

}  // namespace kv_offload
