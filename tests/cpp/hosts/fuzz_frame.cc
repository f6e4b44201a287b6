// SPDX-License-Identifier: Apache-2.0
// libFuzzer target for the messages between the hosts of one engine. A decoded body is encoded to the same
// bytes again, and frames are found only in bytes with a valid tag. Clang only (CMake: fuzz_frame).
#include <algorithm>
#include <cstdlib>
#include <string_view>

#include "hosts/frame.h"
#include "hosts/tier_frames.h"

namespace {

using namespace kv_offload;

void check(bool holds) {
  if (!holds) std::abort();
}

void check_bodies(ByteSpan body) {
  const auto is_body = [&](const Bytes& bytes) {
    return ByteSpan(bytes).size() == body.size() && std::equal(bytes.begin(), bytes.end(), body.begin());
  };
  if (const auto join = decode_join(body)) check(is_body(encode(*join)));
  if (const auto geometry = decode_geometry(body)) check(is_body(encode(*geometry)));
  if (const auto reports = decode_reports(body)) check(is_body(encode(*reports)));
  if (const auto set = decode_keep_memory(body)) check(is_body(encode(*set)));
  if (const auto kept = decode_memory_kept(body)) check(is_body(encode(*kept)));
  if (const auto frame = decode_open_tiers(body)) check(is_body(encode(*frame)));
  if (const auto frame = decode_ops(body)) check(is_body(encode(*frame)));
  if (const auto frame = decode_cancel(body)) check(is_body(encode(*frame)));
  if (const auto frame = decode_lookup(body)) check(is_body(encode(*frame)));
  if (const auto frame = decode_uses(body)) check(is_body(encode(*frame)));
  if (const auto frame = decode_reset(body)) check(is_body(encode(*frame)));
  if (const auto frame = decode_tiers_opened(body)) check(is_body(encode(*frame)));
  if (const auto frame = decode_results(body)) check(is_body(encode(*frame)));
  if (const auto frame = decode_answers(body)) check(is_body(encode(*frame)));
  if (const auto frame = decode_removals(body)) check(is_body(encode(*frame)));
  if (const auto frame = decode_reset_done(body)) check(is_body(encode(*frame)));
  if (const auto frame = decode_state(body)) check(is_body(encode(*frame)));
}

}  // namespace

// The last byte chooses how the input is used.
extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  if (size == 0) return 0;
  const ByteSpan input(data, size - 1);
  const KeyedHash::Hash key = {1};
  switch (data[size - 1] % 4) {
    case 0:
      check_bodies(input);
      break;
    case 1: {  // the body of a frame with a valid tag, then anything
      const std::size_t body_bytes = input.empty() ? 0 : input[0] % input.size();
      Bytes frame;
      FrameWriter(key).append(FrameType::kReports, input.first(body_bytes), &frame);
      const std::size_t frame_bytes = frame.size();
      frame.insert(frame.end(), input.begin(), input.end());
      FrameReader reader(key);
      FrameType type{};
      ByteSpan body;
      std::size_t used = 0;
      check(reader.next(frame, &type, &body, &used) == FrameReader::Result::kFrame && used == frame_bytes);
      check(type == FrameType::kReports && body.size() == body_bytes);
      check(reader.next(ByteSpan(frame).subspan(used), &type, &body, &used) != FrameReader::Result::kFrame);
      break;
    }
    case 2: {
      std::uint32_t version = 0;
      (void)parse_greeting(input, &version);
      check(!check_answer(HostSecret{1}, HostNonce{2}, input));
      break;
    }
    default: {
      const auto endpoint = parse_endpoint({reinterpret_cast<const char*>(input.data()), input.size()});
      if (endpoint) check(parse_endpoint(to_text(*endpoint)).has_value());
    }
  }
  return 0;
}
