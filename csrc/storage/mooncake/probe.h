// What `kv-offload doctor` and `bench` ask of a Mooncake Store, by a process of their own.
#pragma once

#include <cstdint>
#include <string>

#include "storage/mooncake/client.h"

namespace kv_offload::mooncake {

struct Probe {
  std::string version;        // of Mooncake, on this side
  double start_seconds = 0;   // of the process
  double answer_seconds = 0;  // of the master, to the question for a key that is not there
  double write_bytes_per_second = 0, read_bytes_per_second = 0;  // one at a time
  std::string write_refused;                                     // why there are no speeds; empty: there are
};

// Records of so many bytes, of nobody else, which are removed again; none: only who answers. Throws
// ResourceError when it cannot be used.
Probe probe(const ClientOptions& options, const std::string& place, const std::string& key_prefix,
            std::uint64_t record_bytes, unsigned records, Nanos deadline);

}  // namespace kv_offload::mooncake
