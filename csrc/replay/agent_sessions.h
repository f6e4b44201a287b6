// SPDX-License-Identifier: Apache-2.0
// Merges recorded agent sessions into one trace, as a closed loop would run them: a fixed number of sessions
// is active, and the next session begins when one ends. Time is simulated. Requests take as long as recorded,
// whatever a cache saves, so the order of the requests is the same for every cache.
//
// A session has streams: the agent and its sub-agents. A stream runs one request at a time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "replay/trace_replay.h"

namespace kv_offload {

// Requests are in the order of their recorded times within a session. All vectors without "ends" have one
// element per request.
struct AgentSessions {
  std::vector<std::uint32_t> session_ends;  // end of each session's requests
  std::vector<std::uint32_t> streams;       // numbers within the session
  std::vector<double> durations;            // seconds from the request to its last token
  // Seconds before the request: since the end of the previous request of its stream, or, for the first
  // request of a stream, since the begin of the previous request of the session.
  std::vector<double> pauses;
  std::vector<std::uint32_t> common;      // first blocks, the same as in the previous request of the stream
  std::vector<std::uint64_t> new_ends;    // end of the request's other blocks
  std::vector<std::uint64_t> new_blocks;  // equal numbers mean equal prefixes
};

struct MergeOptions {
  std::vector<std::uint32_t> order{};  // of the sessions
  std::size_t active = 32;
  double max_pause = 300;
  std::size_t chunk_blocks = 8;  // the trace has chunks in place of blocks; rests of prompts are left out
};

struct MergedSessions {
  Trace trace;                          // with times
  std::vector<std::uint32_t> requests;  // their positions in AgentSessions
  // Different chunks in the prompts of all streams that run or pause, averaged over the requests. An average
  // over time would be too low: after the last session began, few streams run for a long time.
  double needed_chunks = 0;
  std::size_t different_chunks = 0;
};

// Throws InvalidArgument if the vectors do not fit together, or if an option is 0.
MergedSessions merge_sessions(const AgentSessions& sessions, const MergeOptions& options);

}  // namespace kv_offload
