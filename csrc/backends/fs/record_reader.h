// SPDX-License-Identifier: Apache-2.0
// RecordReader: reads a record's bytes from its file into the shards of an op, and verifies them.
//
// Invariant: ok means that the shards hold the record's bytes: length, header, key and checksum match, and
// the authentication tag of an encrypted record (record_form.h). A record that is proven wrong is forgotten,
// and its file is removed unless another file took its name. The same applies to a record of another format
// version, but that does not count as damage. A record that could not be read stays, and is not offered
// during a back-off.
//
// Threads: I/O threads, several at once. No lock of its own.
#pragma once

#include <cstdint>
#include <memory>

#include "backends/fs/bounce_buffers.h"
#include "backends/fs/open_root.h"
#include "backends/fs/record_index.h"
#include "base/status.h"
#include "record/record_form.h"

namespace kv_offload {

class RecordReader {
 public:
  // All arguments must outlive this object.
  RecordReader(const FsTierOptions& options, const OpenRoot& root, RecordIndex& records,
               BounceBuffers& buffers, RecordForm& form);

  // See RecordStore::read.
  Status read(const TierOp& op, const std::shared_ptr<FsEpoch>& epoch, std::uint64_t* moved);
  // See RecordStore::remove.
  Status remove(const ChunkKey& key, const std::shared_ptr<FsEpoch>& epoch);

 private:
  // *opened: the file, if it is a regular one.
  Status read_file(const TierOp& op, const FsEpoch& epoch, std::uint64_t file_bytes, Fd* opened);
  // opened: the file to remove, if any. It must still be open, because a new file may get the inode number of
  // a removed one that no process has open.
  void remove(const ChunkKey& key, const std::shared_ptr<FsEpoch>& epoch, std::uint64_t file_bytes,
              const Fd& opened, TierRemoval::Reason reason);

  const FsTierOptions& options_;
  const OpenRoot& root_;
  FileOps& ops_;
  RecordIndex& records_;
  BounceBuffers& buffers_;
  RecordForm& form_;
};

}  // namespace kv_offload
