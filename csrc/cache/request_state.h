// What TieredCache knows of one live request: what it saw in its last lookup
// pass, what it waits for and holds, what it may not be promised any more.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "cache/tiered_cache.h"

namespace kv_offload {

// One lookup of a pass.
struct Sight {
  enum class Kind : std::uint8_t { kHit, kFilling, kFetching, kRecorded, kUnknown, kMiss };
  std::uint32_t index = 0;  // kHit, kFilling, kFetching: slot; kRecorded: place in pass_keys;
                            // kWhyLater: in pass_absent
  std::uint16_t group = 0;
  Kind kind = Kind::kMiss;
  std::uint8_t detail = 0;  // kRecorded: tier; kMiss: MissReason or kWhyLater
  static constexpr std::uint8_t kWhyLater = 0xFF;
};

struct RequestState {
  bool live = false;
  std::uint32_t number = 0;  // in order of arrival, never 0
  RequestOptions options;
  LoadPolicy load_policy = LoadPolicy::kAuto;

  // ---- the last lookup pass: all lookups of one step, in order
  std::uint64_t pass_step = 0;
  Nanos pass_time{0};
  bool pass_pending = false;  // some answer of it was kPending or kRetry
  bool unsettled = false;     // its misses are not counted yet
  std::vector<Sight> pass;
  std::vector<ChunkKey> pass_keys;
  std::vector<std::uint64_t> pass_absent;  // fingerprints, for KeyMemory

  // ---- waiting: from the first pending answer until it is admitted
  bool waiting = false;  // pins are held; ends with the deadline too
  bool expired = false;  // it waits no more: what is not resident is a miss, for this reason
  MissReason expired_for = MissReason::kDeadline;
  Nanos waits_since{0};
  Nanos deadline{0};
  Nanos patience{0};              // after this computing is cheaper than waiting on; 0: no such time
  std::uint32_t fetched_for = 0;  // fetches that it ever awaited in this wait
  std::vector<Slot> held;         // resident, pinned once each for this request
  std::vector<Slot> awaited;      // being fetched, among others for this request
  bool decided = false;           // load or recompute
  // No (further) fetch for this group, and why.
  std::vector<std::optional<MissReason>> closed;
  // Fetches that failed while it waited: never tried again for it.
  struct Failed {
    std::uint64_t fingerprint;
    MissReason reason;
  };
  std::vector<Failed> failed;

  // ---- what it is: end positions, in tokens, of the first chunk that was asked for
  // and of its last whole chunk; 0 while not told
  std::uint32_t first_end = 0;
  std::uint32_t last_end = 0;
  bool knows_span = false;
  bool host_dear = false;  // copying from host memory takes longer than computing
  bool held_back = false;  // may not load yet: others' loads run
  bool host_hits = false;  // what is resident is a hit

  RequestReport report;

  // ---- storing: per group, the end of what was offered so far
  std::vector<std::uint32_t> offered_end;
  // The first key of each group that found no row. What follows it
  // is declined too, until it is offered again.
  std::vector<std::optional<ChunkKey>> declined;
  // The chunk of each group that was offered last: the one before the next.
  struct Offered {
    ChunkId id = 0;
    std::uint32_t depth = 0;
  };
  std::vector<Offered> offered;

  std::int8_t priority() const { return static_cast<std::int8_t>(std::clamp(options.priority, -1, 1)); }
  EntryInfo about(ChunkId parent, std::uint32_t depth) const {
    return {0, parent, depth, number, priority()};
  }
  // `key` is offered now: the chunk before it in its prefix, 0 when that is not known.
  // vLLM offers a prefix in order, once or from its head again.
  ChunkId follow(std::uint32_t group, const ChunkKey& key, std::uint32_t depth) {
    const Offered before = std::exchange(offered[group], {chunk_id(key), depth});
    return depth > before.depth ? before.id : 0;
  }

  void begin(std::uint32_t its_number, const RequestOptions& its_options, LoadPolicy policy,
             std::size_t groups) {
    live = true;
    number = its_number;
    options = its_options;
    load_policy = policy;
    clear_pass();
    unsettled = false;
    pass_step = 0;
    clear_wait();
    failed.clear();
    first_end = last_end = 0;
    host_dear = held_back = host_hits = knows_span = false;
    report = {};
    offered_end.assign(groups, 0);
    declined.assign(groups, std::nullopt);
    offered.assign(groups, {});
    closed.assign(groups, std::nullopt);
  }
  void clear_pass() {
    pass_pending = false;
    pass.clear();
    pass_keys.clear();
    pass_absent.clear();
  }
  // REQUIRES: held and awaited are given back.
  void clear_wait() {
    waiting = expired = decided = false;
    deadline = waits_since = patience = Nanos(0);
    fetched_for = 0;
    held.clear();
    awaited.clear();
    for (auto& reason : closed) reason.reset();
  }
};

}  // namespace kv_offload
