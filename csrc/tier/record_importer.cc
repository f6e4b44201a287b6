// SPDX-License-Identifier: Apache-2.0
#include "tier/record_importer.h"

#include <utility>

#include "tier/tier_runtime.h"

namespace kv_offload {
namespace {
constexpr Nanos kImportUpkeep{std::chrono::seconds(1)};
}

RecordImporter::RecordImporter(std::unique_ptr<RecordStore> store) : store_(std::move(store)) {
  store_->start();
  if (!store_->epoch()) {
    if (const Status status = store_->begin_epoch(); !status) throw_resource("{}", status.message());
  }
  epoch_ = store_->epoch();
  if (!epoch_) throw_resource("the tier has no epoch");
  ticker_ = std::make_unique<Ticker>(kImportUpkeep, [this] { store_->maintain(); });
}

RecordImporter::~RecordImporter() { close(); }

Status RecordImporter::write(const WholeRecord& record, std::int64_t used_unix_nanos, bool* written) {
  *written = false;
  TierOp op;
  op.key = record.header().key;
  op.group = record.header().group;
  op.kind = OpKind::kWrite;
  op.shards = {record.bytes()};
  op.is_whole_record = true;
  op.used_unix_nanos = used_unix_nanos;
  std::uint64_t moved = 0;
  const Status status = catch_exceptions([&] { return store_->write(op, epoch_, &moved); });
  *written = status && moved > 0;
  return status;
}

void RecordImporter::close() {
  if (!ticker_) return;
  store_->stop();  // first, so that upkeep in progress gives up soon
  ticker_->stop();
  ticker_.reset();
  (void)catch_exceptions([&] {
    store_->maintain();
    return Status::ok();
  });
  store_->close();
}

}  // namespace kv_offload
