// SPDX-License-Identifier: Apache-2.0
// The records under a prefix of a Redis or Valkey server, or of all nodes of a cluster, for the command-line
// tools (remote_records.h).
//
// Reads do not change the eviction order if the server allows it. Listing uses commands that report size and
// age without touching the key. Where the server knows CLIENT NO-TOUCH (Redis 7.2, Valkey), no other command
// touches it either. On an older server verify() touches each record, and written() therefore returns 0.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "backends/redis/connection.h"
#include "base/clock.h"
#include "tier/remote_records.h"

namespace kv_offload {

struct RedisRecordsOptions {
  redis::Server server;
  std::string key_prefix = "kv_offload";
  Nanos deadline{10'000'000'000};  // for each reply
  unsigned page = 512;             // keys that the server scans for one page
};

// One thread at a time. In a cluster, covers all masters and never omits one silently: while a master is
// down, lists fail; the last page fails if slots moved meanwhile. Throws ResourceError when a server does not
// respond or rejects the connection settings, and when cluster slots have no node.
std::unique_ptr<RemoteRecords> open_redis_records(const RedisRecordsOptions& options);

namespace redis {

// Opens the records of one server. Null, and *is_node is true: it is a cluster node. If is_node is null, a
// cluster node is accepted.
std::unique_ptr<RemoteRecords> open_records_of_server(const RedisRecordsOptions& options, bool* is_node);
// REQUIRES: the server is a node of a cluster.
std::unique_ptr<RemoteRecords> open_records_of_cluster(const RedisRecordsOptions& options);

}  // namespace redis

}  // namespace kv_offload
