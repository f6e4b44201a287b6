// SPDX-License-Identifier: Apache-2.0
// The redis tier stores records as values of a Redis or Valkey server. All engines that use the server share
// them.
//
//   PREFIX:<namespace, 64 hex digits>:epoch                    the startup epoch: new processes join it
//   PREFIX:<namespace>:<epoch, 32 hex digits>:<key, hex>       a record, as on disk (docs/record-format.md)
//
// Epoch names are random (epoch_registry.h). The tier reads the epoch key once a second and writes it again
// when it is missing. Each read also keeps the key from becoming the least recently used one.
//
// The server may be standalone or a node of a cluster. The tier asks at startup; in a cluster it follows
// slots from node to node (cluster.h).
//
// The server enforces its own limits (maxmemory, a TTL). A key that vanished is a miss, and a write that does
// not fit is refused. Records of older epochs age out on the server.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "backends/redis/connection.h"
#include "record/record.h"
#include "tier/thread_pool_tier.h"

namespace kv_offload {

struct RedisTierOptions : ThreadPoolTierOptions {
  redis::Server server;
  // Other nodes of the same cluster, asked for the slot map when `server` is down.
  std::vector<redis::Server> other_nodes;
  std::string key_prefix = "kv_offload";
  NamespaceId namespace_id{};
  std::uint64_t ttl_seconds = 0;  // seconds since the last write by any process; 0: never expires
  // False: a write that would make the server evict other values ends with kNoSpace. Each write then asks the
  // server for its memory first. Other clients may still fill it between the two.
  bool may_evict = true;
  bool read_only = false;  // other processes fill the server: no writes, no removal of damaged records
  EpochChoice epoch{};     // for an engine on several hosts
};

// Throws ResourceError when the server rejects the connection: credentials, certificate, permissions, or a
// database that a cluster does not have. If the server does not respond, upkeep keeps trying in the
// background; until it succeeds the tier is empty and accepts no writes. For an engine on several hosts,
// throws ResourceError in this case if an epoch has to be replaced (EpochRegistry::startup_problem).
std::unique_ptr<Tier> make_redis_tier(const RedisTierOptions& options);

}  // namespace kv_offload
