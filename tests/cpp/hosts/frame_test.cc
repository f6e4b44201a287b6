// SPDX-License-Identifier: Apache-2.0
#include "hosts/frame.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

namespace kv_offload {
namespace {

using Result = FrameReader::Result;

constexpr KeyedHash::Hash kKey = {1, 2, 3};

struct Taken {
  Result result = Result::kBroken;
  FrameType type{};
  Bytes body;
  std::size_t used = 0;
};

Taken take(FrameReader& reader, ByteSpan bytes) {
  Taken taken;
  ByteSpan body;
  taken.result = reader.next(bytes, &taken.type, &body, &taken.used);
  if (taken.result == Result::kFrame) taken.body.assign(body.begin(), body.end());
  return taken;
}

Bytes frame_of(FrameType type, ByteSpan body) {
  Bytes bytes;
  FrameWriter(kKey).append(type, body, &bytes);
  return bytes;
}

const std::vector<RankReport> kReports = {{1, 2, 3}, {4, ~std::uint64_t{0}, 0}};

TEST(Frames, arrive_with_their_type_and_body_in_order) {
  FrameWriter writer(kKey);
  FrameReader reader(kKey);
  Bytes bytes;
  writer.append(FrameType::kAlive, {}, &bytes);
  writer.append(FrameType::kReports, encode(kReports), &bytes);
  const Taken first = take(reader, bytes);
  ASSERT_EQ(first.result, Result::kFrame);
  EXPECT_EQ(first.type, FrameType::kAlive);
  const Taken second = take(reader, ByteSpan(bytes).subspan(first.used));
  ASSERT_EQ(second.result, Result::kFrame);
  EXPECT_EQ(second.type, FrameType::kReports);
  EXPECT_EQ(second.body, encode(kReports));
  EXPECT_EQ(first.used + second.used, bytes.size());
}

TEST(Frames, a_part_of_a_frame_is_incomplete) {
  const Bytes bytes = frame_of(FrameType::kReports, encode(kReports));
  for (std::size_t size = 0; size < bytes.size(); ++size) {
    FrameReader reader(kKey);
    ASSERT_EQ(take(reader, ByteSpan(bytes).first(size)).result, Result::kIncomplete) << size;
  }
}

TEST(Frames, a_changed_byte_is_never_accepted) {
  const Bytes bytes = frame_of(FrameType::kReports, encode(kReports));
  for (std::size_t at = 0; at < bytes.size(); ++at) {
    for (const std::uint8_t bit : {0x01, 0x80}) {
      Bytes changed = bytes;
      changed[at] ^= bit;
      changed.resize(changed.size() + kMostPayload + 64);  // so that a longer length is not incomplete
      FrameReader reader(kKey);
      ASSERT_EQ(take(reader, changed).result, Result::kBroken) << at;
    }
  }
}

TEST(Frames, a_frame_that_is_repeated_left_out_or_moved_is_refused) {
  FrameWriter writer(kKey);
  Bytes first, second;
  writer.append(FrameType::kAlive, {}, &first);
  writer.append(FrameType::kAlive, {}, &second);
  FrameReader repeated(kKey), skipped(kKey);
  EXPECT_EQ(take(repeated, first).result, Result::kFrame);
  EXPECT_EQ(take(repeated, first).result, Result::kBroken);
  EXPECT_EQ(take(skipped, second).result, Result::kBroken);
}

TEST(Frames, a_frame_of_another_connection_is_refused) {
  const HostSecret secret = {7};
  const HostNonce host = {1}, first = {2}, second = {3};
  Bytes bytes;
  FrameWriter(session_key(secret, host, first)).append(FrameType::kAlive, {}, &bytes);
  FrameReader reader(session_key(secret, host, second));
  EXPECT_EQ(take(reader, bytes).result, Result::kBroken);
}

TEST(Frames, a_length_out_of_range_is_refused_before_its_bytes_arrive) {
  for (const std::uint32_t length : {0u, static_cast<std::uint32_t>(kMostPayload) + 1, 0xFFFFFFFFu}) {
    const Bytes bytes = {static_cast<std::uint8_t>(length), static_cast<std::uint8_t>(length >> 8),
                         static_cast<std::uint8_t>(length >> 16), static_cast<std::uint8_t>(length >> 24)};
    FrameReader reader(kKey);
    EXPECT_EQ(take(reader, bytes).result, Result::kBroken) << length;
  }
}

TEST(Frames, an_unknown_type_is_refused) {
  for (const int type : {0, static_cast<int>(FrameType::kLast) + 1, 255}) {
    FrameReader reader(kKey);
    EXPECT_EQ(take(reader, frame_of(static_cast<FrameType>(type), {})).result, Result::kBroken) << type;
  }
}

TEST(FrameBodies, are_decoded_as_they_were_encoded) {
  HostJoin join{1ull << 40, 1ull << 39, 2, 4, 2, 2, "0.1.0", true, {RegionOrigin::kInUse, {5, 1ull << 63}}};
  EXPECT_EQ(decode_join(encode(join)), join);
  join.kept = {};
  EXPECT_EQ(decode_join(encode(join)), join);
  const RegionSet set{1, ~std::uint64_t{0}};
  EXPECT_EQ(decode_keep_memory(encode(set)), set);
  for (const bool is_kept : {false, true})
    EXPECT_EQ(decode_memory_kept(encode(MemoryKept{set, is_kept})), (MemoryKept{set, is_kept}));
  const GeometryFrame geometry{3, {{4096, 100}, "layout"}};
  const auto decoded = decode_geometry(encode(geometry));
  ASSERT_TRUE(decoded);
  EXPECT_EQ(decoded->rank, 3u);
  EXPECT_EQ(decoded->geometry.shard_bytes, geometry.geometry.shard_bytes);
  EXPECT_EQ(decoded->geometry.fingerprint, "layout");
  const auto reports = decode_reports(encode(kReports));
  ASSERT_TRUE(reports);
  ASSERT_EQ(reports->size(), 2u);
  EXPECT_EQ(reports->at(1).rank, 4u);
  EXPECT_EQ(reports->at(1).ticket, ~std::uint64_t{0});
  EXPECT_EQ(reports->at(0).failed_groups, 3u);
}

TEST(FrameBodies, a_body_that_is_too_short_or_too_long_is_refused) {
  const Bytes join = encode(HostJoin{1, 2, 3, 4, 5, 6, "7"});
  const Bytes geometry = encode(GeometryFrame{3, {{4096, 100}, "layout"}});
  const Bytes reports = encode(kReports);
  for (std::size_t size = 0; size < join.size(); ++size)
    EXPECT_FALSE(decode_join(ByteSpan(join).first(size))) << size;
  for (std::size_t size = 0; size < geometry.size(); ++size)
    EXPECT_FALSE(decode_geometry(ByteSpan(geometry).first(size))) << size;
  EXPECT_FALSE(decode_reports(ByteSpan(reports).first(reports.size() - 1)));
  for (Bytes longer : {join, geometry}) {
    longer.push_back(0);
    EXPECT_FALSE(decode_join(longer));
    EXPECT_FALSE(decode_geometry(longer));
  }
}

TEST(FrameBodies, about_kept_memory_with_values_that_no_host_sends_are_refused) {
  Bytes join = encode(HostJoin{1, 2, 3, 4, 5, 6, "7", true, {RegionOrigin::kAdopted, {8, 9}}});
  const std::size_t origin = join.size() - sizeof(RegionSet) - 1;
  join[origin] = static_cast<std::uint8_t>(kLastOrigin) + 1;
  EXPECT_FALSE(decode_join(join));
  join[origin] = 0;
  EXPECT_TRUE(decode_join(join));
  join[origin - 1] = 2;  // neither true nor false
  EXPECT_FALSE(decode_join(join));
  const Bytes set = encode(RegionSet{1, 2});
  for (std::size_t size = 0; size < set.size(); ++size)
    EXPECT_FALSE(decode_keep_memory(ByteSpan(set).first(size))) << size;
  Bytes kept = encode(MemoryKept{{1, 2}, true});
  EXPECT_FALSE(decode_keep_memory(kept)) << "longer";
  for (std::size_t size = 0; size < kept.size(); ++size)
    EXPECT_FALSE(decode_memory_kept(ByteSpan(kept).first(size))) << size;
  kept.back() = 2;
  EXPECT_FALSE(decode_memory_kept(kept));
  kept.back() = 1;
  kept[0] = 0;
  EXPECT_FALSE(decode_memory_kept(kept)) << "no set";
  EXPECT_FALSE(decode_keep_memory(Bytes(sizeof(RegionSet)))) << "no set";
}

TEST(FrameBodies, counts_beyond_the_bytes_that_arrived_allocate_nothing) {
  Bytes groups = {0, 0, 0, 0, 0xFF, 0xFF, 0xFF, 0xFF};
  EXPECT_FALSE(decode_geometry(groups));
  EXPECT_FALSE(decode_reports(Bytes((kMostReports + 1) * 20)));
}

TEST(HostHandshake, both_sides_derive_one_key_from_the_secret) {
  const HostSecret secret = random_bytes();
  const HostNonce host = random_bytes(), scheduler = random_bytes();
  std::uint32_t version = 0;
  EXPECT_EQ(parse_greeting(make_greeting(host), &version), host);
  EXPECT_EQ(version, kHostProtocol);
  EXPECT_EQ(check_answer(secret, host, make_answer(secret, host, scheduler)), scheduler);
}

TEST(HostHandshake, each_direction_of_a_connection_has_a_key_of_its_own) {
  const HostSecret secret = {1};
  const HostNonce host = {2}, scheduler = {3};
  Bytes bytes;
  FrameWriter(command_key(secret, host, scheduler)).append(FrameType::kReset, {}, &bytes);
  FrameReader orders(command_key(secret, host, scheduler)), results(session_key(secret, host, scheduler));
  EXPECT_EQ(take(orders, bytes).result, Result::kFrame);
  EXPECT_EQ(take(results, bytes).result, Result::kBroken) << "an order could be sent back as a result";
}

TEST(HostHandshake, an_answer_without_the_secret_or_for_another_connection_is_refused) {
  const HostSecret secret = {1}, other = {2};
  const HostNonce host = {3}, scheduler = {4};
  EXPECT_FALSE(check_answer(secret, host, make_answer(other, host, scheduler)));
  EXPECT_FALSE(check_answer(secret, host, make_answer(secret, HostNonce{5}, scheduler)));
  const Bytes answer = make_answer(secret, host, scheduler);
  for (std::size_t at = 0; at < answer.size(); ++at) {
    Bytes changed = answer;
    changed[at] ^= 0x10;
    EXPECT_FALSE(check_answer(secret, host, changed)) << at;
  }
  EXPECT_FALSE(check_answer(secret, host, ByteSpan(answer).first(answer.size() - 1)));
}

TEST(HostHandshake, a_greeting_of_another_program_or_version_is_refused) {
  std::uint32_t version = 0;
  Bytes greeting = make_greeting({1});
  EXPECT_FALSE(parse_greeting(ByteSpan(greeting).first(greeting.size() - 1), &version));
  greeting[8] = kHostProtocol + 1;
  EXPECT_FALSE(parse_greeting(greeting, &version));
  EXPECT_EQ(version, kHostProtocol + 1);
  version = 0;
  greeting[0] = 'H';
  EXPECT_FALSE(parse_greeting(greeting, &version));
  EXPECT_EQ(version, 0u);
}

TEST(HostEndpoints, are_parsed_from_their_text) {
  for (const char* address : {"10.0.0.2", "fe80::1"}) {
    const HostEndpoint endpoint{address, 65535, {0xAB, 1}};
    const auto parsed = parse_endpoint(to_text(endpoint));
    ASSERT_TRUE(parsed);
    EXPECT_EQ(parsed->address, address);
    EXPECT_EQ(parsed->port, 65535);
    EXPECT_EQ(parsed->secret, endpoint.secret);
  }
}

TEST(HostEndpoints, other_text_is_refused) {
  const std::string secret(64, 'a');
  EXPECT_TRUE(parse_endpoint("10.0.0.2 1 " + secret));
  const std::vector<std::string> others = {"",
                                           "10.0.0.2",
                                           "10.0.0.2 1",
                                           "host 1 " + secret,
                                           "10.0.0.2 0 " + secret,
                                           "10.0.0.2 65536 " + secret,
                                           "10.0.0.2 -1 " + secret,
                                           "10.0.0.2 1x " + secret,
                                           "10.0.0.2 1 " + secret + "a",
                                           "10.0.0.2 1 " + std::string(64, 'g'),
                                           " 1 " + secret};
  for (const std::string& text : others) {
    EXPECT_FALSE(parse_endpoint(text)) << text;
  }
}

}  // namespace
}  // namespace kv_offload
