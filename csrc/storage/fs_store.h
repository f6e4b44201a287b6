// FsStore: the synchronous heart of the fs tier. What a pool thread runs (write,
// read, remove, scan, reclaim) and what the scheduler thread asks (presence,
// touch, figures). It knows no queues, no breaker.
//
// Threads: any. mutex_ guards the catalogue and is never held across a call to
// the file system; the figures are atomics. So the scheduler thread never waits
// for storage, however stuck other threads are.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <unordered_set>
#include <vector>

#include "base/thread_annotations.h"
#include "storage/fs_catalogue.h"
#include "storage/fs_open.h"
#include "storage/fs_reclaim.h"
#include "storage/fs_walk.h"
#include "storage/staging.h"
#include "storage/tier.h"
#include "storage/write_account.h"

namespace kv_offload {

class FsStore {
 public:
  // Opens the root; throws as make_fs_tier says.
  FsStore(const FsTierOptions& options, FileOps& ops, const Clock& clock);
  ~FsStore();

  // ---- pool threads, may block on storage
  // In the generation that the op was submitted in, or not at all.
  Status write(const TierOp& op, const std::shared_ptr<Generation>& generation, std::uint64_t* moved);
  Status read(const TierOp& op, const std::shared_ptr<Generation>& generation, std::uint64_t* moved);
  // Finds the records of one leaf directory before the scan has come there.
  Status probe(std::uint32_t leaf);
  // Rebuilds the catalogue; the lease holder also counts the root anew and
  // removes what the dead left behind.
  void start();
  // Once a second: take the lease when it is free, make the room others asked
  // for, notice another process's reset and its records, write recency back.
  void tick();
  // After forget(): makes the next generation's directory.
  Status make_generation() EXCLUDES(generation_mutex_);
  void write_back_touches();

  // When no op can come any more: others may evict, and take the namespace.
  void release();

  // ---- any thread, never block on storage
  // Null after forget(), until the next one is made.
  std::shared_ptr<Generation> generation() const EXCLUDES(mutex_);
  Presence presence(const ChunkKey& key, bool* start_probe);
  bool offers(const ChunkKey& key) const;  // what is known, without a probe
  void give_up_probe(std::uint32_t leaf);
  void touch(const ChunkKey& key);
  void forget();  // a reset: drops the generation and its catalogue, for good
  void take_removals(std::vector<TierRemoval>* removals);
  void stop() { stop_.store(true); }  // long walks give up soon
  void figures(TierStats* stats) const;
  bool has_touches() const;

 private:
  enum class LeafState : std::uint8_t { kUnknown, kProbing, kKnown };

  // A record in the making.
  struct Draft {
    std::shared_ptr<Generation> generation;
    std::uint32_t leaf = 0;
    std::uint64_t file_bytes = 0;
    bool direct = false;
    // Its temporary, once there is one: a new file, or that of an evicted record of the same size.
    Fd fd;
    std::string path;
  };

  // fs_write.cc
  Status write_record(const TierOp& op, bool replace, Draft* draft, Reservation* reservation);
  Status make_leaf(const Generation& generation, std::uint32_t leaf, Reservation* reservation);
  Status open_temporary(Draft* draft, Reservation* reservation);
  void discard(const Draft& draft, Reservation* reservation);
  Status put_in_place(const Generation& generation, const std::string& temporary, const std::string& path,
                      std::uint64_t file_bytes, std::uint64_t disk_bytes, Reservation* reservation);
  Status sync_names(const Generation& generation, const std::string& path);
  void note_leaf_growth(const Generation& generation, std::uint32_t leaf, Reservation* reservation);

  // fs_read.cc
  Status read_file(const TierOp& op, const Generation& generation, std::uint64_t file_bytes,
                   std::uint64_t* inode);
  void drop_corrupt(const ChunkKey& key, const std::shared_ptr<Generation>& generation,
                    std::uint64_t file_bytes, std::uint64_t inode);
  void drop_vanished(const ChunkKey& key, const std::shared_ptr<Generation>& generation);

  // fs_evict.cc
  // What has to go for it stays on the account, as part of the reservation: nobody else takes the room. draft
  // (or null) may take over the file of a record.
  Status reserve(std::uint64_t bytes, Draft* draft, Reservation* reservation);
  bool make_room(std::uint64_t bytes, Draft* draft, Reservation* reservation) EXCLUDES(evict_mutex_);
  // One record; false when there is none.
  bool evict_own(Draft* draft, Reservation* reservation, std::uint64_t* freed) REQUIRES(evict_mutex_);
  bool take_over(const std::string& path, Draft* draft, std::uint64_t* freed) REQUIRES(evict_mutex_);
  std::uint64_t reclaim_others(std::uint64_t enough, bool even_open) REQUIRES(evict_mutex_);
  void reclaim_old_generations(const std::string& name, std::uint64_t below) EXCLUDES(evict_mutex_);
  // 0 or -errno; a file that is gone already is no error. The second: off the account, too.
  int unlink_file(const Generation& generation, const std::string& path, std::uint64_t* freed);
  int remove_file(const Generation& generation, const std::string& path) REQUIRES(evict_mutex_);
  // What is to be known before a file goes, so that its bytes come off the account once.
  struct Removal {
    Ledger::Epoch since;
    bool counted;  // by us, in the recount that runs (or none does)
  };
  Removal begin_removal() const;
  // Under evict_mutex_, or on the keeper's thread, which is the one that counts.
  void give_back(std::uint64_t bytes, const Removal& removal);
  Gone each_given_back();

  // fs_scan.cc
  struct Scan;
  bool scan_own(std::uint64_t* counted);
  void set_scan_complete();
  void name_leaves(Scan& scan);
  void scan_leaves(Scan& scan);
  void adopt(const Scan& scan, std::vector<FoundRecord> records);
  void adopt_names(const std::shared_ptr<Generation>& generation, const std::vector<FoundRecord>& records,
                   bool in_order);
  void recount();
  std::uint64_t count_others(std::uint64_t own_generation);
  void set_generation(std::shared_ptr<Generation> generation, bool empty);
  void keep_generation();
  void drop_generation() EXCLUDES(mutex_);
  void look_for_news();
  void adopt_changed_leaves(std::int64_t since_mtime);

  static bool aligned(std::span<const Shard> shards);
  static Status was_reset();

  const FsTierOptions options_;
  FileOps& ops_;
  const Clock& clock_;
  OpenRoot open_;  // its generation moves into generation_
  WriteAccount account_;
  Staging staging_;

  mutable Mutex mutex_;
  FsCatalogue catalogue_ GUARDED_BY(mutex_);
  std::shared_ptr<Generation> generation_ GUARDED_BY(mutex_);
  std::uint64_t least_generation_ GUARDED_BY(mutex_) = 1;  // a reset's next is above
  std::vector<TierRemoval> removals_ GUARDED_BY(mutex_);
  std::vector<LeafState> leaf_states_ GUARDED_BY(mutex_);
  std::vector<std::uint32_t> leaf_bytes_ GUARDED_BY(mutex_);           // of each leaf directory, 0: unknown
  std::unordered_set<std::string> durable_leaves_ GUARDED_BY(mutex_);  // with fsync: full
  Nanos last_write_back_ GUARDED_BY(mutex_){0};

  Mutex generation_mutex_;  // one maker at a time; held across file system calls
  // One remover at a time, and none while a count begins: a file that is off the
  // disk is off the account too. Held across file system calls.
  Mutex evict_mutex_;
  std::atomic<bool> stop_{false};
  std::atomic<bool> names_complete_{false};  // what is not in the catalogue is not on disk
  std::atomic<bool> scan_complete_{false};   // and its order is that of use
  std::atomic<bool> own_counted_{true};      // false while a count may miss or double what is removed
  std::atomic<bool> counted_{false};         // as holder of the lease
  std::atomic<bool> was_reset_{false};       // since it was opened
  std::atomic<bool> apart_{false};  // others were reset and we were not: a newer generation is theirs
  std::atomic<bool> garbage_exhausted_{false};
  std::atomic<bool> recount_due_{false};  // nothing was found to evict, or the last one may be too high
  std::atomic<Nanos> next_recount_{Nanos{0}};
  // Of the keeper's thread alone: what was known when news were looked for last.
  std::int64_t seen_change_ = 0;        // by others, on the ledger
  std::int64_t newest_leaf_mtime_ = 0;  // by the file system's clock
  Nanos next_news_{0};
  std::atomic<std::uint64_t> evicted_bytes_{0}, direct_ops_{0}, buffered_ops_{0};
};

}  // namespace kv_offload
