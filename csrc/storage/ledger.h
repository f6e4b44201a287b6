// Ledger: the byte account of a root, shared by every process that has it open.
// One small file, read and written under an flock, so that it also holds on a
// shared file system.
//
// Rule: bytes are added BEFORE they can appear on disk and taken off AFTER they
// are gone. So whoever dies in between leaves the account too high, never too
// low; the next holder of the lease recounts. An account that cannot be trusted
// (new file, other boot, bad checksum) refuses every reservation until then.
// What goes while somebody recounts may or may not have been counted: see Epoch.
//
// Any thread. Calls block on the file; total() does not.
#pragma once

#include <atomic>
#include <cstdint>
#include <optional>
#include <string>

#include "base/status.h"
#include "base/thread_annotations.h"
#include "storage/file_ops.h"

namespace kv_offload {

class Ledger {
 public:
  // Opens or makes ROOT/ledger. Throws ResourceError (also when the file system
  // has no locks).
  Ledger(FileOps& ops, int root, const std::string& root_path, std::uint64_t max_bytes);

  // ok: all of `bytes` is ours. kNoSpace: it would pass the bound (*missing is
  // what must be given back first) or the account is being counted (*missing 0).
  Status reserve(std::uint64_t bytes, std::uint64_t* missing);
  // Corrects an earlier reservation to what was used. Never fails: a change that
  // cannot be written now is written with the next one.
  void adjust(std::int64_t delta);
  // Changes whenever a recount begins or ends. Taken before a file is removed, it
  // tells give_back whether a recount may have passed by in between. As of the last
  // call that touched the file; an older one errs towards too high.
  using Epoch = std::uint64_t;
  Epoch epoch() const { return seen_epoch_.load(std::memory_order_acquire); }
  // Bytes that were on disk at `since` and are gone. They stay on the account, and
  // a recount is wanted, when one began or ended meanwhile or this cannot be written.
  // counted: the caller, who holds the lease, has counted them in the recount that runs.
  void give_back(std::uint64_t bytes, Epoch since, bool counted = false);
  // Somebody left bytes on the account that are gone. As of the last refresh.
  bool recount_wanted() const { return recount_wanted_.load(std::memory_order_relaxed); }
  // Asks the evictor for room; it takes the sum of all such requests.
  void ask_room(std::uint64_t bytes);
  std::uint64_t take_room_requests();

  // REQUIRES: the lease. Between the two, reservations go on against the old
  // figure. finish adds what was reserved since begin (and `in_flight`, reserved
  // before for what is not counted), so files that appeared in between may count
  // twice, but never not at all.
  Status begin_recount(std::uint64_t in_flight);
  Status finish_recount(std::uint64_t counted);
  // An account of another boot is not to be trusted. REQUIRES: the lease.
  bool trusted();

  // Bytes that other processes added since the last recount here.
  std::uint64_t added_by_others();
  // Differs from its last answer when other processes added or took off bytes
  // between (as of the last refresh).
  std::int64_t change_by_others();

  std::uint64_t total() const { return seen_total_.load(std::memory_order_relaxed); }
  // Refreshes total() from the file.
  Status refresh();

 private:
  friend std::optional<std::uint64_t> recorded_usage(FileOps& ops, int root);
  struct Page;
  template <typename Change>
  Status update(Change change) EXCLUDES(mutex_);

  FileOps& ops_;
  const std::string path_;
  const std::uint64_t max_bytes_;
  Fd fd_;
  Mutex mutex_;                                    // an flock does not keep our own threads apart
  std::int64_t owed_ GUARDED_BY(mutex_) = 0;       // not yet written, by adjust
  std::int64_t explained_ GUARDED_BY(mutex_) = 0;  // total at the last recount, and our changes since
  std::atomic<std::uint64_t> seen_total_{0};
  std::atomic<Epoch> seen_epoch_{0};
  std::atomic<bool> recount_wanted_{false};  // in the file, or not yet written
};

// What the ledger of a root says that it takes; nothing when there is no ledger, or none that can be
// trusted. Takes no lock and writes nothing: for tools, which may run as another user.
std::optional<std::uint64_t> recorded_usage(FileOps& ops, int root);

// The evictor's lease: an exclusive flock on ROOT/lease, gone with its holder.
class Lease {
 public:
  // Throws ResourceError.
  Lease(FileOps& ops, int root, const std::string& root_path);
  bool held() const { return held_.load(std::memory_order_acquire); }
  // True when held afterwards. Does not wait. Any thread.
  bool try_take();
  void release();

 private:
  FileOps& ops_;
  Fd fd_;
  std::atomic<bool> held_{false};
};

}  // namespace kv_offload
