// SPDX-License-Identifier: Apache-2.0
// The files and directories that turn a directory into a root, and that hold a namespace in it: created if
// missing, checked if present. Used at start, and by RootRepairer while the root is served.
//
// All functions throw InvalidArgument or ResourceError, with a sentence for an operator. Any thread.
#pragma once

#include <chrono>
#include <string>
#include <string_view>

#include "backends/fs/file_ops.h"
#include "backends/fs/open_root.h"

namespace kv_offload {

[[noreturn]] void fail(const std::string& path, std::string_view verb, int error);

// Creates root_dir and its parents as needed.
Fd open_root_directory(const FsTierOptions& options, FileOps& ops);

// Writes or checks kv_offload.json.
void write_format(const FsTierOptions& options, FileOps& ops, const OpenRoot& open);

struct NamespaceFiles {
  Fd directory;
  Fd open_lock;  // locked
};
// How long open_namespace() waits for a process that removes the namespace, in real time. That process may be
// stopped. A removal of millions of records takes longer.
inline constexpr std::chrono::milliseconds kStartLockWait{30'000};
inline constexpr std::chrono::milliseconds kUpkeepLockWait{500};
// Opens the namespace's directory, namespace.json and its `open` lock file; creates what is missing and adds
// it to open.space. Throws ResourceError after `lock_wait` if another process still removes the namespace.
NamespaceFiles open_namespace(const FsTierOptions& options, FileOps& ops, const OpenRoot& open,
                              std::chrono::milliseconds lock_wait);

}  // namespace kv_offload
