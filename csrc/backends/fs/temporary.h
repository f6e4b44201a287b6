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
// Turns an unneeded file into a temporary in the same directory, locked by this process, with its content
// unchanged. Returns 0 and sets *fd and *info. *fd is empty if it is not a plain file of ours or has other
// names; then *path is its new name. Returns -errno if the file keeps its old name.
int rename_to_temporary(FileOps& ops, int directory, const std::string& from, int flags, std::uint64_t writer,
                        Fd* fd, std::string* path, FileInfo* info);

}  // namespace kv_offload
