// Space: how many bytes a root takes, shared by every process that has it open. One
// page in ROOT/ledger, changed under an flock, so that it also holds on a shared
// file system; each process has a slot in it (space_page.h).
//
// Every byte below the root is in `used` or under some process's reservation; what may
// be counted either way counts as too much. A reservation is granted only while `used`
// and all reservations, it included, are at most max_bytes.
// (For a moment one record of each process may be missing: that whose file it is about
// to write anew, see Evictor::recycle, if somebody counts just then.)
//
// So nobody has to be elected: whoever needs space removes a file, and what it took
// becomes its reservation. Who has less than its share of a full root asks the others, who evict for it by
// their own policy. Whoever dies leaves the sum too high, never too low: its
// slot is folded into `used` by whoever notices, and counting the root makes it exact.
// A page that cannot be believed (new, damaged, of another boot) grants nothing until
// somebody has counted.
//
// No process holds up another: one that is stopped while it holds the lock loses the
// file (a new one takes its place, to be counted); one that is gone is seen by the
// lock on ROOT/open-<writer>, which each holds while it lives. Locks that do not reach
// other hosts (a mount with nolock) show in changes that get lost, and in processes
// that go on though their lock is free.
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

#include "base/clock.h"
#include "base/status.h"
#include "base/thread_annotations.h"
#include "storage/fs/file_ops.h"
#include "storage/fs/space_page.h"

namespace kv_offload {

// Who shares records: a namespace and a generation of it, told by the first 12 digits of the one and the last
// 16 bits of the other.
std::uint64_t sharer(const std::string& namespace_name, std::uint64_t generation);
bool is_of_namespace(std::uint64_t sharer, const std::string& namespace_name);

enum class SpaceState : std::uint8_t {
  kUncounted,  // nothing is granted until somebody has counted
  kCounted,
  kNotExclusive,  // the locks of this file system do not exclude others: nothing is granted any more
};

// As of one look at the page.
struct SpaceFigures {
  SpaceState state = SpaceState::kUncounted;
  std::uint64_t used = 0, reserved = 0, doubt = 0;
  std::uint64_t writes_by_others = 0;  // only grows; starts anew with a new page
  std::uint64_t writes = 0;            // by all
  bool alone = false;                  // no other process has the root open
  std::vector<std::uint64_t> writers;  // who has it open, we among them
  struct Sharer {
    std::uint64_t id = 0;    // sharer()
    std::uint64_t held = 0;  // bytes of its records
  };
  std::vector<Sharer> sharers;           // what they have open of it, each once
  std::uint64_t wanted = 0, credit = 0;  // of our own slot: what is still asked for, what was granted
  bool asked = false;                    // another sharer asks for space
  bool shared = false;                   // one of the others shares records with us
  // Another that counts now, and something that changes while it lives.
  std::uint64_t counter = 0, counter_version = 0;
};

class Reservation;

class Space {
 public:
  // A number of counts that ended. Taken before a file is removed, it tells whether a count may have missed
  // the file already. One that is older than the truth errs towards too high.
  using Finished = std::uint64_t;

  // Opens or makes ROOT/ledger and takes a slot. Throws ResourceError (also when the
  // file system has no locks).
  Space(FileOps& ops, int root, const std::string& root_path, std::uint64_t max_bytes, std::uint64_t writer,
        std::uint64_t sharer);
  // For who only takes files away (the CLI): no slot. Without a ledger there is nothing to tell.
  Space(FileOps& ops, int root, const std::string& root_path);
  // Not closed: what it leaves is what a process leaves that dies.
  ~Space();
  // Gives the slot back. REQUIRES: no reservation is left.
  void close();

  // What this process shares records as from now on; told with the next change of the page.
  void share_as(std::uint64_t sharer) { sharer_.store(sharer, std::memory_order_relaxed); }

  // What the records of this process and of those that share them take; published with the next change.
  void publish_held(std::uint64_t bytes) { held_.store(bytes, std::memory_order_relaxed); }
  // Asks the other sharers to evict `bytes` for this process, credit that it has included. Waits for nothing.
  // 0 withdraws the request and frees the credit.
  void ask(std::uint64_t bytes) EXCLUDES(mutex_);
  // What this process has to evict for another one: at most what that one wants (SpacePage::claim). Ends with
  // grant().
  std::optional<SpaceRequest> claim() EXCLUDES(mutex_);
  // The files that the reservation adopted are gone: their bytes become credit of the asker, who goes on to
  // want what is missing.
  void grant(const SpaceRequest& request, std::uint64_t missing, Reservation* reservation) EXCLUDES(mutex_);

  // Bytes that appeared without a reservation (an empty directory).
  void add(std::uint64_t bytes);
  // Bytes that are gone from the disk.
  void remove(std::uint64_t bytes, Finished before);
  Finished finished() const { return finished_.load(std::memory_order_acquire); }

  // Counting the root. What is under a reservation is not to be counted: temporaries
  // whose writer is in SpaceFigures::writers and holds their lock. The second fails when
  // the first is not known any more (the page was made anew): then count again.
  Status begin_count(std::uint64_t* number);
  // *surplus (or null): by how much the sum was too high, beyond what it was known to be in doubt of.
  Status finish_count(std::uint64_t number, std::uint64_t counted, std::uint64_t* surplus = nullptr);
  void give_up_count() noexcept;

  // For the caller's one thread that looks after the root, about once a second: folds the slots of the dead.
  Status look(Nanos now, SpaceFigures* figures);

  std::uint64_t total() const { return total_.load(std::memory_order_relaxed); }

  // What this process takes for the bound: max_bytes, or less while the file system has no room for that.
  std::uint64_t bound() const { return bound_.load(); }
  // The file system had no room for what was reserved: from now on the bound is what is in use without it.
  void lower_bound(const Reservation& refused);
  void raise_bound(std::uint64_t by);
  bool bound_is_lowered() const { return bound() < max_bytes_; }

  // How long the lock may be held by somebody else before the file is replaced, in real time.
  static constexpr std::chrono::milliseconds kLockWait{1500};
  // After how long a slot that does not move, and has no lock to look at, is of a dead process.
  static constexpr Nanos kDeadAfter{std::chrono::seconds(3)};

 private:
  friend class Reservation;
  // What is true already and not on the page yet. Sums, not a list: destructors add to it, and memory may
  // have run out.
  struct Owed {
    struct Bytes {
      std::uint64_t appeared = 0, gone = 0;
    };
    Bytes sure, unsure;   // unsure: a count that ended may have missed them, or seen them already
    Finished before = 0;  // of `sure`
    std::uint64_t writes = 0;
    // The number of the page only grows: bytes of a lower number than others are unsure.
    void add(Bytes bytes, Finished of) noexcept;
  };
  // How another's slot looked before.
  struct Seen {
    std::uint64_t version = 0;
    Nanos moved{0};
    bool folded = false;   // its lock was free
    unsigned returns = 0;  // all the same
  };

  Status reserve(Reservation* reservation, std::uint64_t bytes, std::uint64_t* missing) EXCLUDES(mutex_);
  void settle(Reservation* reservation) noexcept EXCLUDES(mutex_);
  Status refuse(const SpacePage& page, const SpaceSlot* own) const REQUIRES(mutex_);

  // space_file.cc
  // Runs change(page, our slot or null) on the page as it is, and writes it back. It may run again, on
  // another page: it keeps to the page, and what it finds out counts when the answer is ok.
  using Change = std::function<void(SpacePage&, SpaceSlot*)>;
  Status update(const Change& change) EXCLUDES(mutex_);
  Status update_locked(const Change& change) REQUIRES(mutex_);
  Status lock_page() REQUIRES(mutex_);
  Status read_page(SpacePage* page) REQUIRES(mutex_);
  Status write_page(SpacePage* page) REQUIRES(mutex_);
  bool was_replaced() REQUIRES(mutex_);
  Status open_page() REQUIRES(mutex_);
  void replace_page() REQUIRES(mutex_);
  SpaceSlot* enter(SpacePage* page) REQUIRES(mutex_);
  void pay(SpacePage* page) REQUIRES(mutex_);

  // space_members.cc
  void hold_presence();
  bool is_dead(const SpaceSlot& slot, Nanos now, Fd* presence) EXCLUDES(mutex_);
  void note(const SpacePage& page, std::uint64_t own_writes, SpaceFigures* figures) const REQUIRES(mutex_);

  FileOps& ops_;
  const int root_;
  const std::string path_;
  const std::uint64_t max_bytes_;
  const std::uint64_t writer_;  // 0: no slot
  std::atomic<std::uint64_t> sharer_;
  std::atomic<std::uint64_t> held_{0};
  std::uint64_t host_ = 0;
  Fd presence_;                         // of the thread that looks after the root
  std::map<std::uint64_t, Seen> seen_;  // too
  Mutex mutex_;                         // an flock does not keep our own threads apart
  Fd fd_ GUARDED_BY(mutex_);
  std::uint64_t version_ GUARDED_BY(mutex_) = 0;
  std::uint64_t reserved_ GUARDED_BY(mutex_) = 0;
  std::uint64_t evicting_ GUARDED_BY(mutex_) = 0;
  std::uint64_t own_writes_ GUARDED_BY(mutex_) = 0;
  std::uint64_t counts_ GUARDED_BY(mutex_) = 0;
  unsigned lost_ GUARDED_BY(mutex_) = 0;     // changes of ours that others overwrote
  bool vouched_ GUARDED_BY(mutex_) = false;  // the page is of this boot
  bool not_exclusive_ GUARDED_BY(mutex_) = false;
  Owed owed_ GUARDED_BY(mutex_);
  std::atomic<std::uint64_t> total_{0};
  std::atomic<std::uint64_t> bound_;
  std::atomic<Finished> finished_{0};
};

// What the page of a root says that it takes; nothing when there is none that can be believed. Takes no lock
// and writes nothing: for tools, which may run as another user.
std::optional<std::uint64_t> recorded_usage(FileOps& ops, int root);

// What one write holds of the space. Settles when it dies: what was `used` stays.
class Reservation {
 public:
  explicit Reservation(Space& space) : space_(space) {}
  ~Reservation() { space_.settle(this); }
  Reservation(const Reservation&) = delete;
  Reservation& operator=(const Reservation&) = delete;

  // ok: `bytes` are ours, in all. kNoSpace: it would pass the bound (*missing is what must go first), or the
  // root is being counted (*missing 0).
  Status grow_to(std::uint64_t bytes, std::uint64_t* missing);
  // A file that is gone for it: the next grow_to turns its bytes into ours, and nobody gets them in between.
  void adopt(std::uint64_t bytes, Space::Finished before) {
    if (bytes > 0) freed_.push_back({bytes, before});
  }
  std::uint64_t used = 0;

 private:
  friend class Space;
  struct Freed {
    std::uint64_t bytes;
    Space::Finished before;
  };
  Space& space_;
  std::uint64_t held_ = 0;
  Space::Finished since_ = 0;
  bool evicting_ = false;
  std::vector<Freed> freed_;
};

}  // namespace kv_offload
