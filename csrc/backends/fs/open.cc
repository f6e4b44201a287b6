// SPDX-License-Identifier: Apache-2.0
#include "backends/fs/open.h"

#include <fcntl.h>

#include <atomic>
#include <cerrno>
#include <cstring>
#include <random>

#include "backends/fs/layout.h"
#include "backends/fs/reclaim.h"
#include "backends/fs/root_files.h"
#include "backends/fs/temporary.h"
#include "backends/fs/walk.h"
#include "base/aligned_buffer.h"

namespace kv_offload {
namespace {

// Reads the existing ledger, for a disk that has no room for a test file. Returns the bytes read or -errno.
std::int64_t read_direct(FileOps& ops, int root) {
  int error = 0;
  constexpr int kFlags = O_RDONLY | O_DIRECT | O_NOFOLLOW;
  const Fd fd = open_fd(ops, root, std::string(layout::kLedgerFile), kFlags, 0, &error);
  if (!fd) return -error;
  const AlignedBuffer page(kPageBytes);
  const iovec part{page.data(), page.size()};
  return ops.preadv(fd.get(), &part, 1, 0);
}

bool takes_direct(FileOps& ops, const OpenRoot& open, DirectMode mode) {
  if (mode == DirectMode::kOff) return false;
  Fd fd;
  std::string path;
  int rc =
      create_temporary(ops, open.namespace_directory.get(), "", O_RDWR | O_DIRECT, open.writer, &fd, &path);
  std::int64_t moved = rc;
  if (rc == 0) {
    const AlignedBuffer page(kPageBytes);
    const iovec part{page.data(), page.size()};
    moved = ops.pwritev(fd.get(), &part, 1, 0);
    if (moved >= 0) moved = ops.preadv(fd.get(), &part, 1, 0);
    (void)ops.unlink(open.namespace_directory.get(), path);
  }
  if (moved == -ENOSPC || moved == -EDQUOT) moved = read_direct(ops, open.directory.get());
  if (moved == static_cast<std::int64_t>(kPageBytes)) return true;
  if (mode == DirectMode::kOn) {
    throw_resource("the file system of {} refuses O_DIRECT ({}); set o_direct to auto or off", open.path,
                   moved < 0 ? std::strerror(static_cast<int>(-moved)) : "short transfer");
  }
  return false;
}

SpaceInfo space_of(FileOps& ops, const OpenRoot& open) {
  SpaceInfo space;
  if (const int rc = ops.statvfs(open.directory.get(), &space); rc < 0)
    fail(open.path, "get the free space of", -rc);
  return space;
}

void check_space(const OpenRoot& open, const SpaceInfo& space) {
  // Space that the root uses already can be freed by eviction.
  const std::uint64_t available = space.free_bytes + open.space->total();
  constexpr std::uint64_t kSmallestRecord = 17 * kPageBytes;
  if (available < kSmallestRecord) {
    throw_resource("{} has {} free; even a small record needs {}; free some space or set root_dir elsewhere",
                   open.path, format_bytes(available), format_bytes(kSmallestRecord));
  }
}

// Counts a root that holds only this new namespace immediately, so that the first write is granted.
bool count_new_root(const FsTierOptions& options, FileOps& ops, const OpenRoot& open, const FsEpoch& epoch) {
  SpaceFigures figures;
  const Nanos now = options.clock != nullptr ? options.clock->now() : SteadyClock().now();
  // Other processes with the root open may write already.
  if (!open.space->poll(now, &figures) || !figures.alone) return false;
  std::vector<std::string> names;
  // Other namespaces, or older epochs of ours, may hold records.
  if (!list_namespaces(ops, open.directory.get(), &names) || names.size() > 1) return false;
  std::vector<std::uint64_t> epochs;
  std::vector<DirEntry> entries;
  if (!list_epochs(ops, open.namespace_directory.get(), &epochs) || epochs.size() > 1) return false;
  // Our epoch may hold records of an earlier run.
  if (ops.list(epoch.directory.get(), &entries) < 0 || !entries.empty()) return false;
  std::uint64_t number = 0;
  if (!open.space->begin_count(&number)) return false;
  const std::atomic<bool> stop{false};
  const CountFor count{open.writer, figures.writers};
  Unseen unseen;
  const std::uint64_t bytes =
      count_tree(ops, open.directory.get(), ".", {.count = &count, .unseen = &unseen}, stop);
  // An incomplete count would make the sum too low.
  if (unseen.any()) {
    open.space->give_up_count();
    return false;
  }
  return open.space->finish_count(number, bytes).is_ok();
}

}  // namespace

OpenRoot open_root(const FsTierOptions& options, FileOps& ops, std::shared_ptr<FsEpoch>* epoch) {
  OpenRoot open(ops);
  open.path = options.root_dir;
  open.namespace_name = layout::namespace_name(options.namespace_id);
  std::random_device random;
  open.writer = std::uint64_t{random()} << 32 | random() | 1;
  open.directory = open_root_directory(options, ops);
  write_format(options, ops, open);
  // Slightly below max_bytes, so that directories and small files of namespaces and resets fit without a
  // reservation.
  constexpr std::uint64_t kMetadataBytes = 16 * kPageBytes;
  open.space =
      std::make_unique<SpaceLedger>(ops, open.directory.get(), open.path, options.max_bytes - kMetadataBytes,
                                    open.writer, sharer(open.namespace_name, 0));
  remove_old_probes(ops, open.directory.get(), open.each_removed());
  NamespaceFiles files = open_namespace(options, ops, open, kStartLockWait);
  open.namespace_directory = std::move(files.directory);
  open.open_lock = std::move(files.open_lock);
  const std::string path = open.namespace_path();
  if (const int rc = open_newest_epoch(ops, open.namespace_directory.get(), path, options.epoch, epoch);
      rc < 0)
    fail(path, "open the newest epoch of", -rc);
  const FsEpoch& own = **epoch;
  open.space->share_as(sharer(open.namespace_name, own.number));
  if (own.made) open.count(own.directory);
  if (own.made && own.number > 1 && options.warn) {
    options.warn(
        options.epoch.is_new
            ? fmt::format(
                  "{}: records of earlier engines are not used, because the hosts of this engine do not "
                  "have the same epoch: a host missed a reset or has a new directory, or several engines "
                  "started at the same time",
                  path)
            : fmt::format("{} was reset: records written before the reset, or by the reset process after it, "
                          "are not used",
                          path));
  }
  open.direct = takes_direct(ops, open, options.o_direct);
  const SpaceInfo space = space_of(ops, open);
  open.reads_direct = open.direct && (!options.memory_outlives || space.ends_reads_first);
  check_space(open, space);
  open.fresh = count_new_root(options, ops, open, own);
  return open;
}

}  // namespace kv_offload
