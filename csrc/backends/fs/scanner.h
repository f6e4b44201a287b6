// SPDX-License-Identifier: Apache-2.0
// Scanner: brings the records on disk of our epoch into RecordIndex. It lists a directory or looks for
// single names while a request waits for them, and walks the whole epoch, which also returns its disk space.
//
// Invariant: it adds only what it found in the epoch that it was given, and forgets a known record only if
// its file is missing. After a complete walk all records are known, in the order of their last use.
//
// Threads: list() and find() on any thread; scan() on the upkeep thread, one at a time, with a few threads of
// its own for its duration. No lock of its own. The lock of one scan's shared work is innermost.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "backends/fs/open_root.h"
#include "backends/fs/record_index.h"
#include "backends/fs/walk.h"
#include "base/status.h"

namespace kv_offload {

// Reads from the headers which tenant wrote these records, and their sizes. Unreadable ones stay unknown.
// Ends early once *stop is true.
void read_tenants(FileOps& ops, const FsEpoch& epoch, const RecordIndex& index,
                  std::span<FoundRecord> records, const std::atomic<bool>& stop);

// Forgets the known records in these leaf directories whose names a listing did not find and whose files are
// missing. Returns their number. A record that is written at the same time stays known. found: hashes of the
// keys that were found; a hash collision keeps a missing record known. leaves: by number. uncertain (or
// null): appends the leaf of each record that stays known because the check of its file failed. Ends early
// once *stop is true.
std::uint64_t forget_missing(FileOps& ops, const std::shared_ptr<FsEpoch>& epoch, RecordIndex& index,
                             std::vector<std::size_t> found, const std::vector<bool>& leaves,
                             std::vector<std::uint32_t>* uncertain, const std::atomic<bool>& stop);

class Scanner {
 public:
  // All arguments must outlive this object. Scans return soon once `stop` is true.
  Scanner(const OpenRoot& root, RecordIndex& records, const std::atomic<bool>& stop)
      : root_(root), ops_(root.ops), records_(records), stop_(stop) {}

  // Lists one leaf directory, names only.
  Status list(const std::shared_ptr<FsEpoch>& epoch, std::uint32_t leaf);
  // Looks for records of these keys that others wrote meanwhile, by their names. For a prefix, skips the keys
  // after the first missing one. Returns an error if the directory does not answer. *looked_at: the number of
  // keys that were not skipped, if ok.
  Status find(const std::shared_ptr<FsEpoch>& epoch, std::span<const ChunkKey> keys, KeyOrder order,
              std::size_t* looked_at);
  // Scans the whole epoch and sets its extent to kOrder. Adds its disk space to *counted. count (or null):
  // the process that counts, and how. Returns false if it gave up. A reset meanwhile ends it early with true:
  // nothing is left to learn then. unseen: errors that hid a part of the epoch, which is then neither counted
  // nor known. dropped (or null): drops known records that are no longer on disk, and adds their number
  // to it.
  bool scan(const std::shared_ptr<FsEpoch>& epoch, const CountFor* count, std::uint64_t* counted,
            Unseen* unseen, std::uint64_t* dropped = nullptr);

 private:
  struct Scan;
  void list_leaves_of(Scan& scan);
  void scan_leaves_of(Scan& scan);
  std::uint64_t drop_missing(const Scan& scan, const std::vector<FoundRecord>& found);
  void read_tenants_of(Scan& scan, std::vector<FoundRecord>& records);
  std::vector<FoundRecord> unknown_records(const Scan& scan, const std::vector<FoundRecord>& records);

  const OpenRoot& root_;
  FileOps& ops_;
  RecordIndex& records_;
  const std::atomic<bool>& stop_;
};

}  // namespace kv_offload
