// Scanner: what is on disk of our generation, brought into KnownRecords: by names while somebody waits for a
// directory or for a record of another process, and by a walk of all of it, which also tells the bytes that
// it takes.
//
// Invariant: it brings in only what it found in the generation that it was given, and removes from what is
// known only a record whose file is not there. After a whole walk all records are known, in the order of
// their last use.
//
// Threads: list() and find() on any thread; scan() on upkeep's, one at a time, which takes a few threads of
// its own for its time. No lock of its own; that of one scan's shared work is innermost.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "base/status.h"
#include "storage/fs/known_records.h"
#include "storage/fs/open_root.h"
#include "storage/fs/walk.h"

namespace kv_offload {

class Scanner {
 public:
  // All of it outlives this. Scans give up soon when `stop` becomes true.
  Scanner(const OpenRoot& root, KnownRecords& records, const std::atomic<bool>& stop)
      : root_(root), ops_(root.ops), records_(records), stop_(stop) {}

  // One leaf directory, by names alone.
  Status list(const std::shared_ptr<Generation>& generation, std::uint32_t leaf);
  // What others wrote since: the records of these keys, by their names. Of a prefix those behind the first
  // that is missing are not looked for. Not ok: the directory does not answer.
  Status find(const std::shared_ptr<Generation>& generation, std::span<const ChunkKey> keys, KeyOrder order);
  // All of the generation; its extent is kOrder then. Adds what it takes on disk to *counted; count (or
  // null): who that is for. False when it gave up. A reset meanwhile ends it early, and there is nothing more
  // to be known. unseen: errors that hid a part of it, which is then neither counted nor known. forgotten (or
  // null): records that are known and no longer on disk are forgotten, and added to it.
  bool scan(const std::shared_ptr<Generation>& generation, const CountFor* count, std::uint64_t* counted,
            Unseen* unseen, std::uint64_t* forgotten = nullptr);

 private:
  struct Scan;
  void list_leaves_of(Scan& scan);
  void scan_leaves_of(Scan& scan);
  std::uint64_t forget_missing(const Scan& scan, const std::vector<FoundRecord>& found);
  std::vector<FoundRecord> not_known(const Scan& scan, const std::vector<FoundRecord>& records);

  const OpenRoot& root_;
  FileOps& ops_;
  KnownRecords& records_;
  const std::atomic<bool>& stop_;
};

}  // namespace kv_offload
