// SPDX-License-Identifier: Apache-2.0
// RecordImporter: writes whole records (whole_record.h) into a tier without a cache, for the command copy.
//
// It uses the write path of a server, so a record is complete or does not exist, and the tier's bounds hold.
// All records belong to the epoch that newly started processes used when this object was made. The caller
// checks whether that is still so: a reset by another process does not change this epoch.
//
// Threads: write() from several threads; everything else from one. Upkeep runs on a thread of this object.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "record/whole_record.h"
#include "tier/record_store.h"
#include "tier/ticker.h"

namespace kv_offload {

class RecordImporter {
 public:
  // Starts the store, which may take minutes: a directory is counted. Throws ResourceError if it has no
  // epoch.
  explicit RecordImporter(std::unique_ptr<RecordStore> store);
  ~RecordImporter();  // calls close()
  RecordImporter(const RecordImporter&) = delete;
  RecordImporter& operator=(const RecordImporter&) = delete;

  // Returns the epoch of all records, as RemoteRecords and FsRoot name it.
  std::string epoch() const { return epoch_->label(); }
  // Waits for the device, and does not use the record afterwards. *written is false if the tier had the
  // record already. used_unix_nanos: when the record was last used; 0: now. kNoSpace: the tier is full.
  // kCancelled: the tier has ended the epoch.
  Status write(const WholeRecord& record, std::int64_t used_unix_nanos, bool* written);
  // REQUIRES: no write() is running. Idempotent.
  void close();

 private:
  const std::unique_ptr<RecordStore> store_;
  RecordStore::EpochPtr epoch_;
  std::unique_ptr<Ticker> ticker_;  // null: closed
};

}  // namespace kv_offload
