// SPDX-License-Identifier: Apache-2.0
#include "hosts/frame.h"

#include <arpa/inet.h>
#include <sys/random.h>

#include <algorithm>
#include <cassert>
#include <cerrno>
#include <charconv>
#include <cstring>

#include "base/types.h"
#include "hosts/wire.h"

namespace kv_offload {
namespace {

constexpr std::array<std::uint8_t, 8> kMagic = {'k', 'v', 'o', '-', 'h', 'o', 's', 't'};
constexpr std::size_t kLengthBytes = 4, kTagBytes = 32;
constexpr std::size_t kReportBytes = 4 + 8 + 8;
constexpr std::size_t kMostVersion = 255, kMostFingerprint = 4095;

using wire::as_bytes;
using wire::Input;
using wire::put;
using wire::put_bytes;

// Takes the same time wherever the hashes differ.
bool is_equal(ByteSpan a, ByteSpan b) {
  std::uint8_t differences = a.size() == b.size() ? 0 : 1;
  for (std::size_t i = 0; i < std::min(a.size(), b.size()); ++i)
    differences = static_cast<std::uint8_t>(differences | (a[i] ^ b[i]));
  return differences == 0;
}

KeyedHash::Hash hash_of(const KeyedHash& key, ByteSpan bytes) {
  KeyedHash::Hash hash;
  if (!key.of(bytes, &hash)) throw_resource("OpenSSL failed to compute HMAC-SHA256");
  return hash;
}

KeyedHash::Hash derive(const HostSecret& secret, std::string_view purpose, const HostNonce& host,
                       const HostNonce& scheduler) {
  Bytes text;
  put_bytes(&text, as_bytes(purpose));
  put(&text, kHostProtocol);
  put_bytes(&text, host);
  put_bytes(&text, scheduler);
  return hash_of(KeyedHash(secret), text);
}

KeyedHash::Hash tag_of(const KeyedHash& key, std::uint64_t number, ByteSpan frame) {
  Bytes text;
  text.reserve(sizeof number + frame.size());
  put(&text, number);
  put_bytes(&text, frame);
  return hash_of(key, text);
}

// Reads the magic and the version.
bool read_head(Input* input, std::uint32_t* version) {
  if (!is_equal(input->take(kMagic.size()), kMagic)) return false;
  *version = input->number<std::uint32_t>();
  return input->is_good();
}

void put_set(Bytes* body, const RegionSet& set) {
  for (const std::uint64_t half : set) put(body, half);
}
RegionSet read_set(Input* input) {
  RegionSet set;
  for (std::uint64_t& half : set) half = input->number<std::uint64_t>();
  return set;
}

HostNonce nonce_of(ByteSpan bytes) {
  HostNonce nonce{};
  std::copy(bytes.begin(), bytes.end(), nonce.begin());
  return nonce;
}

int digit(char c) {
  if (c >= '0' && c <= '9') return c - '0';
  return c >= 'a' && c <= 'f' ? c - 'a' + 10 : -1;
}

}  // namespace

std::string hosts_problem() {
  if (has_encryption()) return "";
  return "this build has no OpenSSL, which connections between the hosts of one engine need: build it with "
         "OpenSSL's headers installed (libssl-dev, openssl-devel)";
}

std::array<std::uint8_t, 32> random_bytes() {
  std::array<std::uint8_t, 32> bytes{};
  // Requests of up to 256 bytes are never cut short.
  if (::getrandom(bytes.data(), bytes.size(), 0) != static_cast<::ssize_t>(bytes.size()))
    throw_resource("getrandom failed: {}", std::strerror(errno));
  return bytes;
}

// ---- addresses

std::string to_text(const HostEndpoint& endpoint) {
  return fmt::format("{} {} {}", endpoint.address, endpoint.port, hex_of(endpoint.secret));
}

std::optional<HostEndpoint> parse_endpoint(std::string_view text) {
  // ADDRESS PORT SECRET, as to_text() writes them. Numeric addresses only, so that no name is looked up.
  const std::size_t first = text.find(' ');
  const std::size_t second = first == std::string_view::npos ? first : text.find(' ', first + 1);
  if (second == std::string_view::npos) return std::nullopt;
  HostEndpoint endpoint;
  endpoint.address = text.substr(0, first);
  std::array<std::uint8_t, sizeof(in6_addr)> parsed;
  if (::inet_pton(AF_INET, endpoint.address.c_str(), parsed.data()) != 1 &&
      ::inet_pton(AF_INET6, endpoint.address.c_str(), parsed.data()) != 1)
    return std::nullopt;
  const std::string_view port = text.substr(first + 1, second - first - 1);
  const auto [end, error] = std::from_chars(port.data(), port.data() + port.size(), endpoint.port);
  if (error != std::errc() || end != port.data() + port.size() || endpoint.port == 0) return std::nullopt;
  const std::string_view secret = text.substr(second + 1);
  if (secret.size() != 2 * endpoint.secret.size()) return std::nullopt;
  for (std::size_t i = 0; i < endpoint.secret.size(); ++i) {
    const int high = digit(secret[2 * i]), low = digit(secret[2 * i + 1]);
    if (high < 0 || low < 0) return std::nullopt;
    endpoint.secret[i] = static_cast<std::uint8_t>(high << 4 | low);
  }
  return endpoint;
}

// ---- handshake

Bytes make_greeting(const HostNonce& host) {
  Bytes bytes;
  put_bytes(&bytes, kMagic);
  put(&bytes, kHostProtocol);
  put_bytes(&bytes, host);
  return bytes;
}

std::optional<HostNonce> parse_greeting(ByteSpan bytes, std::uint32_t* version) {
  Input input(bytes);
  if (!read_head(&input, version) || *version != kHostProtocol) return std::nullopt;
  const ByteSpan nonce = input.take(sizeof(HostNonce));
  if (!input.ended_well()) return std::nullopt;
  return nonce_of(nonce);
}

Bytes make_answer(const HostSecret& secret, const HostNonce& host, const HostNonce& scheduler) {
  Bytes bytes;
  put_bytes(&bytes, kMagic);
  put(&bytes, kHostProtocol);
  put_bytes(&bytes, scheduler);
  put_bytes(&bytes, derive(secret, "scheduler", host, scheduler));
  return bytes;
}

std::optional<HostNonce> check_answer(const HostSecret& secret, const HostNonce& host, ByteSpan bytes) {
  Input input(bytes);
  std::uint32_t version = 0;
  if (!read_head(&input, &version) || version != kHostProtocol) return std::nullopt;
  const ByteSpan nonce = input.take(sizeof(HostNonce));
  const ByteSpan proof = input.take(sizeof(KeyedHash::Hash));
  if (!input.ended_well()) return std::nullopt;
  const HostNonce scheduler = nonce_of(nonce);
  if (!is_equal(proof, derive(secret, "scheduler", host, scheduler))) return std::nullopt;
  return scheduler;
}

KeyedHash::Hash session_key(const HostSecret& secret, const HostNonce& host, const HostNonce& scheduler) {
  return derive(secret, "session", host, scheduler);
}

KeyedHash::Hash command_key(const HostSecret& secret, const HostNonce& host, const HostNonce& scheduler) {
  return derive(secret, "commands", host, scheduler);
}

// ---- bodies

Bytes encode(const HostJoin& join) {
  Bytes body;
  put(&body, join.bytes);
  put(&body, join.area_bytes);
  put(&body, join.num_areas);
  put(&body, join.num_workers);
  put(&body, join.first_rank);
  put(&body, join.local_ranks);
  const std::string_view version = std::string_view(join.version).substr(0, kMostVersion);
  put(&body, static_cast<std::uint8_t>(version.size()));
  put_bytes(&body, as_bytes(version));
  wire::put_bool(&body, join.keeps_memory);
  put(&body, static_cast<std::uint8_t>(join.kept.origin));
  put_set(&body, join.kept.set);
  return body;
}

std::optional<HostJoin> decode_join(ByteSpan body) {
  Input input(body);
  HostJoin join;
  join.bytes = input.number<std::uint64_t>();
  join.area_bytes = input.number<std::uint64_t>();
  join.num_areas = input.number<std::uint32_t>();
  join.num_workers = input.number<std::uint32_t>();
  join.first_rank = input.number<std::uint32_t>();
  join.local_ranks = input.number<std::uint32_t>();
  join.version = input.text(input.number<std::uint8_t>());
  join.keeps_memory = input.boolean();
  join.kept.origin = static_cast<RegionOrigin>(input.at_most(static_cast<std::uint8_t>(kLastOrigin)));
  join.kept.set = read_set(&input);
  if (!input.ended_well()) return std::nullopt;
  return join;
}

Bytes encode(const GeometryFrame& geometry) {
  Bytes body;
  put(&body, geometry.rank);
  put(&body, static_cast<std::uint32_t>(geometry.geometry.shard_bytes.size()));
  for (const std::uint64_t bytes : geometry.geometry.shard_bytes) put(&body, bytes);
  put(&body, static_cast<std::uint32_t>(geometry.geometry.fingerprint.size()));
  put_bytes(&body, as_bytes(geometry.geometry.fingerprint));
  return body;
}

std::optional<GeometryFrame> decode_geometry(ByteSpan body) {
  Input input(body);
  GeometryFrame decoded;
  decoded.rank = input.number<std::uint32_t>();
  const auto groups = input.number<std::uint32_t>();
  if (groups > input.left() / sizeof(std::uint64_t)) return std::nullopt;
  for (std::uint32_t i = 0; i < groups; ++i)
    decoded.geometry.shard_bytes.push_back(input.number<std::uint64_t>());
  const auto bytes = input.number<std::uint32_t>();
  if (bytes > kMostFingerprint) return std::nullopt;
  decoded.geometry.fingerprint = input.text(bytes);
  if (!input.ended_well()) return std::nullopt;
  return decoded;
}

Bytes encode(std::span<const RankReport> reports) {
  assert(reports.size() <= kMostReports);
  Bytes body;
  body.reserve(reports.size() * kReportBytes);
  for (const RankReport& report : reports) {
    put(&body, report.rank);
    put(&body, report.ticket);
    put(&body, report.failed_groups);
  }
  return body;
}

std::optional<std::vector<RankReport>> decode_reports(ByteSpan body) {
  if (body.size() % kReportBytes != 0 || body.size() / kReportBytes > kMostReports) return std::nullopt;
  Input input(body);
  std::vector<RankReport> reports(body.size() / kReportBytes);
  for (RankReport& report : reports) {
    report.rank = input.number<std::uint32_t>();
    report.ticket = input.number<std::uint64_t>();
    report.failed_groups = input.number<std::uint64_t>();
  }
  return reports;
}

Bytes encode(const RegionSet& set) {
  assert(is_set(set));
  Bytes body;
  put_set(&body, set);
  return body;
}

std::optional<RegionSet> decode_keep_memory(ByteSpan body) {
  Input input(body);
  const RegionSet set = read_set(&input);
  if (!input.ended_well() || !is_set(set)) return std::nullopt;
  return set;
}

Bytes encode(const MemoryKept& kept) {
  Bytes body = encode(kept.set);
  wire::put_bool(&body, kept.is_kept);
  return body;
}

std::optional<MemoryKept> decode_memory_kept(ByteSpan body) {
  Input input(body);
  MemoryKept kept;
  kept.set = read_set(&input);
  kept.is_kept = input.boolean();
  if (!input.ended_well() || !is_set(kept.set)) return std::nullopt;
  return kept;
}

// ---- frames

void FrameWriter::append(FrameType type, ByteSpan body, Bytes* out) {
  assert(body.size() < kMostPayload);
  const std::size_t begin = out->size();
  put(out, static_cast<std::uint32_t>(body.size() + 1));
  put(out, static_cast<std::uint8_t>(type));
  put_bytes(out, body);
  const KeyedHash::Hash tag = tag_of(hash_, number_++, ByteSpan(*out).subspan(begin));
  put_bytes(out, tag);
}

FrameReader::Result FrameReader::next(ByteSpan bytes, FrameType* type, ByteSpan* body, std::size_t* used) {
  Input input(bytes);
  const auto length = input.number<std::uint32_t>();
  if (!input.is_good()) return Result::kIncomplete;
  if (length == 0 || length > kMostPayload) return Result::kBroken;
  const ByteSpan payload = input.take(length);
  const ByteSpan tag = input.take(kTagBytes);
  if (!input.is_good()) return Result::kIncomplete;
  if (!is_equal(tag, tag_of(hash_, number_, bytes.first(kLengthBytes + length)))) return Result::kBroken;
  if (payload[0] < static_cast<std::uint8_t>(FrameType::kJoin) ||
      payload[0] > static_cast<std::uint8_t>(FrameType::kLast))
    return Result::kBroken;
  ++number_;
  *type = static_cast<FrameType>(payload[0]);
  *body = payload.subspan(1);
  *used = kLengthBytes + length + kTagBytes;
  return Result::kFrame;
}

}  // namespace kv_offload
