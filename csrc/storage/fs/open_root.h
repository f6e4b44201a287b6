// OpenRoot: a root and a namespace in it, as open_root() (open.h) leaves them.
//
// Invariant: from open_root() to close() no member changes; the locks that it holds keep other servers from
// removing the namespace. All that appears or goes below the root by our doing is told to `space`. A
// directory that something else removed is made again and put under the same descriptor (RootMender).
//
// Threads: any, for it does not change and Space guards itself. close() when no other call can come.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "storage/fs/charges.h"
#include "storage/fs/file_ops.h"
#include "storage/fs/full_disk.h"
#include "storage/fs/generation.h"
#include "storage/fs/outside_changes.h"
#include "storage/fs/space.h"
#include "storage/fs/tier.h"

namespace kv_offload {

struct OpenRoot {
  explicit OpenRoot(FileOps& file_ops) : ops(file_ops) {}

  FileOps& ops;
  std::string path;
  std::string namespace_name;
  Fd directory;
  Fd namespace_directory;
  Fd open_lock;  // of <namespace>/open, shared while the namespace is open
  std::unique_ptr<Space> space;
  std::unique_ptr<Charges> charges = std::make_unique<Charges>();
  std::unique_ptr<FullDisk> full_disk = std::make_unique<FullDisk>();
  std::unique_ptr<OutsideChanges> changes = std::make_unique<OutsideChanges>();
  bool direct = false;        // O_DIRECT works here
  bool reads_direct = false;  // and is to be used for reads
  bool fresh = false;         // new, ours alone, counted already: nothing to scan
  std::uint64_t writer = 0;   // random, not 0; names our temporaries and our slot in the page

  std::string namespace_path() const { return path + "/" + namespace_name; }
  // What we made, without a reservation, counts from now on.
  void count(const Fd& made) const;
  // 0 or -errno; a file that is gone already is no error.
  int remove_file(int at, const std::string& name) const;
  // For a reclaimer, which tells of each file after it went, before the next goes.
  std::function<void(std::uint64_t bytes)> each_removed() const;
  void close();
};

}  // namespace kv_offload
