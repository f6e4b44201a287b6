// SPDX-License-Identifier: Apache-2.0
#include "hosts/tier_frames.h"

#include <cassert>

#include "hosts/wire.h"

namespace kv_offload {
namespace {

using wire::as_bytes;
using wire::Input;
using wire::put;
using wire::put_bool;
using wire::put_bytes;
using wire::put_double;

// Of one op without its tenant, or one use, in its frame.
constexpr std::size_t kMostOpBytes = 128, kMostUseBytes = 80;
constexpr std::size_t kMostTenant = 255, kMostTenants = 64;
constexpr std::uint64_t kMostNanos = std::uint64_t{1} << 60;  // added to a clock

template <typename Enumeration>
void put_enum(Bytes* to, Enumeration value) {
  put(to, static_cast<std::uint8_t>(value));
}
template <typename Enumeration>
Enumeration enum_of(Input* input, Enumeration last) {
  return static_cast<Enumeration>(input->at_most(static_cast<std::uint8_t>(last)));
}

void put_key(Bytes* to, const ChunkKey& key) {
  put(to, static_cast<std::uint8_t>(key.size()));
  put_bytes(to, as_bytes(key.bytes()));
}
ChunkKey key_of(Input* input) {
  const auto size = input->number<std::uint8_t>();
  if (!input->check(ChunkKey::fits(size))) return {};
  const ByteSpan bytes = input->take(size);
  if (bytes.empty()) return {};
  return ChunkKey::unchecked(reinterpret_cast<const char*>(bytes.data()), bytes.size());
}

void put_info(Bytes* to, const EntryInfo& info) {
  put(to, info.id);
  put(to, info.parent);
  put(to, info.depth);
  put(to, info.request);
  put(to, static_cast<std::uint8_t>(info.priority));
  put(to, info.tenant);
}
EntryInfo info_of(Input* input) {
  EntryInfo info;
  info.id = input->number<ChunkId>();
  info.parent = input->number<ChunkId>();
  info.depth = input->number<std::uint32_t>();
  info.request = input->number<std::uint32_t>();
  info.priority = static_cast<std::int8_t>(input->number<std::uint8_t>());
  info.tenant = input->number<TenantId>();
  return info;
}

// Lists: their length, 2 bytes, then the elements.
template <typename List, typename Put>
void put_list(Bytes* to, const List& list, std::size_t most, Put put_one) {
  assert(list.size() <= most);
  (void)most;
  put(to, static_cast<std::uint16_t>(list.size()));
  for (const auto& one : list) put_one(to, one);
}
template <typename Element, typename Take>
std::vector<Element> list_of(Input* input, std::size_t most, Take take_one) {
  const auto count = input->at_most(static_cast<std::uint16_t>(most));
  std::vector<Element> list;
  for (std::size_t i = 0; i < count && input->is_good(); ++i) list.push_back(take_one(input));
  return list;
}

void put_number(Bytes* to, std::uint64_t number) { put(to, number); }
std::uint64_t number_of(Input* input) { return input->number<std::uint64_t>(); }

void put_text(Bytes* to, const std::string& text, std::size_t most) {
  assert(text.size() <= most);
  (void)most;
  put(to, static_cast<std::uint16_t>(text.size()));
  put_bytes(to, as_bytes(text));
}
std::string text_of(Input* input, std::size_t most) {
  return input->text(input->at_most(static_cast<std::uint16_t>(most)));
}

// Calls visit(number) for each 64-bit figure, in the order of the frame.
template <typename Stats, typename Visit>
void for_each_figure(Stats& stats, Visit visit) {
  for (auto* figure :
       {&stats.bytes, &stats.capacity_bytes, &stats.chunks, &stats.evicted_bytes, &stats.direct_ops,
        &stats.buffered_ops, &stats.epoch_id, &stats.rebuilds, &stats.lost_bytes, &stats.breaker_trips,
        &stats.read_timeouts, &stats.write_timeouts, &stats.read_record_bytes, &stats.written_record_bytes,
        &stats.encoded_raw_bytes, &stats.encoded_stored_bytes})
    visit(*figure);
}
template <typename Stats, typename Visit>
void for_each_flag(Stats& stats, Visit visit) {
  for (auto* flag : {&stats.names_complete, &stats.scan_complete, &stats.readable, &stats.writable,
                     &stats.is_shared, &stats.diverged, &stats.may_encode, &stats.encodes})
    visit(*flag);
}
template <typename Stats, typename Visit>
void for_each_amount(Stats& stats, Visit visit) {
  for (auto* amount : {&stats.oldest_read_seconds, &stats.oldest_write_seconds, &stats.encode_seconds,
                       &stats.decode_seconds, &stats.largest_key_error, &stats.largest_value_error})
    visit(*amount);
}

template <typename Frame>
std::optional<Frame> unless_bad(const Input& input, Frame frame) {
  if (!input.ended_well()) return std::nullopt;
  return frame;
}

}  // namespace

// ---- from the scheduler

Bytes encode(const OpenTiers& frame) {
  Bytes body;
  put(&body, frame.round);
  put_list(&body, frame.epochs, kMostTiers, [](Bytes* to, const EpochChoice& choice) {
    put(to, choice.id);
    put_bool(to, choice.is_new);
    put(to, choice.replaces);
  });
  put_text(&body, frame.text, kMostOpenText);
  return body;
}

std::optional<OpenTiers> decode_open_tiers(ByteSpan body) {
  Input input(body);
  OpenTiers frame;
  frame.round = input.number<std::uint32_t>();
  frame.epochs = list_of<EpochChoice>(&input, kMostTiers, [](Input* from) {
    EpochChoice choice;
    choice.id = from->number<std::uint64_t>();
    choice.is_new = from->boolean();
    choice.replaces = from->number<std::uint64_t>();
    return choice;
  });
  frame.text = text_of(&input, kMostOpenText);
  return unless_bad(input, std::move(frame));
}

Bytes encode(const TierOps& frame) { return encode_ops(frame.tier, frame.ops); }

Bytes encode_ops(std::uint8_t tier, std::span<const HostOp> ops) {
  Bytes body;
  body.reserve(kMostOpBytes * (ops.size() + 1));
  put(&body, tier);
  put_list(&body, ops, kMostOps, [](Bytes* to, const HostOp& op) {
    put(to, op.id);
    put_enum(to, op.kind);
    put_key(to, op.key);
    put(to, op.row);
    put(to, op.group);
    put(to, op.nanos_left);
    put_info(to, op.entry_info);
    put_double(to, op.weight);
    put_bool(to, op.may_decline);
    put_text(to, op.tenant, kMostTenant);
  });
  return body;
}

std::optional<TierOps> decode_ops(ByteSpan body) {
  Input input(body);
  TierOps frame;
  frame.tier = input.number<std::uint8_t>();
  frame.ops = list_of<HostOp>(&input, kMostOps, [](Input* from) {
    HostOp op;
    op.id = from->number<OpId>();
    op.kind = enum_of(from, OpKind::kRemove);
    op.key = key_of(from);
    op.row = from->number<RowId>();
    op.group = from->number<std::uint32_t>();
    op.nanos_left = from->at_most(kMostNanos);
    op.entry_info = info_of(from);
    op.weight = from->amount();
    // A divisor of costs.
    (void)from->check(op.weight >= 1e-6 && op.weight <= 1e6);
    op.may_decline = from->boolean();
    op.tenant = text_of(from, kMostTenant);
    return op;
  });
  return unless_bad(input, std::move(frame));
}

Bytes encode(const TierCancel& frame) {
  Bytes body;
  put(&body, frame.tier);
  put_list(&body, frame.ids, kMostKeys, put_number);
  return body;
}

std::optional<TierCancel> decode_cancel(ByteSpan body) {
  Input input(body);
  TierCancel frame;
  frame.tier = input.number<std::uint8_t>();
  frame.ids = list_of<OpId>(&input, kMostKeys, number_of);
  return unless_bad(input, std::move(frame));
}

Bytes encode(const TierLookup& frame) {
  Bytes body;
  put(&body, frame.tier);
  put_enum(&body, frame.order);
  put(&body, frame.epoch);
  put_list(&body, frame.keys, kMostKeys, put_key);
  return body;
}

std::optional<TierLookup> decode_lookup(ByteSpan body) {
  Input input(body);
  TierLookup frame;
  frame.tier = input.number<std::uint8_t>();
  frame.order = enum_of(&input, KeyOrder::kPrefix);
  frame.epoch = input.number<std::uint64_t>();
  frame.keys = list_of<ChunkKey>(&input, kMostKeys, key_of);
  return unless_bad(input, std::move(frame));
}

Bytes encode(const TierUsesFrame& frame) { return encode_uses(frame.tier, frame.is_touch, frame.uses); }

Bytes encode_uses(std::uint8_t tier, bool is_touch, std::span<const TierUse> uses) {
  Bytes body;
  body.reserve(kMostUseBytes * (uses.size() + 1));
  put(&body, tier);
  put_bool(&body, is_touch);
  put_list(&body, uses, kMostUses, [](Bytes* to, const TierUse& use) {
    put_key(to, use.key);
    put_info(to, use.entry_info);
  });
  return body;
}

std::optional<TierUsesFrame> decode_uses(ByteSpan body) {
  Input input(body);
  TierUsesFrame frame;
  frame.tier = input.number<std::uint8_t>();
  frame.is_touch = input.boolean();
  frame.uses = list_of<TierUse>(&input, kMostUses, [](Input* from) {
    TierUse use;
    use.key = key_of(from);
    use.entry_info = info_of(from);
    return use;
  });
  return unless_bad(input, std::move(frame));
}

Bytes encode(const TierReset& frame) {
  Bytes body;
  put(&body, frame.tier);
  put(&body, frame.epoch);
  put(&body, frame.startup_id);
  return body;
}

std::optional<TierReset> decode_reset(ByteSpan body) {
  Input input(body);
  TierReset frame;
  frame.tier = input.number<std::uint8_t>();
  frame.epoch = input.number<std::uint64_t>();
  frame.startup_id = input.number<std::uint64_t>();
  return unless_bad(input, frame);
}

// ---- from the host

OpenedTier opened(const Tier& tier) {
  const TierStats stats = tier.stats();
  return {stats.epoch_id, stats.epoch_id == 0 && !stats.readable, tier.epoch_problem()};
}

Bytes encode(const TiersOpened& frame) {
  Bytes body;
  put(&body, frame.round);
  put_text(&body, frame.problem.substr(0, kMostProblem), kMostProblem);
  put_list(&body, frame.tiers, kMostTiers, [](Bytes* to, const OpenedTier& tier) {
    put(to, tier.epoch_id);
    put_bool(to, tier.awaits_epoch);
    put_text(to, tier.epoch_problem.substr(0, kMostEpochProblem), kMostEpochProblem);
  });
  return body;
}

std::optional<TiersOpened> decode_tiers_opened(ByteSpan body) {
  Input input(body);
  TiersOpened frame;
  frame.round = input.number<std::uint32_t>();
  frame.problem = text_of(&input, kMostProblem);
  frame.tiers = list_of<OpenedTier>(&input, kMostTiers, [](Input* from) {
    OpenedTier tier;
    tier.epoch_id = from->number<std::uint64_t>();
    tier.awaits_epoch = from->boolean();
    tier.epoch_problem = text_of(from, kMostEpochProblem);
    return tier;
  });
  return unless_bad(input, std::move(frame));
}

Bytes encode(const TierResults& frame) {
  Bytes body;
  put(&body, frame.tier);
  put_list(&body, frame.results, kMostResults, [](Bytes* to, const HostResult& result) {
    put(to, result.id);
    put_enum(to, result.kind);
    put(to, static_cast<std::uint32_t>(result.error_number));
    put(to, result.bytes);
    put_double(to, result.seconds);
    put_double(to, result.queued_seconds);
  });
  return body;
}

std::optional<TierResults> decode_results(ByteSpan body) {
  Input input(body);
  TierResults frame;
  frame.tier = input.number<std::uint8_t>();
  frame.results = list_of<HostResult>(&input, kMostResults, [](Input* from) {
    HostResult result;
    result.id = from->number<OpId>();
    result.kind = enum_of(from, StatusKind::kDeclined);
    result.error_number = static_cast<std::int32_t>(from->number<std::uint32_t>());
    result.bytes = from->number<std::uint64_t>();
    result.seconds = from->seconds();
    result.queued_seconds = from->seconds();
    return result;
  });
  return unless_bad(input, std::move(frame));
}

Bytes encode(const TierAnswers& frame) {
  Bytes body;
  put(&body, frame.tier);
  put(&body, frame.epoch);
  put_list(&body, frame.answers, kMostKeys, [](Bytes* to, const TierAnswers::Answer& answer) {
    put_key(to, answer.key);
    put_enum(to, answer.found);
  });
  return body;
}

std::optional<TierAnswers> decode_answers(ByteSpan body) {
  Input input(body);
  TierAnswers frame;
  frame.tier = input.number<std::uint8_t>();
  frame.epoch = input.number<std::uint64_t>();
  frame.answers = list_of<TierAnswers::Answer>(&input, kMostKeys, [](Input* from) {
    TierAnswers::Answer answer;
    answer.key = key_of(from);
    answer.found = enum_of(from, TierAnswers::Found::kUnknown);
    return answer;
  });
  return unless_bad(input, std::move(frame));
}

Bytes encode(const TierRemovals& frame) {
  Bytes body;
  put(&body, frame.tier);
  put(&body, frame.epoch);
  put_list(&body, frame.removals, kMostKeys, [](Bytes* to, const TierRemoval& removal) {
    put_key(to, removal.key);
    put_enum(to, removal.reason);
  });
  return body;
}

std::optional<TierRemovals> decode_removals(ByteSpan body) {
  Input input(body);
  TierRemovals frame;
  frame.tier = input.number<std::uint8_t>();
  frame.epoch = input.number<std::uint64_t>();
  frame.removals = list_of<TierRemoval>(&input, kMostKeys, [](Input* from) {
    TierRemoval removal;
    removal.key = key_of(from);
    removal.reason = enum_of(from, TierRemoval::Reason::kReset);
    return removal;
  });
  return unless_bad(input, std::move(frame));
}

Bytes encode(const TierResetDone& frame) {
  Bytes body;
  put(&body, frame.tier);
  put(&body, frame.epoch);
  put_enum(&body, frame.kind);
  return body;
}

std::optional<TierResetDone> decode_reset_done(ByteSpan body) {
  Input input(body);
  TierResetDone frame;
  frame.tier = input.number<std::uint8_t>();
  frame.epoch = input.number<std::uint64_t>();
  frame.kind = enum_of(&input, StatusKind::kDeclined);
  return unless_bad(input, frame);
}

Bytes encode(const TierState& frame) {
  Bytes body;
  put(&body, frame.tier);
  for_each_figure(frame.stats, [&](std::uint64_t figure) { put(&body, figure); });
  for_each_flag(frame.stats, [&](bool flag) { put_bool(&body, flag); });
  for_each_amount(frame.stats, [&](double amount) { put_double(&body, amount); });
  put(&body, frame.stats.queued_reads);
  put(&body, frame.stats.queued_writes);
  put_list(&body, frame.stats.tenant_bytes, kMostTenants, put_number);
  put_double(&body, frame.queue_seconds);
  put_double(&body, frame.read_bytes_per_second);
  return body;
}

std::optional<TierState> decode_state(ByteSpan body) {
  Input input(body);
  TierState frame;
  frame.tier = input.number<std::uint8_t>();
  for_each_figure(frame.stats, [&](std::uint64_t& figure) { figure = input.number<std::uint64_t>(); });
  for_each_flag(frame.stats, [&](bool& flag) { flag = input.boolean(); });
  for_each_amount(frame.stats, [&](double& amount) { amount = input.seconds(); });
  frame.stats.queued_reads = input.number<std::uint32_t>();
  frame.stats.queued_writes = input.number<std::uint32_t>();
  frame.stats.tenant_bytes = list_of<std::uint64_t>(&input, kMostTenants, number_of);
  frame.queue_seconds = input.seconds();
  frame.read_bytes_per_second = input.amount();
  return unless_bad(input, std::move(frame));
}

}  // namespace kv_offload
