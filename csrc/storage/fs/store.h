// FsStore: the record store of the fs tier. An epoch is a generation's directory.
// It keeps its catalogue, which knows every record of ours and, within a second or
// two, those of other processes.
//
// Threads: as RecordStore says. mutex_ guards the catalogue and is never held
// across a call to the file system; the figures are atomics. So the scheduler
// thread never waits for storage, however stuck other threads are.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <unordered_set>
#include <vector>

#include "base/thread_annotations.h"
#include "storage/fs/catalogue.h"
#include "storage/fs/open.h"
#include "storage/fs/reclaim.h"
#include "storage/fs/space.h"
#include "storage/fs/staging.h"
#include "storage/fs/walk.h"
#include "storage/record_store.h"

namespace kv_offload {

class FsStore final : public RecordStore, public Catalogue {
 public:
  // Opens the root; throws as make_fs_tier says.
  FsStore(const FsTierOptions& options, FileOps& ops, const Clock& clock);
  ~FsStore() override;

  // ---- RecordStore
  Status write(const TierOp& op, const EpochPtr& epoch, std::uint64_t* moved) override;
  Status read(const TierOp& op, const EpochPtr& epoch, std::uint64_t* moved) override;
  // Before the scan has come there: lists the leaf directories of these keys.
  Status locate(std::span<const ChunkKey> keys, const EpochPtr& epoch, std::vector<bool>* present) override;
  std::size_t keys_per_locate() const override { return 1; }  // of each directory one key is asked for
  // Rebuilds the catalogue; counts the root anew where that is needed.
  void start() override;
  // Notices another process's reset, its records and its death, counts the root when
  // the sum is in doubt, writes recency back.
  void maintain() override;
  // Makes the next generation's directory.
  Status begin_epoch() override EXCLUDES(generation_mutex_);
  EpochPtr epoch() const override { return generation(); }
  void forget() override;  // the generation and its catalogue, for good
  void stop() override { stop_.store(true); }
  void close() override;  // others may take the namespace
  void figures(TierStats* stats) const override;
  Catalogue* catalogue() override { return this; }

  // ---- Catalogue
  Presence contains(const ChunkKey& key) const override;
  void begin_asking(std::vector<ChunkKey>* keys) override;
  void give_up_asking(std::span<const ChunkKey> keys) override;
  void touch(const ChunkKey& key) override;
  void take_removals(std::vector<TierRemoval>* removals) override;

 private:
  enum class LeafState : std::uint8_t { kUnknown, kAsking, kKnown };
  // How much of our namespace's records is in the catalogue.
  enum class Known : std::uint8_t {
    kSome,   // a directory is listed when one of its records is asked for
    kNames,  // what is not in it is not on disk
    kOrder,  // and what was used last: records may be evicted
  };

  // Null after forget(), until the next one is made.
  std::shared_ptr<Generation> generation() const EXCLUDES(mutex_);
  Status list_leaf(std::uint32_t leaf);
  void write_back_touches();

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

  // write.cc
  Status write_record(const TierOp& op, bool replace, Draft* draft, Reservation* reservation);
  Status make_leaf(const Generation& generation, std::uint32_t leaf, Reservation* reservation);
  Status open_temporary(Draft* draft, Reservation* reservation);
  void discard(const Draft& draft, Reservation* reservation);
  Status put_in_place(const Generation& generation, const std::string& temporary, const std::string& path,
                      std::uint64_t file_bytes, std::uint64_t disk_bytes, Reservation* reservation);
  Status sync_names(const Generation& generation, const std::string& path);
  void note_leaf_growth(const Generation& generation, std::uint32_t leaf, Reservation* reservation);

  // read.cc
  Status read_file(const TierOp& op, const Generation& generation, std::uint64_t file_bytes,
                   std::uint64_t* inode);
  void drop_corrupt(const ChunkKey& key, const std::shared_ptr<Generation>& generation,
                    std::uint64_t file_bytes, std::uint64_t inode);
  void drop_vanished(const ChunkKey& key, const std::shared_ptr<Generation>& generation);

  // evict.cc
  // What has to go for it becomes part of the reservation: nobody else takes the room. draft (or null) may
  // take over the file of a record.
  Status reserve(std::uint64_t bytes, Draft* draft, Reservation* reservation);
  // kNoSpace when nothing is left to go; with an errno when it cannot be removed.
  Status make_room(std::uint64_t bytes, Draft* draft, Reservation* reservation) EXCLUDES(evict_mutex_);
  bool below_share() const EXCLUDES(mutex_);
  // One record; kNotFound when there is none. One that cannot be removed stays known, as the last to go.
  Status evict_own(Draft* draft, Reservation* reservation, std::uint64_t* freed) REQUIRES(evict_mutex_);
  int take_over(const std::string& path, Draft* draft, std::uint64_t* freed) REQUIRES(evict_mutex_);
  std::uint64_t reclaim_dead(std::uint64_t enough) REQUIRES(evict_mutex_);
  std::uint64_t reclaim_others(std::uint64_t enough, bool even_open) REQUIRES(evict_mutex_);
  void reclaim_unused_generations(const Generation& own);
  // 0 or -errno; a file that is gone already is no error. The second: out of the sum, too.
  int unlink_file(const Generation& generation, const std::string& path, std::uint64_t* freed);
  int remove_file(const Generation& generation, const std::string& path);
  Gone each_removed();

  // scan.cc
  struct Scan;
  // False when it gave up. count (or null): what `counted` is for.
  bool scan_own(const CountFor* count, std::uint64_t* counted);
  void name_leaves(Scan& scan);
  void scan_leaves(Scan& scan);
  void drop_vanished(const Scan& scan, std::vector<FoundRecord>* records);
  void adopt(const Scan& scan, std::vector<FoundRecord> records);
  void adopt_names(const std::shared_ptr<Generation>& generation, const std::vector<FoundRecord>& records,
                   bool in_order);
  // New and empty. False when a reset came while it was made, or none when it was made for one: then its mark
  // says the wrong thing.
  bool set_generation(std::shared_ptr<Generation> generation, bool by_reset);
  void keep_generation();
  void drop_generation() EXCLUDES(mutex_);

  // count.cc
  void look_at_space();
  bool count_is_due(const SpaceFigures& figures);
  bool another_counts(const SpaceFigures& figures);
  void count_root(const SpaceFigures& figures);
  std::uint64_t count_others(std::uint64_t own_generation, const CountFor& count);

  // foreign.cc
  void look_for_foreign_records(const SpaceFigures& figures);
  void adopt_changed_leaves(std::int64_t since_mtime);

  static bool aligned(std::span<const Shard> shards);
  static Status was_reset();

  const FsTierOptions options_;
  FileOps& ops_;
  const Clock& clock_;
  OpenRoot open_;  // its generation moves into generation_
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
  std::vector<std::uint64_t> sharers_ GUARDED_BY(mutex_);  // of the root: what is open of it (space.h)

  Mutex generation_mutex_;  // one maker at a time; held across file system calls
  // One that makes room at a time: two would remove twice as much. Held across file
  // system calls.
  Mutex evict_mutex_;
  std::atomic<bool> stop_{false};
  std::atomic<Known> known_;
  std::atomic<bool> was_reset_{false};  // since it was opened
  std::atomic<bool> apart_{false};      // others were reset and we were not: a newer generation is theirs
  std::atomic<bool> nothing_to_evict_{false};        // though the root is full: the sum may be too high
  std::atomic<Nanos> next_look_for_dead_{Nanos{0}};  // namespaces
  // Of the keeper's thread alone.
  Nanos next_count_{0};
  bool count_again_ = false;         // the last one came to nothing
  std::uint64_t writes_before_ = 0;  // when it looked last
  std::uint64_t counter_[2] = {};    // another that counts, and its version
  Nanos counter_moved_{0};
  std::uint64_t foreign_writes_ = 0;    // that were looked for
  std::int64_t newest_leaf_mtime_ = 0;  // by the file system's clock
  Nanos next_foreign_look_{0};
  bool told_not_exclusive_ = false;
  std::atomic<std::uint64_t> evicted_bytes_{0}, direct_ops_{0}, buffered_ops_{0};
};

}  // namespace kv_offload
