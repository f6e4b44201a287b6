// SPDX-License-Identifier: Apache-2.0
// Detects the type of a server and measures its speed, with a few temporary records.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "backends/redis/connection.h"
#include "base/clock.h"

namespace kv_offload::redis {

struct NodeProbe {
  std::string address;
  std::string failure;                          // why the other fields are empty
  std::string version, role, eviction_policy;   // from INFO; empty if the user may not run INFO
  std::uint64_t used_bytes = 0, max_bytes = 0;  // of the whole server; max 0: no limit
  std::uint64_t host_bytes = 0;                 // memory of its host; 0: not reported

  // Bytes that the server can take without evicting anything. No value: unknown.
  std::optional<std::uint64_t> free_bytes() const;
};

struct Probe {
  double ping_seconds = 0;                                       // the median of a few pings
  double write_bytes_per_second = 0, read_bytes_per_second = 0;  // 0: not measured
  std::string write_refused;                                     // why no write was measured
  unsigned records = 0;  // records written; 0 and an empty write_refused: not enough free memory to be safe
  std::uint64_t bytes_per_record = 0;  // server memory that one record takes; 0: not reported
  bool cluster = false;
  std::vector<NodeProbe> nodes;  // the nodes that own keys; the only server if it is standalone
};

// Uses one connection per node. The measurement skips cluster nodes that do not respond. Writes at most a
// quarter of the free memory, so that no other key is evicted, and removes its records. Throws ResourceError
// when no server responds, InvalidArgument when one rejects the connection settings.
Probe probe(const std::vector<Server>& seeds, const std::string& key_prefix, std::uint64_t record_bytes,
            unsigned records, Nanos deadline);

}  // namespace kv_offload::redis
