#include "storage/fs/evictor.h"

#include <fcntl.h>

#include <algorithm>
#include <cerrno>
#include <utility>

#include "storage/fs/layout.h"
#include "storage/fs/reclaim.h"
#include "storage/fs/record_file.h"
#include "storage/fs/temporary.h"
#include "storage/fs/walk.h"

namespace kv_offload {
namespace {
constexpr int kReserveAttempts = 4;   // others may take what other namespaces gave back
constexpr int kMostNotRemovable = 4;  // records, before a write gives up
constexpr Nanos kLookForDeadEvery{std::chrono::seconds(1)};
}  // namespace

Evictor::Evictor(const Context& context)
    : options_(context.options),
      root_(context.root),
      ops_(context.root.ops),
      records_(context.records),
      clock_(context.clock),
      stop_(context.stop) {}

Status Evictor::reserve(std::uint64_t bytes, Draft* draft, Reservation* reservation) {
  Status status;
  for (int attempt = 0; attempt < kReserveAttempts; ++attempt) {
    std::uint64_t missing = 0;
    status = reservation->grow_to(bytes, &missing);
    if (status || missing == 0 || bytes > options_.max_bytes) return status;
    const Status made = make_space(missing, draft, reservation);
    if (!made) return made.error_number() != 0 || made.kind() == StatusKind::kDeclined ? made : status;
  }
  return status;
}

// Order: what nobody can hit any more, our records by policy, at last those of namespaces that others have
// open; or before ours, while we have less than our share.
Status Evictor::make_space(std::uint64_t bytes, Draft* draft, Reservation* reservation) {
  const MutexLock lock(mutex_);
  // While it waited for the lock. What it would write is wanted by nobody, and nothing has to go for it.
  if (draft != nullptr && draft->generation != records_.generation())
    return Status::error(StatusKind::kCancelled, "the tier was reset after the op was submitted", ECANCELED);
  std::uint64_t freed = reclaim_dead(bytes);
  // What is not in the catalogue yet may be older than what is.
  const bool ordered = records_.extent() == KnownRecords::Extent::kOrder;
  if (ordered && freed < bytes && is_below_share()) freed += reclaim_others(bytes - freed, true);
  Status failure;
  for (int failures = 0; ordered && freed < bytes && failures < kMostNotRemovable;) {
    const Status status = evict_own(draft, reservation, &freed);
    if (status.kind() == StatusKind::kDeclined) return status;
    if (status.kind() == StatusKind::kNotFound) break;
    if (status) continue;
    failure = status;
    ++failures;
  }
  if (ordered && freed < bytes) freed += reclaim_others(bytes - freed, true);
  if (freed >= bytes) return Status::ok();
  if (!failure) return failure;
  ran_dry_.store(ordered);
  if (root_.changes->suspected()) {  // there is room, but the sum does not say so yet
    return Status::error(StatusKind::kIo, "records were removed by another program: the root is counted again",
                         ENOENT, root_.path);
  }
  return Status::error(StatusKind::kNoSpace, "nothing is left to evict");
}

// Those who have records of their own, another namespace or another generation of ours, share the root alike.
// Who has less takes from the others.
bool Evictor::is_below_share() const {
  std::size_t sharers = 0;
  {
    const MutexLock lock(shares_mutex_);
    sharers = sharers_.size();
  }
  return sharers > 1 && records_.bytes() < root_.space->bound() / sharers;
}

Status Evictor::evict_own(Draft* draft, Reservation* reservation, std::uint64_t* freed) {
  bool own = false;
  const std::uint32_t spared = draft != nullptr ? draft->spared_request : 0;
  const std::optional<KnownRecords::Victim> victim = records_.take_victim(spared, &own);
  if (own) return Status::error(StatusKind::kDeclined, "what would go for it is of its own prompt");
  if (!victim) return Status::error(StatusKind::kNotFound, "no record is left to evict");
  const Generation& generation = *victim->generation;
  const std::string path = layout::record_path(victim->record.key, victim->record.file_bytes);
  // With fsync a record that was reported as written is never found torn, and evicted ones may come back with
  // the power: their bytes are left alone then.
  const bool usable = draft != nullptr && !draft->fd && options_.fsync == FsyncMode::kNone &&
                      draft->generation == victim->generation &&
                      draft->file_bytes == victim->record.file_bytes;
  const Space::Finished before = root_.space->finished();
  std::uint64_t bytes = 0;
  int rc = usable ? recycle(path, draft, &bytes) : -EAGAIN;
  if (rc < 0) rc = unlink_file(ops_, generation.directory.get(), path, &bytes);
  if (rc == -EISDIR) rc = 0;  // what is there is no record
  if (rc == 0 && bytes == 0) root_.changes->note_missing();
  reservation->adopt(bytes, before);
  evicted_bytes_.fetch_add(bytes);
  *freed += bytes;
  if (rc < 0) {
    records_.put_back(*victim);
    return Status::error(StatusKind::kIo, Status::from_errno(-rc, "evict").message(), -rc,
                         generation.path + "/" + path);
  }
  records_.evicted(*victim);
  return Status::ok();
}

// No inode and no blocks are given back and sought again: half of the time of a record in a full root. Others
// that have the record open find bytes that do not match, and the name gone. -errno: it is where it was.
// REQUIRES: the draft has no file yet, and this one is of its size.
int Evictor::recycle(const std::string& path, Draft* draft, std::uint64_t* freed) {
  const int directory = draft->generation->directory.get();
  const int flags = O_WRONLY | (draft->direct ? O_DIRECT : 0);
  std::string temporary;
  FileInfo info;
  const int moved =
      rename_to_temporary(ops_, directory, path, flags, root_.writer, &draft->fd, &temporary, &info);
  if (moved < 0) return moved;
  if (draft->fd && info.size == draft->file_bytes) {
    draft->path = std::move(temporary);
    *freed = info.charge();
    return 0;
  }
  draft->fd.reset();
  const int rc = unlink_file(ops_, directory, temporary, freed);
  if (rc < 0) (void)ops_.rename(directory, temporary, path, true);
  return rc;
}

std::uint64_t Evictor::reclaim_dead(std::uint64_t enough) {
  const Nanos now = clock_.now();
  if (now < next_look_for_dead_) return 0;
  const std::uint64_t freed = reclaim_others(enough, false);
  if (freed < enough) next_look_for_dead_ = now + kLookForDeadEvery;
  return freed;
}

std::uint64_t Evictor::reclaim_others(std::uint64_t enough, bool even_open) {
  std::vector<std::string> names;
  if (!list_namespaces(ops_, root_.directory.get(), &names)) return 0;
  std::vector<std::uint64_t> sharers;
  {
    const MutexLock lock(shares_mutex_);
    sharers = sharers_;
  }
  std::uint64_t freed = 0;
  for (const std::string& name : names) {
    if (freed >= enough || stop_.load()) break;
    if (name == root_.namespace_name) {
      freed += reclaim_generations(enough - freed, even_open);
      continue;
    }
    const bool open = std::any_of(sharers.begin(), sharers.end(),
                                  [&](std::uint64_t sharer) { return is_of_namespace(sharer, name); });
    if (open && !even_open) continue;  // maybe on another host
    freed += reclaim_namespace(ops_, root_.directory.get(), name, enough - freed, even_open, stop_,
                               root_.each_removed());
  }
  evicted_bytes_.fetch_add(freed);
  return freed;
}

// Of our namespace: what a reset left that nobody uses; even_open: also what others keep who were not reset,
// or reset apart from us.
std::uint64_t Evictor::reclaim_generations(std::uint64_t enough, bool even_open) {
  const std::shared_ptr<Generation> own = records_.generation();
  if (!own) return 0;
  const int directory = root_.namespace_directory.get();
  const auto gone = root_.each_removed();
  return even_open
             ? reclaim_other_generations(ops_, directory, own->number, enough, stop_, gone)
             : kv_offload::reclaim_unused_generations(ops_, directory, own->number, enough, stop_, gone);
}

void Evictor::reclaim_unused_generations() {
  evicted_bytes_.fetch_add(reclaim_generations(kAllUnused, false));
}

void Evictor::share_with(std::vector<std::uint64_t> sharers) {
  const MutexLock lock(shares_mutex_);
  sharers_ = std::move(sharers);
}

}  // namespace kv_offload
