#include "storage/fs/recency.h"

#include <chrono>
#include <memory>
#include <vector>

#include "storage/fs/layout.h"

namespace kv_offload {

void Recency::write() {
  std::shared_ptr<Generation> own;
  const std::vector<FsCatalogue::Record> records = records_.take_touched(&own);
  if (!own) return;
  // One nanosecond apart, so that their order survives too.
  std::int64_t nanos =
      std::chrono::duration_cast<Nanos>(std::chrono::system_clock::now().time_since_epoch()).count() -
      static_cast<std::int64_t>(records.size());
  for (const FsCatalogue::Record& record : records)
    (void)ops_.set_mtime(own->directory.get(), layout::record_path(record.key, record.file_bytes), nanos++);
}

void Recency::write_when_due() {
  const Nanos now = clock_.now();
  if (now - last_write_ < FsCatalogue::kTouchEvery) return;
  last_write_ = now;
  write();
}

}  // namespace kv_offload
