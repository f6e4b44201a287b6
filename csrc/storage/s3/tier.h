// The s3 tier: records as objects of a bucket, in AWS S3 or a store that speaks as it does, shared by all
// engines that use it.
//
//   PREFIX/<namespace, 64 hex digits>/epoch                    the epoch of those who start
//   PREFIX/<namespace>/<epoch, 32 hex digits>/<key, hex>       a record, as on disk (specs/RECORD_FORMAT.md)
//   PREFIX/conditions                                          empty; shows whether the store knows
//   conditions
//
// Epochs are named at random (named_epochs.h). They rely on what S3 promises: who reads after a write sees
// it.
//
// Two who start at once and find no epoch: the one whose `If-None-Match: *` comes second is refused, reads
// again and takes the first one's. A store that does not know the condition keeps the one written last; both
// read again after writing, and if they still differ, each has an epoch of its own: they are apart, and share
// nothing until a restart. An epoch that is gone (a lifecycle rule) is put back only by If-None-Match, and
// only where the store was seen to heed it: or an epoch of before a reset could take the place of the one
// after it.
//
// The bucket is bounded by a lifecycle rule: an object that vanished is a miss.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "storage/pooled_tier.h"
#include "storage/record.h"
#include "storage/s3/client.h"

namespace kv_offload {

struct S3TierOptions : PooledTierOptions {
  s3::Bucket bucket;
  std::string prefix = "kv_offload";  // of letters, digits and -_./
  NamespaceId namespace_id{};
  bool read_only = false;            // others fill it: never writes, nor removes what is damaged
  std::function<void(Nanos)> pause;  // for tests: in place of waiting before a request is sent again
};

// Throws ResourceError when there is no libcurl in this build, or the store refuses how it is spoken to:
// credentials, permissions, certificate, no such bucket, another region. One that does not answer is waited
// for by upkeep; until then the tier is empty and takes nothing.
std::unique_ptr<Tier> make_s3_tier(const S3TierOptions& options);

}  // namespace kv_offload
