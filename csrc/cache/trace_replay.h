// Replays request traces through the index, the eviction policies and a tier's
// catalogue, without a byte of memory or storage behind them: what would have
// been hit, stored and written at given capacities. Requests come one after the
// other; what one stores the next may hit. One block of the trace is one chunk.
//
// The verbs are TieredCache's: a lookup from the left up to the first miss,
// eviction in the policy's order but never of the request's own prefix, the deepest
// chunk first. (A test replays a trace through both.)
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "cache/tiered_cache.h"

namespace kv_offload {

// The blocks of each request's prompt, in order. Equal numbers are equal prefixes.
struct Trace {
  std::vector<std::uint32_t> ends;    // of each request's blocks
  std::vector<std::uint64_t> blocks;  // of all requests, one after the other

  std::size_t size() const { return ends.size(); }
  std::span<const std::uint64_t> request(std::size_t i) const {
    const std::size_t begin = i == 0 ? 0 : ends[i - 1];
    return {blocks.data() + begin, ends[i] - begin};
  }
};

struct ReplayOptions {
  std::size_t host_chunks = 0;
  std::size_t tier_chunks = 0;  // 0: no tier
  std::string eviction_policy = "lru";
  std::string tier_eviction_policy = "lru";
  TierSlotOptions tier{};  // its write policy
  // Not 0: after so many requests the process is killed and started again. Host memory is empty then, unless
  // it is kept; of the tier's records the new process knows the order, and no request that used them.
  std::size_t kill_after = 0;
  std::size_t recent_requests = 50;  // before the kill: what is left of their prompts is counted
  // Host memory outlives the kill: what it holds, and in which order it was used.
  bool keep_host_memory = false;
};

struct ReplayResult {
  std::uint64_t requests = 0;
  std::uint64_t blocks = 0;
  std::uint64_t host_hits = 0;  // blocks
  std::uint64_t tier_hits = 0;
  std::uint64_t stored = 0;         // in host memory
  std::uint64_t declined = 0;       // found no row
  std::uint64_t evicted = 0;        // from host memory
  std::uint64_t written = 0;        // to the tier
  std::uint64_t tier_declined = 0;  // not written: it would have taken the place of its own prompt
  std::uint64_t tier_evicted = 0;
  // Of the kill: records on the tier; blocks of the recent prompts, and how many of them hit if they were all
  // asked for again at once; blocks asked for from then on, and hit.
  std::uint64_t killed_with = 0;
  std::uint64_t recent_blocks = 0, recent_hits = 0;
  std::uint64_t blocks_after = 0, hits_after = 0;
};

// Throws InvalidArgument (a capacity of 0, an unknown policy, ends that are not in order, a kill after the
// end).
ReplayResult replay(const Trace& trace, const ReplayOptions& options);

// The most that any cache of so many blocks could hit: it knows the future (Belady),
// and does not take in what will not come back in time.
std::uint64_t optimal_hits(const Trace& trace, std::size_t capacity);

}  // namespace kv_offload
