#include <fcntl.h>

#include <algorithm>
#include <cerrno>

#include "storage/fs/layout.h"
#include "storage/fs/reclaim.h"
#include "storage/fs/store.h"

namespace kv_offload {
namespace {
constexpr int kReserveAttempts = 4;   // others may take what other namespaces gave back
constexpr int kMostNotRemovable = 4;  // records, before a write gives up
constexpr Nanos kLookForDeadEvery{std::chrono::seconds(1)};
}  // namespace

Status FsStore::reserve(std::uint64_t bytes, Draft* draft, Reservation* reservation) {
  Status status;
  for (int attempt = 0; attempt < kReserveAttempts; ++attempt) {
    std::uint64_t missing = 0;
    status = reservation->grow_to(bytes, &missing);
    if (status || missing == 0 || bytes > options_.max_bytes) return status;
    const Status room = make_room(missing, draft, reservation);
    if (!room) return room.error_number() != 0 ? room : status;
  }
  return status;
}

// Order: what nobody can hit any more, our records by policy, at last those of namespaces that others have
// open; or before ours, while we have less than our share.
Status FsStore::make_room(std::uint64_t bytes, Draft* draft, Reservation* reservation) {
  const MutexLock lock(evict_mutex_);
  std::uint64_t freed = reclaim_dead(bytes);
  // What is not in the catalogue yet may be older than what is.
  const bool ordered = known_.load() == Known::kOrder;
  if (ordered && freed < bytes && below_share()) freed += reclaim_others(bytes - freed, true);
  Status failure;
  for (int failures = 0; ordered && freed < bytes && failures < kMostNotRemovable;) {
    const Status status = evict_own(draft, reservation, &freed);
    if (status.kind() == StatusKind::kNotFound) break;
    if (status) continue;
    failure = status;
    ++failures;
  }
  if (ordered && freed < bytes) freed += reclaim_others(bytes - freed, true);
  if (freed >= bytes) return Status::ok();
  if (!failure) return failure;
  nothing_to_evict_.store(ordered);
  return Status::error(StatusKind::kNoSpace, "nothing is left to evict");
}

// Those who have records of their own, another namespace or another generation of ours, share the root alike.
// Who has less takes from the others.
bool FsStore::below_share() const {
  const MutexLock lock(mutex_);
  return sharers_.size() > 1 && catalogue_.bytes() < options_.max_bytes / sharers_.size();
}

Status FsStore::evict_own(Draft* draft, Reservation* reservation, std::uint64_t* freed) {
  std::optional<FsCatalogue::Record> victim;
  std::shared_ptr<Generation> generation;
  {
    const MutexLock lock(mutex_);
    generation = generation_;
    if (generation) victim = catalogue_.take_victim();
  }
  if (!victim) return Status::error(StatusKind::kNotFound, "no record is left to evict");
  const std::string path = layout::record_path(victim->key, victim->file_bytes);
  // With fsync a record that was reported as written is never found torn, and evicted ones may come back with
  // the power: their bytes are left alone then.
  const bool usable = draft != nullptr && !draft->fd && options_.fsync == FsyncMode::kNone &&
                      draft->generation == generation && draft->file_bytes == victim->file_bytes;
  const Space::Finished before = open_.space->finished();
  std::uint64_t bytes = 0;
  int rc = usable ? take_over(path, draft, &bytes) : -EAGAIN;
  if (rc < 0) rc = unlink_file(*generation, path, &bytes);
  if (rc == -EISDIR) rc = 0;  // what is there is no record
  reservation->adopt(bytes, before);
  evicted_bytes_.fetch_add(bytes);
  *freed += bytes;
  const MutexLock lock(mutex_);
  if (rc < 0) {
    if (generation == generation_) catalogue_.insert(*victim, {});
    return Status::error(StatusKind::kIo, Status::from_errno(-rc, "evict").message(), -rc,
                         generation->path + "/" + path);
  }
  removals_.push_back({victim->key, TierRemoval::Reason::kEvicted});
  return Status::ok();
}

// No inode and no blocks are given back and sought again: half of the time of a record in a full root. Others
// that have the record open find bytes that do not match, and the name gone. -errno: it is where it was.
// REQUIRES: the draft has no file yet, and this one is of its size.
int FsStore::take_over(const std::string& path, Draft* draft, std::uint64_t* freed) {
  const int directory = draft->generation->directory.get();
  const int flags = O_WRONLY | (draft->direct ? O_DIRECT : 0);
  std::string temporary;
  FileInfo info;
  const int moved =
      rename_to_temporary(ops_, directory, path, flags, open_.writer, &draft->fd, &temporary, &info);
  if (moved < 0) return moved;
  if (draft->fd && info.size == draft->file_bytes) {
    draft->path = temporary;
    *freed = info.disk_bytes;
    return 0;
  }
  draft->fd.reset();
  const int rc = unlink_file(*draft->generation, temporary, freed);
  if (rc < 0) (void)ops_.rename(directory, temporary, path, true);
  return rc;
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
  const Space::Finished before = open_.space->finished();
  std::uint64_t freed = 0;
  const int rc = unlink_file(generation, path, &freed);
  open_.space->remove(freed, before);
  return rc;
}

// For a reclaimer: each file goes after the one before was told.
Gone FsStore::each_removed() {
  return [this, before = open_.space->finished()](std::uint64_t bytes) mutable {
    open_.space->remove(bytes, before);
    before = open_.space->finished();
  };
}

std::uint64_t FsStore::reclaim_dead(std::uint64_t enough) {
  const Nanos now = clock_.now();
  if (now < next_look_for_dead_.load()) return 0;
  const std::uint64_t freed = reclaim_others(enough, false);
  if (freed < enough) next_look_for_dead_.store(now + kLookForDeadEvery);
  return freed;
}

std::uint64_t FsStore::reclaim_others(std::uint64_t enough, bool even_open) {
  std::vector<std::string> names;
  if (!list_namespaces(ops_, open_.root.get(), &names)) return 0;
  std::vector<std::uint64_t> sharers;
  {
    const MutexLock lock(mutex_);
    sharers = sharers_;
  }
  std::uint64_t freed = 0;
  for (const std::string& name : names) {
    if (freed >= enough || stop_.load()) break;
    if (name == open_.namespace_name) {  // what others keep who were not reset, or reset apart from us
      const std::shared_ptr<Generation> own = generation();
      if (even_open && own)
        freed += reclaim_other_generations(ops_, open_.namespace_directory.get(), own->number, enough - freed,
                                           stop_, each_removed());
      continue;
    }
    const bool open = std::any_of(sharers.begin(), sharers.end(),
                                  [&](std::uint64_t sharer) { return is_of_namespace(sharer, name); });
    if (open && !even_open) continue;  // maybe on another host
    freed +=
        reclaim_namespace(ops_, open_.root.get(), name, enough - freed, even_open, stop_, each_removed());
  }
  evicted_bytes_.fetch_add(freed);
  return freed;
}

void FsStore::reclaim_unused_generations(const Generation& own) {
  evicted_bytes_.fetch_add(kv_offload::reclaim_unused_generations(ops_, open_.namespace_directory.get(),
                                                                  own.number, stop_, each_removed()));
}

}  // namespace kv_offload
