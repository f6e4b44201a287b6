// Temporaries of a root: files in the making, locked by their writer while it lives.
#pragma once

#include <cstdint>
#include <string>

#include "storage/fs/file_ops.h"

namespace kv_offload {

// A new temporary in `prefix` ("ab/" or ""), locked as ours. 0 or -errno.
int create_temporary(FileOps& ops, int directory, const std::string& prefix, int flags, std::uint64_t writer,
                     Fd* fd, std::string* path);
// A file that nobody needs any more becomes a temporary in the same directory, locked as ours, with the bytes
// that are in it. 0, *fd and *info; *fd empty when it is no plain file of ours or has other names: then *path
// is where it is now; or -errno: it is where it was.
int rename_to_temporary(FileOps& ops, int directory, const std::string& from, int flags, std::uint64_t writer,
                        Fd* fd, std::string* path, FileInfo* info);

}  // namespace kv_offload
