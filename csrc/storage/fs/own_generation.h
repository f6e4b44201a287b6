// OwnGeneration: which generation this process uses, from one reset to the next: it makes the next one when
// there is none, and sees when ours was removed.
//
// Invariant: this process uses no generation that somebody else's reset made, and after a reset of its own
// none that was there before. One that was begun for whoever starts is never used after a reset.
//
// A process that shares the namespace may have been reset, which says nothing of our weights: we keep the
// generation that we have until we are reset ourselves, for what is in a newer one is of other weights than
// ours, and what we would write there of other weights than theirs.
//
// Where ours was removed, and no reset came: the one that a server that shared it has made since, or the one
// of the same number that was put back (from a snapshot), or a new one for whoever starts. They all hold what
// ours held. After a reset, or apart from others that were reset, a new one for this process alone. The marks
// in the namespace show a reset that came after the last keep().
//
// Threads: begin() and keep() on upkeep's, also beside each other; reset() on any, it never waits. making_
// admits one maker at a time; it is held across calls to the file system, and before the locks of
// KnownRecords and Space.
#pragma once

#include <string>
#include <vector>

#include "base/status.h"
#include "base/thread_annotations.h"
#include "storage/fs/known_records.h"
#include "storage/fs/open_root.h"

namespace kv_offload {

class OwnGeneration {
 public:
  // Both outlive this.
  OwnGeneration(const OpenRoot& root, KnownRecords& records)
      : root_(root), ops_(root.ops), records_(records) {}

  // Ok when there is a generation, made now or before.
  Status begin() EXCLUDES(making_);
  // Makes another one when ours was removed, by hand or by a host that does not see our lock, and says so in
  // *lost. True when there are others beside it.
  bool keep(std::vector<std::string>* lost) EXCLUDES(making_);
  // Nothing that was recorded until now is ours any more.
  void reset() { records_.reset(); }

 private:
  int make_next(const KnownRecords::Next& next, const std::vector<std::uint64_t>& numbers,
                std::shared_ptr<Generation>* made) REQUIRES(making_);

  const OpenRoot& root_;
  FileOps& ops_;
  KnownRecords& records_;
  Mutex making_;
};

}  // namespace kv_offload
