// The files and directories that make a directory a root, and a root hold a namespace: made when they are
// missing, checked when they are there. For a start, and for RootMender while the root is served.
//
// All of it throws InvalidArgument or ResourceError, with a sentence for an operator. Any thread.
#pragma once

#include <string>
#include <string_view>

#include "storage/fs/file_ops.h"
#include "storage/fs/open_root.h"

namespace kv_offload {

[[noreturn]] void fail(const std::string& path, std::string_view verb, int error);

// Makes root_dir and its parents as needed.
Fd open_root_directory(const FsTierOptions& options, FileOps& ops);

// kv_offload.json.
void write_format(const FsTierOptions& options, FileOps& ops, const OpenRoot& open);

struct NamespaceFiles {
  Fd directory;
  Fd open_lock;  // held
};
// The directory of the namespace, namespace.json and `open` in it. What it makes is added to open.space.
NamespaceFiles open_namespace(const FsTierOptions& options, FileOps& ops, const OpenRoot& open);

}  // namespace kv_offload
