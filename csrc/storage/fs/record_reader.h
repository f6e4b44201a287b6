// RecordReader: a record's bytes from its file into the shards of an op, verified.
//
// Invariant: ok means that the shards hold the record's bytes: length, header, key and checksum, of a sealed
// record its tag, were compared (record_form.h). A record that is proven wrong is no longer known, and its
// file is gone unless another took its name; so is one of another version of the format, which is no damage.
// One that could not be read stays, and is not offered for a while.
//
// Threads: I/O threads, several at once. No lock of its own.
#pragma once

#include <cstdint>
#include <memory>

#include "base/status.h"
#include "storage/fs/bounce_buffers.h"
#include "storage/fs/known_records.h"
#include "storage/fs/open_root.h"
#include "storage/record_form.h"

namespace kv_offload {

class RecordReader {
 public:
  // All of it outlives this.
  RecordReader(const FsTierOptions& options, const OpenRoot& root, KnownRecords& records,
               BounceBuffers& buffers, RecordForm& form);

  // As RecordStore::read.
  Status read(const TierOp& op, const std::shared_ptr<Generation>& generation, std::uint64_t* moved);

 private:
  Status read_file(const TierOp& op, const Generation& generation, std::uint64_t file_bytes,
                   std::uint64_t* inode);
  void remove(const ChunkKey& key, const std::shared_ptr<Generation>& generation, std::uint64_t file_bytes,
              std::uint64_t inode, TierRemoval::Reason reason);

  const FsTierOptions& options_;
  const OpenRoot& root_;
  FileOps& ops_;
  KnownRecords& records_;
  BounceBuffers& buffers_;
  RecordForm& form_;
};

}  // namespace kv_offload
