// KnownRecords: the generation that this process uses, and what it knows of the records in it: the catalogue,
// the leaf directories that were listed, the removals that the cache has not heard of.
//
// While others write into the generation, what is not in the catalogue is unknown: a record of theirs is
// found by its name when it is asked for, without waiting until the directories are listed again.
//
// Invariant: all of it is of one generation. What was learnt in another changes nothing, so whoever brings it
// says which generation it is of. While there is none, nothing is known, and nothing is there to be found.
//
// Threads: any. mutex_ guards all but not_found_, and is the innermost lock: it is never held across a call
// to the file system, nor while another lock is taken. Each hold of it is short whatever the number of
// records: long lists are taken in piece by piece, and between two pieces those who wait for the lock get it;
// tables grow in small steps; a reset only puts aside what was known, and other calls go through it and free
// it. So the scheduler's thread waits neither for storage nor for a scan. Nor does it close files, which may
// wait for a server: whoever lets go of a generation last, it stays open until free_unused().
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "base/status.h"
#include "base/thread_annotations.h"
#include "storage/fs/catalogue.h"
#include "storage/fs/generation.h"
#include "storage/fs/walk.h"
#include "storage/presence.h"
#include "storage/tier.h"

namespace kv_offload {

class KnownRecords final : public Catalogue {
 public:
  using GenerationPtr = std::shared_ptr<Generation>;
  // How much of the generation's records is in the catalogue.
  enum class Extent : std::uint8_t {
    kSome,   // a directory is listed when one of its records is asked for
    kNames,  // what is not in it is not on disk
    kOrder,  // and what was used last: records may be evicted
  };
  // What could not be asked for is asked for again after this; until then it is a miss.
  static constexpr Nanos kAskAgainAfter{std::chrono::seconds(1)};
  // So many names that were asked for and not found are remembered (48 MiB): all requests that wait, and
  // what they share.
  static constexpr std::size_t kMostNotFound = std::size_t{1} << 19;
  // Uses that wait to be applied, and the lists (one a step) that they are in; the oldest beyond that are
  // forgotten.
  static constexpr std::size_t kMostUses = std::size_t{1} << 16;
  static constexpr std::size_t kMostUseLists = 1024;
  // Of a long list, what is done in one hold of the lock: some 0.1 ms.
  static constexpr std::size_t kRecordsPerLock = 64;
  // That one call of take_removals() tells; the next calls tell the others.
  static constexpr std::size_t kMostRemovals = 2048;

  // Throws InvalidArgument (unknown policy).
  KnownRecords(const std::string& eviction_policy, const Clock& clock);

  // ---- Catalogue
  Presence contains(const ChunkKey& key) const override EXCLUDES(mutex_);
  void begin_asking(std::span<const ChunkKey> keys, Era, std::vector<ChunkKey>* asked) override
      EXCLUDES(mutex_);
  void forget_absence(const ChunkKey& key) override { not_found_.forget_absence(key); }
  void give_up_asking(std::span<const ChunkKey> keys, Era) override EXCLUDES(mutex_);
  void touch(const ChunkKey& key) override EXCLUDES(mutex_);
  void used(const TierUses& uses) override EXCLUDES(mutex_);
  void take_removals(std::vector<TierRemoval>* removals) override EXCLUDES(mutex_);

  // ---- the generation
  GenerationPtr generation() const EXCLUDES(mutex_);  // null: there is none
  // What the next generation has to be.
  struct Next {
    std::uint64_t least_number = 1;
    bool by_reset = false;
  };
  std::optional<Next> next() const EXCLUDES(mutex_);  // nothing while there is a generation
  // False when a reset came since `made_for` was asked for: its lock file says the wrong thing.
  bool begin(GenerationPtr generation, const Next& made_for, Extent extent) EXCLUDES(mutex_);
  // Closes the generations that are over and that no op uses any more, and frees what was known of those
  // before a reset. Upkeep's threads.
  void free_unused() EXCLUDES(mutex_);
  // Others write into it, or nobody does.
  void note_shared(bool shared) EXCLUDES(mutex_);
  // Forgets it, if it is still ours, and all its records: its directory is gone. If others had been reset and
  // we not, the next one is for this process alone.
  void drop(const GenerationPtr& generation) EXCLUDES(mutex_);
  // Forgets whatever there is, so that no process that starts shares the next generation.
  void reset() EXCLUDES(mutex_);
  void close() EXCLUDES(mutex_);  // lets go of all generations and their locks
  // There is a generation above this one: others were reset, and unless we were too, we are apart from them.
  void note_newer(const GenerationPtr& generation, bool newer) EXCLUDES(mutex_);

  // ---- ops. kCancelled: of a generation that is no longer used.
  // What a read holds: while it lives, its record is not evicted.
  class Pin {
   public:
    Pin() = default;
    ~Pin() {
      if (records_ != nullptr) records_->unpin(ref_);
    }
    Pin(const Pin&) = delete;
    Pin& operator=(const Pin&) = delete;
    std::uint64_t file_bytes() const { return ref_.file_bytes; }

   private:
    friend class KnownRecords;
    KnownRecords* records_ = nullptr;
    FsCatalogue::Ref ref_;
  };
  Status begin_read(const ChunkKey& key, const GenerationPtr& generation, Pin* pin) EXCLUDES(mutex_);
  // What came of it.
  Status finish_read(const TierOp& op, const GenerationPtr& generation, Status status) EXCLUDES(mutex_);
  // *present: nothing is to be written. *replace: there is one that could not be read of late.
  Status begin_write(const ChunkKey& key, const GenerationPtr& generation, bool* present, bool* replace)
      EXCLUDES(mutex_);
  Status written(const FsCatalogue::Record& record, const EntryInfo& about, const GenerationPtr& generation)
      EXCLUDES(mutex_);
  void remove(const ChunkKey& key, const GenerationPtr& generation, TierRemoval::Reason reason)
      EXCLUDES(mutex_);
  // They were asked for: what is not known by now was not found.
  void answered(std::span<const ChunkKey> keys) EXCLUDES(mutex_);
  // It was declined for this request: so are those behind it that the request stores, which are worth nothing
  // without it. What a later request stores is looked at anew.
  void note_declined(const ChunkKey& key, std::uint32_t request, const GenerationPtr& generation)
      EXCLUDES(mutex_);
  bool is_declined(ChunkId id, std::uint32_t request) const EXCLUDES(mutex_);
  Status offered(std::span<const ChunkKey> keys, const RecordStore::EpochPtr& epoch,
                 std::vector<bool>* present) const EXCLUDES(mutex_);

  // ---- eviction
  struct Victim {
    FsCatalogue::Record record;
    GenerationPtr generation;
  };
  // Nothing known of it remains. *own: the next to go is of this request (not 0), and stays.
  std::optional<Victim> take_victim(std::uint32_t spared_request = 0, bool* own = nullptr) EXCLUDES(mutex_);
  void put_back(const Victim& victim) EXCLUDES(mutex_);
  void evicted(const Victim& victim) EXCLUDES(mutex_);

  // ---- scans. Those of long lists stop early when *stop becomes true.
  Extent extent() const EXCLUDES(mutex_);
  // Which names the records of these keys have, if there are any; 0: a group of which none was seen.
  std::vector<std::uint64_t> file_bytes_of(std::span<const ChunkKey> keys) const EXCLUDES(mutex_);
  // Never back from more to less.
  void note_extent(const GenerationPtr& generation, Extent extent) EXCLUDES(mutex_);
  void note_listed(const GenerationPtr& generation, std::uint32_t leaf) EXCLUDES(mutex_);
  // Names without times. newest: they are more recent than what is known; else a scan will tell.
  void adopt_names(const GenerationPtr& generation, std::span<const FoundRecord> records, bool newest,
                   const std::atomic<bool>& stop) EXCLUDES(mutex_);
  // Least recently used first. first: what was used since it was opened is more recent than all of these.
  using LastUse = std::pair<std::int64_t, std::uint32_t>;  // its time, and which record
  void adopt_in_order(const GenerationPtr& generation, std::span<const FoundRecord> records,
                      std::span<const LastUse> order, bool first, const std::atomic<bool>& stop)
      EXCLUDES(mutex_);
  // The known records in some slots from *slot on, which moves on. False: there are no more.
  bool known_from(const GenerationPtr& generation, Slot* slot,
                  std::vector<FsCatalogue::Record>* records) const EXCLUDES(mutex_);
  std::vector<FoundRecord> unknown_of(std::span<const FoundRecord> records) const EXCLUDES(mutex_);

  // Gives records their places by what used() told since. I/O and upkeep's threads.
  void apply_uses() EXCLUDES(mutex_);

  // ---- figures
  // Records in use since the last call, oldest use first, and their generation. Of a generation that ended
  // meanwhile: none.
  std::vector<FsCatalogue::Record> take_touched(GenerationPtr* generation) EXCLUDES(mutex_);
  std::uint64_t bytes() const EXCLUDES(mutex_);  // of the known records' files
  void figures(TierStats* stats) const EXCLUDES(mutex_);

 private:
  struct Leaf {
    enum class State : std::uint8_t { kUnknown, kAsking, kGivenUp, kListed } state = State::kUnknown;
    Nanos ask_again{0};  // kGivenUp
  };
  // What was known before a reset: its keys are to be told as removed.
  struct Forgotten {
    FsCatalogue catalogue;
    std::deque<TierUses> uses;
    Slot told = 0;  // the slots below this one

    explicit Forgotten(const std::string& eviction_policy) : catalogue(eviction_policy) {}
  };
  std::unique_ptr<Forgotten> nothing() const { return std::make_unique<Forgotten>(policy_name_); }

  bool apply_some_uses() EXCLUDES(mutex_);
  // Calls visit(at) for each `at` below `count`, kRecordsPerLock in a hold of the lock. False: it ended
  // early, as *stop became true, or *generation (where it is given) is no longer ours.
  template <typename Visit>
  bool in_pieces(std::size_t count, const GenerationPtr* generation, const std::atomic<bool>& stop,
                 Visit visit) const EXCLUDES(mutex_);
  bool is_unknown(const Leaf& leaf, Nanos now) const REQUIRES(mutex_);
  // Puts aside what was known; *forgotten is the empty place for it.
  void drop_all(std::unique_ptr<Forgotten> forgotten) REQUIRES(mutex_);
  void unpin(const FsCatalogue::Ref& ref) EXCLUDES(mutex_);

  const std::string policy_name_;
  const Clock& clock_;
  mutable Mutex mutex_;
  GenerationPtr generation_ GUARDED_BY(mutex_);
  std::vector<GenerationPtr> over_ GUARDED_BY(mutex_);  // those before it that are still open
  Next next_ GUARDED_BY(mutex_);
  bool apart_ GUARDED_BY(mutex_) = false;
  bool shared_ GUARDED_BY(mutex_) = false;
  Extent extent_ GUARDED_BY(mutex_) = Extent::kOrder;
  FsCatalogue catalogue_ GUARDED_BY(mutex_);
  std::vector<Leaf> leaves_ GUARDED_BY(mutex_);
  std::deque<TierRemoval> removals_ GUARDED_BY(mutex_);
  std::deque<std::unique_ptr<Forgotten>> forgotten_ GUARDED_BY(mutex_);  // oldest first
  std::vector<std::unique_ptr<Forgotten>> told_ GUARDED_BY(mutex_);      // all of it; to be freed
  std::deque<TierUses> uses_ GUARDED_BY(mutex_);            // not applied yet, oldest first; none is empty
  std::size_t used_keys_ GUARDED_BY(mutex_) = 0;            // in them
  std::size_t next_use_ GUARDED_BY(mutex_) = 0;             // of the oldest
  std::vector<std::uint64_t> declined_ GUARDED_BY(mutex_);  // marks, each in the one cell that it may be in
  PresenceCache not_found_;  // none of its keys is present: those that are found are in the catalogue
};

}  // namespace kv_offload
