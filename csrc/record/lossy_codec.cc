// SPDX-License-Identifier: Apache-2.0
#include "record/lossy_codec.h"

#include <algorithm>
#include <cfenv>
#include <cmath>
#include <cstring>
#include <limits>
#include <optional>
#include <utility>

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

}  // namespace

bool ErrorBounds::allow(const Loss& loss) const {
  return loss.keys <= LossyCodec::rounded_up(keys) && loss.values <= LossyCodec::rounded_up(values);
}

struct LossyCodec::Contexts {
  LossyKernels kernels;
  ContextPool<LossySection> pool;

  // Encodes the section at the current block, measures it, and moves past it. *period: of the payload; 0: not
  // found yet. Returns the bytes used; nullopt if the library fails.
  std::optional<std::size_t> encode(LossySection& section, ShardBlocks& blocks, Element element,
                                    const GroupBounds& bounds, std::size_t* period, std::byte* out,
                                    Losses* losses) const;
  // Decodes an encoded section and adds its loss.
  void measure(LossySection& section, std::span<const std::byte> raw, std::span<const std::byte> encoded,
               Element element, const GroupBounds& bounds, Losses* losses) const;
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
                                                        Element element, const GroupBounds& bounds,
                                                        std::size_t* period, std::byte* out,
                                                        Losses* losses) const {
  blocks.limit(lossy_section_bytes_at_most(element));
  blocks.gather();
  std::span<const std::byte> raw(blocks.place(), blocks.bytes());
  section.quantize(kernels.quantizer, raw, element, bounds);
  if (*period == 0) *period = section.find_period(raw.size() / bounds.group_bytes);
  const std::size_t used_period = std::max(*period, std::size_t{1});
  const auto whole_tiles = raw.first(lossy_section_bytes(blocks.left(), used_period, element));
  if (bounds.factors != nullptr && *period != 0)
    section.refine_small_groups(kernels.quantizer, whole_tiles, element, bounds, *period);
  const auto encoded = section.encode(kernels, whole_tiles, element, used_period, out);
  if (!encoded) return std::nullopt;
  std::size_t used = *encoded;
  if (used > 0) {
    raw = whole_tiles;
    measure(section, raw, {out, used}, element, bounds, losses);
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
                                   const GroupBounds& bounds, Losses* losses) const {
  const auto restored = std::span(section.restored).first(raw.size());
  const auto period = std::to_integer<std::size_t>(encoded[0]);
  std::uint64_t read = 1;
  const char* const wrong = section.decode(kernels, period, encoded.subspan(1), element, restored, &read);
  const std::size_t group = bounds.group_bytes, groups = raw.size() / group * group;
  if (wrong != nullptr || read != encoded.size() ||
      std::memcmp(raw.data() + groups, restored.data() + groups, raw.size() - groups) != 0)
    losses->of_keys.largest = std::numeric_limits<double>::infinity();
  for (std::size_t at = 0; at < groups; at += group) {
    GroupLosses& of_its_bound = bounds.is_values(at) ? losses->of_values : losses->of_keys;
    const GroupError error = kernels.quantizer.compare(raw.data() + at, restored.data() + at, element);
    of_its_bound.add(raw.data() + at, restored.data() + at, element, error);
    const double bound = bounds.factors != nullptr ? bounds.of(at) : 1;
    if (error.squared_error > bound * bound * error.squared_norm)
      of_its_bound.largest = std::numeric_limits<double>::infinity();
  }
}

Status LossyCodec::encode(std::span<const Shard> shards, Element element, const ErrorBounds& bounds,
                          const KvRuns& runs, const BoundFactors* factors, std::span<std::byte> out,
                          std::uint64_t* bytes, Loss* loss) {
  *bytes = 0;
  const std::size_t group_bytes = group_bytes_of(element);
  const std::size_t groups_of_shard = factors != nullptr ? factors->groups_of_each(shards, group_bytes) : 0;
  if (factors != nullptr && groups_of_shard == 0) return {};
  const DefaultFloats while_encoding;
  auto section = contexts_->pool.take();
  if (section == nullptr || !section->frames.can_encode() || !section->frames.can_decode())
    return no_memory_for_section();
  std::uint64_t used = 0;
  std::size_t period = 0;
  Losses losses;
  Status status;
  ShardBlocks blocks(shards, lossy_section_bytes_at_most(element), section->block.data());
  const std::uint64_t payload = blocks.left();
  GroupBounds of_groups{.keys = static_cast<float>(bounds.keys),
                        .values = static_cast<float>(bounds.values),
                        .runs = runs.in(shards),
                        .group_bytes = group_bytes,
                        .factors = factors,
                        .groups_of_shard = groups_of_shard,
                        .least = static_cast<float>(kLeastError)};
  while (status && blocks.left() > 0) {
    of_groups.begin = payload - blocks.left();
    const auto encoded =
        contexts_->encode(*section, blocks, element, of_groups, &period, out.data() + used, &losses);
    if (encoded) {
      used += *encoded;
    } else {
      status = no_memory_for_section();
    }
  }
  contexts_->pool.give_back(std::move(section));
  if (!status) return status;
  const double keys = losses.of_keys.largest, values = losses.of_values.largest;
  if (!(keys <= bounds.keys && values <= bounds.values) ||
      static_cast<double>(used) * PayloadCodec::kMinRatio > static_cast<double>(payload))
    return status;
  *loss = {.keys = rounded_up(keys), .values = rounded_up(values)};
  // The rounding of the sums may exceed the largest.
  loss->rms = std::min(rounded_up(rms_of(losses)), std::max(loss->keys, loss->values));
  *bytes = used;
  return status;
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
  ShardBlocks blocks(shards, lossy_section_bytes_at_most(element), section->block.data());
  while (status && blocks.left() > 0) status = contexts_->decode(*section, blocks, element, in, &at);
  contexts_->pool.give_back(std::move(section));
  if (status && at != in.size()) return damaged_section(at, "extra bytes after the last section");
  return status;
}

}  // namespace kv_offload
