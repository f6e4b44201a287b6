// SPDX-License-Identifier: Apache-2.0
#include "policy/tenant_shares.h"

#include <numeric>

#include "base/status.h"

namespace kv_offload {
namespace {

constexpr double kRounding = 1e-9;  // shares are given in percent

}  // namespace

TenantShares::TenantShares(std::span<const TenantOptions> tenants, std::uint64_t capacity_bytes) {
  if (tenants.empty() || tenants.size() > kMaxTenants) {
    throw_invalid("{} tenants were given; possible: 1 to {}", tenants.size(), kMaxTenants);
  }
  double sum = 0;
  for (const TenantOptions& tenant : tenants) {
    if (!(tenant.share >= 0 && tenant.share <= 1)) {
      throw_invalid("the share of tenant '{}' is {}; possible: 0 to 1", tenant.name, tenant.share);
    }
    sum += tenant.share;
    names_.push_back(tenant.name);
    fractions_.push_back(tenant.share);
  }
  if (sum > 1 + kRounding) throw_invalid("the shares of all tenants are {} together; at most 1", sum);
  used_.assign(tenants.size(), 0);
  shares_.resize(tenants.size());
  set_capacity(capacity_bytes);
}

void TenantShares::set_capacity(std::uint64_t bytes) {
  for (std::size_t i = 0; i < shares_.size(); ++i)
    shares_[i] = static_cast<std::int64_t>(fractions_[i] * static_cast<double>(bytes));
}

std::uint64_t TenantShares::used() const {
  return static_cast<std::uint64_t>(std::accumulate(used_.begin(), used_.end(), std::int64_t{0}));
}

}  // namespace kv_offload
