// SPDX-License-Identifier: Apache-2.0
// EvictionPolicy: decides which chunk to evict next. One small interface for host memory and for each tier;
// it sees slots (dense numbers chosen by its owner), not keys.
//
// PINS belong to the owner (a pinned slot is never a victim); ORDER belongs to the policy. Every call is O(1)
// or O(log n), growth included. Not thread-safe: the owner serialises calls.
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

// Number of a tenant, see TenantShares. 0: the tenant of all other requests, or tenants are not configured.
using TenantId = std::uint8_t;

// Facts about an entry and the request that stores or hits it. Everything except `id` is a hint: 0 if
// unknown.
struct EntryInfo {
  ChunkId id = 0;
  ChunkId parent = 0;         // the previous chunk of its prefix, without which it is useless
  std::uint32_t depth = 0;    // how much prefix precedes it
  std::uint32_t request = 0;  // number of the request
  std::int8_t priority = 0;   // of the request: below 0 is evicted first, above 0 last
  // When the entry's session is expected back, in seconds on the owner's clock; infinity: it does not return.
  double returns_at = 0;
  TenantId tenant = 0;  // that the entry is charged to
};

class TenantShares;

class EvictionPolicy {
 public:
  virtual ~EvictionPolicy() = default;
  // Adds an entry, unpinned and most recent. REQUIRES: the slot is unknown. All other calls require a known
  // slot. If memory runs out, throws, and the slot stays unknown.
  virtual void insert(Slot slot, const EntryInfo& info) = 0;
  // A hit: a request uses the entry. `info`: the entry and the request that hits it. If memory runs out,
  // throws, and the entry keeps its place; so do the next two calls.
  virtual void access(Slot slot, const EntryInfo& info) = 0;
  // Makes the entry as recent as a hit does, without a request for it (it was used elsewhere).
  virtual void refresh(Slot slot, const EntryInfo& info) { access(slot, info); }
  // Gives an entry that was inserted without an id its id, and makes it as recent as a new one.
  virtual void identify(Slot slot, const EntryInfo& info) { refresh(slot, info); }
  // A hint: whether a slower tier has this entry too, which makes it cheaper to get back. False after
  // insert().
  virtual void set_recorded(Slot, bool) {}
  // The time in seconds on the owner's clock, called before a step; never less than in the last call.
  virtual void set_now(double /*seconds*/) {}
  // A hint: replaces EntryInfo::returns_at of the entry.
  virtual void set_return(Slot, double /*returns_at*/, ChunkId) {}
  // A hint that this chunk will be inserted or hit soon, so that its data can be fetched into the CPU cache.
  virtual void prefetch(ChunkId) const {}
  // Removes an entry, pinned or not.
  virtual void erase(Slot slot) = 0;
  // Gives the entry the priority of `info`, also a lower one, as if it were new there. If memory runs out,
  // throws, and the entry keeps its place and its priority.
  virtual void set_priority(Slot slot, const EntryInfo& info) { refresh(slot, info); }
  // A pinned slot keeps its place in the order but is never returned by victim(). Calls do not nest: the
  // owner counts. unpin() does not throw: if memory runs out, the slot has another place in the order.
  virtual void pin(Slot slot) = 0;
  virtual void unpin(Slot slot) = 0;
  // Returns the next unpinned entry to evict, or nullopt. Does not remove it. (May reorder internally, as a
  // clock does.)
  virtual std::optional<Slot> victim() = 0;
  // True if victim() may return nothing although unpinned entries are left.
  virtual bool is_restricted() const { return false; }
  // Hides the victim until put_back(), to see which entry would be evicted after it. REQUIRES: the slot is
  // the victim. Until then only victim() and further set_aside() calls are allowed; put back in reverse
  // order. Neither throws: if memory runs out, an entry has another place in the order.
  virtual void set_aside(Slot slot) { pin(slot); }
  virtual void put_back(Slot slot) { unpin(slot); }
  virtual std::string_view name() const = 0;
};

// Returns a policy by name, applied within the levels of EntryInfo::priority (priorities.h). Throws
// InvalidArgument naming the known ones.
std::unique_ptr<EvictionPolicy> make_eviction_policy(std::string_view name);
// Returns that policy for each tenant, within these shares (per_tenant.h).
std::unique_ptr<EvictionPolicy> make_tenant_policy(std::string_view name,
                                                   std::shared_ptr<const TenantShares> shares);
std::vector<std::string> eviction_policy_names();

}  // namespace kv_offload
