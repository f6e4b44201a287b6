// EvictionPolicy: which chunk goes next. One small interface for host memory
// and for each tier; it sees slots (dense numbers chosen by its owner), not keys.
//
// Two ideas, kept apart: PINS belong to the owner (a pinned slot is never a
// victim), ORDER belongs to the policy. Every call is O(1) or O(log n).
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

struct EntryInfo {
  const ChunkKey* key = nullptr;  // for policies with a ghost list; valid during the call
  std::uint64_t bytes = 0;
  std::uint32_t depth = 0;    // chunks before this one in its prefix; 0 if unknown
  std::int32_t priority = 0;  // request hint: higher stays longer; 0 = normal
};

class EvictionPolicy {
 public:
  virtual ~EvictionPolicy() = default;
  // REQUIRES: unknown. A new entry, unpinned, most recent. All others: known.
  virtual void insert(Slot slot, const EntryInfo& info) = 0;
  // A hit (lookup that led to a load, or a load).
  virtual void access(Slot slot) = 0;
  // Gone for any reason. Pinned or not.
  virtual void erase(Slot slot) = 0;
  // A pinned slot keeps its place in the order but is never returned by
  // victim(). Calls do not nest: the owner counts.
  virtual void pin(Slot slot) = 0;
  virtual void unpin(Slot slot) = 0;
  // The next to go among the unpinned, or nothing. Does not remove it. (May
  // reorder internally, as a clock does.)
  virtual std::optional<Slot> victim() = 0;
  virtual std::string_view name() const = 0;
};

// Throws InvalidArgument naming the known ones. capacity_hint: entries expected.
std::unique_ptr<EvictionPolicy> make_eviction_policy(std::string_view name, std::size_t capacity_hint);
std::vector<std::string> eviction_policy_names();

}  // namespace kv_offload
