// SPDX-License-Identifier: Apache-2.0
// Temporary files of a root: files being written, locked by their writer while it lives.
#pragma once

#include <cstdint>
#include <string>

#include "backends/fs/file_ops.h"

namespace kv_offload {

// Creates a temporary in `prefix` ("ab/" or ""), locked by this process. Returns 0 or -errno.
int create_temporary(FileOps& ops, int directory, const std::string& prefix, int flags, std::uint64_t writer,
                     Fd* fd, std::string* path);
// A file's path in an open directory.
struct FileName {
  int directory = -1;
  std::string path;
};
// Turns an unneeded file into a temporary, locked by this process, with its content unchanged. to->path is
// the prefix of the new name, and becomes that name. Returns 0 and sets *fd and *info. *fd is empty if the
// file is not a plain file of this user, or has other names. Returns -errno if the file keeps its old name.
int rename_to_temporary(FileOps& ops, const FileName& from, FileName* to, int flags, std::uint64_t writer,
                        Fd* fd, FileInfo* info);

}  // namespace kv_offload
