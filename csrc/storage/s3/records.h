// The records under a prefix of a bucket, for the commands (remote_records.h). Looking changes nothing there.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "base/clock.h"
#include "storage/remote_records.h"
#include "storage/s3/client.h"

namespace kv_offload {

struct S3RecordsOptions {
  s3::Bucket bucket;
  std::string prefix = "kv_offload";
  Nanos deadline{10'000'000'000};    // for each answer
  unsigned page = 1000;              // objects that are asked for at once
  std::function<void(Nanos)> pause;  // for tests: in place of waiting before a request is sent again
};

// Any thread. Throws ResourceError when this build has no libcurl; a store that refuses or does not answer
// shows with the first call.
std::unique_ptr<RemoteRecords> open_s3_records(const S3RecordsOptions& options);

}  // namespace kv_offload
