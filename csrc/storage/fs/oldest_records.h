// OldestRecords: removes the least recently used records of generations that this process does not use, by
// the times of their files, as many as are needed now.
//
// A full sort would list every directory; keys are hashes, so a few directories tell how old the oldest 32nd
// of all records is. A pass removes the records that are at least that old, one directory after the other,
// and lists each directory once. So only prompts of that oldest part lose records out of order.
//
// Threads: one at a time. Calls block on storage.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "storage/fs/file_ops.h"
#include "storage/fs/reclaim.h"
#include "storage/fs/walk.h"

namespace kv_offload {

class OldestRecords {
 public:
  struct Source {
    std::string namespace_name;
    std::uint64_t generation = 0;
    bool findable = true;  // false: a reset made its records useless, so all of them go before others
  };
  struct Request {
    std::uint64_t bytes = 0;
    std::function<std::vector<Source>()> sources;  // asked at the start of a pass
    std::function<bool(const Source&)> may_take;   // asked before each record
    Gone gone;                                     // told of each record after it went
  };
  // A pass removes about one part in so many.
  static constexpr std::uint64_t kParts = 32;
  // So many records are listed before their age is judged.
  static constexpr std::size_t kSample = 2048;

  // Both outlive this.
  OldestRecords(FileOps& ops, int root) : ops_(ops), root_(root) {}

  // The bytes that are gone: at least request.bytes, unless nothing is left or can be removed, or *stop.
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
  bool begin_pass(const Request& request, const std::atomic<bool>& stop);
  void open(const std::vector<Source>& sources);
  std::vector<Candidate> list_next();
  void queue(std::vector<Candidate> found);
  std::uint64_t remove_next();

  FileOps& ops_;
  const int root_;
  std::vector<Opened> opened_;
  std::vector<Leaf> leaves_;
  std::size_t next_leaf_ = 0;
  std::int64_t newest_ = 0;            // the newest time of last use that goes in this pass
  std::vector<Candidate> candidates_;  // the next to go is the last
};

}  // namespace kv_offload
