// SPDX-License-Identifier: Apache-2.0
#include "backends/fs/temporary.h"

#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>

#include "backends/fs/layout.h"

namespace kv_offload {
namespace {

std::string next_temporary(const std::string& prefix, std::uint64_t writer) {
  static std::atomic<std::uint64_t> next{1};  // O_EXCL detects a name that is taken
  return prefix + layout::temporary_name(writer, next.fetch_add(1));
}

}  // namespace

int create_temporary(FileOps& ops, int directory, const std::string& prefix, int flags, std::uint64_t writer,
                     Fd* fd, std::string* path) {
  for (int attempt = 0; attempt < 100; ++attempt) {
    *path = next_temporary(prefix, writer);
    int error = 0;
    *fd = open_fd(ops, directory, *path, flags | O_CREAT | O_EXCL | O_NOFOLLOW, 0600, &error);
    if (!*fd && error == EEXIST) continue;
    if (!*fd) return -error;
    // A sweeper may have removed the file between the open and the lock.
    FileInfo info;
    const int locked = lock_file(ops, fd->get(), LOCK_EX | LOCK_NB);
    const int known = locked == 0 ? ops.fstat(fd->get(), &info) : 0;
    if (locked == 0 && known == 0 && info.links > 0) return 0;
    (void)ops.unlink(directory, *path);
    if (locked < 0 && locked != -EWOULDBLOCK) return locked;
    if (known < 0) return known;
  }
  return -EBUSY;
}

int rename_to_temporary(FileOps& ops, const FileName& from, FileName* to, int flags, std::uint64_t writer,
                        Fd* fd, FileInfo* info) {
  to->path = next_temporary(to->path, writer);
  if (const int rc = ops.move(from.directory, from.path, to->directory, to->path, false); rc < 0) return rc;
  int error = 0;
  Fd opened = open_fd(ops, to->directory, to->path, flags | O_NOFOLLOW | O_NONBLOCK, 0, &error);
  // A sweeper may have removed the file between the rename and the lock: links is 0 then.
  if (opened && lock_file(ops, opened.get(), LOCK_EX | LOCK_NB) == 0 && ops.fstat(opened.get(), info) == 0 &&
      info->is_regular() && info->links == 1 && info->owner == ::geteuid()) {
    *fd = std::move(opened);
  }
  return 0;
}

}  // namespace kv_offload
