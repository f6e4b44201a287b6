// Walking a root: counting what `du` counts, finding records, removing what is
// garbage. Used by the tier's upkeep and by FsRoot. Functions only; they may
// take long, and give up between directories when *stop becomes true.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "base/status.h"
#include "base/types.h"
#include "storage/fs/charges.h"
#include "storage/fs/file_ops.h"

namespace kv_offload {

struct FoundRecord {
  ChunkKey key;
  std::uint64_t file_bytes = 0;  // as its name says
  std::uint64_t disk_bytes = 0;
  std::int64_t mtime_nanos = 0;
  std::uint64_t size = 0;  // of the file
  std::uint64_t charge() const { return charged_bytes(disk_bytes, size); }
};

// Removed when nobody holds its lock: true, and when it was gone already.
bool sweep_temporary(FileOps& ops, int directory, const std::string& name);

// One leaf directory: its records, what it and its other files take on disk.
struct LeafFound {
  std::vector<FoundRecord> records;
  std::uint64_t directory_bytes = 0;
  std::uint64_t other_bytes = 0;  // temporaries, foreign files
};
// Who counts against the bound: what is under a reservation is left out, and what the dead left is removed.
struct CountFor {
  std::uint64_t writer = 0;            // who counts: what it does not hold the lock of is garbage
  std::vector<std::uint64_t> writers;  // all that have the root open: theirs is left alone
  const Charges* charges = nullptr;    // null: as charged_bytes()
};
// Errors that hid a part of a tree from a walk, so that its bytes were not counted. What vanished, and what
// permissions hide for good, is no such error.
struct Unseen {
  std::atomic<bool> shortage{false};  // of descriptors or memory: it says nothing of the tree
  std::atomic<bool> failed{false};    // any other error

  bool any() const { return shortage.load() || failed.load(); }
  void note(int error);  // 0: none
};
struct LeafOptions {
  const CountFor* count = nullptr;  // null: all is counted as it is
  bool names_only = false;          // records without disk_bytes and mtime; nothing else is looked at
  Unseen* unseen = nullptr;         // null: the caller does not need to know
};
Status scan_leaf(FileOps& ops, int generation, std::uint32_t leaf, const LeafOptions& options,
                 LeafFound* found);
// The leaf directories that exist; adds to *other_bytes what is no leaf.
Status list_leaves(FileOps& ops, int generation, std::vector<std::uint32_t>* leaves,
                   std::uint64_t* other_bytes);

// Everything at and below directory/name, as `du`. Vanished files count nothing; nor does what lies deeper
// than any tree of ours (each level holds a descriptor).
inline constexpr int kDeepestTree = 32;
std::uint64_t count_tree(FileOps& ops, int directory, const std::string& name, const LeafOptions& options,
                         const std::atomic<bool>& stop, int levels = kDeepestTree);

// Removes our files (records, temporaries of the dead) below a generation until
// `enough` bytes are gone; with remove_directories also emptied directories and
// at last the generation itself and its marks. Returns the bytes that are gone from disk.
// `gone` is told of each file's bytes as it goes.
std::uint64_t reclaim_generation(FileOps& ops, int namespace_directory, std::uint64_t number,
                                 std::uint64_t enough, bool remove_directories, const std::atomic<bool>& stop,
                                 const std::function<void(std::uint64_t)>& gone);

// What lies in an open directory.
Status list_directory(FileOps& ops, int directory, std::vector<DirEntry>* entries);
bool may_be_directory(const DirEntry& entry);
Status list_namespaces(FileOps& ops, int root, std::vector<std::string>* names);

}  // namespace kv_offload
