// SPDX-License-Identifier: Apache-2.0
// Measures how fast a bucket responds, with a few temporary records.
#pragma once

#include <cstdint>
#include <string>

#include "backends/s3/client.h"
#include "base/clock.h"

namespace kv_offload::s3 {

struct Probe {
  double answer_seconds = 0;                                     // the median of a few small requests
  unsigned records = 0;                                          // written and read, as many as time allows
  double write_bytes_per_second = 0, read_bytes_per_second = 0;  // 0: not measured
  std::string write_refused;                                     // why no speed was measured
};

// Uses one connection. Throws ResourceError when the store does not respond or refuses a request,
// InvalidArgument when a setting is wrong.
Probe probe(const Bucket& bucket, const std::string& prefix, std::uint64_t record_bytes, unsigned records,
            Nanos deadline);

// Returns the response to a query about the bucket itself, such as "GET /?lifecycle=", with at most 64 KiB of
// text. Throws ResourceError when there is no response or it is longer.
Answer ask_bucket(const Bucket& bucket, const std::string& query, Nanos deadline);

}  // namespace kv_offload::s3
