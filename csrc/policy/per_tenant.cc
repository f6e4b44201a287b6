// SPDX-License-Identifier: Apache-2.0
#include "policy/per_tenant.h"

#include <utility>

#include "base/steps.h"

namespace kv_offload {

PerTenant::PerTenant(Make make, std::shared_ptr<const TenantShares> shares)
    : make_(std::move(make)), shares_(std::move(shares)) {
  policies_.resize(shares_->size());
  known_.resize(shares_->size());
  aside_.resize(shares_->size());
  policies_[0] = make_();
}

EvictionPolicy& PerTenant::make_policy(TenantId tenant) {
  if (!policies_[tenant]) {
    auto made = make_();
    made->set_now(now_);
    policies_[tenant] = std::move(made);
  }
  return *policies_[tenant];
}

void PerTenant::insert(Slot slot, const EntryInfo& info) {
  states_.grow_to(std::size_t{slot} + 1);
  make_policy(info.tenant).insert(slot, info);  // the last call that may throw
  states_[slot] = {.tenant = info.tenant};
  ++known_[info.tenant];
  last_ = info.tenant;
}

void PerTenant::access(Slot slot, const EntryInfo& info) {
  State& state = states_[slot];
  if (info.tenant == state.tenant) {
    of(slot).access(slot, info);
    last_ = info.tenant;
    return;
  }
  make_policy(info.tenant).insert(slot, info);  // first, because it may throw
  of(slot).erase(slot);
  --known_[state.tenant];
  ++known_[info.tenant];
  state.tenant = last_ = info.tenant;
  if (state.recorded) of(slot).set_recorded(slot, true);
  if (state.pinned) of(slot).pin(slot);
}

void PerTenant::set_recorded(Slot slot, bool recorded) {
  states_[slot].recorded = recorded;
  of(slot).set_recorded(slot, recorded);
}

void PerTenant::set_now(double seconds) {
  now_ = seconds;
  for (const auto& policy : policies_) {
    if (policy) policy->set_now(seconds);
  }
}

void PerTenant::erase(Slot slot) {
  of(slot).erase(slot);
  --known_[states_[slot].tenant];
  states_[slot] = State{};
}

void PerTenant::pin(Slot slot) {
  states_[slot].pinned = true;
  of(slot).pin(slot);
}

void PerTenant::unpin(Slot slot) {
  states_[slot].pinned = false;
  of(slot).unpin(slot);
}

// Entries that are set aside count as evicted. They have the average size of the tenant's entries.
std::int64_t PerTenant::excess_of(TenantId tenant) const {
  const std::int64_t excess = shares_->excess_after(tenant);
  if (aside_[tenant] == 0) return excess;
  return excess - static_cast<std::int64_t>(shares_->used(tenant) / known_[tenant] * aside_[tenant]);
}

std::optional<Slot> PerTenant::victim() {
  static_assert(TenantShares::kMaxTenants <= 32);
  std::uint32_t asked = 0;  // one bit per tenant
  for (;;) {
    std::optional<TenantId> furthest;
    std::int64_t most = 0;
    for (std::size_t i = 0; i < policies_.size(); ++i) {
      const auto tenant = static_cast<TenantId>(i);
      count_steps(1);
      if (known_[i] == 0 || (asked >> i & 1) != 0 || !shares_->may_take_from(tenant)) continue;
      const std::int64_t excess = excess_of(tenant);
      // Of equal ones the requester itself gives up an entry.
      if (furthest && excess <= most && !(excess == most && shares_->is_requester(tenant))) continue;
      furthest = tenant;
      most = excess;
    }
    if (!furthest) return std::nullopt;
    if (const auto victim = policies_[*furthest]->victim()) return victim;
    asked |= std::uint32_t{1} << *furthest;
  }
}

void PerTenant::set_aside(Slot slot) {
  of(slot).set_aside(slot);
  ++aside_[states_[slot].tenant];
}

void PerTenant::put_back(Slot slot) {
  of(slot).put_back(slot);
  --aside_[states_[slot].tenant];
}

}  // namespace kv_offload
