// SPDX-License-Identifier: Apache-2.0
#include "record/lossy_codec.h"

#include <cmath>
#include <cstring>
#include <limits>
#include <optional>
#include <utility>

#include "record/context_pool.h"
#include "record/group_quantizer.h"
#include "record/lossy_section.h"
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

}  // namespace

struct LossyCodec::Contexts {
  GroupQuantizer quantizer{};
  ContextPool<LossySection> pool;

  // Encodes the section at the current block, measures it, and moves past it. Returns the bytes used; nullopt
  // if the library fails.
  std::optional<std::size_t> encode(LossySection& section, ShardBlocks& blocks, Element element,
                                    float max_error, std::byte* out, GroupLosses* losses) const;
  // Adds the loss of an encoded section, which it decodes.
  void measure(LossySection& section, std::span<const std::byte> raw, std::span<const std::byte> encoded,
               Element element, GroupLosses* losses) const;
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

LossyCodec::LossyCodec() : contexts_(std::make_unique<Contexts>()) {
  GroupQuantizer ways[kMostGroupQuantizers];
  (void)group_quantizers_known(ways);
  contexts_->quantizer = ways[0];
}

LossyCodec::~LossyCodec() = default;

std::uint64_t LossyCodec::encoded_bytes_at_most(std::span<const Shard> shards) {
  const std::uint64_t bytes = unpadded_bytes(shards);
  // A byte for each section, which has at least half of the possible groups unless it is the last one.
  return bytes + bytes / (kLossySectionBytes / 2) + 1 + LossySection::kMostNeeded;
}

std::optional<std::size_t> LossyCodec::Contexts::encode(LossySection& section, ShardBlocks& blocks,
                                                        Element element, float max_error, std::byte* out,
                                                        GroupLosses* losses) const {
  blocks.limit(kLossySectionBytes);
  blocks.gather();
  std::span<const std::byte> raw(blocks.place(), blocks.bytes());
  section.quantize(quantizer, raw, element, max_error);
  const std::size_t period = section.find_period(raw.size() / kLossyGroupBytes);
  const auto whole_tiles = raw.first(lossy_section_bytes(blocks.left(), period));
  const auto encoded = section.encode(whole_tiles, period, out);
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
                                   GroupLosses* losses) const {
  const auto restored = std::span(section.restored).first(raw.size());
  const auto period = std::to_integer<std::size_t>(encoded[0]);
  std::uint64_t read = 1;
  const char* const wrong = section.decode(quantizer, period, encoded.subspan(1), element, restored, &read);
  const std::size_t groups = raw.size() / kLossyGroupBytes * kLossyGroupBytes;
  if (wrong != nullptr || read != encoded.size() ||
      std::memcmp(raw.data() + groups, restored.data() + groups, raw.size() - groups) != 0)
    losses->largest = std::numeric_limits<double>::infinity();
  for (std::size_t at = 0; at < groups; at += kLossyGroupBytes)
    losses->add(raw.data() + at, restored.data() + at, element);
}

Status LossyCodec::encode(std::span<const Shard> shards, Element element, double max_error,
                          std::span<std::byte> out, std::uint64_t* bytes, Loss* loss) {
  *bytes = 0;
  auto section = contexts_->pool.take();
  if (section == nullptr || !section->frames.can_encode() || !section->frames.can_decode())
    return no_memory_for_section();
  std::uint64_t used = 0;
  GroupLosses losses;
  Status status;
  ShardBlocks blocks(shards, kLossySectionBytes, section->block.data());
  while (status && blocks.left() > 0) {
    const auto encoded = contexts_->encode(*section, blocks, element, static_cast<float>(max_error),
                                           out.data() + used, &losses);
    if (encoded) {
      used += *encoded;
    } else {
      status = no_memory_for_section();
    }
  }
  contexts_->pool.give_back(std::move(section));
  if (!status) return status;
  const auto raw_bytes = static_cast<double>(unpadded_bytes(shards));
  if (!(losses.largest <= max_error) || static_cast<double>(used) * PayloadCodec::kMinRatio > raw_bytes)
    return status;
  loss->largest = rounded_up(losses.largest);
  const double rms = losses.squared_norm > 0 ? std::sqrt(losses.squared_error / losses.squared_norm) : 0;
  loss->rms = std::min(rounded_up(rms), loss->largest);  // rounding of the sums may exceed it
  *bytes = used;
  return status;
}

Status LossyCodec::Contexts::decode(LossySection& section, ShardBlocks& blocks, Element element,
                                    std::span<const std::byte> in, std::uint64_t* at) const {
  const std::uint64_t begin = *at;
  if (begin == in.size()) return damaged_section(begin, "it is missing");
  const auto period = std::to_integer<std::size_t>(in[begin]);
  if (period > kMostLossyPeriod) return damaged_section(begin, "an impossible period");
  blocks.limit(period == 0 ? kLossySectionBytes : lossy_section_bytes(blocks.left(), period));
  const std::span<std::byte> raw(blocks.place(), blocks.bytes());
  *at += 1;
  if (period != 0) {
    const char* const wrong = section.decode(quantizer, period, in.subspan(*at), element, raw, at);
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
  auto section = contexts_->pool.take();
  if (section == nullptr || !section->frames.can_decode()) return no_memory_for_section();
  std::uint64_t at = 0;
  Status status;
  ShardBlocks blocks(shards, kLossySectionBytes, section->block.data());
  while (status && blocks.left() > 0) status = contexts_->decode(*section, blocks, element, in, &at);
  contexts_->pool.give_back(std::move(section));
  if (status && at != in.size()) return damaged_section(at, "extra bytes after the last section");
  return status;
}

}  // namespace kv_offload
