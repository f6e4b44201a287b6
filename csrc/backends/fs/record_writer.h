// SPDX-License-Identifier: Apache-2.0
// RecordWriter: writes a record from the shards of an op into a file: reserves its bytes, writes a temporary
// (a new file, or the file of an evicted record), renames it, and adds the record to the catalog.
//
// Invariant: after a failure there is no temporary and no catalog entry. A temporary that could not be
// removed is counted, and the next count of the root removes it. Every byte that is written to disk is under
// the reservation of its op until it is in the sum.
//
// A file system that is full below max_bytes lowers the bound (SpaceLedger::lower_bound), so the next attempt
// evicts.
//
// Threads: I/O threads, several at once. No lock of its own; it waits for a thread that makes space
// (Evictor).
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "backends/fs/bounce_buffers.h"
#include "backends/fs/evictor.h"
#include "backends/fs/open_root.h"
#include "backends/fs/pending_record.h"
#include "backends/fs/record_index.h"
#include "base/status.h"
#include "record/record_form.h"

namespace kv_offload {

class RecordWriter {
 public:
  // All arguments must outlive this object.
  RecordWriter(const FsTierOptions& options, const OpenRoot& root, RecordIndex& records, Evictor& evictor,
               BounceBuffers& buffers, RecordForm& form);

  // See RecordStore::write.
  Status write(const TierOp& op, const std::shared_ptr<FsEpoch>& epoch, std::uint64_t* moved);

 private:
  struct PendingGuard;
  // *full: the file system has no room although the tier is below its bound; evicting may allow another
  // attempt.
  Status write_once(const TierOp& op, const std::shared_ptr<FsEpoch>& epoch, std::uint64_t* moved,
                    bool* full);
  Status write_file(OutgoingRecord& record, const TierOp& op, bool replace, PendingRecord* pending,
                    Reservation* reservation);
  Status make_leaf(FsEpoch& epoch, std::uint32_t leaf, Reservation* reservation);
  Status open_temporary(PendingRecord* pending, Reservation* reservation);
  void discard(const PendingRecord& pending, Reservation* reservation);
  int rename_to_name(const PendingRecord& pending,
                     const std::string& path);  // 0 or -errno; -EEXIST: the name is taken
  bool is_complete(const PendingRecord& pending, const std::string& path, std::uint64_t bytes);
  Status publish(PendingRecord* pending, const std::string& path, std::uint64_t charge,
                 Reservation* reservation);
  Status sync_names(FsEpoch& epoch, std::uint32_t leaf);
  void count_growth(FsEpoch& epoch, std::uint32_t leaf, Reservation* reservation);

  const FsTierOptions& options_;
  const OpenRoot& root_;
  FileOps& ops_;
  RecordIndex& records_;
  Evictor& evictor_;
  BounceBuffers& buffers_;
  RecordForm& form_;
};

}  // namespace kv_offload
