// The records under a prefix of a Redis or Valkey server, or of all nodes of a cluster, for the commands
// (remote_records.h).
//
// Looking changes no order of eviction where the server lets it: lists ask for sizes and ages in ways that
// are no use of a key, and where the server knows CLIENT NO-TOUCH (Redis 7.2, Valkey) nothing else is one
// either. On an older server verify() is a use of each record, and written() therefore knows nothing.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "base/clock.h"
#include "storage/redis/connection.h"
#include "storage/remote_records.h"

namespace kv_offload {

struct RedisRecordsOptions {
  redis::Server server;
  std::string key_prefix = "kv_offload";
  Nanos deadline{10'000'000'000};  // for each answer
  unsigned page = 512;             // keys that the server looks at for one page
};

// One thread at a time. Of a cluster all of its masters; what one of them has is not left out: while it is
// away, lists fail, and so does the last page when slots moved meanwhile. Throws ResourceError when a server
// does not answer or refuses how it is spoken to, and when slots of a cluster are on no node.
std::unique_ptr<RemoteRecords> open_redis_records(const RedisRecordsOptions& options);

namespace redis {

// Those that one server has; null, and *is_node: it is a node of a cluster. Without is_node it may be one.
std::unique_ptr<RemoteRecords> open_records_of_server(const RedisRecordsOptions& options, bool* is_node);
// REQUIRES: the server is a node of a cluster.
std::unique_ptr<RemoteRecords> open_records_of_cluster(const RedisRecordsOptions& options);

}  // namespace redis

}  // namespace kv_offload
