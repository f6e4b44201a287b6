// The redis tier: records as values of a Redis or Valkey server, shared by all engines that use it.
//
//   PREFIX:<namespace, 64 hex digits>:epoch                    the epoch of those who start
//   PREFIX:<namespace>:<epoch, 32 hex digits>:<key, hex>       a record, as on disk (specs/RECORD_FORMAT.md)
//
// Epochs are named at random (named_epochs.h). The epoch's key is looked at once a second, which also keeps
// it from being the one that was not used for longest, and is put back when it is gone.
//
// One server, or a cluster: that is asked of it at the start, and the slots of keys are followed from node to
// node (cluster.h).
//
// The server bounds itself (maxmemory, a TTL): a key that vanished is a miss, and a write that it has no room
// for is refused. What older epochs left ages out there.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "storage/pooled_tier.h"
#include "storage/record.h"
#include "storage/redis/connection.h"

namespace kv_offload {

struct RedisTierOptions : PooledTierOptions {
  redis::Server server;
  std::vector<redis::Server>
      other_nodes;  // of the same cluster, asked who has which keys when `server` is away
  std::string key_prefix = "kv_offload";
  NamespaceId namespace_id{};
  std::uint64_t ttl_seconds = 0;  // since it was written last, by anybody; 0: for ever
  bool read_only = false;         // others fill it: never writes, nor removes what is damaged
};

// Throws ResourceError when the server refuses how it is spoken to: credentials, certificate, permissions, a
// database that a cluster does not have. One that does not answer is waited for by upkeep; until then the
// tier is empty and takes nothing.
std::unique_ptr<Tier> make_redis_tier(const RedisTierOptions& options);

}  // namespace kv_offload
