// SPDX-License-Identifier: Apache-2.0
// The fs tier: records as files under one root directory, bounded, shared by several processes (replicas on
// one host, hosts on a shared file system).
//
//   ROOT/                                       0700
//     kv_offload.json          format of the root
//     ledger                   bytes used and reserved, shared by the processes
//     open-<writer>            locked by one process while it has the root open
//     <namespace hex>/namespace.json            readable, verified at open
//     <namespace hex>/open                      locked (shared) by all that have it open
//     <namespace hex>/g<epoch>.open, .reset     locked (shared) by all that use it (fs_epoch.h)
//     <namespace hex>/g<epoch>/ab/<key hex>.<size>.rec
//     .../<same directory>/.tmp-<pid>-<writer>-<n>   temporaries, counted; locked by
//                                               their writer, swept when they are not
// Other files under the root count against the bound and are left unchanged.
//
// Write: reserve bytes -> temporary -> (fsync) -> rename -> catalog. A failed write leaves no temporary and
// no entry. In a full root, without fsync, the temporary is the file of an evicted record of the same size,
// of this epoch or of a namespace that no server has open.
//
// Read: open, verify length, header, key, checksum. A proven-bad record is removed. An unreadable one is a
// failure with back-off, and is not deleted. O_DIRECT transfers from and into the shards where the root
// supports it (probed), buffered transfers otherwise; both are counted.
//
// Start: the catalog is rebuilt in the background, from names and sizes alone; recency from the file times.
// Records that other processes write into the namespace are found within about a second: the ledger shows
// that a process wrote, the directory times show where. Each process evicts for itself, and none waits for
// another.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "policy/tenant_shares.h"
#include "record/record.h"
#include "tier/thread_pool_tier.h"

namespace kv_offload {

enum class FsyncMode : std::uint8_t { kNone, kData, kFull };
enum class DirectMode : std::uint8_t { kAuto, kOn, kOff };

// The interface to the file system; tests inject failures with it.
class FileOps;

struct FsTierOptions : ThreadPoolTierOptions {
  FsTierOptions() { name = "fs"; }
  std::string root_dir;
  std::uint64_t max_bytes = 0;  // hard bound on the whole root
  NamespaceId namespace_id{};
  // Written next to the records, compared at open. Empty: unknown; namespace.json is neither written nor
  // read.
  std::string namespace_json;
  // False: nothing is evicted for a write, and no other server is asked to evict. A write that does not fit
  // ends with kNoSpace.
  bool may_evict = true;
  // False: a root above max_bytes is not trimmed without a write. For tiers that do not write: the servers
  // that write set the limit.
  bool may_trim = true;
  EpochChoice epoch{};
  FsyncMode fsync = FsyncMode::kNone;
  DirectMode o_direct = DirectMode::kAuto;
  // The memory that reads fill outlives this process (HostRegion::keep), and other processes then use it. So
  // reads do not use O_DIRECT where the kernel may continue them after a kill (SpaceInfo::ends_reads_first).
  bool memory_outlives = false;
  std::string eviction_policy = "lru";
  // Empty, or the tenants that share the root, as in CacheOptions.
  std::vector<TenantOptions> tenants{};
  // Warnings for an operator, each reported once. Called on any of the tier's threads. Default: stderr.
  std::function<void(const std::string&)> warn;
  // Must outlive the tier and any thread that the tier abandoned.
  FileOps* file_ops = nullptr;  // null: POSIX
};

// Throws ResourceError (the root cannot be created or written, no space for one record, owned by another
// user, or being removed by another process for kStartLockWait; the message names requested and available
// sizes and the setting) or InvalidArgument (kv_offload.json is of another format).
std::unique_ptr<Tier> make_fs_tier(const FsTierOptions& options);

}  // namespace kv_offload
