// BoundCache: a TieredCache together with what must outlive it.
//
// Threads: one, under the GIL.
#pragma once

#include <memory>
#include <vector>

#include "bindings/bindings.h"
#include "cache/tiered_cache.h"
#include "storage/fs_tier.h"

namespace kv_offload::bindings {

// A tier that TieredCache's constructor opens.
struct FsTierSpec {
  FsTierOptions options;
  TierSlotOptions slot;
};

// The context object last seen by a lookup function, and its request; see lookup.h.
struct LookupState;

struct BoundCache {
  std::shared_ptr<HostRegion> region;
  std::shared_ptr<Metrics> metrics;
  SteadyClock clock;
  std::unique_ptr<TieredCache> cache;  // last: dies first
  std::vector<LookupState*> lookups;   // the living functions of make_lookup

  BoundCache() = default;
  ~BoundCache() {  // closing waits for storage
    const py::gil_scoped_release release;
    cache.reset();
  }
};

}  // namespace kv_offload::bindings
