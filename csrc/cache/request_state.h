// What Requests knows of one live request: what it was answered in its last lookup
// pass, what it waits for and holds, what it offered for storing. Plain data: others
// read it, Requests alone changes it (Offers apart, which a store keeps up).
#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
#include <optional>
#include <unordered_map>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "cache/cache_types.h"
#include "policy/eviction_policy.h"
#include "storage/tier.h"

namespace kv_offload {

// One lookup of a pass, and its answer.
struct Lookup {
  enum class Kind : std::uint8_t { kHit, kFilling, kFetching, kRecorded, kUnknown, kMiss };
  std::uint32_t index = 0;  // kHit, kFilling, kFetching: slot; kRecorded: place in LookupPass::keys;
                            // kReasonLater: in LookupPass::absent
  std::uint16_t group = 0;
  Kind kind = Kind::kMiss;
  std::uint8_t detail = 0;  // kRecorded: tier; kMiss: MissReason or kReasonLater
  static constexpr std::uint8_t kReasonLater = 0xFF;
};

// All lookups of a request in one step, in order.
struct LookupPass {
  struct Recorded {
    ChunkKey key;
    std::uint32_t part_tokens = 0;  // 0: a whole chunk
  };
  static constexpr auto kAllWhole = static_cast<std::size_t>(-1);
  std::uint64_t step = 0;
  Nanos time{0};
  bool pending = false;    // some answer of it was kPending or kRetry
  bool uncounted = false;  // its misses are not counted yet
  bool awaits = false;     // kUnknown are chunks that another server may be writing
  std::vector<Lookup> lookups;
  std::size_t whole = kAllWhole;      // so many of them are of whole chunks; then come parts of one
  std::vector<Recorded> keys;         // of kRecorded
  std::uint32_t part_tokens = 0;      // of the chunk that is looked up now
  std::vector<std::uint64_t> absent;  // fingerprints of misses, for KeyMemory
  std::uint32_t scans = 0;            // of one group each, that came to a key which a tier does not know

  void clear() {
    pending = awaits = false;
    scans = 0;
    whole = kAllWhole;
    lookups.clear();
    keys.clear();
    absent.clear();
  }
  // Frees what clear() keeps for the next pass: some 50 bytes for each chunk of the prompt.
  void release() {
    std::vector<Lookup>().swap(lookups);
    std::vector<Recorded>().swap(keys);
    std::vector<std::uint64_t>().swap(absent);
    clear();
  }
};

// What a request offered for storing, by group: the chunk before the next one, and
// where it found no row.
class Offers {
 public:
  void begin(std::size_t groups) { groups_.assign(groups, {}); }
  // `key` is offered now: the chunk before it in its prefix, 0 when that is not known.
  // vLLM offers a prefix in order, once or from its head again.
  ChunkId follow(std::uint32_t group, const ChunkKey& key, std::uint32_t depth) {
    const Chunk before = std::exchange(groups_[group].last, {chunk_id(key), depth});
    return depth > before.depth ? before.id : 0;
  }
  // It was loaded: what is offered next comes after it.
  void note_loaded(std::uint32_t group, const ChunkKey& key, std::uint32_t depth) {
    groups_[group].last = {chunk_id(key), depth};
  }
  // The end of what was offered so far, in tokens.
  std::uint32_t end(std::uint32_t group) const { return groups_[group].end; }
  void extend(std::uint32_t group, std::uint32_t end) {
    groups_[group].end = std::max(groups_[group].end, end);
  }
  // The first key that finds no row. What follows it is declined too, or there would
  // be holes, until vLLM starts from that key again.
  void decline(std::uint32_t group, const ChunkKey& key) { groups_[group].declined = key; }
  bool is_declined(std::uint32_t group, const ChunkKey& key) {
    auto& declined = groups_[group].declined;
    if (declined && *declined == key) declined.reset();
    return declined.has_value();
  }
  void forget_declined() {
    for (Group& group : groups_) group.declined.reset();
  }

 private:
  struct Chunk {
    ChunkId id = 0;
    std::uint32_t depth = 0;
  };
  struct Group {
    Chunk last;
    std::uint32_t end = 0;
    std::optional<ChunkKey> declined;
  };
  std::vector<Group> groups_;
};

struct RequestState {
  bool live = false;
  std::uint32_t number = 0;  // in order of arrival, never 0
  RequestOptions options;
  LoadPolicy load_policy = LoadPolicy::kAuto;
  LookupPass pass;  // the last one
  RequestReport report;
  Offers offers;

  // ---- waiting: from the first pending answer until it is admitted
  bool waiting = false;      // pins are held; ends with the deadline too
  std::size_t waits_at = 0;  // place among all that wait
  bool expired = false;      // it waits no more: what is not resident is a miss, for this reason
  MissReason expired_for = MissReason::kDeadline;
  Nanos waits_since{0};
  Nanos deadline{0};
  Nanos reads_since{0};           // likewise, or the last pass that came to chunks not written yet
  Nanos load_budget{0};           // for the reads
  Nanos load_budget_end{0};       // computing is cheaper than waiting any longer; 0: no such time
  std::uint32_t fetched_for = 0;  // fetches that it ever awaited in this wait
  std::vector<Slot> held;         // resident, pinned once each for this request
  std::map<OpId, Slot> awaited;   // being fetched, among others for this request; the oldest read first
  std::uint64_t waiter = 0;       // of these reads (TierOps::Waiter)
  bool decided = false;           // load or recompute
  // No (further) fetch for this group, and why.
  std::vector<std::optional<MissReason>> closed;
  // Keys, by their fingerprints, whose fetches failed while it waited: never tried again for it.
  std::unordered_map<std::uint64_t, MissReason> failed;
  // Keys that tiers were asked for, by their fingerprints: once, however old the answer is when it is looked
  // up next. True: it came, and another's question is not waited for.
  std::unordered_map<std::uint64_t, bool> asked;

  std::optional<Nanos> first_lookup;

  // ---- what it is: end positions, in tokens, of the first chunk that was asked for
  // and of its last whole chunk; 0 while not told
  std::uint32_t first_end = 0;
  std::uint32_t last_end = 0;
  bool knows_span = false;
  bool host_too_slow = false;  // copying from host memory takes longer than computing
  bool held_back = false;      // may not load yet: others' loads run
  bool host_hits = false;      // what is resident is a hit

  std::int8_t priority() const { return static_cast<std::int8_t>(std::clamp(options.priority, -1, 1)); }
  EntryInfo about(ChunkId parent, std::uint32_t depth) const {
    return {0, parent, depth, number, priority()};
  }
  // What is absent may come yet.
  bool awaits_records() const { return pass.time - *first_lookup < options.await_records; }
  double waited_seconds() const {  // in this wait
    return waiting || expired ? to_seconds(pass.time - waits_since) : 0;
  }

  void begin(std::uint32_t its_number, const RequestOptions& its_options, LoadPolicy policy,
             std::size_t groups) {
    live = true;
    number = its_number;
    options = its_options;
    load_policy = policy;
    pass.clear();
    pass.uncounted = false;
    pass.step = 0;
    clear_wait();
    failed.clear();
    asked.clear();
    first_lookup.reset();
    first_end = last_end = 0;
    host_too_slow = held_back = host_hits = knows_span = false;
    report = {};
    offers.begin(groups);
    closed.assign(groups, std::nullopt);
  }
  // Its report stays, until the handle is used again; all memory that grew with its prompt is freed now.
  // REQUIRES: held and awaited are given back.
  void end() {
    RequestState ended;
    ended.report = report;
    *this = std::move(ended);
  }
  // REQUIRES: held and awaited are given back.
  void clear_wait() {
    waiting = expired = decided = false;
    deadline = waits_since = reads_since = load_budget = load_budget_end = Nanos(0);
    fetched_for = 0;
    held.clear();
    awaited.clear();
    waiter = 0;
    for (auto& reason : closed) reason.reset();
  }
};

}  // namespace kv_offload
