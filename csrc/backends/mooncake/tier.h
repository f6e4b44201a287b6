// SPDX-License-Identifier: Apache-2.0
// The mooncake tier stores records as objects of a Mooncake Store. All engines that use the store share them.
//
//   PREFIX:<namespace, 64 hex digits>:epoch                    the startup epoch: new processes join it
//   PREFIX:<namespace>:<epoch, 32 hex digits>:<key, hex>       a record, as on disk (docs/record-format.md)
//
// Epoch names are random (epoch_registry.h). The tier reads the epoch object once a second and writes it
// again when it is missing: a restarted master has forgotten everything. Each read also keeps the object from
// being evicted.
//
// In an engine on several hosts, a store keeps its epoch at a start even if the hosts have different ones:
// Mooncake cannot replace a value only if it is unchanged. A reset replaces it then (hosts/open_tiers.h).
//
// Mooncake enforces its own limits: an evicted or forgotten record is a miss, and a write that does not fit
// is refused. Mooncake evicts the records of older epochs.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "backends/mooncake/client.h"
#include "record/record.h"
#include "tier/thread_pool_tier.h"

namespace kv_offload {

struct MooncakeTierOptions : ThreadPoolTierOptions {
  mooncake::ClientOptions client;
  std::string place;  // the name in error messages: the master's address
  std::string key_prefix = "kv_offload";
  NamespaceId namespace_id{};
  bool read_only = false;  // other processes fill the store: no writes, no removal of damaged records
  EpochChoice epoch{};     // for an engine on several hosts. `replaces` is ignored
};

// Throws ResourceError when something is missing on this host: the package, or a recent enough version of it.
// If the master does not respond, upkeep keeps trying in the background; until it succeeds the tier is empty
// and accepts no writes.
std::unique_ptr<Tier> make_mooncake_tier(const MooncakeTierOptions& options);

}  // namespace kv_offload
