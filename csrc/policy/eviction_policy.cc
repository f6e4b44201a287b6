// SPDX-License-Identifier: Apache-2.0
#include "policy/eviction_policy.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "base/status.h"
#include "policy/expected_returns.h"
#include "policy/lru.h"
#include "policy/per_tenant.h"
#include "policy/prefix.h"
#include "policy/priorities.h"

namespace kv_offload {

// Instantiated next to each policy, so that its calls are inlined.
extern template class ExpectedReturns<LruPolicy>;
extern template class ExpectedReturns<PrefixPolicy>;

namespace {

template <typename Policy>
std::unique_ptr<EvictionPolicy> make() {
  return std::make_unique<Prioritised>([] { return std::make_unique<ExpectedReturns<Policy>>(); });
}

struct KnownPolicy {
  std::string_view name;
  std::unique_ptr<EvictionPolicy> (*make)();
};

constexpr KnownPolicy kPolicies[] = {
    {"lru", &make<LruPolicy>},
    {"prefix", &make<PrefixPolicy>},
};

}  // namespace

std::unique_ptr<EvictionPolicy> make_eviction_policy(std::string_view name) {
  const auto* found = std::find_if(std::begin(kPolicies), std::end(kPolicies),
                                   [&](const KnownPolicy& policy) { return policy.name == name; });
  if (found == std::end(kPolicies)) {
    throw_invalid("eviction_policy '{}' is not known; known: {}", name,
                  fmt::join(eviction_policy_names(), ", "));
  }
  return found->make();
}

std::unique_ptr<EvictionPolicy> make_tenant_policy(std::string_view name,
                                                   std::shared_ptr<const TenantShares> shares) {
  return std::make_unique<PerTenant>([name = std::string(name)] { return make_eviction_policy(name); },
                                     std::move(shares));
}

std::vector<std::string> eviction_policy_names() {
  std::vector<std::string> names;
  for (const KnownPolicy& policy : kPolicies) names.emplace_back(policy.name);
  return names;
}

}  // namespace kv_offload
