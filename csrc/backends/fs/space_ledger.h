// SPDX-License-Identifier: Apache-2.0
// SpaceLedger: how many bytes a root takes, shared by every process that has it open. The state is one page
// in ROOT/ledger, changed under an flock, so it also works on a shared file system. Each process has a slot
// in the page (ledger_page.h).
//
// Every byte below the root is in `used` or under the reservation of some process. Bytes that may or may not
// be counted twice are counted. A reservation is granted only while `used` plus all reservations, including
// the new one, are at most max_bytes. (Exception: for a moment one record per process may be missing, if
// another process counts just while this process reuses its file, see Evictor::recycle.)
//
// So no leader is needed: a process that needs space removes a file, and the freed bytes become its
// reservation. A process below its share of a full root asks the others, which evict for it by their own
// policy. A process that dies leaves the sum too high, never too low: the first process that notices folds
// its slot into `used`, and counting the root makes the sum exact. A page that is not trusted (new, damaged,
// from another boot) grants nothing until some process has counted.
//
// No process blocks another. If a process is stopped while it holds the lock, a new file replaces the ledger,
// and the root must be counted. Dead processes are detected by the lock on ROOT/open-<writer>, which each
// process holds while it lives. Locks that do not reach other hosts (a mount with nolock) are detected by
// lost changes, and by processes that continue although their lock is free.
//
// Any thread. Calls block on the file; total() and finished() do not.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "backends/fs/file_ops.h"
#include "backends/fs/ledger_page.h"
#include "base/clock.h"
#include "base/status.h"
#include "base/thread_annotations.h"

namespace kv_offload {

// Returns the sharer id: all processes that use one epoch of one namespace share records. It holds the first
// 12 hex digits of the namespace name and the low 16 bits of the epoch number.
std::uint64_t sharer(const std::string& namespace_name, std::uint64_t epoch);
bool is_of_namespace(std::uint64_t sharer, const std::string& namespace_name);

enum class SpaceState : std::uint8_t {
  kUncounted,  // nothing is granted until some process has counted
  kCounted,
  kNotExclusive,  // file locks here do not exclude other hosts: nothing is granted any more
};

// The state at one poll of the page.
struct SpaceFigures {
  SpaceState state = SpaceState::kUncounted;
  std::uint64_t used = 0, reserved = 0, doubt = 0;
  std::uint64_t writes_by_others = 0;    // only grows; restarts with a new page
  std::uint64_t removals_by_others = 0;  // files; the same
  std::uint64_t writes = 0;              // by all processes
  bool alone = false;                    // no other process has the root open
  std::vector<std::uint64_t> writers;    // all processes that have it open, including this one
  struct Sharer {
    std::uint64_t id = 0;    // sharer()
    std::uint64_t held = 0;  // bytes of its records
  };
  std::vector<Sharer> sharers;           // each listed once
  std::uint64_t wanted = 0, credit = 0;  // our own slot: bytes still requested, bytes granted
  bool space_requested = false;          // another sharer requests space
  bool shared = false;                   // another process shares records with us
  // Another process that counts now, and a number that changes while that process runs.
  std::uint64_t counter = 0, counter_version = 0;
};

// True if the file system has no room. One that copies on write refuses even to overwrite the page of the
// ledger. Removing files makes room, and needs none.
inline bool is_full(const Status& status) {
  return status.kind() == StatusKind::kNoSpace && status.error_number() != 0;
}

class Reservation;

class SpaceLedger {
 public:
  // The number of counts that ended. If it is read before a file is removed, it shows whether a count may
  // have missed the file already. An outdated number errs towards a sum that is too high.
  using Finished = std::uint64_t;

  // Opens or creates ROOT/ledger and takes a slot. Throws ResourceError (even if the file system has no
  // locks). If the file system is full, a later change takes the slot.
  SpaceLedger(FileOps& ops, int root, const std::string& root_path, std::uint64_t max_bytes,
              std::uint64_t writer, std::uint64_t sharer);
  // For tools that only remove files (the CLI): takes no slot. Without a ledger it does nothing.
  SpaceLedger(FileOps& ops, int root, const std::string& root_path);
  // Does not close(): leaves the same state as a process that dies.
  ~SpaceLedger();
  // Frees the slot. REQUIRES: no reservation is left.
  void close();

  // Sets the sharer id of this process; published with the next change of the page.
  void share_as(std::uint64_t sharer) { sharer_.store(sharer, std::memory_order_relaxed); }

  // Sets the bytes held by the records of this process and of those that share them; published with the next
  // change of the page.
  void publish_held(std::uint64_t bytes) { held_.store(bytes, std::memory_order_relaxed); }
  // Asks the other sharers to evict `bytes` for this process, including its existing credit. Does not wait. 0
  // withdraws the request and frees the credit.
  void ask(std::uint64_t bytes) EXCLUDES(mutex_);
  // Returns the bytes that this process has to evict for another one, at most those requested
  // (LedgerPage::claim). The caller must finish with grant().
  std::optional<LedgerRequest> claim() EXCLUDES(mutex_);
  // Reports that the files which the reservation adopted were removed: their bytes become credit of the
  // requester, whose request keeps the `missing` rest.
  void grant(const LedgerRequest& request, std::uint64_t missing, Reservation* reservation) EXCLUDES(mutex_);

  // Adds bytes that appeared without a reservation (an empty directory).
  void add(std::uint64_t bytes);
  // Subtracts bytes that were removed from the disk.
  void remove(std::uint64_t bytes, Finished before);
  Finished finished() const { return finished_.load(std::memory_order_acquire); }

  // Starts and finishes a count of the root. The counter must skip bytes under a reservation: temporaries
  // whose writer is in SpaceFigures::writers and holds their lock. finish_count() fails if the page no longer
  // knows the count (the page was replaced); then count again.
  Status begin_count(std::uint64_t* number);
  // *surplus (or null): by how much the sum was too high, beyond its known doubt.
  Status finish_count(std::uint64_t number, std::uint64_t counted, std::uint64_t* surplus = nullptr);
  void give_up_count() noexcept;

  // For the one thread that looks after the root, about once a second: reads the page and folds the slots of
  // dead processes.
  Status poll(Nanos now, SpaceFigures* figures);

  // Returns a number that changes when another process has written or removed a record; empty if the page
  // cannot be read now. Takes no file lock, so another host may see a change late.
  std::optional<std::uint64_t> peek_changes_by_others() EXCLUDES(mutex_);

  std::uint64_t total() const { return total_.load(std::memory_order_relaxed); }

  // Returns the bound in use: max_bytes, or less while the file system has no room for that.
  std::uint64_t bound() const { return bound_.load(); }
  // Reports that the file system had no room for a reservation: the bound becomes the bytes in use without
  // it.
  void lower_bound(const Reservation& refused);
  void raise_bound(std::uint64_t by);
  bool bound_is_lowered() const { return bound() < max_bytes_; }

  // How long another process may hold the lock before the file is replaced, in real time.
  static constexpr std::chrono::milliseconds kLockWait{1500};
  // A slot that has no lock file and does not change for this long belongs to a dead process.
  static constexpr Nanos kDeadAfter{std::chrono::seconds(3)};

 private:
  friend class Reservation;
  // Changes that happened but are not on the page yet. Sums instead of a list, because destructors add to it,
  // and memory may have run out.
  struct PendingChanges {
    struct Bytes {
      std::uint64_t appeared = 0, removed = 0;
    };
    Bytes certain, uncertain;  // uncertain: a count that ended may have missed them, or included them already
    Finished before = 0;       // for `certain`
    std::uint64_t writes = 0, removals = 0;
    // `finished` only grows on a page: bytes recorded at a lower value than others are uncertain.
    void add(Bytes bytes, Finished of) noexcept;
  };
  // Earlier state of another process's slot.
  struct Seen {
    std::uint64_t version = 0;
    Nanos moved{0};
    bool folded = false;   // its lock was free
    unsigned returns = 0;  // times it came back after that
  };

  Status reserve(Reservation* reservation, std::uint64_t bytes, std::uint64_t* missing) EXCLUDES(mutex_);
  void settle(Reservation* reservation) noexcept EXCLUDES(mutex_);
  Status refuse(const LedgerPage& page, const LedgerSlot* own) const REQUIRES(mutex_);

  // ledger_file.cc
  // Runs change(page, our slot or null) on the current page and writes it back. `change` may run again on
  // another page, so it must modify only the page; its other results count only if the returned status is ok.
  using Change = std::function<void(LedgerPage&, LedgerSlot*)>;
  Status update(const Change& change) EXCLUDES(mutex_);
  Status update_locked(const Change& change) REQUIRES(mutex_);
  Status lock_page() REQUIRES(mutex_);
  Status read_page(LedgerPage* page) REQUIRES(mutex_);
  Status write_page(LedgerPage* page) REQUIRES(mutex_);
  bool was_replaced() REQUIRES(mutex_);
  Status open_page() REQUIRES(mutex_);
  void replace_page() REQUIRES(mutex_);
  LedgerSlot* claim_slot(LedgerPage* page) REQUIRES(mutex_);
  void apply_pending(LedgerPage* page) REQUIRES(mutex_);

  // ledger_members.cc
  void hold_presence();
  bool is_dead(const LedgerSlot& slot, Nanos now, Fd* presence) EXCLUDES(mutex_);
  struct OwnChanges {
    std::uint64_t writes = 0, removals = 0;
  };
  void fill_figures(const LedgerPage& page, const OwnChanges& own, SpaceFigures* figures) const
      REQUIRES(mutex_);

  FileOps& ops_;
  const int root_;
  const std::string path_;
  const std::uint64_t max_bytes_;
  const std::uint64_t writer_;  // 0: no slot
  std::atomic<std::uint64_t> sharer_;
  std::atomic<std::uint64_t> held_{0};
  std::uint64_t host_ = 0;
  Fd presence_;                         // used only by the thread that looks after the root
  std::map<std::uint64_t, Seen> seen_;  // same thread
  Mutex mutex_;                         // needed because an flock does not exclude threads of one process
  Fd fd_ GUARDED_BY(mutex_);
  std::uint64_t version_ GUARDED_BY(mutex_) = 0;
  std::uint64_t reserved_ GUARDED_BY(mutex_) = 0;
  std::uint64_t evicting_ GUARDED_BY(mutex_) = 0;
  OwnChanges own_ GUARDED_BY(mutex_);
  std::uint64_t counts_ GUARDED_BY(mutex_) = 0;
  unsigned overwritten_ GUARDED_BY(mutex_) = 0;        // our changes that other processes overwrote
  bool counted_this_boot_ GUARDED_BY(mutex_) = false;  // the page is from this boot
  bool not_exclusive_ GUARDED_BY(mutex_) = false;
  PendingChanges pending_ GUARDED_BY(mutex_);
  std::atomic<std::uint64_t> total_{0};
  std::atomic<std::uint64_t> bound_;
  std::atomic<Finished> finished_{0};
};

// Returns the bytes that a root takes according to its page; empty if there is no trusted page. Takes no lock
// and writes nothing: for tools, which may run as another user.
std::optional<std::uint64_t> recorded_usage(FileOps& ops, int root);

// The space that one write holds. The destructor settles it: the bytes in `used` stay counted.
class Reservation {
 public:
  explicit Reservation(SpaceLedger& space) : space_(space) {}
  ~Reservation() { space_.settle(this); }
  Reservation(const Reservation&) = delete;
  Reservation& operator=(const Reservation&) = delete;

  // Grows the reservation to `bytes` in total. kNoSpace: this would exceed the bound (*missing must be freed
  // first), or the root is being counted (*missing is 0). kNoSpace with an errno: is_full(); *missing is
  // `bytes`.
  Status grow_to(std::uint64_t bytes, std::uint64_t* missing);
  // Reports a file that was removed for this reservation. The next grow_to() turns its bytes into reserved
  // bytes, and no other process gets them in between.
  void adopt(std::uint64_t bytes, SpaceLedger::Finished before) {
    if (bytes > 0) freed_.push_back({bytes, before});
  }
  std::uint64_t used = 0;

 private:
  friend class SpaceLedger;
  struct Freed {
    std::uint64_t bytes;
    SpaceLedger::Finished before;
  };
  SpaceLedger& space_;
  std::uint64_t held_ = 0;
  SpaceLedger::Finished since_ = 0;
  bool evicting_ = false;
  std::vector<Freed> freed_;
};

}  // namespace kv_offload
