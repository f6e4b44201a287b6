// SPDX-License-Identifier: Apache-2.0
// open_root(): creates an OpenRoot. Every check that must fail at start runs here, before the first request
// is served.
//
// Threads: any.
#pragma once

#include <memory>

#include "backends/fs/file_ops.h"
#include "backends/fs/fs_epoch.h"
#include "backends/fs/open_root.h"
#include "backends/fs/tier.h"

namespace kv_offload {

// Opens the root and an epoch of the namespace. Throws InvalidArgument or ResourceError.
OpenRoot open_root(const FsTierOptions& options, FileOps& ops, std::shared_ptr<FsEpoch>* epoch);

}  // namespace kv_offload
