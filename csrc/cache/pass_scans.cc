// SPDX-License-Identifier: Apache-2.0
#include "cache/pass_scans.h"

#include <algorithm>

namespace kv_offload {
namespace {

using Kind = Lookup::Kind;

// Returns the chunk of this lookup; 0 if it was not recorded.
ChunkId chunk_of(const LookupPass& pass, const Lookup& lookup, const HostChunks& chunks) {
  switch (lookup.kind) {
    case Kind::kHit:
    case Kind::kFilling:
    case Kind::kFetching: {  // the slot may have been released since: then it is absent
      const ChunkEntry& entry = chunks.at(lookup.index);
      return entry.state == ChunkState::kAbsent ? 0 : chunk_id(entry.key);
    }
    case Kind::kRecorded:
      return chunk_id(pass.keys[lookup.index].key);
    case Kind::kUnknown:
    case Kind::kMiss:
      break;
  }
  return 0;
}

void add(Scan* scan, const LookupPass& pass, std::size_t at, ChunkId before) {
  const Lookup& lookup = pass.lookups[at];
  switch (lookup.kind) {
    case Kind::kHit:
      scan->hits.push_back(lookup.index);
      break;
    case Kind::kFetching:
      scan->fetching.push_back(lookup.index);
      break;
    case Kind::kRecorded:
      if (scan->ends_unknown) break;
      scan->candidates.push_back({static_cast<std::uint32_t>(at), lookup.index, lookup.detail, before});
      break;
    case Kind::kUnknown:
      scan->ends_unknown = scan->is_prefix;
      break;
    case Kind::kMiss:
    case Kind::kFilling:
      break;
  }
  scan->pending |= lookup.kind != Kind::kHit && lookup.kind != Kind::kMiss;
}

}  // namespace

Scans scans_of(const LookupPass& pass, const ChunkGroups& groups, const HostChunks& chunks) {
  Scans scans;
  const std::vector<Lookup>& lookups = pass.lookups;
  for (std::size_t begin = 0, end = 0; begin < lookups.size(); begin = end) {
    const std::uint16_t group = lookups[begin].group;
    while (end < lookups.size() && lookups[end].group == group) ++end;
    std::erase_if(scans, [&](const Scan& scan) { return scan.group == group; });
    Scan& scan = scans.emplace_back();
    scan.group = group;
    const bool full_attention = groups[group].full_attention;
    // If vLLM does not report which groups have a window, those follow the others.
    scan.is_prefix = full_attention || (!groups.kinds_are_known() && scans.size() == 1);
    ChunkId before = 0;
    for (std::size_t i = begin; i < end; ++i) {
      if (lookups[i].kind == Kind::kMiss && i + 1 < end && !full_attention) {
        scan = Scan{};  // not a prefix
        scan.group = group;
      }
      add(&scan, pass, i, before);
      before = full_attention ? chunk_of(pass, lookups[i], chunks) : 0;
    }
    scan.begin = static_cast<std::uint32_t>(begin);
    scan.end = static_cast<std::uint32_t>(end);
  }
  return scans;
}

Loadable loadable_of(const LookupPass& pass, const Scans& scans, const ChunkGroups& groups) {
  const Scan& first = scans.front();
  const std::uint32_t tokens = groups[first.group].tokens;
  std::uint64_t chunk_bytes = 0;
  for (const Scan& scan : scans) chunk_bytes += groups[scan.group].bytes * tokens / groups[scan.group].tokens;
  Loadable loadable;
  std::vector<Stretch>& stretches = loadable.stretches;
  const auto add_chunk = [&](std::int32_t tier) {
    if (stretches.empty() || stretches.back().tier != tier) stretches.push_back({tier, 0, 0, 0});
    Stretch& last = stretches.back();
    ++last.chunks;
    last.tokens += tokens;
    last.bytes += chunk_bytes;
  };
  if (!first.is_prefix) {
    for (const Scan::Candidate& candidate : first.candidates) add_chunk(candidate.tier);
    const std::uint16_t prefix = pass.lookups.front().group;
    const auto lookups = std::find_if(pass.lookups.begin(), pass.lookups.end(),
                                      [&](const Lookup& lookup) { return lookup.group != prefix; }) -
                         pass.lookups.begin();
    stretches.back().tokens =
        std::max(stretches.back().tokens, static_cast<std::uint64_t>(lookups) * groups[prefix].tokens);
    return loadable;
  }
  for (std::uint32_t i = first.begin; i < first.end; ++i) {
    const Lookup& lookup = pass.lookups[i];
    if (lookup.kind == Kind::kMiss || (lookup.kind == Kind::kUnknown && !pass.awaits)) break;
    if (lookup.kind == Kind::kHit && stretches.empty()) {
      ++loadable.hits_before;
    } else if (lookup.kind == Kind::kUnknown) {  // arrives next, from the tier of the first candidate
      add_chunk(first.candidates.front().tier);
    } else {
      add_chunk(lookup.kind == Kind::kRecorded ? lookup.detail : Stretch::kHostMemory);
    }
  }
  return loadable;
}

void keep_first(Scans* scans, std::uint64_t tokens, const LookupPass& pass, const ChunkGroups& groups) {
  for (Scan& scan : *scans) {
    const std::uint64_t end =
        std::min<std::uint64_t>(scan.end, scan.begin + tokens / groups[scan.group].tokens);
    std::size_t kept = 0;
    for (std::uint32_t i = scan.begin; i < end; ++i) kept += pass.lookups[i].kind == Kind::kRecorded;
    if (kept < scan.candidates.size()) scan.candidates.resize(kept);
  }
}

}  // namespace kv_offload
