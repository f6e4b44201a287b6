// SPDX-License-Identifier: Apache-2.0
// State of one live request in RequestTable: the results of its last lookup pass, what it waits for and
// holds, and what it offered for storing. Plain data: only RequestTable changes it, and other classes read
// it. The exception is Offers, which StorePath updates.
#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <unordered_map>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "cache/cache_types.h"
#include "cache/host_chunks.h"
#include "policy/eviction_policy.h"
#include "tier/tier.h"

namespace kv_offload {

// One lookup of a pass and its result.
struct Lookup {
  enum class Kind : std::uint8_t { kHit, kFilling, kFetching, kRecorded, kUnknown, kMiss };
  std::uint32_t index = 0;  // kHit, kFilling, kFetching: slot; kRecorded: index in LookupPass::keys;
                            // kReasonLater: index in LookupPass::absent
  std::uint16_t group = 0;
  Kind kind = Kind::kMiss;
  std::uint8_t detail = 0;  // kRecorded: tier; kMiss: MissReason or kReasonLater
  static constexpr std::uint8_t kReasonLater = 0xFF;
};

// All lookups of a request in one step, in order.
struct LookupPass {
  struct Recorded {
    ChunkKey key;
    std::uint32_t part_tokens = 0;  // 0 = whole chunk
  };
  static constexpr auto kAllWhole = static_cast<std::size_t>(-1);
  std::uint64_t step = 0;
  Nanos time{0};
  bool pending = false;     // some result was kPending or kRetry
  bool uncounted = false;   // its misses are not counted yet
  bool awaits = false;      // another server may be writing the kUnknown chunks
  std::uint32_t asked = 0;  // tiers that are asked for the last kUnknown chunk, one bit each
  std::vector<Lookup> lookups;
  std::size_t whole = kAllWhole;      // number of lookups of whole chunks; parts of a chunk follow
  std::vector<Recorded> keys;         // for kRecorded
  std::uint32_t part_tokens = 0;      // of the chunk that is being looked up
  std::vector<std::uint64_t> absent;  // fingerprints of misses, for KeyHistory
  std::uint32_t scans = 0;            // scans of one group that reached a key unknown to a tier

  void clear() {
    pending = awaits = false;
    asked = 0;
    scans = 0;
    whole = kAllWhole;
    lookups.clear();
    keys.clear();
    absent.clear();
  }
  // Frees the memory that clear() keeps for the next pass: about 50 bytes per chunk of the prompt.
  void release() {
    std::vector<Lookup>().swap(lookups);
    std::vector<Recorded>().swap(keys);
    std::vector<std::uint64_t>().swap(absent);
    clear();
  }
};

// Offers of a request for storing, by group: the chunk before the next offer, and the first offer that
// found no row.
class Offers {
 public:
  void begin(std::size_t groups) { groups_.assign(groups, {}); }
  // Records that `key` is offered. Returns the chunk before it in its prefix; 0 if unknown. vLLM offers a
  // prefix in order, either once or again from its head.
  ChunkId follow(std::uint32_t group, const ChunkKey& key, std::uint32_t depth) {
    const Chunk before = std::exchange(groups_[group].last, {chunk_id(key), depth});
    return depth > before.depth ? before.id : 0;
  }
  // The chunk was loaded: the next offer follows it.
  void set_last(std::uint32_t group, const ChunkKey& key, std::uint32_t depth) {
    groups_[group].last = {chunk_id(key), depth};
  }
  // Returns the end of the offers so far, in tokens.
  std::uint32_t end(std::uint32_t group) const { return groups_[group].end; }
  void extend(std::uint32_t group, std::uint32_t end) {
    groups_[group].end = std::max(groups_[group].end, end);
  }
  // Records the first key that found no row. Later keys are declined too, which avoids holes, until vLLM
  // offers that key again.
  void decline(std::uint32_t group, const ChunkKey& key) { groups_[group].declined = key; }
  bool is_declined(std::uint32_t group, const ChunkKey& key) {
    auto& declined = groups_[group].declined;
    if (declined && *declined == key) declined.reset();
    return declined.has_value();
  }
  // Records that the chunk has a row, for requests with hints. Keeps the last ones: those of a chain are
  // found from its last one that was not evicted meanwhile.
  void hold(std::uint32_t group, ChunkId id) {
    std::vector<ChunkId>& held = groups_[group].held;
    if (held.size() == 2 * kWindow) held.erase(held.begin(), held.begin() + kWindow);
    held.push_back(id);
  }
  std::span<const ChunkId> held(std::uint32_t group) const { return groups_[group].held; }
  void clear_declined() {
    for (Group& group : groups_) group.declined.reset();
  }

 private:
  static constexpr std::size_t kWindow = 16;  // chunks of a group without a chain that are always kept
  struct Chunk {
    ChunkId id = 0;
    std::uint32_t depth = 0;
  };
  struct Group {
    Chunk last;
    std::uint32_t end = 0;
    std::optional<ChunkKey> declined;
    std::vector<ChunkId> held;
  };
  std::vector<Group> groups_;
};

struct RequestState {
  bool live = false;
  std::uint32_t number = 0;  // in order of arrival, never 0
  RequestOptions options;
  LoadPolicy load_policy = LoadPolicy::kAuto;
  LookupPass pass;  // the last pass
  RequestReport report;
  Offers offers;

  // ---- waiting: from the first pending result until admission
  bool waiting = false;           // holds pins; also ends with the deadline
  std::size_t waiting_index = 0;  // index in RequestTable::waiting_
  bool expired = false;           // stopped waiting: chunks that are not resident miss, with this reason
  MissReason expired_for = MissReason::kDeadline;
  Nanos waited{0};  // used of the timeout since the last admission: see RequestTable::continue_wait
  std::string_view counted_choice;  // the last decision since the last admission
  Nanos waits_since{0};
  Nanos deadline{0};
  Nanos reads_since{0};             // waits_since, or when the time for them began again
  Nanos load_budget{0};             // time allowed for the reads
  Nanos load_budget_end{0};         // recomputing is cheaper than waiting past this; 0 = no limit
  std::uint32_t fetched_for = 0;    // fetches awaited since reads_since
  std::vector<Slot> held;           // resident; each pinned once for this request
  std::map<OpId, Slot> awaited;     // reads in flight that it awaits, oldest first
  std::uint64_t waiter = 0;         // its TierIo::Waiter number for these reads
  bool decided = false;             // load or recompute was decided
  std::uint64_t load_tokens = 0;    // of a partial decision: loads this many tokens of each scan; 0 = all
  std::optional<Nanos> rows_since;  // waits for rows since then; without the time in which vLLM did not ask
  // If set, nothing (more) is fetched for this group, for this reason.
  std::vector<std::optional<MissReason>> closed;
  // Fingerprints of keys whose fetches failed while it waited: they are never fetched again for it.
  std::unordered_map<std::uint64_t, MissReason> failed;
  // Fingerprints of keys that the tiers were asked for. Each key is asked for once, however old the answer is
  // at the next lookup. kAnswered, kFailed: the lookups ended, and the request does not wait for a lookup
  // that another request started.
  enum class TierLookup : std::uint8_t { kAsked, kAnswered, kFailed };  // kFailed: on at least one tier
  std::unordered_map<std::uint64_t, TierLookup> tier_lookups;

  std::optional<Nanos> first_lookup;

  // ---- span: end positions, in tokens, of the first chunk that is looked up and of the last whole chunk; 0
  // until set
  std::uint32_t first_end = 0;
  std::uint32_t last_end = 0;
  bool has_span = false;
  bool host_too_slow = false;  // copying from host memory is slower than recomputing
  bool host_lost = false;      // reports of some ranks cannot arrive: nothing is loaded
  bool held_back = false;      // may not load while loads of other requests run
  bool host_hits = false;      // resident chunks are hits

  std::int8_t priority() const { return static_cast<std::int8_t>(std::clamp(options.priority, -1, 1)); }
  // When its session is expected back, in seconds; 0 = unknown.
  double returns_at(double now) const { return options.returns_in > 0 ? now + options.returns_in : 0; }
  Requester requester() const { return {number, options.tenant}; }
  EntryInfo entry_info(ChunkId parent, std::uint32_t depth) const {
    return {0, parent, depth, number, priority(), 0, options.tenant};
  }
  // True while absent chunks may still be written by another server.
  bool waits_for_remote() const { return pass.time - *first_lookup < options.remote_wait; }
  bool awaits_rows() const { return rows_since && pass.pending; }
  double waited_seconds() const {  // in this wait
    return waiting || expired ? to_seconds(pass.time - waits_since) : 0;
  }

  // REQUIRES: the state is new, or end() was called last. It stays so if memory runs out.
  void begin(std::uint32_t request_number, const RequestOptions& request_options, LoadPolicy policy,
             std::size_t groups) {
    offers.begin(groups);
    closed.assign(groups, std::nullopt);
    number = request_number;
    options = request_options;
    load_policy = policy;
    report = {};
    live = true;
  }
  // Keeps only the report, until the handle is reused, and frees all memory that grew with the prompt.
  // REQUIRES: held and awaited were released.
  void end() {
    RequestState ended;
    ended.report = std::move(report);
    *this = std::move(ended);
  }
  // REQUIRES: held and awaited were released.
  void clear_wait() {
    waiting = expired = decided = false;
    deadline = waited = waits_since = reads_since = load_budget = load_budget_end = Nanos(0);
    rows_since.reset();
    load_tokens = 0;
    fetched_for = 0;
    held.clear();
    awaited.clear();
    waiter = 0;
    for (auto& reason : closed) reason.reset();
  }
};

}  // namespace kv_offload
