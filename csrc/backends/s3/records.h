// SPDX-License-Identifier: Apache-2.0
// The records under a prefix of a bucket, for the command-line tools (remote_records.h). Read operations
// change nothing.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "backends/s3/client.h"
#include "base/clock.h"
#include "tier/remote_records.h"

namespace kv_offload {

struct S3RecordsOptions {
  s3::Bucket bucket;
  std::string prefix = "kv_offload";
  Nanos deadline{10'000'000'000};    // for each response
  unsigned page = 1000;              // objects per request
  std::function<void(Nanos)> pause;  // for tests: called instead of waiting before a retry
};

// Thread-safe. Throws ResourceError when OpenSSL or libcurl is not available. If the store refuses a request
// or does not respond, the first call reports it.
std::unique_ptr<RemoteRecords> open_s3_records(const S3RecordsOptions& options);

}  // namespace kv_offload
