// SPDX-License-Identifier: Apache-2.0
// Inputs and outputs of TieredCache: options, results, reports, events.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/clock.h"
#include "base/types.h"
#include "policy/tenant_shares.h"

namespace kv_offload {

enum class LookupResult : std::uint8_t { kMiss, kHit, kPending, kRetry };
enum class LoadPolicy : std::uint8_t { kAuto, kAlways, kNever };

enum class MissReason : std::uint8_t {
  kNotStored,
  kEvicted,
  kRecomputeCheaper,
  kDeadline,
  kCorrupt,
  kIoError,
  kPressure,
  kDisabled,
  kIncomplete,  // vLLM offered the chunk without some of its blocks
  kHostLost     // a host of the engine's ranks is not connected
};
std::string_view to_string(MissReason reason);

enum class WritePolicy : std::uint8_t { kWriteThrough, kOnEvict, kReuse, kReadOnly /* others fill it */ };

struct TierSlotOptions {
  WritePolicy write_policy = WritePolicy::kWriteThrough;
  std::uint32_t reuse_threshold = 2;  // for kReuse: 1 to KeyHistory::kMaxUses
};

struct CacheOptions {
  std::vector<GroupGeometry> groups{};  // by position
  std::vector<bool> full_attention{};   // by position; empty = unknown (vLLM <= 0.32)
  // Blocks of vLLM's GPU KV cache, shared by all groups; 0 = unknown. See DeviceLoads::must_wait.
  std::uint32_t cache_blocks = 0;
  std::uint32_t blocks_per_chunk = 1;
  std::string eviction_policy = "lru";
  LoadPolicy load_policy = LoadPolicy::kAuto;
  Nanos lookup_timeout{std::chrono::seconds(5)};
  std::vector<TierSlotOptions> tiers{};  // one per tier
  bool keep_events = false;
  std::size_t max_sessions = 4096;     // remembered at once
  std::uint64_t max_pinned_bytes = 0;  // of all pin hints; at most half of host memory
  // Not empty: host memory outlives this cache (the region has keep_for), and the next cache with the same
  // identity takes it over. The identity covers everything that the bytes of a chunk depend on.
  std::string keep_identity{};
  // Empty, or the tenants that share host memory. The first one is that of all other requests.
  std::vector<TenantOptions> tenants{};
  // Not empty: engines of this host with the same identity (see keep_identity) read each other's host memory
  // (the region has share_for).
  std::string share_identity{};
  Nanos neighbour_interval{std::chrono::seconds(1)};  // see Neighbours
};

struct RequestOptions {
  static constexpr std::uint8_t kAllTiers = 0xFF;
  bool load_from_cpu = true;            // kv_load_tiers
  std::uint8_t load_tiers = kAllTiers;  // one bit per tier below host memory
  bool skip_store = false;
  std::optional<LoadPolicy> load_policy{};
  std::int32_t priority = 0;
  // How long after the first lookup the request waits for chunks that no tier has, because another server may
  // still be writing them.
  Nanos remote_wait{0};
  std::uint32_t family = 0;  // the session's family: see HostChunks::claim
  std::uint64_t client = 0;  // as in Turn
  // Expected time from now until the session's next request, in seconds: a hint that the request itself
  // carries. Infinity: there is none; 0 = unknown.
  double returns_in = 0;
  TenantId tenant = 0;  // index in CacheOptions::tenants
};

// ---- hints about sessions: see Sessions
// A digest of the session's name, its client and the first chunk of its prompts. Zeros: no session.
struct SessionId {
  std::uint64_t high = 0, low = 0;
  bool operator==(const SessionId&) const = default;
  explicit operator bool() const { return (high | low) != 0; }
};
// The session that a request belongs to.
struct Turn {
  SessionId session{};
  std::uint64_t client = 0;  // a digest of the client's name
};
enum class HintType : std::uint8_t { kResume, kPrefetch, kRelease, kSupersede, kRetain, kPin };
struct Hint {
  HintType type = HintType::kResume;
  SessionId target{};  // none: the prompt of the request
  SessionId trunk{};   // kRelease of a branch: the chunks of this session's newest prompt stay as they are
  // From now. kResume: until the session returns; kRetain, kPin: until the hint ends.
  double seconds = 0;
  std::uint64_t bytes = 0;  // kPin: at most; 0 = as many as the limits allow
};
enum class HintOutcome : std::uint8_t {
  kAccepted,
  kClipped,  // accepted with a smaller amount
  kRejected,
  kMissing  // the target has no chunk in host memory, and none can be prefetched
};
std::string_view to_string(HintOutcome outcome);

// Outcome for one request's prompt, summed over all its admissions.
struct RequestReport {
  static constexpr std::size_t kPlaces = 10;  // host memory, the tiers, host memory of neighbours
  static constexpr std::size_t kNeighbour = kPlaces - 1;
  static constexpr std::size_t kReasons = 10;  // indexed by MissReason
  using Places = std::array<std::uint64_t, kPlaces>;
  Places hit_tokens{};
  static constexpr std::size_t kNeighbourNumbers = 64;  // as many as shared regions can have
  // Hit tokens in memory of neighbours, by the neighbour's number.
  std::array<std::uint64_t, kNeighbourNumbers> neighbour_tokens{};
  std::array<std::uint64_t, kReasons> miss_tokens{};
  std::string_view choice{};  // last decision; empty: no decision was needed
  double load_seconds = 0;    // estimate of that decision; 0 = unknown
  double compute_seconds = 0;
  double waited_seconds = 0;  // measured until the loads could begin
  // Times on the cache's clock; 0 = it did not happen.
  Nanos begun{0}, ended{0};  // begin_request and end_request
  Nanos first_lookup{0};
  Nanos last_lookup{0};  // start of the last pass of lookups
  Nanos decided{0};      // the decision in `choice`
  // Reads that the request waited for and that ended while it waited.
  struct Reads {
    std::uint32_t arrived = 0, failed = 0;  // chunks
    MissReason failure{};                   // of the last failed read
    std::uint64_t bytes = 0;
    Nanos begin{0}, end{0};  // submission of the first one, end of the last one on the device
  };
  std::array<Reads, kPlaces - 1> reads{};  // by tier
  std::uint32_t unfinished_reads = 0;      // cancelled, or in flight when the request stopped waiting
  // Copies from host memory to the device: usually one, and one more after each preemption.
  struct Load {
    Nanos begin{0}, end{0};  // prepare_load and complete_load; end 0: the request ended first
  };
  static constexpr std::size_t kLoads = 4;
  std::array<Load, kLoads> loads{};  // the first ones
  std::uint32_t load_count = 0;      // all
};

inline constexpr std::string_view kNeighbourPlace = "neighbour";  // label of RequestReport::kNeighbour

using RequestHandle = std::uint32_t;  // dense, reused after end_request

// Rows for the worker, per group, in the order of the keys.
struct RowTransfer {
  Ticket ticket = kNoTicket;
  std::vector<RowId> rows;
  std::vector<std::uint32_t> group_rows;  // rows per group position
};
struct StoreGrant {
  std::vector<std::uint32_t> accepted;  // indices into the offered keys, ascending
  RowTransfer transfer;
  std::vector<ChunkKey> evicted;  // evicted from host memory to free rows
};

// Chunks of one group that lookups found and missed since the start.
struct LookupCounts {
  std::uint64_t found = 0, missed = 0;
};

// What one tenant holds in host memory: its chunks in any state, and its share.
struct TenantStats {
  std::string name;
  std::uint64_t bytes = 0, share_bytes = 0;
};

struct CacheEvent {
  std::vector<ChunkKey> keys;
  bool storage = false;  // false: CPU medium
  bool removed = false;
  std::string owner;  // tier name for storage
};

}  // namespace kv_offload
