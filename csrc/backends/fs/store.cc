// SPDX-License-Identifier: Apache-2.0
#include "backends/fs/store.h"

#include <fmt/core.h>

#include <cstdio>
#include <utility>

#include "backends/fs/layout.h"
#include "backends/fs/open.h"

namespace kv_offload {
namespace {

FsTierOptions with_defaults(FsTierOptions options) {
  if (!options.warn)
    options.warn = [](const std::string& line) { fmt::print(stderr, "kv_offload: {}\n", line); };
  return options;
}

OpenRoot open_and_begin(const FsTierOptions& options, FileOps& ops, RecordIndex* records) {
  std::shared_ptr<FsEpoch> epoch;
  OpenRoot root = open_root(options, ops, &epoch);
  (void)records->begin(std::move(epoch), {},
                       root.fresh ? RecordIndex::Extent::kOrder : RecordIndex::Extent::kSome);
  return root;
}

std::shared_ptr<FsEpoch> fs_epoch_of(const RecordStore::EpochPtr& epoch) {
  return std::static_pointer_cast<FsEpoch>(epoch);
}

}  // namespace

FsStore::FsStore(const FsTierOptions& options, FileOps& ops, const Clock& clock)
    : options_(with_defaults(options)),
      records_(options.eviction_policy, clock, options.tenants),
      root_(open_and_begin(options_, ops, &records_)),
      evictor_({options_, root_, records_, clock, stop_}),
      buffers_(clock),
      form_(options_.form),
      reader_(options_, root_, records_, buffers_, form_),
      writer_(options_, root_, records_, evictor_, buffers_, form_),
      scanner_(root_, records_, stop_),
      usage_scanner_({options_, root_, records_, evictor_, scanner_, clock, stop_}),
      epoch_manager_(root_, records_),
      root_repairer_(options_, root_),
      recency_(root_, records_, clock) {}

Status FsStore::write(const TierOp& op, const EpochPtr& epoch, std::uint64_t* moved) {
  return writer_.write(op, fs_epoch_of(epoch), moved);
}

Status FsStore::read(const TierOp& op, const EpochPtr& epoch, std::uint64_t* moved) {
  return reader_.read(op, fs_epoch_of(epoch), moved);
}

Status FsStore::remove(const ChunkKey& key, const EpochPtr& epoch) {
  return reader_.remove(key, fs_epoch_of(epoch));
}

Status FsStore::locate(std::span<const ChunkKey> keys, KeyOrder order, const EpochPtr& epoch,
                       std::vector<bool>* present) {
  if (records_.extent() != RecordIndex::Extent::kSome) {
    std::size_t looked_at = 0;
    if (Status status = scanner_.find(fs_epoch_of(epoch), keys, order, &looked_at); !status) return status;
    records_.answered(keys.first(looked_at));
    records_.skipped(keys.subspan(looked_at));
    present->resize(looked_at);
    return records_.offered(keys.first(looked_at), epoch, present);
  }
  for (const ChunkKey& key : keys) {
    if (Status status = scanner_.list(fs_epoch_of(epoch), layout::leaf_of(key)); !status) return status;
  }
  return records_.offered(keys, epoch, present);
}

void FsStore::start() {
  if (root_.fresh) return;
  usage_scanner_.start();
  if (stop_.load()) return;
  evictor_.reclaim_unused_epochs();
  evictor_.trade();
}

void FsStore::maintain() {
  if (stop_.load()) {
    records_.apply_uses();
    return recency_.write();
  }
  std::vector<std::string> lost = root_repairer_.poll(records_.epoch());
  if (epoch_manager_.keep(&lost)) evictor_.reclaim_unused_epochs();
  evictor_.publish_held();  // with this poll
  usage_scanner_.poll(std::move(lost));
  evictor_.trim();
  evictor_.trade();
  records_.apply_uses();
  recency_.write_if_due();
}

void FsStore::watch(PresenceCache*) {
  if (!stop_.load()) usage_scanner_.watch();
}

void FsStore::close() {
  root_.close();
  records_.close();
}

void FsStore::figures(TierStats* stats) const {
  stats->bytes = root_.space->total();
  stats->capacity_bytes = options_.max_bytes;
  stats->evicted_bytes = evictor_.evicted_bytes();
  stats->rebuilds = root_.changes->rebuilds();
  stats->lost_bytes = root_.changes->lost_bytes();
  stats->direct_ops = buffers_.direct_ops();
  stats->buffered_ops = buffers_.buffered_ops();
  records_.figures(stats);
  if (const auto epoch = records_.epoch()) stats->epoch_id = epoch->id;
}

}  // namespace kv_offload
