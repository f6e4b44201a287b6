// SPDX-License-Identifier: Apache-2.0
#include "backends/fs/recency.h"

#include <cerrno>
#include <chrono>
#include <memory>
#include <vector>

#include "backends/fs/layout.h"

namespace kv_offload {

void Recency::write() {
  std::shared_ptr<FsEpoch> own;
  const std::vector<FsCatalog::Record> records = records_.take_touched(&own);
  if (!own) return;
  // One nanosecond apart, to preserve the order of the records too.
  std::int64_t nanos = now_of_files() - static_cast<std::int64_t>(records.size());
  for (const FsCatalog::Record& record : records) {
    const std::string path = layout::record_path(record.key, record.file_bytes);
    if (ops_.set_mtime(own->directory.get(), path, nanos++) == -ENOENT) root_.changes->add_missing();
  }
}

// Returns the time of the file system's clock, which may be a file server's: new records get their times from
// it, and times of last use are compared with those. The ledger was written within about the last second.
std::int64_t Recency::now_of_files() const {
  // A smaller difference is the age of the ledger's last write.
  constexpr std::int64_t kMostSkew = 5'000'000'000;
  const std::int64_t local_time =
      std::chrono::duration_cast<Nanos>(std::chrono::system_clock::now().time_since_epoch()).count();
  FileInfo ledger;
  if (ops_.stat(root_.directory.get(), std::string(layout::kLedgerFile), &ledger) != 0) return local_time;
  const std::int64_t skew =
      ledger.mtime_nanos > local_time ? ledger.mtime_nanos - local_time : local_time - ledger.mtime_nanos;
  return skew > kMostSkew ? ledger.mtime_nanos : local_time;
}

void Recency::write_if_due() {
  const Nanos now = clock_.now();
  if (now - last_write_ < FsCatalog::kTouchEvery) return;
  last_write_ = now;
  write();
}

}  // namespace kv_offload
