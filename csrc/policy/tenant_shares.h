// SPDX-License-Identifier: Apache-2.0
// TenantShares: how many bytes of one bounded memory each tenant holds, and its share of them.
//
// The owner of the memory charges and refunds bytes. PerTenant reads the excess of each tenant to choose
// whose entry is evicted next.
//
// Not thread-safe: the owner serialises calls.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "policy/eviction_policy.h"

namespace kv_offload {

// One tenant of a cache. Tenant 0 holds everything of requests that belong to no other tenant.
struct TenantOptions {
  std::string name;
  double share = 0;  // fraction of the memory that is guaranteed, 0 to 1
};

class TenantShares {
 public:
  static constexpr std::size_t kMaxTenants = 32;
  static constexpr double kMinWeight = 0.01;

  // Throws InvalidArgument (no tenant, too many, a share outside of 0 to 1, more than 1 together).
  TenantShares(std::span<const TenantOptions> tenants, std::uint64_t capacity_bytes);

  std::size_t size() const { return shares_.size(); }
  std::uint64_t used(TenantId tenant) const { return static_cast<std::uint64_t>(used_[tenant]); }
  std::uint64_t share(TenantId tenant) const { return static_cast<std::uint64_t>(shares_[tenant]); }
  const std::string& name(TenantId tenant) const { return names_[tenant]; }
  // Returns the tenant's part of a bandwidth. Tenants without a share get a little, so that their ops end.
  double weight(TenantId tenant) const { return std::max(fractions_[tenant], kMinWeight); }
  double fraction(TenantId tenant) const { return fractions_[tenant]; }
  void charge(TenantId tenant, std::uint64_t bytes) { used_[tenant] += static_cast<std::int64_t>(bytes); }
  void refund(TenantId tenant, std::uint64_t bytes) { used_[tenant] -= static_cast<std::int64_t>(bytes); }
  // Divides another size from now on. O(tenants).
  void set_capacity(std::uint64_t bytes);
  std::uint64_t used() const;  // by all tenants
  // Returns the bytes that the tenant holds above its share; negative: below it.
  std::int64_t excess(TenantId tenant) const { return used_[tenant] - shares_[tenant]; }
  // True if an entry of `bytes` that is charged to `from` and used by `to` is charged to `to` from now on.
  // `from` is above its share, and stays above `to` after the change, so the charge does not alternate.
  bool should_move(TenantId from, TenantId to, std::uint64_t bytes) const {
    return from != to && excess(from) > 0 &&
           excess(from) - static_cast<std::int64_t>(bytes) >= excess(to) + static_cast<std::int64_t>(bytes);
  }

  // ---- the tenant that needs memory, from here to its end. None: no particular tenant.
  class Request {
   public:
    Request(TenantShares& shares, TenantId tenant, std::uint64_t bytes) : shares_(shares) {
      shares_.has_requester_ = true;
      shares_.requester_ = tenant;
      shares_.requested_ = static_cast<std::int64_t>(bytes);
    }
    ~Request() { shares_.has_requester_ = false; }
    Request(const Request&) = delete;
    Request& operator=(const Request&) = delete;

   private:
    TenantShares& shares_;
  };
  bool is_requester(TenantId tenant) const { return has_requester_ && tenant == requester_; }
  // Returns the excess of the tenant after the request.
  std::int64_t excess_after(TenantId tenant) const {
    return excess(tenant) + (is_requester(tenant) ? requested_ : 0);
  }
  // True if an entry of this tenant may be evicted for the request: the tenant is the requester, or at least
  // as far above its share as the requester would be.
  bool may_take_from(TenantId tenant) const {
    return !has_requester_ || tenant == requester_ || excess(tenant) >= excess_after(requester_);
  }

 private:
  std::vector<std::string> names_;
  std::vector<double> fractions_;
  std::vector<std::int64_t> shares_, used_;  // bytes
  bool has_requester_ = false;
  TenantId requester_ = 0;
  std::int64_t requested_ = 0;
};

}  // namespace kv_offload
