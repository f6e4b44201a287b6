// SPDX-License-Identifier: Apache-2.0
// The bodies of frames about the tiers of a host without the scheduler. `tier` is the index of a tier.
//
// decode_*() return nothing for bytes that encode() does not produce. Numbers inside are not checked against
// the receiver's own state, such as the number of tiers: the receiver does that.
//
// Threads: none; functions only.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "hosts/frame.h"
#include "tier/tier.h"

namespace kv_offload {

// What one frame holds at most, so that it fits into kMostPayload.
inline constexpr std::size_t kMostOps = 64, kMostKeys = 512, kMostUses = 256, kMostResults = 512;
inline constexpr std::size_t kMostOpenText = 24576, kMostTiers = 8, kMostProblem = 4096;
inline constexpr std::size_t kMostEpochProblem = 512;

// ---- from the scheduler
struct OpenTiers {
  std::uint32_t round = 0;            // of this request; the answer has the same number
  std::vector<EpochChoice> epochs{};  // by tier
  std::string text{};                 // what the tiers depend on; the core does not read it
  bool operator==(const OpenTiers&) const = default;
};
struct HostOp {
  OpId id = 0;
  OpKind kind = OpKind::kRead;
  ChunkKey key;
  RowId row = 0;
  std::uint32_t group = 0;
  std::uint64_t nanos_left = 0;  // until the op's deadline, when it was sent; 0 = none
  EntryInfo entry_info{};
  double weight = 1;
  bool may_decline = false;
  std::string tenant{};  // at most 255 bytes
};
struct TierOps {
  std::uint8_t tier = 0;
  std::vector<HostOp> ops{};
};
struct TierCancel {
  std::uint8_t tier = 0;
  std::vector<OpId> ids{};
};
struct TierLookup {
  std::uint8_t tier = 0;
  KeyOrder order = KeyOrder::kNone;
  std::uint64_t epoch = 0;  // number of resets that the scheduler has sent
  std::vector<ChunkKey> keys{};
};
struct TierUsesFrame {
  std::uint8_t tier = 0;
  bool is_touch = false;  // Tier::touch of the keys instead of Tier::used
  std::vector<TierUse> uses{};
};
struct TierReset {
  std::uint8_t tier = 0;
  std::uint64_t epoch = 0;       // number of resets that the scheduler has sent; never 0
  std::uint64_t startup_id = 0;  // see Tier::reset
};

// ---- from the host
struct OpenedTier {
  std::uint64_t epoch_id = 0;   // see TierStats; 0: it has none
  bool awaits_epoch = false;    // the store does not respond: the tier opens an epoch when it does
  std::string epoch_problem{};  // see Tier; at most kMostEpochProblem bytes are sent
  bool operator==(const OpenedTier&) const = default;
};
OpenedTier opened(const Tier& tier);  // REQUIRES: the tier was just opened
struct TiersOpened {
  std::uint32_t round = 0;
  std::string problem{};  // empty: all tiers are open
  std::vector<OpenedTier> tiers{};
  bool operator==(const TiersOpened&) const = default;
};
struct HostResult {
  OpId id = 0;
  StatusKind kind = StatusKind::kOk;
  std::int32_t error_number = 0;
  std::uint64_t bytes = 0;
  double seconds = 0, queued_seconds = 0;
};
struct TierResults {
  std::uint8_t tier = 0;
  std::vector<HostResult> results{};
};
struct TierAnswers {
  enum class Found : std::uint8_t { kAbsent, kPresent, kUnknown };  // kUnknown: the lookup failed
  struct Answer {
    ChunkKey key;
    Found found = Found::kAbsent;
  };
  std::uint8_t tier = 0;
  std::uint64_t epoch = 0;  // of the lookup
  std::vector<Answer> answers{};
};
struct TierRemovals {
  std::uint8_t tier = 0;
  std::uint64_t epoch = 0;  // number of resets that the host had received
  std::vector<TierRemoval> removals{};
};
struct TierResetDone {
  std::uint8_t tier = 0;
  std::uint64_t epoch = 0;
  StatusKind kind = StatusKind::kOk;  // see Tier::reset
};
struct TierState {
  std::uint8_t tier = 0;
  TierStats stats{};
  double queue_seconds = 0;          // estimate for a read that is queued now, without its own bytes
  double read_bytes_per_second = 0;  // 0: unknown
};

Bytes encode(const OpenTiers& frame);
Bytes encode(const TierOps& frame);
Bytes encode(const TierCancel& frame);
Bytes encode(const TierLookup& frame);
Bytes encode(const TierUsesFrame& frame);
// The same without a copy of the ops or uses. At most kMostOps, kMostUses.
Bytes encode_ops(std::uint8_t tier, std::span<const HostOp> ops);
Bytes encode_uses(std::uint8_t tier, bool is_touch, std::span<const TierUse> uses);
Bytes encode(const TierReset& frame);
Bytes encode(const TiersOpened& frame);
Bytes encode(const TierResults& frame);
Bytes encode(const TierAnswers& frame);
Bytes encode(const TierRemovals& frame);
Bytes encode(const TierResetDone& frame);
Bytes encode(const TierState& frame);

std::optional<OpenTiers> decode_open_tiers(ByteSpan body);
std::optional<TierOps> decode_ops(ByteSpan body);
std::optional<TierCancel> decode_cancel(ByteSpan body);
std::optional<TierLookup> decode_lookup(ByteSpan body);
std::optional<TierUsesFrame> decode_uses(ByteSpan body);
std::optional<TierReset> decode_reset(ByteSpan body);
std::optional<TiersOpened> decode_tiers_opened(ByteSpan body);
std::optional<TierResults> decode_results(ByteSpan body);
std::optional<TierAnswers> decode_answers(ByteSpan body);
std::optional<TierRemovals> decode_removals(ByteSpan body);
std::optional<TierResetDone> decode_reset_done(ByteSpan body);
std::optional<TierState> decode_state(ByteSpan body);

}  // namespace kv_offload
