// BoundCache: a TieredCache together with what must outlive it.
//
// Threads: one, under the GIL.
#pragma once

#include <memory>
#include <string_view>
#include <vector>

#include "bindings/bindings.h"
#include "cache/tiered_cache.h"

namespace kv_offload::bindings {

// The context object last seen by a lookup function, and its request; see lookup.h.
struct LookupState;

// The region may outlive it: a thread stuck in a tier's device shares it. What else such a thread touches is
// its tier's own (no clock of ours is given to it).
struct BoundCache {
  std::shared_ptr<HostRegion> region;
  std::shared_ptr<Metrics> metrics;
  SteadyClock clock;
  std::unique_ptr<TieredCache> cache;  // last: dies first
  std::vector<LookupState*> lookups;   // the living functions of make_lookup
  std::uint64_t handles = 0;           // one more than the largest that begin_request gave

  // The handle, if begin_request ever gave it: lookups do not check again.
  RequestHandle check_handle(std::uint64_t handle) const {
    if (handle >= handles) throw_invalid("request handle {} was never given by begin_request", handle);
    return static_cast<RequestHandle>(handle);
  }

  BoundCache() = default;
  ~BoundCache() {  // closing waits for storage
    const py::gil_scoped_release release;
    cache.reset();
  }
};

}  // namespace kv_offload::bindings
