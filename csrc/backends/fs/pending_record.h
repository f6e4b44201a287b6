// SPDX-License-Identifier: Apache-2.0
// PendingRecord: a record that is being written. Owned by one thread, from the reservation of its bytes until
// the record has its name.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "backends/fs/file_ops.h"
#include "backends/fs/fs_epoch.h"
#include "policy/eviction_policy.h"

namespace kv_offload {

struct PendingRecord {
  std::shared_ptr<FsEpoch> epoch;
  std::uint32_t leaf = 0;
  std::uint64_t file_bytes = 0;   // bytes to write
  std::uint64_t named_bytes = 0;  // file size of the raw record, as in the file name
  std::uint64_t charge = 0;       // of the file, once it is complete
  TenantId tenant = 0;
  bool direct = false;
  // If not 0, the write is declined rather than evict a record of this request.
  std::uint32_t spared_request = 0;
  // The temporary file of `epoch`, once there is one: a new file, or the file of an evicted record of the
  // same size.
  Fd fd;
  std::string path;
  // True once no temporary is left: the record has its name, or another process wrote the same record.
  bool published = false;
};

}  // namespace kv_offload
