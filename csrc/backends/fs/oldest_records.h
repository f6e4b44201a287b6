// SPDX-License-Identifier: Apache-2.0
// OldestRecords: removes the least recently used records of epochs that this process does not use, ordered by
// file times, as many as are needed now.
//
// A full sort would list every directory. Keys are hashes, so a few directories are a sample that shows the
// age of the oldest 1/32 of all records. A pass removes the records that are at least that old, one directory
// after another, and lists each directory once. So only prompts within that oldest part lose records out of
// order.
//
// Threads: one at a time. Calls block on storage.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "backends/fs/file_ops.h"
#include "backends/fs/reclaim.h"
#include "backends/fs/temporary.h"
#include "backends/fs/walk.h"

namespace kv_offload {

class OldestRecords {
 public:
  struct Source {
    std::string namespace_name;
    std::uint64_t epoch = 0;
    bool findable = true;  // false: a reset made its records useless, so all of them are removed first
  };
  struct Request {
    std::uint64_t bytes = 0;
    std::function<std::vector<Source>()> sources;  // called at the start of a pass
    std::function<bool(const Source&)> may_take;   // called before each record
    OnRemoved on_removed;                          // called after each removed record
    // Called instead of the removal of a record's file, or null. Returns the file's bytes if it has no name
    // in its directory any more. Returns 0 if the file is to be removed.
    std::function<std::uint64_t(const Source&, const FileName&, const FileInfo&)> reuse;
  };
  // A pass removes about 1/kParts of all records.
  static constexpr std::uint64_t kParts = 32;
  // Sample size for the age threshold, in records.
  static constexpr std::size_t kSample = 2048;

  // Both must outlive this object.
  OldestRecords(FileOps& ops, int root) : ops_(ops), root_(root) {}

  // Returns the bytes freed: at least request.bytes, unless no record is left or can be removed, or *stop is
  // true.
  std::uint64_t remove(const Request& request, const std::atomic<bool>& stop);

 private:
  struct Opened {
    Source source;
    Fd directory;
  };
  struct Leaf {
    std::size_t source = 0;  // index into opened_
    std::uint32_t number = 0;
  };
  struct Candidate {
    std::size_t source = 0;
    FoundRecord record;
  };
  bool begin_pass(const Request& request, std::uint64_t needed, const std::atomic<bool>& stop);
  void open(const std::vector<Source>& sources);
  std::vector<Candidate> list_next();
  void queue(std::vector<Candidate> found);
  std::uint64_t remove_next(const Request& request);

  FileOps& ops_;
  const int root_;
  std::vector<Opened> opened_;
  std::vector<Leaf> leaves_;
  std::size_t next_leaf_ = 0;
  std::int64_t newest_ = 0;            // age threshold: records last used after this stay in this pass
  std::vector<Candidate> candidates_;  // the next victim is the last element
};

}  // namespace kv_offload
