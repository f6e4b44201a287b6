// SPDX-License-Identifier: Apache-2.0
// Frames: the messages between the scheduler of an engine and its other hosts, over TCP.
//
//   greeting   host to scheduler   magic 8, version 4, nonce 32                      44 bytes
//   answer     scheduler to host   magic 8, version 4, nonce 32, proof 32            76 bytes
//   frames     both directions     payload length 4, type 1, body, tag 32
//
// Integers are little-endian. Each host has a fresh secret of 32 bytes, which only its scheduler receives.
// The proof is the HMAC-SHA256, under the secret, of both nonces. The tag is the HMAC-SHA256, under a key
// derived from the secret and both nonces, one for each direction, of the frame's number and its bytes. So
// neither side accepts a stranger, and a frame that is changed, repeated, left out or moved ends the
// connection. Frames are not encrypted: they contain sizes, job numbers, the settings of the ranks and, for
// tiers, keys of chunks (hashes) and the settings of the engine: no prompts and no KV cache.
//
// Every byte that arrives is hostile until its tag has been checked, and bounded: no length is trusted.
//
// Threads: none; an object belongs to one thread.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "memory/host_region.h"
#include "record/encryption.h"

namespace kv_offload {

using Bytes = std::vector<std::uint8_t>;
using ByteSpan = std::span<const std::uint8_t>;
using HostSecret = std::array<std::uint8_t, 32>;
using HostNonce = std::array<std::uint8_t, 32>;

inline constexpr std::uint32_t kHostProtocol = 5;
inline constexpr std::size_t kGreetingBytes = 44, kAnswerBytes = 76;
inline constexpr std::size_t kMostPayload = 32768;  // of a frame: type and body
inline constexpr std::size_t kMostReports = 1024;   // in a frame

// Returns why this build cannot connect the hosts of an engine; empty if it can.
std::string hosts_problem();
// Returns 32 random bytes from the kernel. Throws ResourceError.
std::array<std::uint8_t, 32> random_bytes();

// ---- addresses: "127.0.0.1 4711 <secret in hex>"
struct HostEndpoint {
  std::string address;  // numeric, IPv4 or IPv6
  std::uint16_t port = 0;
  HostSecret secret{};
};
std::string to_text(const HostEndpoint& endpoint);
std::optional<HostEndpoint> parse_endpoint(std::string_view text);

// ---- handshake
Bytes make_greeting(const HostNonce& host);
// Returns nothing unless these are kGreetingBytes of a greeting; *version is set if the magic is right.
std::optional<HostNonce> parse_greeting(ByteSpan bytes, std::uint32_t* version);
// Throw ResourceError if OpenSSL fails.
Bytes make_answer(const HostSecret& secret, const HostNonce& host, const HostNonce& scheduler);
// Returns the scheduler's nonce if the answer proves that the scheduler has the secret.
std::optional<HostNonce> check_answer(const HostSecret& secret, const HostNonce& host, ByteSpan bytes);
// The keys of the frames that the host sends, and of those that the scheduler sends.
KeyedHash::Hash session_key(const HostSecret& secret, const HostNonce& host, const HostNonce& scheduler);
KeyedHash::Hash command_key(const HostSecret& secret, const HostNonce& host, const HostNonce& scheduler);

// ---- frames
enum class FrameType : std::uint8_t {
  kJoin = 1,  // the first frame: values that must be equal on all hosts
  kGeometry,  // of one rank
  kReports,   // results of jobs
  kReady,     // everything known so far has been sent
  kAlive,     // sent when there is nothing else to send
  kLeaving,   // the last one: the host shuts down
  kMemoryKept,
  // ---- about tiers, from the host (tier_frames.h)
  kTiersOpened,
  kOpsEnded,  // no op of an earlier connection is running: ops may be sent
  kResults,
  kAnswers,
  kRemovals,
  kResetDone,
  kState,
  // ---- from the scheduler, about tiers
  kOpenTiers,
  kOps,
  kCancel,
  kLookup,
  kUses,
  kReset,
  // ---- from the scheduler, about other things
  kKeepMemory,      // let the region outlive the engine, in this set
  kSchedulerAlive,  // sent when there is nothing else to send
  kLast = kSchedulerAlive,
};
inline bool is_of_scheduler(FrameType type) { return type >= FrameType::kOpenTiers; }

struct HostJoin {
  std::uint64_t bytes = 0, area_bytes = 0;  // as in RegionOptions and HostRegion
  std::uint32_t num_areas = 0, num_workers = 0, first_rank = 0, local_ranks = 0;
  std::string version;  // of this package, at most 255 bytes
  bool keeps_memory = false;
  KeptRegion kept{};  // keeps_memory: what the host has of an earlier engine
  bool operator==(const HostJoin&) const = default;
};
// The answer to kKeepMemory, whose body is the set.
struct MemoryKept {
  RegionSet set{};
  bool is_kept = false;  // false: the region ends with the engine (HostRegion::keep)
  bool operator==(const MemoryKept&) const = default;
};
struct GeometryFrame {
  std::uint32_t rank = 0;
  RankGeometry geometry;
};

Bytes encode(const HostJoin& join);
Bytes encode(const GeometryFrame& geometry);
Bytes encode(std::span<const RankReport> reports);  // at most kMostReports
Bytes encode(const RegionSet& set);                 // REQUIRES: is_set(set)
Bytes encode(const MemoryKept& kept);               // REQUIRES: is_set(kept.set)
// Return nothing for bytes that encode() does not produce.
std::optional<HostJoin> decode_join(ByteSpan body);
std::optional<GeometryFrame> decode_geometry(ByteSpan body);
std::optional<std::vector<RankReport>> decode_reports(ByteSpan body);
std::optional<RegionSet> decode_keep_memory(ByteSpan body);
std::optional<MemoryKept> decode_memory_kept(ByteSpan body);

class FrameWriter {
 public:
  explicit FrameWriter(const KeyedHash::Hash& key) : hash_(key) {}
  // Appends a frame to *out. Throws ResourceError if OpenSSL fails. REQUIRES: body.size() < kMostPayload.
  void append(FrameType type, ByteSpan body, Bytes* out);

 private:
  KeyedHash hash_;
  std::uint64_t number_ = 0;
};

class FrameReader {
 public:
  enum class Result : std::uint8_t { kIncomplete, kFrame, kBroken };
  explicit FrameReader(const KeyedHash::Hash& key) : hash_(key) {}
  // Takes the next frame from the front of `bytes`. kFrame: *type and *body are set, and *used bytes belong
  // to the frame. kBroken: the bytes are no frame of this connection; do not read on.
  Result next(ByteSpan bytes, FrameType* type, ByteSpan* body, std::size_t* used);

 private:
  KeyedHash hash_;
  std::uint64_t number_ = 0;
};

}  // namespace kv_offload
