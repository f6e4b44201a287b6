// SPDX-License-Identifier: Apache-2.0
#include "hosts/tier_frames.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <map>
#include <set>

#include "base/xxh3.h"
#include "tier/tier_driver.h"

namespace kv_offload {
namespace {

using testing::key_of;

EntryInfo some_info() { return {1, 2, 3, 4, -5, 0, 7}; }

HostOp some_op(std::uint32_t number) {
  return {number, OpKind::kRemove, key_of(number, 3), 5, 6, 7, some_info(), 0.25, true, "tenant"};
}

TierState some_state() {
  TierState state;
  state.tier = 2;
  std::uint64_t next = 1;
  TierStats& stats = state.stats;
  for (auto* figure :
       {&stats.bytes, &stats.capacity_bytes, &stats.chunks, &stats.evicted_bytes, &stats.direct_ops,
        &stats.buffered_ops, &stats.epoch_id, &stats.rebuilds, &stats.lost_bytes, &stats.breaker_trips,
        &stats.read_timeouts, &stats.write_timeouts, &stats.read_record_bytes, &stats.written_record_bytes,
        &stats.encoded_raw_bytes, &stats.encoded_stored_bytes})
    *figure = next++;
  stats.readable = false;
  stats.diverged = stats.encodes = true;
  stats.oldest_read_seconds = 0.5;
  stats.oldest_write_seconds = 0.75;
  stats.encode_seconds = 3.5;
  stats.decode_seconds = 2.5;
  stats.largest_key_error = 0.0625;
  stats.largest_value_error = 0.125;
  stats.queued_reads = 8;
  stats.queued_writes = 9;
  stats.tenant_bytes = {1, 2, 3};
  state.queue_seconds = 0.125;
  state.read_bytes_per_second = 1e9;
  return state;
}

// A decoded body is encoded to the same bytes, and no body that is shorter or longer is accepted.
template <typename Frame, typename Decode>
Frame arrives(const Frame& frame, Decode decode) {
  const Bytes body = encode(frame);
  EXPECT_LT(body.size(), kMostPayload);
  const auto decoded = decode(ByteSpan(body));
  EXPECT_TRUE(decoded);
  if (!decoded) return {};
  EXPECT_EQ(encode(*decoded), body);
  for (std::size_t size = 0; size < body.size(); ++size)
    EXPECT_FALSE(decode(ByteSpan(body).first(size))) << size << " of " << body.size() << " bytes";
  Bytes longer = body;
  longer.push_back(0);
  EXPECT_FALSE(decode(ByteSpan(longer)));
  return *decoded;
}

TEST(TierFrames, arrive_as_they_were_sent) {
  const OpenTiers open{7, {{1, true, 9}, {2, false, 0}}, "text"};
  EXPECT_EQ(arrives(open, decode_open_tiers), open);
  const TiersOpened opened{7, "problem", {{3, true, "no route"}}};
  EXPECT_EQ(arrives(opened, decode_tiers_opened), opened);
  const HostOp op = arrives(TierOps{1, {some_op(1), some_op(2)}}, decode_ops).ops.at(1);
  EXPECT_EQ(op.key, key_of(2, 3));
  EXPECT_EQ(op.entry_info.priority, -5);
  EXPECT_EQ(op.tenant, "tenant");
  EXPECT_EQ(arrives(TierCancel{1, {4, 5}}, decode_cancel).ids, (std::vector<OpId>{4, 5}));
  const LookupOptions options{KeyOrder::kPrefix, 2, 0.25};
  const TierLookup lookup = arrives(TierLookup{1, options, 3, {key_of(1)}}, decode_lookup);
  EXPECT_EQ(lookup.keys.at(0), key_of(1));
  EXPECT_EQ(lookup.options, options);
  EXPECT_EQ(lookup.epoch, 3u);
  EXPECT_EQ(arrives(TierUsesFrame{1, true, {{key_of(1), some_info()}}}, decode_uses).uses.at(0).key,
            key_of(1));
  EXPECT_EQ(arrives(TierReset{1, 2, 3}, decode_reset).startup_id, 3u);
  EXPECT_EQ(arrives(TierResults{1, {{1, StatusKind::kCorrupt, -5, 6, 0.5, 1.5}}}, decode_results)
                .results.at(0)
                .error_number,
            -5);
  for (const auto found : {TierAnswers::Found::kUnknown, TierAnswers::Found::kSkipped}) {
    EXPECT_EQ(arrives(TierAnswers{1, 2, {{key_of(1), found}}}, decode_answers).answers.at(0).found, found);
  }
  EXPECT_EQ(arrives(TierRemovals{1, 2, {{key_of(1), TierRemoval::Reason::kVanished}}}, decode_removals)
                .removals.at(0)
                .reason,
            TierRemoval::Reason::kVanished);
  EXPECT_EQ(arrives(TierResetDone{1, 2, StatusKind::kIo}, decode_reset_done).kind, StatusKind::kIo);
  EXPECT_EQ(arrives(some_state(), decode_state).stats.encoded_stored_bytes, 16u);
}

// ---- the protocol number

// Appends a body of each type of frame, and of each value of the enumerations in them.
std::vector<std::pair<FrameType, Bytes>> sample_frames() {
  std::vector<std::pair<FrameType, Bytes>> frames;
  const auto add = [&](FrameType type, Bytes body) { frames.emplace_back(type, std::move(body)); };
  for (const RegionOrigin origin :
       {RegionOrigin::kNew, RegionOrigin::kAdopted, RegionOrigin::kReplaced, RegionOrigin::kInUse})
    add(FrameType::kJoin, encode(HostJoin{1, 2, 3, 4, 5, 6, "0.1.0", true, {origin, {7, 8}}}));
  add(FrameType::kKeepMemory, encode(RegionSet{1, 2}));
  add(FrameType::kMemoryKept, encode(MemoryKept{{1, 2}, true}));
  add(FrameType::kGeometry, encode(GeometryFrame{3, {{4096, 100}, "layout"}}));
  add(FrameType::kReports, encode(std::vector<RankReport>{{1, 2, 3}, {4, ~std::uint64_t{0}, 0}}));
  for (const FrameType type : {FrameType::kReady, FrameType::kAlive, FrameType::kLeaving,
                               FrameType::kOpsEnded, FrameType::kSchedulerAlive})
    add(type, {});
  add(FrameType::kTiersOpened, encode(TiersOpened{7, "problem", {{3, false, ""}, {0, true, "no route"}}}));
  TierResults results{1, {}};
  for (std::size_t kind = 0; kind < kStatusKinds; ++kind)
    results.results.push_back({kind, static_cast<StatusKind>(kind), -5, 6, 0.5, 1.5});
  add(FrameType::kResults, encode(results));
  using enum TierAnswers::Found;
  add(FrameType::kAnswers,
      encode(TierAnswers{
          1,
          2,
          {{key_of(1), kAbsent}, {key_of(2), kPresent}, {key_of(3), kUnknown}, {key_of(4), kSkipped}}}));
  using enum TierRemoval::Reason;
  add(FrameType::kRemovals,
      encode(TierRemovals{
          1,
          2,
          {{key_of(1), kEvicted}, {key_of(2), kCorrupt}, {key_of(3), kVanished}, {key_of(4), kReset}}}));
  add(FrameType::kResetDone, encode(TierResetDone{1, 2, StatusKind::kTimeout}));
  add(FrameType::kState, encode(some_state()));
  add(FrameType::kOpenTiers, encode(OpenTiers{7, {{1, true, 9}, {2, false, 0}}, "text"}));
  TierOps ops{1, {}};
  for (const OpKind kind : {OpKind::kRead, OpKind::kWrite, OpKind::kRemove}) {
    ops.ops.push_back(some_op(static_cast<std::uint32_t>(kind)));
    ops.ops.back().kind = kind;
  }
  add(FrameType::kOps, encode(ops));
  add(FrameType::kCancel, encode(TierCancel{1, {4, 5}}));
  add(FrameType::kLookup, encode(TierLookup{1, {KeyOrder::kPrefix, 2, 0.25}, 3, {key_of(1)}}));
  add(FrameType::kUses, encode(TierUsesFrame{1, true, {{key_of(1), some_info()}}}));
  add(FrameType::kReset, encode(TierReset{1, 2, 3, true}));
  return frames;
}

// If this test fails, the bytes that hosts exchange have changed. A host with the earlier encoding would
// misread them, so it must be refused:
//   1. raise kHostProtocol (hosts/frame.h) by one, unless this change has done so already;
//   2. add a line for it here with the digest that the test prints.
// Never change the digest of a number that a release has. A frame type without a sample fails
// too: add one to sample_frames().
TEST(TierFrames, another_encoding_has_another_protocol_number) {
  const std::map<std::uint32_t, std::uint64_t> digests = {{3, 0xa01ecd1b2abe57b8},
                                                          {4, 0xf7060b9a932fd528},
                                                          {5, 0x4b70a897350f2b09},
                                                          {6, 0x96d861331db7b6a2},
                                                          {7, 0x519b2c67087630da}};
  FrameWriter writer(KeyedHash::Hash{1});
  Bytes all = make_greeting(HostNonce{2});
  const Bytes answer = make_answer(HostSecret{3}, HostNonce{4}, HostNonce{5});
  all.insert(all.end(), answer.begin(),
             answer.begin() + 44);  // without the proof, which depends on the number
  for (const std::size_t version : {std::size_t{8}, kGreetingBytes + 8})
    std::fill_n(all.begin() + static_cast<std::ptrdiff_t>(version), 4, std::uint8_t{0});
  std::set<FrameType> seen;
  for (const auto& [type, body] : sample_frames()) {
    writer.append(type, body, &all);
    seen.insert(type);
  }
  EXPECT_EQ(seen.size(), static_cast<std::size_t>(FrameType::kLast)) << "a frame type has no sample";
  const std::uint64_t digest = XXH3_64bits(all.data(), all.size());
  ASSERT_TRUE(digests.contains(kHostProtocol)) << fmt::format("add {{{}, {:#018x}}}", kHostProtocol, digest);
  EXPECT_EQ(digests.at(kHostProtocol), digest) << fmt::format("{:#018x}: raise kHostProtocol", digest);
}

TEST(TierFrames, as_many_elements_as_allowed_fit_into_a_frame) {
  const ChunkKey longest(std::string(ChunkKey::kMaxBytes, 'k'));
  HostOp op = some_op(1);
  op.key = longest;
  op.tenant = std::string(255, 't');
  EXPECT_LT(encode(TierOps{0, std::vector<HostOp>(kMostOps, op)}).size(), kMostPayload);
  EXPECT_LT(encode(TierLookup{0, KeyOrder::kNone, 0, std::vector<ChunkKey>(kMostKeys, longest)}).size(),
            kMostPayload);
  EXPECT_LT(encode(TierAnswers{0, 0, std::vector<TierAnswers::Answer>(kMostKeys, {longest, {}})}).size(),
            kMostPayload);
  EXPECT_LT(encode(TierRemovals{0, 0, std::vector<TierRemoval>(kMostKeys, {longest, {}})}).size(),
            kMostPayload);
  EXPECT_LT(encode(TierUsesFrame{0, false, std::vector<TierUse>(kMostUses, {longest, some_info()})}).size(),
            kMostPayload);
  EXPECT_LT(encode(TierResults{0, std::vector<HostResult>(kMostResults)}).size(), kMostPayload);
  EXPECT_LT(
      encode(OpenTiers{0, std::vector<EpochChoice>(kMostTiers), std::string(kMostOpenText, 't')}).size(),
      kMostPayload);
  const OpenedTier opened{0, true, std::string(2 * kMostEpochProblem, 'e')};
  EXPECT_LT(
      encode(TiersOpened{0, std::string(2 * kMostProblem, 'p'), std::vector(kMostTiers, opened)}).size(),
      kMostPayload);
}

TEST(TierFrames, values_that_no_host_sends_are_refused) {
  const auto changed = [](Bytes body, std::size_t at, std::uint8_t value) {
    body.at(at) = value;
    return body;
  };
  const Bytes op = encode(TierOps{0, {some_op(1)}});
  ASSERT_TRUE(decode_ops(op));
  EXPECT_FALSE(decode_ops(changed(op, 1, kMostOps + 1))) << "too many ops";
  EXPECT_FALSE(decode_ops(changed(op, 11, 3))) << "an unknown kind";
  EXPECT_FALSE(decode_ops(changed(op, 12, 4))) << "a key that is too short";
  EXPECT_FALSE(decode_ops(changed(op, 12, 200))) << "a key that is too long";
  HostOp bad = some_op(1);
  for (const double weight : {0.0, 1e9, -1.0, std::numeric_limits<double>::quiet_NaN()}) {
    bad.weight = weight;
    EXPECT_FALSE(decode_ops(encode(TierOps{0, {bad}}))) << weight;
    EXPECT_FALSE(decode_lookup(encode(TierLookup{0, {KeyOrder::kNone, 1, weight}, 0, {key_of(1)}})))
        << weight;
  }
  bad = some_op(1);
  bad.nanos_left = ~std::uint64_t{0};
  EXPECT_FALSE(decode_ops(encode(TierOps{0, {bad}}))) << "a clock would overflow";
  TierState state = some_state();
  state.queue_seconds = -1;
  EXPECT_FALSE(decode_state(encode(state)));
  for (const double seconds : {1e10, std::numeric_limits<double>::infinity()}) {
    HostResult result;
    result.queued_seconds = seconds;
    EXPECT_FALSE(decode_results(encode(TierResults{0, {result}}))) << seconds;
  }
  const Bytes uses = encode(TierUsesFrame{0, true, {}});
  EXPECT_FALSE(decode_uses(changed(uses, 1, 2))) << "a flag that is neither true nor false";
  EXPECT_FALSE(decode_results(changed(encode(TierResults{0, {{}}}), 11, 200))) << "an unknown status";
}

}  // namespace
}  // namespace kv_offload
