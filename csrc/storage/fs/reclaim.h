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
// The least recently used records of these namespaces' generations that live,
// until `enough` bytes are gone. Two walks, 16 bytes of memory a record; a record
// that is used between the two is spared. dry_run: counts what would go.
Reclaimed reclaim_oldest(FileOps& ops, int root, const std::vector<std::string>& names, std::uint64_t enough,
                         bool dry_run, const Gone& gone);

}  // namespace kv_offload
