// SPDX-License-Identifier: Apache-2.0
// Replays request traces through the index, the eviction policies and a tier's catalog, without any data in
// memory or storage. Reports what would have been hit, stored and written at given capacities. Requests run
// one after the other, so a request may hit what an earlier one stored. One block of the trace is one chunk.
//
// The rules are those of TieredCache: lookups from the left up to the first miss; eviction in the policy's
// order, but never from the request's own prefix; deepest chunk first. (A test replays a trace through both.)
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "cache/cache_types.h"
#include "policy/eviction_policy.h"

namespace kv_offload {

// When a request runs, in seconds since the start of the trace.
struct RequestTimes {
  double begins = 0;
  double ends = 0;
  double returns_at = 0;       // begin of the next request of its stream; infinity: there is none
  std::uint32_t shared = 0;    // first blocks of its prompt that other sessions use, too
  std::uint32_t previous = 0;  // 1 + the previous request of its stream; 0: there is none
};

// The blocks of each request's prompt, in order. Equal numbers mean equal prefixes.
struct Trace {
  std::vector<std::uint32_t> ends;    // end of each request's blocks
  std::vector<std::uint64_t> blocks;  // blocks of all requests, one after the other
  std::vector<RequestTimes> times{};  // empty, or one per request, ordered by begin

  std::size_t size() const { return ends.size(); }
  std::span<const std::uint64_t> request(std::size_t i) const {
    const std::size_t begin = i == 0 ? 0 : ends[i - 1];
    return {blocks.data() + begin, ends[i] - begin};
  }
};

struct ReplayOptions {
  std::size_t host_chunks = 0;
  std::size_t tier_chunks = 0;  // 0 = no tier
  std::string eviction_policy = "lru";
  std::string tier_eviction_policy = "lru";
  TierSlotOptions tier{};  // write policy of the tier
  // Not 0: the process is killed and restarted after this many requests. Host memory is then empty unless it
  // is kept. The new process knows the order of the tier's records, but not the requests that used them.
  std::size_t kill_after = 0;
  std::size_t recent_requests = 50;  // last ones before the kill, whose remaining blocks are counted
  // Host memory outlives the kill, with its chunks and their order of use.
  bool keep_host_memory = false;
  // For a trace with times: the hint of each request, as EntryInfo::returns_at; 0: no hint. It is given to
  // the policy of host memory for the blocks that only this session uses. Empty: no hints.
  std::vector<double> hints{};
  // The hints come after the requests. Otherwise the requests carry them, so that they count while it runs.
  bool late_hints = false;
  // Prompts that a hint expects back are read from the tier before their return.
  bool prefetch = true;
  double tier_chunks_per_second = 0;  // speed of these reads; 0: they take no time
  std::function<std::unique_ptr<EvictionPolicy>(std::string_view)> make_policy = make_eviction_policy;
};

struct ReplayResult {
  std::uint64_t requests = 0;
  std::uint64_t blocks = 0;
  std::uint64_t host_hits = 0;  // blocks
  std::uint64_t tier_hits = 0;
  std::uint64_t stored = 0;         // in host memory
  std::uint64_t declined = 0;       // no row was found
  std::uint64_t evicted = 0;        // from host memory
  std::uint64_t written = 0;        // to the tier
  std::uint64_t tier_declined = 0;  // not written: would have replaced records of the same prompt
  std::uint64_t tier_evicted = 0;
  std::uint64_t prefetched = 0, prefetched_used = 0;  // read from the tier before a return; hit after that
  // Results of a kill: records on the tier; blocks of the recent prompts, and how many of them would hit if
  // all were requested again at once; blocks requested after the kill, and their hits.
  std::uint64_t killed_with = 0;
  std::uint64_t recent_blocks = 0, recent_hits = 0;
  std::uint64_t blocks_after = 0, hits_after = 0;
  std::vector<std::uint32_t> host_hits_of, tier_hits_of;  // of each request
};

// Throws InvalidArgument (a capacity of 0, an unknown policy, unsorted ends, a kill after the end of the
// trace, hints without times).
ReplayResult replay(const Trace& trace, const ReplayOptions& options);

// Returns the most hits that any cache of `capacity` blocks could have: it knows the future (Belady) and does
// not admit blocks that are not reused in time.
std::uint64_t optimal_hits(const Trace& trace, std::size_t capacity);

}  // namespace kv_offload
