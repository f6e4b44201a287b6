// The records under a prefix of a Redis or Valkey server, for the commands (remote_records.h).
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

// One thread at a time. Throws ResourceError when the server does not answer or refuses how it is spoken to,
// and when it is a node of a cluster, which knows a part of the keys only, or does not let itself be asked.
std::unique_ptr<RemoteRecords> open_redis_records(const RedisRecordsOptions& options);

}  // namespace kv_offload
