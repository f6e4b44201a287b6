// SPDX-License-Identifier: Apache-2.0
// BoundCache: a TieredCache together with the objects that must outlive it.
//
// Threads: one, which holds the GIL.
#pragma once

#include <memory>
#include <string_view>
#include <vector>

#include "bindings/bindings.h"
#include "cache/tiered_cache.h"

namespace kv_offload::bindings {

// The last context object that a lookup function received, and its request; see lookup.h.
struct LookupState;

// The region may outlive this object: a thread that is stuck in a tier's device shares it. All else that such
// a thread touches belongs to its tier, which does not use our clock.
struct BoundCache {
  std::shared_ptr<HostRegion> region;
  std::shared_ptr<Metrics> metrics;
  SteadyClock clock;
  std::unique_ptr<TieredCache> cache;  // last member: destroyed first
  std::vector<LookupState*> lookups;   // the lookup functions that exist
  std::uint64_t handles = 0;           // one more than the largest handle from begin_request

  // Returns the handle. Throws InvalidArgument unless begin_request returned it: lookups do not check again.
  RequestHandle check_handle(std::uint64_t handle) const {
    if (handle >= handles) throw_invalid("invalid request handle {}", handle);
    return static_cast<RequestHandle>(handle);
  }

  BoundCache() = default;
  ~BoundCache() {  // closing waits for storage
    const py::gil_scoped_release release;
    cache.reset();
  }
};

}  // namespace kv_offload::bindings
