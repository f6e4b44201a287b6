// What a server is and how fast it answers, by a few records of its own that are removed again.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "base/clock.h"
#include "storage/redis/connection.h"

namespace kv_offload::redis {

struct NodeProbe {
  std::string address;
  std::string failure;                          // why it says nothing more
  std::string version, role, eviction_policy;   // as INFO says; empty when it may not be asked
  std::uint64_t used_bytes = 0, max_bytes = 0;  // of the whole server; max 0: not bounded
  std::uint64_t host_bytes = 0;                 // memory of its host; 0: it does not say

  // What it can take without evicting anything. No value: unknown.
  std::optional<std::uint64_t> free_bytes() const;
};

struct Probe {
  double ping_seconds = 0;                                       // the median of a few
  double write_bytes_per_second = 0, read_bytes_per_second = 0;  // 0: not measured
  std::string write_refused;                                     // why not
  unsigned records = 0;  // written; 0 without write_refused: there was no room that is safe to use
  std::uint64_t bytes_per_record = 0;  // that one takes of the server's memory; 0: it does not say
  bool cluster = false;
  std::vector<NodeProbe> nodes;  // that have keys; one server alone: itself
};

// On one connection to each node. Nodes of a cluster that do not answer are left out of what is measured.
// Writes at most a quarter of what is free, so that no other key is evicted, and removes what it wrote.
// Throws ResourceError when no server answers, InvalidArgument when it refuses us.
Probe probe(const std::vector<Server>& seeds, const std::string& key_prefix, std::uint64_t record_bytes,
            unsigned records, Nanos deadline);

}  // namespace kv_offload::redis
