// The fs tier: records as files under one root directory, bounded, shared by several
// processes (replicas on one host, hosts on a shared file system).
//
//   ROOT/                                       0700
//     kv_offload.json          format of the root
//     ledger                   bytes used and reserved, shared by the processes
//     open-<writer>            locked by one process while it has the root open
//     <namespace hex>/namespace.json            readable, verified at open
//     <namespace hex>/open                      locked (shared) by all that have it open
//     <namespace hex>/g<generation>.open, .reset   locked (shared) by all that use it (generation.h)
//     <namespace hex>/g<generation>/ab/<key hex>.<size>.rec
//     .../<same directory>/.tmp-<pid>-<writer>-<n>   temporaries, counted; locked by
//                                               their writer, swept when they are not
// Other files under the root count against the bound and are left alone.
//
// write: reserve bytes -> temporary -> (fsync) -> rename -> catalogue. A failed
// write leaves no temporary and no entry. In a full root, without fsync, the
// temporary is the file of an evicted record of the same size. read: open, verify
// length, header, key, checksum. A proven-bad record is removed; an unreadable one
// is a failure with back-off, not deleted. O_DIRECT from and into the shards where
// the root supports it (probed), buffered otherwise, both counted.
// Start: the catalogue is rebuilt behind, from names and sizes alone; recency
// from the files' times. What other processes record in the namespace is found
// within about a second: the ledger tells that somebody wrote, the directories'
// times tell where. Each process evicts for itself; none waits for another.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "storage/pooled_tier.h"
#include "storage/record.h"

namespace kv_offload {

enum class FsyncMode : std::uint8_t { kNone, kData, kFull };
enum class DirectMode : std::uint8_t { kAuto, kOn, kOff };

// What the file system is asked through; tests give one that fails.
class FileOps;

struct FsTierOptions : PooledTierOptions {
  FsTierOptions() { name = "fs"; }
  std::string root_dir;
  std::uint64_t max_bytes = 0;  // hard bound on the whole root
  NamespaceId namespace_id{};
  std::string namespace_json;  // written beside, compared at open
  FsyncMode fsync = FsyncMode::kNone;
  DirectMode o_direct = DirectMode::kAuto;
  // What is read into outlives this process (HostRegion::keep), and others use it then: reads are not direct
  // where the kernel may go on with them (SpaceInfo::ends_reads_first).
  bool memory_outlives = false;
  std::string eviction_policy = "lru";
  // What an operator has to know, once each. On any of the tier's threads. Default: stderr.
  std::function<void(const std::string&)> warn;
  // Outlives the tier and any thread it had to let go.
  FileOps* file_ops = nullptr;  // null: POSIX
};

// Throws ResourceError (root cannot be made or written, no space for one
// record, owned by another user; names asked, available, setting) or
// InvalidArgument (namespace.json of this id says something else).
std::unique_ptr<Tier> make_fs_tier(const FsTierOptions& options);

}  // namespace kv_offload
