// SPDX-License-Identifier: Apache-2.0
// Measurements of a Mooncake Store for `kv-offload doctor` and `bench`, in a separate client process.
#pragma once

#include <cstdint>
#include <string>

#include "backends/mooncake/client.h"

namespace kv_offload::mooncake {

struct Probe {
  std::string version;        // of the Mooncake package on this host
  double start_seconds = 0;   // start time of the process
  double answer_seconds = 0;  // the master's reply time to a lookup of a missing key
  double write_bytes_per_second = 0, read_bytes_per_second = 0;  // one at a time
  std::string write_refused;  // why no speeds were measured; empty: they were
};

// Writes, reads and removes `records` temporary records of `record_bytes`. With 0 records it only measures
// lookups. Throws ResourceError when the store cannot be used, InvalidArgument when something is missing on
// this host.
Probe probe(const ClientOptions& options, const std::string& place, const std::string& key_prefix,
            std::uint64_t record_bytes, unsigned records, Nanos deadline);

}  // namespace kv_offload::mooncake
