// How fast a bucket answers, by a few records of its own that are removed again.
#pragma once

#include <cstdint>
#include <string>

#include "base/clock.h"
#include "storage/s3/client.h"

namespace kv_offload::s3 {

struct Probe {
  double answer_seconds = 0;                                     // the median of a few small requests
  unsigned records = 0;                                          // written and read: as many as time allows
  double write_bytes_per_second = 0, read_bytes_per_second = 0;  // 0: not measured
  std::string write_refused;                                     // why not
};

// On one connection. Throws ResourceError when the store does not answer or refuses us.
Probe probe(const Bucket& bucket, const std::string& prefix, std::uint64_t record_bytes, unsigned records,
            Nanos deadline);

// What the store says of the bucket itself: the answer to "GET /?lifecycle=" and the like, with at most 64
// KiB of text. Throws ResourceError when there is none.
Answer ask_bucket(const Bucket& bucket, const std::string& query, Nanos deadline);

}  // namespace kv_offload::s3
