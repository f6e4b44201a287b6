// The mooncake tier: records as objects of a Mooncake Store, shared by all engines that use it.
//
//   PREFIX:<namespace, 64 hex digits>:epoch                    the epoch of those who start
//   PREFIX:<namespace>:<epoch, 32 hex digits>:<key, hex>       a record, as on disk (specs/RECORD_FORMAT.md)
//
// Epochs are named at random (named_epochs.h). The epoch's object is looked at once a second, which also
// keeps it from being evicted, and is put back when it is gone: a master that was restarted has forgotten
// all.
//
// Mooncake bounds itself: what it evicted or forgot is a miss, and a write that it has no room for is
// refused. What older epochs left is evicted there.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "storage/mooncake/client.h"
#include "storage/pooled_tier.h"
#include "storage/record.h"

namespace kv_offload {

struct MooncakeTierOptions : PooledTierOptions {
  mooncake::ClientOptions client;
  std::string place;  // what errors call it: the master's address
  std::string key_prefix = "kv_offload";
  NamespaceId namespace_id{};
  bool read_only = false;  // others fill it: never writes, nor removes what is damaged
};

// Throws ResourceError when something is missing on this side: the package, a version of it that is new
// enough. A master that does not answer is waited for by upkeep; until then the tier is empty and takes
// nothing.
std::unique_ptr<Tier> make_mooncake_tier(const MooncakeTierOptions& options);

}  // namespace kv_offload
