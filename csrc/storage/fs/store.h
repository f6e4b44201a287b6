// FsStore: the record store of the fs tier. An epoch is a generation's directory. It implements RecordStore
// by its parts, in the order in which each may know those before it:
//
//   OpenRoot         the root and the namespace, opened; what all others borrow (open_root.h)
//   KnownRecords     the generation in use, and what is known of its records
//   Evictor          the space for a record in a full root
//   BounceBuffers    how bytes go between rows and the device
//   RecordForm       raw or encoded, sealed or not
//   RecordReader, RecordWriter
//   Scanner          what is on disk; ForeignRecords: what others wrote
//   RootCounter      what the root takes, when that is in doubt
//   OwnGeneration    which generation is used, and how the next one is made
//   RootMender       what other programs remove from the root, made again
//   Recency          what was used last, for after a restart
//
// Threads: as RecordStore says. Locks, each held while one below it is taken: those of Evictor and
// OwnGeneration, which are held across calls to the file system; then Space's; then those that never are,
// KnownRecords' above all. So the scheduler's thread never waits for storage, however stuck others are.
#pragma once

#include <atomic>
#include <memory>
#include <span>
#include <vector>

#include "storage/fs/bounce_buffers.h"
#include "storage/fs/evictor.h"
#include "storage/fs/known_records.h"
#include "storage/fs/open_root.h"
#include "storage/fs/own_generation.h"
#include "storage/fs/recency.h"
#include "storage/fs/record_reader.h"
#include "storage/fs/record_writer.h"
#include "storage/fs/root_counter.h"
#include "storage/fs/root_mender.h"
#include "storage/fs/scanner.h"
#include "storage/record_store.h"

namespace kv_offload {

class FsStore final : public RecordStore {
 public:
  // Opens the root; throws as make_fs_tier says.
  FsStore(const FsTierOptions& options, FileOps& ops, const Clock& clock);

  Status write(const TierOp& op, const EpochPtr& epoch, std::uint64_t* moved) override;
  Status read(const TierOp& op, const EpochPtr& epoch, std::uint64_t* moved) override;
  // Before the scan has come there it lists the leaf directories of these keys; later it looks for the names
  // that others may have written since.
  Status locate(std::span<const ChunkKey> keys, KeyOrder order, const EpochPtr& epoch,
                std::vector<bool>* present) override;
  // Of each directory one key is asked for.
  std::size_t keys_per_locate(KeyOrder order) const override {
    return records_.extent() == KnownRecords::Extent::kSome ? 1 : order == KeyOrder::kPrefix ? 64 : 16;
  }
  void start() override;
  void maintain() override;
  Status begin_epoch() override { return own_.begin(); }
  EpochPtr epoch() const override { return records_.generation(); }
  void forget() override { own_.reset(); }
  void stop() override { stop_.store(true); }
  void close() override;
  void figures(TierStats* stats) const override;
  Catalogue* catalogue() override { return &records_; }

 private:
  const FsTierOptions options_;
  std::atomic<bool> stop_{false};  // set once, by stop(); all that takes long asks it
  KnownRecords records_;           // before the root: a policy that is unknown leaves nothing on disk
  OpenRoot root_;
  Evictor evictor_;
  BounceBuffers buffers_;
  RecordForm form_;
  RecordReader reader_;
  RecordWriter writer_;
  Scanner scanner_;
  RootCounter counter_;
  OwnGeneration own_;
  RootMender mender_;
  Recency recency_;
};

}  // namespace kv_offload
