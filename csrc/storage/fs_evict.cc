#include <fcntl.h>

#include <algorithm>
#include <cerrno>
#include <limits>

#include "storage/fs_layout.h"
#include "storage/fs_reclaim.h"
#include "storage/fs_store.h"

namespace kv_offload {
namespace {
constexpr std::uint64_t kAll = std::numeric_limits<std::uint64_t>::max();
constexpr int kReserveAttempts = 4;  // others may take what other namespaces gave back
}  // namespace

Status FsStore::reserve(std::uint64_t bytes, Draft* draft, Reservation* reservation) {
  Status status;
  for (int attempt = 0; attempt < kReserveAttempts; ++attempt) {
    std::uint64_t missing = 0;
    status = reservation->grow_to(bytes, &missing);
    if (status || missing == 0 || bytes > options_.max_bytes) return status;
    if (!open_.lease->try_take()) {
      open_.ledger->ask_room(bytes);  // the evictor's next tick
      return status;
    }
    if (!make_room(missing, draft, reservation)) return status;
  }
  return status;
}

// REQUIRES: the lease. Order: what nobody can hit any more, our records by policy, at last those of
// namespaces that others have open.
bool FsStore::make_room(std::uint64_t bytes, Draft* draft, Reservation* reservation) {
  const MutexLock lock(evict_mutex_);
  // What is not in the catalogue yet may be older than what is.
  if (!scan_complete_.load() || !own_counted_.load()) return false;
  std::uint64_t freed = 0;
  if (counted_.load() && !garbage_exhausted_.load()) {
    freed += reclaim_others(bytes, false);
    if (freed < bytes) garbage_exhausted_.store(true);
  }
  while (freed < bytes && evict_own(draft, reservation, &freed)) {
  }
  if (freed < bytes && counted_.load()) freed += reclaim_others(bytes - freed, true);
  if (freed < bytes) recount_due_.store(true);
  return freed >= bytes;
}

bool FsStore::evict_own(Draft* draft, Reservation* reservation, std::uint64_t* freed) {
  std::optional<FsCatalogue::Record> victim;
  std::shared_ptr<Generation> generation;
  {
    const MutexLock lock(mutex_);
    generation = generation_;
    if (generation) victim = catalogue_.take_victim();
    if (!victim) return false;
    removals_.push_back({victim->key, TierRemoval::Reason::kEvicted});
  }
  const std::string path = layout::record_path(victim->key, victim->file_bytes);
  // With fsync a record that was reported as written is never found torn, and evicted ones may come back with
  // the power: their bytes are left alone then.
  const bool usable = draft != nullptr && !draft->fd && options_.fsync == FsyncMode::kNone &&
                      draft->generation == generation && draft->file_bytes == victim->file_bytes;
  std::uint64_t bytes = 0;
  if (!usable || !take_over(path, draft, &bytes)) (void)unlink_file(*generation, path, &bytes);
  reservation->adopt(bytes);
  evicted_bytes_.fetch_add(bytes);
  *freed += bytes;
  return true;
}

// No inode and no blocks are given back and sought again: half of the time of a record in a full root. Others
// that have the record open find bytes that do not match, and the name gone. False: it is where it was.
// REQUIRES: the draft has no file yet, and this one is of its size.
bool FsStore::take_over(const std::string& path, Draft* draft, std::uint64_t* freed) {
  const int directory = draft->generation->directory.get();
  const int flags = O_WRONLY | (draft->direct ? O_DIRECT : 0);
  std::string temporary;
  FileInfo info;
  if (rename_to_temporary(ops_, directory, path, flags, open_.writer, &draft->fd, &temporary, &info) < 0)
    return false;
  if (draft->fd && info.size == draft->file_bytes) {
    draft->path = temporary;
    *freed = info.disk_bytes;
  } else {
    draft->fd.reset();
    if (unlink_file(*draft->generation, temporary, freed) < 0)  // no file: it goes back to where it was
      (void)ops_.rename(directory, temporary, path, true);
  }
  return true;
}

int FsStore::unlink_file(const Generation& generation, const std::string& path, std::uint64_t* freed) {
  const int directory = generation.directory.get();
  FileInfo info;
  int rc = ops_.stat(directory, path, &info);
  if (rc == 0) rc = ops_.unlink(directory, path);
  if (rc < 0) return rc == -ENOENT ? 0 : rc;
  *freed += info.disk_bytes;
  return 0;
}

int FsStore::remove_file(const Generation& generation, const std::string& path) {
  const Removal removal = begin_removal();
  std::uint64_t freed = 0;
  const int rc = unlink_file(generation, path, &freed);
  if (freed > 0) give_back(freed, removal);
  return rc;
}

FsStore::Removal FsStore::begin_removal() const {
  // In this order: a recount that begins in between has another epoch.
  const Ledger::Epoch since = open_.ledger->epoch();
  return {since, open_.lease->held() && own_counted_.load()};
}

void FsStore::give_back(std::uint64_t bytes, const Removal& removal) {
  open_.ledger->give_back(bytes, removal.since, removal.counted);
}

// For a reclaimer: each file goes after the one before was given back.
Gone FsStore::each_given_back() {
  return [this, removal = begin_removal()](std::uint64_t bytes) mutable {
    give_back(bytes, removal);
    removal = begin_removal();
  };
}

std::uint64_t FsStore::reclaim_others(std::uint64_t enough, bool even_open) {
  std::vector<std::string> names;
  if (!list_namespaces(ops_, open_.root.get(), &names)) return 0;
  std::uint64_t freed = 0;
  for (const std::string& name : names) {
    if (freed >= enough || stop_.load()) break;
    if (name == open_.namespace_name) {  // what others keep who were not reset, or reset apart from us
      const std::shared_ptr<Generation> own = generation();
      if (even_open && own)
        freed += reclaim_other_generations(ops_, open_.namespace_directory.get(), own->number, enough - freed,
                                           stop_, each_given_back());
      continue;
    }
    freed +=
        reclaim_namespace(ops_, open_.root.get(), name, enough - freed, even_open, stop_, each_given_back());
  }
  evicted_bytes_.fetch_add(freed);
  return freed;
}

void FsStore::reclaim_old_generations(const std::string& name, std::uint64_t below) {
  int error = 0;
  const Fd directory = open_fd(ops_, open_.root.get(), name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW, 0, &error);
  std::vector<std::uint64_t> generations;
  if (!directory || !list_generations(ops_, directory.get(), &generations)) return;
  for (const std::uint64_t number : generations) {
    if (number >= below || number == generations.back()) break;
    if (generation_is_open(ops_, directory.get(), number)) continue;
    evicted_bytes_.fetch_add(reclaim_generation(ops_, directory.get(), layout::generation_name(number), kAll,
                                                true, stop_, each_given_back()));
  }
}

}  // namespace kv_offload
