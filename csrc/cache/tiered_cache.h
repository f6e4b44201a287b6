// TieredCache: the one place where index, region and tiers meet. It is the
// scheduler-side brain behind vLLM's OffloadingManager.
//
// Threads: one (the scheduler's); no call waits for storage. Tier results are
// polled in end_step() and at the start of lookup passes.
//
// States of a key: ChunkIndex holds what has a row; a tier's catalogue holds
// what is recorded. lookup():
//   resident            -> kHit
//                          (kPending while it must be held back, see load_path.cc)
//   filling, fetching   -> kPending until the request's deadline, then kMiss
//   recorded on a tier  -> kPending, noted; end_step() makes a plan
//   tier says unknown   -> kRetry (bounded by the same deadline); end_step() asks
//                          the tier for all such keys at once
//   else                -> kMiss, with a reason that is counted once per request
//
// Plans (end_step): per waiting request, in the order requests arrived: decide
// load or recompute; reserve rows for the reads or trim the plan to what fits;
// submit; pin what the request already hit. Keys of groups after the first one
// (in lookup order) with pending keys are not fetched in this step, so that
// nothing is read that the agreed prefix does not need; groups that full_groups
// marks are taken together. A request never waits past its deadline.
//
// Failure: a fetch or fill that fails makes the key absent for everybody, with
// the reason, once. prepare_load only ever gets resident chunks and pins them.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/clock.h"
#include "base/types.h"
#include "index/chunk_index.h"
#include "memory/host_region.h"
#include "memory/row_allocator.h"
#include "metrics/metrics.h"
#include "storage/tier.h"

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
  kDisabled
};
std::string_view to_string(MissReason reason);

enum class WritePolicy : std::uint8_t { kThrough, kOnEvict, kReuse, kNever /* others fill it */ };

struct TierSlotOptions {
  WritePolicy write_policy = WritePolicy::kThrough;
  std::uint32_t reuse_threshold = 2;  // for kReuse: 1 to KeyMemory::kMaxSights
};

struct CacheOptions {
  std::vector<GroupGeometry> groups{};  // by position
  std::vector<bool> full_attention{};   // by position; empty = unknown (vLLM <= 0.32)
  // Blocks of the cache that vLLM computes in, shared by all groups; 0 = unknown.
  // See TieredCache::Impl::must_hold_back.
  std::uint32_t cache_blocks = 0;
  std::uint32_t blocks_per_chunk = 1;
  std::string eviction_policy = "lru";
  LoadPolicy load_policy = LoadPolicy::kAuto;
  Nanos lookup_deadline{std::chrono::seconds(5)};
  std::vector<TierSlotOptions> tiers{};  // one per tier
  bool keep_events = false;
};

struct RequestOptions {
  bool load_from_cpu = true;  // kv_load_tiers
  bool load_from_tiers = true;
  bool skip_store = false;
  std::optional<LoadPolicy> load_policy{};
  std::int32_t priority = 0;
};

// What became of one request's prompt, all its admissions together.
struct RequestReport {
  static constexpr std::size_t kPlaces = 9;   // host memory, then the tiers
  static constexpr std::size_t kReasons = 8;  // indexed by MissReason
  using Places = std::array<std::uint64_t, kPlaces>;
  Places hit_tokens{};
  std::array<std::uint64_t, kReasons> miss_tokens{};
  std::string_view choice{};  // of the last decision; empty: there was none to make
  double load_seconds = 0;    // estimated by it; 0 = unknown
  double compute_seconds = 0;
  double waited_seconds = 0;  // measured, until its loads could begin
};

using RequestHandle = std::uint32_t;  // dense, reused after end_request

// What the worker needs: rows of each group, in the order of the keys.
struct RowTransfer {
  Ticket ticket = kNoTicket;
  std::vector<RowId> rows;
  std::vector<std::uint32_t> group_rows;  // rows per group position
};
struct StoreGrant {
  std::vector<std::uint32_t> accepted;  // indices into the keys that were offered, ascending
  RowTransfer transfer;
  std::vector<ChunkKey> evicted;  // left host memory to make room
};

struct CacheEvent {
  std::vector<ChunkKey> keys;
  bool storage = false;  // false: CPU medium
  bool removed = false;
  std::string owner;  // tier name for storage
};

class TieredCache {
 public:
  // The region must have all ranks attached. It lives until the cache is gone and
  // no op of a tier can touch it any more. Throws InvalidArgument (region smaller
  // than one row of each group, unknown policy).
  TieredCache(CacheOptions options, const std::shared_ptr<HostRegion>& region,
              std::vector<std::unique_ptr<Tier>> tiers, Metrics& metrics, const Clock& clock);
  ~TieredCache();  // close()

  // ---- requests
  RequestHandle begin_request(std::string_view request_id, const RequestOptions& options);
  void end_request(RequestHandle request);  // drops its pins and plan
  // Where in its prompt a request's lookups start and how long it is: end
  // positions, in tokens, of the first chunk that is asked for and of its last
  // whole chunk. Without it the cost of computing is taken as that of a prompt's
  // first tokens, and a miss counts its own chunk alone.
  bool knows_span(RequestHandle request) const;
  void set_span(RequestHandle request, std::uint32_t first_end, std::uint32_t last_end);
  // So far; complete once the request ended (until the handle is used again).
  RequestReport report(RequestHandle request) const;

  // ---- vLLM's manager verbs
  LookupResult lookup(RequestHandle request, const ChunkKey& key);
  // -1: host memory by a store; else index of the tier its bytes came from.
  int load_source(const ChunkKey& key) const;
  // REQUIRES: all hit in this step. Pins until complete_load or reset.
  RowTransfer prepare_load(RequestHandle request, std::span<const ChunkKey> keys);
  void complete_load(std::span<const ChunkKey> keys);
  // Accepts a prefix of what is new (keys known in any state with a row are
  // skipped, not declined). The first decline ends it: no holes. When it throws,
  // it has accepted nothing; what it evicted stays evicted.
  StoreGrant prepare_store(RequestHandle request, std::span<const ChunkKey> keys,
                           std::span<const std::uint32_t> depths = {});
  // All ranks reported; the ticket in the control page decides per group
  // whether the keys become resident.
  void complete_store(std::span<const ChunkKey> keys, bool success = true);
  void end_step();                // poll tiers, make plans, expire deadlines, free quarantined rows
  bool has_pending_work() const;  // only while a request waits for us
  void reset();                   // forget everything in memory and on every tier; rows of copies in flight
                                  // are reused only after their tickets are reported
  std::vector<CacheEvent> take_events();

  // ---- figures
  struct Stats {
    std::uint64_t resident_chunks, resident_bytes, capacity_bytes;
    std::uint64_t pinned_chunks, quarantined_rows, waiting_requests, requests;
    std::uint64_t longest_prompt;  // tokens, of those asked for since the start
  };
  Stats stats() const;
  // Chunks of a group that lookups found and that they missed, since the start.
  struct Sights {
    std::uint64_t found = 0, missed = 0;
  };
  std::vector<Sights> sights() const;  // by group position
  void publish_gauges();               // residency, capacities, queue depths into Metrics
  const std::vector<std::unique_ptr<Tier>>& tiers() const;
  void close();  // sheds queued writes, closes tiers. Idempotent

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace kv_offload
