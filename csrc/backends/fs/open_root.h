// SPDX-License-Identifier: Apache-2.0
// OpenRoot: a root and a namespace in it, as opened by open_root() (open.h).
//
// Invariant: from open_root() to close() no member changes. The locks that it holds keep other servers from
// removing the namespace. All bytes that this process adds or removes below the root are reported to `space`.
// A directory that another program removed is created again under the same descriptor (RootRepairer).
//
// Threads: any, because the object does not change and SpaceLedger is thread-safe. close() only when no other
// call can follow.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "backends/fs/charges.h"
#include "backends/fs/file_ops.h"
#include "backends/fs/fs_epoch.h"
#include "backends/fs/full_disk.h"
#include "backends/fs/outside_changes.h"
#include "backends/fs/space_ledger.h"
#include "backends/fs/tier.h"

namespace kv_offload {

struct OpenRoot {
  explicit OpenRoot(FileOps& file_ops) : ops(file_ops) {}

  FileOps& ops;
  std::string path;
  std::string namespace_name;
  Fd directory;
  Fd namespace_directory;
  Fd open_lock;  // on <namespace>/open, shared while the namespace is open
  std::unique_ptr<SpaceLedger> space;
  std::unique_ptr<Charges> charges = std::make_unique<Charges>();
  std::unique_ptr<FullDisk> full_disk = std::make_unique<FullDisk>();
  std::unique_ptr<OutsideChanges> changes = std::make_unique<OutsideChanges>();
  bool direct = false;        // O_DIRECT works here
  bool reads_direct = false;  // O_DIRECT is used for reads too
  bool fresh = false;         // new, used by this process alone, and counted already: no scan is needed
  // Random, not 0. Part of the names of our temporaries, and the id of our slot in the page.
  std::uint64_t writer = 0;

  std::string namespace_path() const { return path + "/" + namespace_name; }
  // Counts a file or directory that was created without a reservation.
  void count(const Fd& made) const;
  // Removes a file. Returns 0 or -errno; a missing file counts as success.
  int remove_file(int at, const std::string& name) const;
  // Returns a callback for a reclaimer, which must call it after each removed file, before it removes the
  // next.
  std::function<void(std::uint64_t bytes)> each_removed() const;
  void close();
};

}  // namespace kv_offload
