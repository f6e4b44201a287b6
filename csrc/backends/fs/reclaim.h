// SPDX-License-Identifier: Apache-2.0
// Frees space in a root while servers use it: whole namespaces, and the least recently used records of all
// namespaces together. Functions only; used by the tier's evictor and by FsRoot.
//
// No server is asked, and no lock is held for long. Readers tolerate files that vanish. Each freed size is
// reported to `on_removed`, which subtracts it from the ledger.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "backends/fs/file_ops.h"

namespace kv_offload {

using OnRemoved = std::function<void(std::uint64_t bytes)>;

// Removes our files of one namespace until `enough` bytes are freed. Skips a namespace that a process has
// open, unless even_open. Blocks opening a closed namespace meanwhile, and removes the namespace itself once
// it is empty. Returns the bytes freed.
std::uint64_t reclaim_namespace(FileOps& ops, int root, const std::string& name, std::uint64_t enough,
                                bool even_open, const std::atomic<bool>& stop, const OnRemoved& on_removed);

// True if some process has the namespace open.
bool namespace_is_open(FileOps& ops, int namespace_directory);

// Removes what killed runs of probe_disk() and probe_root() (root.h) left in this directory. Skips runs in
// progress. A run that begins at the same time may fail.
void remove_old_probes(FileOps& ops, int directory, const OnRemoved& on_removed);

struct Reclaimed {
  std::uint64_t records = 0, bytes = 0;
};
// Removes the least recently used records of these namespaces' live epochs until `enough` bytes are freed. A
// record that is used after it was listed stays.
//
// Among the records to remove, the most recently used one is removed first. A prompt is written and used from
// its first chunk on, and a chunk can be loaded only if all chunks before it are present. So an eviction that
// ends early leaves prompts without their ends, and not prompts without their beginnings.
//
// OldestRecords does not list the whole root, because a write waits for it; within a pass it removes
// directory by directory. Here no write waits: one walk per 2^20 removed records, with 64 bytes of memory for
// each. dry_run: counts what would be removed, in one walk.
Reclaimed reclaim_oldest(FileOps& ops, int root, const std::vector<std::string>& names, std::uint64_t enough,
                         bool dry_run, const OnRemoved& on_removed);

}  // namespace kv_offload
