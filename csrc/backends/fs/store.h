// SPDX-License-Identifier: Apache-2.0
// FsStore: the record store of the fs tier. An epoch is a g<N> directory. The class implements RecordStore
// with these parts, in the order in which each may use those before it:
//
//   OpenRoot         the opened root and namespace; used by all others (open_root.h)
//   RecordIndex      the epoch in use, and what is known of its records
//   Evictor          makes space for a record in a full root
//   BounceBuffers    moves bytes between rows and the device
//   RecordForm       raw or encoded, encrypted or not
//   RecordReader, RecordWriter
//   Scanner          finds the records on disk; PeerRecords: those that others wrote
//   UsageScanner     counts the root when its size is in doubt
//   EpochManager     selects the epoch in use, and creates the next one
//   RootRepairer     restores what other programs remove from the root
//   Recency          saves the times of last use for a restart
//
// Threads: see RecordStore. Lock order, outermost first: the locks of Evictor and EpochManager, which are
// held across calls to the file system; SpaceLedger's lock; the locks that are never held across such calls,
// above all RecordIndex's. So the scheduler thread never waits for storage, however stuck other threads are.
#pragma once

#include <atomic>
#include <memory>
#include <span>
#include <vector>

#include "backends/fs/bounce_buffers.h"
#include "backends/fs/epoch_manager.h"
#include "backends/fs/evictor.h"
#include "backends/fs/open_root.h"
#include "backends/fs/recency.h"
#include "backends/fs/record_index.h"
#include "backends/fs/record_reader.h"
#include "backends/fs/record_writer.h"
#include "backends/fs/root_repairer.h"
#include "backends/fs/scanner.h"
#include "backends/fs/usage_scanner.h"
#include "tier/record_store.h"

namespace kv_offload {

class FsStore final : public RecordStore {
 public:
  // Opens the root; throws as described at make_fs_tier().
  FsStore(const FsTierOptions& options, FileOps& ops, const Clock& clock);

  Status write(const TierOp& op, const EpochPtr& epoch, std::uint64_t* moved) override;
  Status read(const TierOp& op, const EpochPtr& epoch, std::uint64_t* moved) override;
  Status remove(const ChunkKey& key, const EpochPtr& epoch) override;
  // Before the scan is complete it lists the leaf directories of these keys. Later it looks for the names
  // that others may have written meanwhile.
  Status locate(std::span<const ChunkKey> keys, KeyOrder order, const EpochPtr& epoch,
                std::vector<bool>* present) override;
  // One key per directory while directories are listed.
  std::size_t keys_per_locate(KeyOrder order) const override {
    return records_.extent() == RecordIndex::Extent::kSome ? 1 : order == KeyOrder::kPrefix ? 64 : 16;
  }
  void start() override;
  void maintain() override;
  void watch(PresenceCache* known) override;
  Status begin_epoch() override { return epoch_manager_.begin(); }
  EpochPtr epoch() const override { return records_.epoch(); }
  void forget(std::uint64_t) override { epoch_manager_.reset(); }
  void stop() override { stop_.store(true); }
  void close() override;
  void figures(TierStats* stats) const override;
  Catalog* catalog() override { return &records_; }

 private:
  const FsTierOptions options_;
  std::atomic<bool> stop_{false};  // set once, by stop(); long operations check it
  RecordIndex records_;            // before root_: an unknown policy then leaves nothing on disk
  OpenRoot root_;
  Evictor evictor_;
  BounceBuffers buffers_;
  RecordForm form_;
  RecordReader reader_;
  RecordWriter writer_;
  Scanner scanner_;
  UsageScanner usage_scanner_;
  EpochManager epoch_manager_;
  RootRepairer root_repairer_;
  Recency recency_;
};

}  // namespace kv_offload
