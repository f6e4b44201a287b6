// Taking bytes off a root beside everybody who serves from it: whole namespaces,
// and the least recently used records of all namespaces together. Functions only;
// used by the tier's evictor and by FsRoot.
//
// Nobody is asked and nothing is locked for long: readers tolerate files that
// vanish, and what is gone is told to `gone`, which takes it off the ledger.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "storage/fs/file_ops.h"

namespace kv_offload {

using Gone = std::function<void(std::uint64_t bytes)>;

// Removes our files of one namespace until `enough` bytes are gone. One that
// somebody has open is passed over, unless even_open; one that nobody has open
// is held against opening meanwhile, and itself removed when it is empty.
std::uint64_t reclaim_namespace(FileOps& ops, int root, const std::string& name, std::uint64_t enough,
                                bool even_open, const std::atomic<bool>& stop, const Gone& gone);

// True when some process has it open.
bool namespace_is_open(FileOps& ops, int namespace_directory);

struct Reclaimed {
  std::uint64_t records = 0, bytes = 0;
};
// Removes the least recently used records of these namespaces' live generations until `enough` bytes are
// gone. A record that is used after it was listed stays.
//
// Of the records that have to go, the most recently used one is removed first. A prompt is written and used
// from its first chunk on, and a chunk can be loaded only if all chunks before it are there. So an eviction
// that ends early leaves prompts without their ends, and not prompts without their beginnings.
//
// OldestRecords does not list the whole root, as a write waits for it; the order within its passes is that of
// the directories. Here nothing waits: one walk for each 2^20 records that go, 64 bytes of memory for each.
// dry_run: counts what would go, in one walk.
Reclaimed reclaim_oldest(FileOps& ops, int root, const std::vector<std::string>& names, std::uint64_t enough,
                         bool dry_run, const Gone& gone);

}  // namespace kv_offload
