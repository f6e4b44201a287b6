// SPDX-License-Identifier: Apache-2.0
#include "backends/fs/tier.h"

#include "backends/fs/file_ops.h"
#include "backends/fs/store.h"
#include "tier/encrypted_key_tier.h"

namespace kv_offload {

std::unique_ptr<Tier> make_fs_tier(const FsTierOptions& options) {
  check_options(options);
  FileOps& ops = options.file_ops != nullptr ? *options.file_ops : posix_file_ops();
  return with_encrypted_keys(
      make_thread_pool_tier(std::make_unique<FsStore>(options, ops, clock_of(options)), options),
      options.form.keys, options.namespace_id);
}

}  // namespace kv_offload
