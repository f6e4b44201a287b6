// The scans of a lookup pass: what its outcome depends on, by group, and what of it
// could be fetched. Pure: reads a pass, changes nothing.
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
  bool pending = false;              // something is filling, fetching, recorded or unknown
  std::vector<Slot> hits, fetching;
  struct Candidate {    // is recorded
    std::uint32_t at;   // in LookupPass::lookups
    std::uint32_t key;  // place in LookupPass::keys
    std::uint8_t tier;
    ChunkId parent;  // what was looked up before it
  };
  // Of a prefix only those with nothing unknown before them: rows are taken from the left, so that a prompt
  // which finds too few of them has the beginning of it, in whatever order its chunks become known.
  std::vector<Candidate> candidates;
  bool ends_unknown = false;  // a prefix: what lies behind the candidates is to be known soon
};
using Scans = std::vector<Scan>;

// In lookup order. A miss that is followed by more lookups of the same scan is one of a
// window group, which is scanned from the right: what was seen before it lies in no
// whole window and is not needed.
Scans scans_of(const LookupPass& pass, const ChunkGroups& groups, const HostChunks& chunks);

// What loading the first of these scans would take, the others fetched along with it.
struct Loadable {
  // From its first chunk that is not in host memory on; groups that are read together
  // add their bytes. What is awaited counts as if it were where the first candidate is.
  // Of a window: all of it, or what was found of the prefix is worth nothing.
  std::vector<Stretch> stretches;
  std::uint32_t hits_before = 0;  // chunks
};
// REQUIRES: scans is not empty, and its first scan has candidates.
Loadable loadable_of(const LookupPass& pass, const Scans& scans, const ChunkGroups& groups);

// Drops the candidates that lie behind `tokens`, counted from where each scan began.
void keep_first(Scans* scans, std::uint64_t tokens, const LookupPass& pass, const ChunkGroups& groups);

}  // namespace kv_offload
