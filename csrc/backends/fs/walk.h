// SPDX-License-Identifier: Apache-2.0
// Walks a root: counts what `du` counts, finds records, removes garbage. Used by the tier's upkeep and by
// FsRoot. Functions only. They may take long, and stop between directories once *stop is true.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <limits>
#include <optional>
#include <string>
#include <vector>

#include "backends/fs/charges.h"
#include "backends/fs/file_ops.h"
#include "base/status.h"
#include "base/types.h"
#include "policy/eviction_policy.h"

namespace kv_offload {

struct FoundRecord {
  ChunkKey key;
  std::uint64_t file_bytes = 0;  // as its name says
  std::uint64_t disk_bytes = 0;
  std::int64_t mtime_nanos = 0;
  std::uint64_t size = 0;               // file size
  std::optional<TenantId> tenant = {};  // that wrote it; empty: unknown
  std::uint64_t charge() const { return charged_bytes(disk_bytes, size); }
};

// Removes a temporary if no process holds its lock. Returns true if it was removed or already missing.
bool sweep_temporary(FileOps& ops, int directory, const std::string& name);

// The contents of one leaf directory: its records, and the disk space of the directory and its other files.
struct LeafFound {
  std::vector<FoundRecord> records;
  std::uint64_t directory_bytes = 0;
  std::uint64_t other_bytes = 0;  // temporaries, foreign files
};
// The process that counts against the bound: skips what is under a reservation, and removes what dead
// processes left.
struct CountFor {
  std::uint64_t writer = 0;            // the counting process: its unlocked temporaries are garbage
  std::vector<std::uint64_t> writers;  // all processes with the root open: their files are left unchanged
  const Charges* charges = nullptr;    // null: charged_bytes()
};
// Errors that hid a part of a tree from a walk, so that its bytes were not counted. Vanished files, and files
// that permissions hide permanently, are not included.
struct Unseen {
  std::atomic<bool> shortage{false};  // of descriptors or memory: not a property of the tree
  std::atomic<bool> failed{false};    // any other error

  bool any() const { return shortage.load() || failed.load(); }
  void add(int error);  // 0: no error
};
struct LeafOptions {
  const CountFor* count = nullptr;  // null: count everything by its blocks
  bool names_only = false;          // only record names, without disk_bytes and mtime; no other files
  Unseen* unseen = nullptr;         // null: errors are not recorded
};
Status scan_leaf(FileOps& ops, int epoch, std::uint32_t leaf, const LeafOptions& options, LeafFound* found);
// Lists the existing leaf directories. Adds the disk space of everything else to *other_bytes.
Status list_leaves(FileOps& ops, int epoch, std::vector<std::uint32_t>* leaves, std::uint64_t* other_bytes);

// Counts everything at and below directory/name, like `du`. Vanished files count nothing. Levels deeper than
// any tree of ours count nothing either, because each level holds a descriptor.
inline constexpr int kDeepestTree = 32;
std::uint64_t count_tree(FileOps& ops, int directory, const std::string& name, const LeafOptions& options,
                         const std::atomic<bool>& stop, int levels = kDeepestTree);

inline constexpr std::uint64_t kAllBytes = std::numeric_limits<std::uint64_t>::max();
// Removes our files (records, temporaries of dead processes) below an epoch until `enough` bytes are freed.
// With remove_directories, also removes emptied directories, and finally the epoch directory and its marks.
// Returns the bytes freed on disk. Calls `on_removed` with the bytes of each removed file.
std::uint64_t reclaim_epoch(FileOps& ops, int namespace_directory, std::uint64_t number, std::uint64_t enough,
                            bool remove_directories, const std::atomic<bool>& stop,
                            const std::function<void(std::uint64_t)>& on_removed);

// Lists an open directory.
Status list_directory(FileOps& ops, int directory, std::vector<DirEntry>* entries);
bool may_be_directory(const DirEntry& entry);
Status list_namespaces(FileOps& ops, int root, std::vector<std::string>* names);

}  // namespace kv_offload
