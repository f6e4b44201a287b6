// SPDX-License-Identifier: Apache-2.0
// The s3 tier stores records as objects of a bucket, in AWS S3 or an S3-compatible store. All engines that
// use the bucket share them.
//
//   PREFIX/<namespace, 64 hex digits>/epoch                    the startup epoch: new processes join it
//   PREFIX/<namespace>/<epoch, 32 hex digits>/<key, hex>       a record, as on disk (docs/record-format.md)
//   PREFIX/conditions                                          empty; an object to test conditional writes on
//
// Epoch names are random (epoch_registry.h). Epochs rely on S3's strong consistency: a read after a write
// returns the written object.
//
// Two processes may start at once and find no epoch. The store refuses the second `If-None-Match: *`; that
// process reads again and joins the first one's epoch. A store that does not support the condition keeps the
// last write. Both processes read again after writing. If they still differ, each has its own epoch and they
// share nothing until a restart.
//
// A missing epoch (removed by a lifecycle rule) is restored only with If-None-Match, and only if the store
// was seen to respect it. Otherwise an epoch from before a reset could replace the one from after it.
//
// A lifecycle rule limits the bucket's size: an object that vanished is a miss.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "backends/s3/client.h"
#include "record/record.h"
#include "tier/thread_pool_tier.h"

namespace kv_offload {

struct S3TierOptions : ThreadPoolTierOptions {
  s3::Bucket bucket;
  std::string prefix = "kv_offload";  // letters, digits and -_./
  NamespaceId namespace_id{};
  bool read_only = false;  // other processes fill the bucket: no writes, no removal of damaged records
  EpochChoice epoch{};     // for an engine on several hosts
  std::function<void(Nanos)> pause;  // for tests: called instead of waiting before a retry
};

// Throws ResourceError when OpenSSL or libcurl is not available, or the store rejects the connection
// settings: credentials, permissions, certificate, a missing bucket, another region. If the store does not
// respond, upkeep keeps trying in the background; until it succeeds the tier is empty and accepts no writes.
// For an engine on several hosts, throws ResourceError if an epoch has to be replaced, and the store does not
// respond (EpochRegistry::startup_problem) or does not support If-Match in PUT.
std::unique_ptr<Tier> make_s3_tier(const S3TierOptions& options);

}  // namespace kv_offload
