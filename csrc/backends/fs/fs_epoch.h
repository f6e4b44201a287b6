// SPDX-License-Identifier: Apache-2.0
// The epochs of a namespace: directories g<N>. Each process reads and writes in one epoch; a reset creates
// the next one. Functions only.
//
// A process that uses an epoch holds a shared flock on its mark, a file next to the directory: g<N>.open, or
// g<N>.reset if a reset created the epoch. (Locks on directories would not reach other hosts on NFS.) An
// epoch without a lock is reclaimed, unless it is the newest.
//
// A process that starts uses the newest epoch, or creates the next one if a reset created the newest. Records
// of a reset epoch belong to weights that one process had in memory, and no starting process has those.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "backends/fs/file_ops.h"
#include "backends/fs/leaf_directories.h"
#include "base/status.h"
#include "tier/record_store.h"
#include "tier/tier.h"

namespace kv_offload {

// Shared by the ops in flight, so that a reset does not close descriptors that they use.
struct FsEpoch : RecordStore::Epoch {
  std::string label() const override { return std::to_string(number); }
  std::uint64_t number = 0;
  std::uint64_t id = 0;  // EpochChoice::id; 0: it has none
  Fd mark;               // holds the lock, and the id in hexadecimal digits
  Fd directory;
  std::string path;
  bool made = false;      // by this process
  bool by_reset = false;  // as its mark says
  LeafDirectories leaves;
};

enum class EpochCreation : std::uint8_t {
  kNone,     // open an existing epoch
  kAtStart,  // shared by every process that starts
  kByReset,  // for this process only
};
// Opens or creates an epoch. Returns 0 or -errno: ENOENT if it was removed or is being removed; EEXIST if it
// was to be created and exists. `id`: of an epoch that is created.
int open_epoch(FileOps& ops, int namespace_directory, const std::string& namespace_path, std::uint64_t number,
               EpochCreation make, std::uint64_t id, std::shared_ptr<FsEpoch>* epoch);
// Opens the epoch for a process that starts. Returns 0 or -errno.
int open_newest_epoch(FileOps& ops, int namespace_directory, const std::string& namespace_path,
                      const EpochChoice& choice, std::shared_ptr<FsEpoch>* epoch);

// Creates the mark of an epoch in use again if it was removed, and locks it. Returns 0 or -errno.
int keep_mark(FileOps& ops, int namespace_directory, const FsEpoch& epoch);
// True if a reset created this epoch, and if that cannot be determined.
bool made_by_reset(FileOps& ops, int namespace_directory, std::uint64_t number);
// True if a reset created an epoch of this number or above: its mark exists, its directory may be missing.
// Also true if the namespace cannot be listed.
bool reset_made_any_from(FileOps& ops, int namespace_directory, std::uint64_t least);

// Lists the epochs in ascending order.
Status list_epochs(FileOps& ops, int namespace_directory, std::vector<std::uint64_t>* epochs);
// True if some process uses the epoch, this one included, or if that cannot be determined.
bool epoch_is_open(FileOps& ops, int namespace_directory, std::uint64_t number);
// Lists the epochs whose records some process may hit, in ascending order: those in use, and the newest
// unless a reset created it.
std::vector<std::uint64_t> live_epochs(FileOps& ops, int namespace_directory);

// Removes the records that no process can hit any more: all epochs that are neither in use, nor `own`, nor
// the newest. Also removes the records of the newest if a reset created it and its process has ended. Returns
// the bytes freed on disk; calls `on_removed` with the bytes of each removed file.
std::uint64_t reclaim_unused_epochs(FileOps& ops, int namespace_directory, std::optional<std::uint64_t> own,
                                    const std::atomic<bool>& stop,
                                    const std::function<void(std::uint64_t)>& on_removed);
// Returns the bytes that reclaim_unused_epochs() would remove.
std::uint64_t count_unused_epochs(FileOps& ops, int namespace_directory);
// Removes the marks that `which` selects; for marks without an epoch. Returns the bytes freed.
std::uint64_t remove_marks(FileOps& ops, int namespace_directory,
                           const std::function<bool(std::uint64_t number)>& which);

}  // namespace kv_offload
