// SPDX-License-Identifier: Apache-2.0
// PerTenant: applies any policy separately to the entries of each tenant (EntryInfo::tenant), within the
// shares of TenantShares.
//
// The victim is an entry of the tenant that is furthest above its share, chosen by that tenant's own policy.
// If that tenant has no victim, the next one is asked. While a tenant requests memory
// (TenantShares::Request), only itself and tenants that are at least as far above their shares give up
// entries. So shares that are not used are lent to the others, and are taken back by the next requests of
// their tenant. A tenant below its share gives up nothing to a tenant above its own.
//
// Separate policies also keep the learned reuse and the ages of one tenant's entries independent of the
// others: a tenant that holds exactly its share is served as by a cache of that size.
//
// An access for another tenant (EntryInfo::tenant differs) moves the entry to that tenant's policy. The owner
// decides when (TenantShares::should_move), and charges the bytes.
//
// victim(): O(tenants) more than the policy's own. The other calls: O(1) more. Memory: 3 bytes per slot.
#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "base/segmented_vector.h"
#include "policy/eviction_policy.h"
#include "policy/tenant_shares.h"

namespace kv_offload {

class PerTenant final : public EvictionPolicy {
 public:
  // `make` is called for a tenant when its first entry is inserted.
  using Make = std::function<std::unique_ptr<EvictionPolicy>()>;
  PerTenant(Make make, std::shared_ptr<const TenantShares> shares);

  void insert(Slot slot, const EntryInfo& info) override;
  void access(Slot slot, const EntryInfo& info) override;
  void refresh(Slot slot, const EntryInfo& info) override { of(slot).refresh(slot, info); }
  void identify(Slot slot, const EntryInfo& info) override { of(slot).identify(slot, info); }
  void set_priority(Slot slot, const EntryInfo& info) override { of(slot).set_priority(slot, info); }
  void set_recorded(Slot slot, bool recorded) override;
  void set_now(double seconds) override;
  void set_return(Slot slot, double returns_at, ChunkId id) override {
    of(slot).set_return(slot, returns_at, id);
  }
  void prefetch(ChunkId id) const override { policies_[last_]->prefetch(id); }
  void erase(Slot slot) override;
  void pin(Slot slot) override;
  void unpin(Slot slot) override;
  std::optional<Slot> victim() override;
  bool is_restricted() const override { return true; }
  void set_aside(Slot slot) override;
  void put_back(Slot slot) override;
  std::string_view name() const override { return policies_[0]->name(); }

 private:
  struct State {
    TenantId tenant = 0;
    bool pinned = false;
    bool recorded = false;
  };
  EvictionPolicy& of(Slot slot) { return *policies_[states_[slot].tenant]; }
  EvictionPolicy& make_policy(TenantId tenant);
  std::int64_t excess_of(TenantId tenant) const;

  Make make_;
  const std::shared_ptr<const TenantShares> shares_;
  std::vector<std::unique_ptr<EvictionPolicy>> policies_;  // by tenant; null until its first entry
  std::vector<std::size_t> known_, aside_;                 // entries by tenant; of these: set aside
  SegmentedVector<State> states_;
  TenantId last_ = 0;  // of the last inserted or used entry, for prefetch()
  double now_ = -1;    // until the first set_now(): then a new policy has no clock either
};

}  // namespace kv_offload
