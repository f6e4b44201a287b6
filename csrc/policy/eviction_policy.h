// EvictionPolicy: which chunk goes next. One small interface for host memory
// and for each tier; it sees slots (dense numbers chosen by its owner), not keys.
//
// Two ideas, kept apart: PINS belong to the owner (a pinned slot is never a
// victim), ORDER belongs to the policy. Every call is O(1) or O(log n), growing included.
// Not thread-safe: its owner serialises.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/types.h"

namespace kv_offload {

using Slot = std::uint32_t;

// A chunk's key in 64 bits, the same in host memory and on every tier; never 0.
using ChunkId = std::uint64_t;
inline ChunkId chunk_id(const ChunkKey& key) { return ChunkKey::Hash{}(key) | 1; }

// What is known of an entry and of the request that stores or hits it. All of it
// but `id` is a hint: 0 where it is not known.
struct EntryInfo {
  ChunkId id = 0;
  ChunkId parent = 0;         // the chunk before it in its prefix, without which it is worth nothing
  std::uint32_t depth = 0;    // how much prefix lies before it
  std::uint32_t request = 0;  // number of the request
  std::int8_t priority = 0;   // of the request: below 0 goes first, above 0 last
};

class EvictionPolicy {
 public:
  virtual ~EvictionPolicy() = default;
  // REQUIRES: unknown. A new entry, unpinned, most recent. All others: known.
  virtual void insert(Slot slot, const EntryInfo& info) = 0;
  // A hit: a request uses it. `info`: of the entry, with the request that hits it.
  virtual void access(Slot slot, const EntryInfo& info) = 0;
  // As recent as after a hit, though nobody asked for it (it was used elsewhere).
  virtual void refresh(Slot slot, const EntryInfo& info) { access(slot, info); }
  // A hint: a slower tier has this entry too, so that it costs less to have it again; or has it no more.
  // After insert() it has not.
  virtual void set_recorded(Slot, bool) {}
  // A hint that this chunk is inserted or hit soon: what is known of it may be far away.
  virtual void prefetch(ChunkId) const {}
  // Gone for any reason. Pinned or not.
  virtual void erase(Slot slot) = 0;
  // A pinned slot keeps its place in the order but is never returned by
  // victim(). Calls do not nest: the owner counts.
  virtual void pin(Slot slot) = 0;
  virtual void unpin(Slot slot) = 0;
  // The next to go among the unpinned, or nothing. Does not remove it. (May
  // reorder internally, as a clock does.)
  virtual std::optional<Slot> victim() = 0;
  // To see what goes after the victim: as if it were gone, until it is put back.
  // REQUIRES: it is the victim. No other calls meanwhile but victim() and set_aside() of
  // further ones; the last of them is put back first.
  virtual void set_aside(Slot slot) { pin(slot); }
  virtual void put_back(Slot slot) { unpin(slot); }
  virtual std::string_view name() const = 0;
};

// A policy of this name, within the levels of EntryInfo::priority (priorities.h).
// Throws InvalidArgument naming the known ones.
std::unique_ptr<EvictionPolicy> make_eviction_policy(std::string_view name);
std::vector<std::string> eviction_policy_names();

}  // namespace kv_offload
