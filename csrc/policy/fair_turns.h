// SPDX-License-Identifier: Apache-2.0
// FairTurns: the order in which tenants with queued operations take turns (start-time fair queueing).
//
// Each tenant with queued ops gets a part of the started costs in proportion to its weight, however many ops
// the others have queued: the cost of an op is its size divided by the weight. A tenant that was idle begins
// at the present time, so it gains nothing by waiting.
//
// A queue may be a std::map. Its keys are then the tenant, and a number that orders the tenant's ops.
//
// Not thread-safe.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cstdint>
#include <optional>

#include "base/steps.h"
#include "policy/tenant_shares.h"

namespace kv_offload {

class FairTurns {
 public:
  // Returns the key of a tenant's op. REQUIRES: number < 2^56.
  static std::uint64_t key_of(TenantId tenant, std::uint64_t number) {
    return std::uint64_t{tenant} << kNumberBits | number;
  }
  static TenantId tenant_of(std::uint64_t key) { return static_cast<TenantId>(key >> kNumberBits); }
  // Returns the first op of the next tenant in the queue, or its end. Each call is O(log n).
  template <typename Queue, typename Iterator>
  static Iterator next_tenant(Queue& queue, Iterator at) {
    return queue.lower_bound(key_of(static_cast<TenantId>(tenant_of(at->first) + 1), 0));
  }

  // Returns the first op of the tenant whose turn it is. charge() must follow. REQUIRES: not empty.
  // O(tenants log n).
  template <typename Queue>
  typename Queue::iterator next(Queue& queue) {
    std::uint32_t waiting = 0;
    for (auto at = queue.begin(); at != queue.end(); at = next_tenant(queue, at))
      waiting |= std::uint32_t{1} << tenant_of(at->first);
    return queue.lower_bound(key_of(next(waiting), 0));
  }
  // As above, for other queues. `waiting`: the tenants with queued ops, one bit each. REQUIRES: not 0.
  TenantId next(std::uint32_t waiting) {
    std::optional<TenantId> chosen;
    for (std::uint32_t left = waiting; left != 0; left &= left - 1) {
      const auto tenant = static_cast<TenantId>(std::countr_zero(left));
      count_steps(1);
      if ((waiting_ >> tenant & 1) == 0) started_[tenant] = std::max(started_[tenant], now_);  // was idle
      if (!chosen || started_[tenant] < started_[*chosen]) chosen = tenant;
    }
    waiting_ = waiting;
    now_ = started_[*chosen];
    return *chosen;
  }
  // Counts an op of the tenant that next() returned as started. `cost`: above 0. A later call may correct it:
  // together they are at least 0.
  void charge(TenantId tenant, double cost) { started_[tenant] += cost; }

 private:
  static constexpr unsigned kNumberBits = 56;
  std::array<double, TenantShares::kMaxTenants> started_{};  // virtual time of each tenant's next op
  double now_ = 0;                                           // virtual time of the last started op
  std::uint32_t waiting_ = 0;                                // tenants with ops at the last call, by bit
};

}  // namespace kv_offload
