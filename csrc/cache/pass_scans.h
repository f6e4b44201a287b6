// SPDX-License-Identifier: Apache-2.0
// The scans of a lookup pass: what the outcome of each group depends on, and which chunks could be fetched.
// Pure: reads a pass and changes nothing.
#pragma once

#include <cstdint>
#include <vector>

#include "cache/chunk_groups.h"
#include "cache/cost_model.h"
#include "cache/host_chunks.h"
#include "cache/request_state.h"

namespace kv_offload {

// The last scan of one group.
struct Scan {
  std::uint32_t group = 0;
  std::uint32_t begin = 0, end = 0;  // in LookupPass::lookups
  bool is_prefix = false;            // scanned from the left
  bool pending = false;              // some lookup is filling, fetching, recorded or unknown
  std::vector<Slot> hits, fetching;
  struct Candidate {    // a recorded chunk
    std::uint32_t at;   // index in LookupPass::lookups
    std::uint32_t key;  // index in LookupPass::keys
    std::uint8_t tier;
    ChunkId parent;  // chunk that was looked up before it
  };
  // In a prefix, only candidates with nothing unknown before them. Rows are taken from the left, so a request
  // that is short of rows gets the beginning of its prompt, whatever the order in which its chunks become
  // known.
  std::vector<Candidate> candidates;
  bool ends_unknown = false;  // a prefix only: the lookups after the candidates become known soon
};
using Scans = std::vector<Scan>;

// Returns the scans in lookup order. A miss followed by more lookups of the same scan belongs to a window
// group, which is scanned from the right: chunks seen before that miss are in no complete window and are not
// needed.
Scans scans_of(const LookupPass& pass, const ChunkGroups& groups, const HostChunks& chunks);

// Cost input for loading the first of these scans, with the others fetched alongside.
struct Loadable {
  // Starts at the first chunk that is not in host memory. Groups that are read together add their bytes. An
  // awaited chunk counts as if it were where the first candidate is. For a window group: the whole window,
  // with the tokens of the whole prefix, because the prefix hits are worthless without it.
  std::vector<Stretch> stretches;
  std::uint32_t hits_before = 0;  // chunks
};
// REQUIRES: scans is not empty, and its first scan has candidates.
Loadable loadable_of(const LookupPass& pass, const Scans& scans, const ChunkGroups& groups);

// Drops the candidates that follow the first `tokens` tokens of each scan.
void keep_first(Scans* scans, std::uint64_t tokens, const LookupPass& pass, const ChunkGroups& groups);

}  // namespace kv_offload
