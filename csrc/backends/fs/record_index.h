// SPDX-License-Identifier: Apache-2.0
// RecordIndex: the epoch that this process uses, and what it knows of the records in it: the catalog, the
// listed leaf directories, and the removals not yet reported to the cache.
//
// While other processes write into the epoch, a record outside the catalog is unknown, not missing: such a
// record is looked up by its file name when it is requested, without waiting for the next listing.
//
// Invariant: everything here belongs to one epoch. Facts learned in another epoch change nothing, so callers
// pass the epoch that they looked at. While there is no epoch, nothing is known and nothing can be found.
//
// Threads: any. mutex_ guards everything except not_found_. It is the innermost lock: it is never held across
// a call to the file system, nor while another lock is taken. Each hold is short, whatever the number of
// records. Long lists are processed in pieces, and waiting threads get the lock between two pieces
// (take_removals(), which is bounded, excepted). A caller's list grows before the lock is taken (make_room).
// Tables grow in small steps. A reset only sets the old state aside; later calls report its keys and free it.
// So the scheduler thread waits neither for storage nor for a scan. It does not close files either, which may
// wait for a file server: an epoch stays open until free_unused(), whichever thread drops the last other
// reference.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "backends/fs/catalog.h"
#include "backends/fs/fs_epoch.h"
#include "backends/fs/walk.h"
#include "base/clock.h"
#include "base/status.h"
#include "base/thread_annotations.h"
#include "tier/presence.h"
#include "tier/tier.h"

namespace kv_offload {

class RecordIndex final : public Catalog {
 public:
  using FsEpochPtr = std::shared_ptr<FsEpoch>;
  // How much of the epoch's records the catalog holds.
  enum class Extent : std::uint8_t {
    kSome,   // a directory is listed when one of its records is requested
    kNames,  // a record outside the catalog is not on disk
    kOrder,  // the last uses are known too: records may be evicted
  };
  // Delay before a failed lookup is tried again; until then it is a miss.
  static constexpr Nanos kLookupRetryDelay{std::chrono::seconds(1)};
  // Bound on remembered lookups that found nothing (48 MiB): enough for all waiting requests and the chunks
  // that they share.
  static constexpr std::size_t kMostNotFound = std::size_t{1} << 19;
  // Bounds on the uses that wait to be applied, and on the lists (one per step) that hold them. The oldest
  // beyond these bounds are forgotten.
  static constexpr std::size_t kMostUses = std::size_t{1} << 16;
  static constexpr std::size_t kMostUseLists = 1024;
  // Records of a long list processed per hold of the lock: about 0.1 ms.
  static constexpr std::size_t kRecordsPerLock = 64;
  // Removals that one call of take_removals() reports; later calls report the rest. The call is the scheduler
  // thread's, which must not wait: it does not let waiting threads in between its holds. So a thread may wait
  // for all holds of one call: this many removals.
  static constexpr std::size_t kMostRemovals = 2048;
  static_assert(kMostRemovals % kRecordsPerLock == 0);
  // Bound on the waiting removals of records that this process never reported as present. With the others,
  // whose number is bounded by the records that were known when the removals were last taken, it bounds the
  // list of an idle engine, which takes none.
  static constexpr std::size_t kMostUnreported = std::size_t{1} << 16;

  // tenants: empty, or as in CacheOptions. Throws InvalidArgument for an unknown policy.
  RecordIndex(const std::string& eviction_policy, const Clock& clock,
              std::vector<TenantOptions> tenants = {});

  // ---- Catalog
  Presence contains(const ChunkKey& key) const override EXCLUDES(mutex_);
  void begin_lookup(std::span<const ChunkKey> keys, EpochNumber, std::vector<ChunkKey>* started) override
      EXCLUDES(mutex_);
  void forget_miss(const ChunkKey& key) override { not_found_.forget_miss(key); }
  void cancel_lookup(std::span<const ChunkKey> keys, EpochNumber) override EXCLUDES(mutex_);
  void touch(const ChunkKey& key) override EXCLUDES(mutex_);
  void used(const TierUses& uses) override EXCLUDES(mutex_);
  void take_removals(std::vector<TierRemoval>* removals) override EXCLUDES(mutex_);
  bool has_removals() const override EXCLUDES(mutex_);  // except those of a reset

  // ---- the epoch
  FsEpochPtr epoch() const EXCLUDES(mutex_);  // null: there is none
  // Requirements on the next epoch.
  struct Next {
    std::uint64_t least_number = 1;
    bool by_reset = false;
  };
  std::optional<Next> next() const EXCLUDES(mutex_);  // empty while there is an epoch
  // Starts to use an epoch. Returns false if a reset came after `made_for` was returned by next(): the
  // epoch's lock file is of the wrong kind then.
  bool begin(FsEpochPtr epoch, const Next& made_for, Extent extent) EXCLUDES(mutex_);
  // Closes the ended epochs that no op uses any more, and frees what was known before a reset. Upkeep threads
  // only.
  void free_unused() EXCLUDES(mutex_);
  // Sets whether other processes write into the epoch.
  void set_shared(bool shared) EXCLUDES(mutex_);
  // Forgets the epoch and all its records, because its directory was removed; no effect if the epoch is no
  // longer ours. If other processes were reset and this one was not, the next epoch is for this process only.
  void drop(const FsEpochPtr& epoch) EXCLUDES(mutex_);
  // Forgets everything. The next epoch is not shared with any process that starts.
  void reset() EXCLUDES(mutex_);
  void close() EXCLUDES(mutex_);  // releases all epochs and their locks
  // Sets whether an epoch with a higher number exists. If so, others were reset, and unless this process was
  // reset too, it no longer shares records with them.
  void set_newer(const FsEpochPtr& epoch, bool newer) EXCLUDES(mutex_);

  // ---- ops. kCancelled: the epoch is no longer in use.
  // Held by a read. While it exists, its record is not evicted.
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
    friend class RecordIndex;
    RecordIndex* records_ = nullptr;
    FsCatalog::Ref ref_;
  };
  Status begin_read(const ChunkKey& key, const FsEpochPtr& epoch, Pin* pin) EXCLUDES(mutex_);
  // Reports the result of a read and returns it; kCancelled after a reset.
  Status finish_read(const TierOp& op, const FsEpochPtr& epoch, Status status) EXCLUDES(mutex_);
  // *present: the record exists, so no write is needed. *replace: a record exists, but recent reads of it
  // failed.
  Status begin_write(const ChunkKey& key, const FsEpochPtr& epoch, bool* present, bool* replace)
      EXCLUDES(mutex_);
  Status written(const FsCatalog::Record& record, const EntryInfo& entry_info, const FsEpochPtr& epoch)
      EXCLUDES(mutex_);
  void remove(const ChunkKey& key, const FsEpochPtr& epoch, TierRemoval::Reason reason) EXCLUDES(mutex_);
  // Forgets a record whose file another process removed. Reports it only if this process reported the record
  // as present. Returns false if the record was unknown.
  bool forget(const ChunkKey& key, const FsEpochPtr& epoch) EXCLUDES(mutex_);
  // Reports that these keys were looked up: keys that are still unknown were not found.
  void answered(std::span<const ChunkKey> keys) EXCLUDES(mutex_);
  // Reports that the lookup of these keys ended without looking for them.
  void skipped(std::span<const ChunkKey> keys) EXCLUDES(mutex_);
  // Records that the record was declined for this request. Later chunks of the same request are declined too,
  // because they are useless without this one. Chunks that a later request stores are decided again.
  void mark_declined(const ChunkKey& key, std::uint32_t request, const FsEpochPtr& epoch) EXCLUDES(mutex_);
  bool is_declined(ChunkId id, std::uint32_t request) const EXCLUDES(mutex_);
  Status offered(std::span<const ChunkKey> keys, const RecordStore::EpochPtr& epoch,
                 std::vector<bool>* present) const EXCLUDES(mutex_);

  // ---- eviction
  struct Victim {
    FsCatalog::Record record;
    FsEpochPtr epoch;
  };
  // Takes the next victim out of the catalog. *own: the next victim belongs to spared_request (if not 0),
  // and stays. need: see FsCatalog::take_victim.
  std::optional<Victim> take_victim(std::uint32_t spared_request = 0, bool* own = nullptr,
                                    const FsCatalog::Need* need = nullptr) EXCLUDES(mutex_);
  // True if take_victim() returns a record to a caller that may evict any.
  bool has_victim() EXCLUDES(mutex_);
  void put_back(const Victim& victim) EXCLUDES(mutex_);
  void evicted(const Victim& victim) EXCLUDES(mutex_);

  // ---- tenants
  bool has_tenants() const { return !tenants_.empty(); }
  // Returns the tenant with this name, which a record has; empty if it is not configured.
  std::optional<TenantId> tenant_of(std::string_view name) const;

  // ---- scans. Calls with long lists end early once *stop is true.
  Extent extent() const EXCLUDES(mutex_);
  // Returns the file sizes in the names of these keys' records, should they exist; 0 if no record of the
  // key's group was seen.
  std::vector<std::uint64_t> file_bytes_of(std::span<const ChunkKey> keys) const EXCLUDES(mutex_);
  // Only raises the extent.
  void raise_extent(const FsEpochPtr& epoch, Extent extent) EXCLUDES(mutex_);
  void mark_listed(const FsEpochPtr& epoch, std::uint32_t leaf) EXCLUDES(mutex_);
  // Adds names without times. newest: they are more recent than all known records; otherwise a scan reports
  // their order later.
  void adopt_names(const FsEpochPtr& epoch, std::span<const FoundRecord> records, bool newest,
                   const std::atomic<bool>& stop) EXCLUDES(mutex_);
  // Adds records in `order`, least recently used first. first: records used since the epoch was opened are
  // more recent than all of these.
  using LastUse = std::pair<std::int64_t, std::uint32_t>;  // time of the last use, index of the record
  void adopt_in_order(const FsEpochPtr& epoch, std::span<const FoundRecord> records,
                      std::span<const LastUse> order, bool first, const std::atomic<bool>& stop)
      EXCLUDES(mutex_);
  // Appends the known records in some slots from *slot on, and advances *slot. Returns false if there are no
  // more.
  bool known_from(const FsEpochPtr& epoch, Slot* slot, std::vector<FsCatalog::Record>* records) const
      EXCLUDES(mutex_);
  std::vector<FoundRecord> unknown_of(std::span<const FoundRecord> records) const EXCLUDES(mutex_);

  // Updates the eviction order by the uses that used() reported. I/O and upkeep threads only.
  void apply_uses() EXCLUDES(mutex_);

  // ---- figures
  // Returns the records used since the last call, oldest use first, and their epoch. Empty if the epoch ended
  // meanwhile.
  std::vector<FsCatalog::Record> take_touched(FsEpochPtr* epoch) EXCLUDES(mutex_);
  std::uint64_t bytes() const EXCLUDES(mutex_);  // total file size of the known records
  void figures(TierStats* stats) const EXCLUDES(mutex_);

 private:
  struct Leaf {
    enum class State : std::uint8_t { kUnknown, kPending, kCancelled, kListed } state = State::kUnknown;
    Nanos retry_at{0};  // kCancelled
  };
  // State from before a reset. Its keys are reported as removed.
  struct DroppedState {
    FsCatalog catalog;
    std::deque<TierUses> uses;
    Slot reported = 0;  // the slots below this one were reported

    DroppedState(const std::string& eviction_policy, std::span<const TenantOptions> tenants)
        : catalog(eviction_policy, tenants) {}
  };
  std::unique_ptr<DroppedState> empty_state() const {
    return std::make_unique<DroppedState>(policy_name_, tenants_);
  }

  bool apply_use_batch() EXCLUDES(mutex_);
  bool take_some_removals(std::vector<TierRemoval>* removals) EXCLUDES(mutex_);
  void queue_removal(const ChunkKey& key, TierRemoval::Reason reason, bool reported) REQUIRES(mutex_);
  // Calls visit(at) for each `at` below `count`, kRecordsPerLock per hold of the lock. Calls prepare() before
  // each hold. Returns false if it ended early: *stop became true, or *epoch (if given) is no longer current.
  template <typename Visit, typename Prepare = void (*)()>
  bool in_batches(
      std::size_t count, const FsEpochPtr* epoch, const std::atomic<bool>& stop, Visit visit,
      Prepare prepare = [] {}) const EXCLUDES(mutex_);
  bool is_unknown(const Leaf& leaf, Nanos now) const REQUIRES(mutex_);
  // Moves the known state into `dropped`, which must be empty, and keeps that until its keys are reported. If
  // memory runs out, throws and changes nothing.
  void drop_all(std::unique_ptr<DroppedState> dropped, bool by_reset) REQUIRES(mutex_);
  void unpin(const FsCatalog::Ref& ref) EXCLUDES(mutex_);

  const std::string policy_name_;
  const std::vector<TenantOptions> tenants_;
  const Clock& clock_;
  mutable Mutex mutex_;
  FsEpochPtr epoch_ GUARDED_BY(mutex_);
  std::vector<FsEpochPtr> ended_epochs_ GUARDED_BY(mutex_);  // ended epochs that are still open
  Next next_ GUARDED_BY(mutex_);
  bool diverged_ GUARDED_BY(mutex_) = false;
  bool shared_ GUARDED_BY(mutex_) = false;
  Extent extent_ GUARDED_BY(mutex_) = Extent::kOrder;
  FsCatalog catalog_ GUARDED_BY(mutex_);
  std::vector<Leaf> leaves_ GUARDED_BY(mutex_);
  std::deque<TierRemoval> removals_ GUARDED_BY(mutex_);
  std::deque<std::unique_ptr<DroppedState>> dropped_ GUARDED_BY(mutex_);    // oldest first
  std::vector<std::unique_ptr<DroppedState>> reported_ GUARDED_BY(mutex_);  // fully reported; to be freed
  std::deque<TierUses> uses_ GUARDED_BY(mutex_);            // not applied yet, oldest first; no empty lists
  std::size_t used_keys_ GUARDED_BY(mutex_) = 0;            // number of uses in uses_
  std::size_t next_use_ GUARDED_BY(mutex_) = 0;             // index into the oldest list
  std::vector<std::uint64_t> declined_ GUARDED_BY(mutex_);  // marks; each has one possible cell
  PresenceCache not_found_;  // holds only absent keys: found records are in the catalog
};

}  // namespace kv_offload
