// The generations of a namespace: directories g<N>. Each process reads and writes in
// one; a reset makes the next. Functions only.
//
// Who uses a generation holds a shared flock on its mark, a file beside it: g<N>.open,
// or g<N>.reset when a reset made it. (Locks on directories would not reach other hosts
// on NFS.) Without a lock it is reclaimed, unless it is the newest.
//
// Who starts uses the newest, or makes the next when a reset made that one: its records
// are of the weights that one process had in memory, and nobody who starts has those.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/status.h"
#include "storage/fs/file_ops.h"
#include "storage/fs/leaf_directories.h"
#include "storage/record_store.h"

namespace kv_offload {

// Ops in flight share it, so that a reset does not pull the descriptors from under them.
struct Generation : RecordStore::Epoch {
  std::uint64_t number = 0;
  Fd mark;  // with its lock
  Fd directory;
  std::string path;
  bool made = false;      // by this process
  bool by_reset = false;  // its mark says so
  LeafDirectories leaves;
};

enum class Generate : std::uint8_t {
  kNot,      // it is there
  kAtStart,  // for whoever starts
  kByReset,  // for this process alone
};
// 0 or -errno: ENOENT when it is gone, or about to be; EEXIST when it was to be made.
int open_generation(FileOps& ops, int namespace_directory, const std::string& namespace_path,
                    std::uint64_t number, Generate make, std::shared_ptr<Generation>* generation);
// For who starts; 0 or -errno.
int open_newest_generation(FileOps& ops, int namespace_directory, const std::string& namespace_path,
                           std::shared_ptr<Generation>* generation);

// Makes the mark of one that is in use again when it was removed, and locks it; 0 or -errno.
int keep_mark(FileOps& ops, int namespace_directory, const Generation& generation);
// Taken to be, when it cannot be told.
bool made_by_reset(FileOps& ops, int namespace_directory, std::uint64_t number);
// True if a reset made a generation of this number or above: its mark is there, its directory may be missing.
// Also true when the namespace cannot be listed.
bool reset_made_any_from(FileOps& ops, int namespace_directory, std::uint64_t least);

// Ascending.
Status list_generations(FileOps& ops, int namespace_directory, std::vector<std::uint64_t>* generations);
// True when some process uses it, this one included, or it cannot be told.
bool generation_is_open(FileOps& ops, int namespace_directory, std::uint64_t number);
// Whose records somebody may hit: those in use, and the newest unless a reset made it. Ascending.
std::vector<std::uint64_t> live_generations(FileOps& ops, int namespace_directory);

// Removes what nobody can hit any more: all generations that are neither in use, nor `own`, nor the newest,
// and the records of the newest when a reset made it and its process is gone; ends when `enough` bytes are
// gone. The bytes that are gone from disk; `gone` is told of each file's.
std::uint64_t reclaim_unused_generations(FileOps& ops, int namespace_directory,
                                         std::optional<std::uint64_t> own, std::uint64_t enough,
                                         const std::atomic<bool>& stop,
                                         const std::function<void(std::uint64_t)>& gone);
inline constexpr std::uint64_t kAllUnused = std::numeric_limits<std::uint64_t>::max();
// What that would remove.
std::uint64_t count_unused_generations(FileOps& ops, int namespace_directory);
// Marks without a generation; the bytes they took.
std::uint64_t remove_marks(FileOps& ops, int namespace_directory,
                           const std::function<bool(std::uint64_t number)>& which);

}  // namespace kv_offload
