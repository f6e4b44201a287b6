// SPDX-License-Identifier: Apache-2.0
#include "backends/fs/evictor.h"

#include <fcntl.h>

#include <algorithm>
#include <cerrno>
#include <utility>

#include "backends/fs/layout.h"
#include "backends/fs/reclaim.h"
#include "backends/fs/record_file.h"
#include "backends/fs/walk.h"

namespace kv_offload {
namespace {
constexpr int kReserveAttempts = 4;   // a count that ends meanwhile may have missed the freed bytes
constexpr int kMostNotRemovable = 4;  // unremovable records before a write gives up
// Missing records per hold of mutex_, and per write or request. Each one costs two calls to the file system.
constexpr int kMissingPerLock = 64;
constexpr int kMostMissing = 8 * kMissingPerLock;
constexpr Nanos kScanInterval{std::chrono::seconds(1)};
}  // namespace

Evictor::Evictor(const Context& context)
    : options_(context.options),
      root_(context.root),
      ops_(context.root.ops),
      records_(context.records),
      clock_(context.clock),
      stop_(context.stop),
      shares_(context.options.max_bytes, context.root, context.records, context.clock),
      unused_records_(context.root.ops, context.root.directory.get()),
      peer_records_(context.root.ops, context.root.directory.get()) {}

Status Evictor::reserve(std::uint64_t bytes, PendingRecord* pending, Reservation* reservation) {
  if (options_.may_evict) shares_.on_write(bytes);
  Status status;
  int missing_records = 0;
  std::uint64_t missing = 0;
  int attempt = 0;
  while (attempt < kReserveAttempts) {
    status = reservation->grow_to(bytes, &missing);
    if (status || missing == 0 || bytes > root_.space->bound() || !options_.may_evict)
      break;                // eviction cannot help
    if (is_full(status)) {  // the bound may not be reached, so this must not evict the whole cache
      if (attempt > 0 || !root_.full_disk->eviction_helps()) break;
    }
    if (missing_records >= kMostMissing) {
      exhausted_.store(true);  // the next count forgets the other missing records
      return doubtful_sum_error();
    }
    const int before = missing_records;
    // Other writes wait for this one, so it does not evict the whole excess of a root far above its bound.
    const Status made =
        make_space(std::min(missing, bytes + kMostAtOnce), pending, reservation, &missing_records);
    if (!made) return made.error_number() != 0 || made.kind() == StatusKind::kDeclined ? made : status;
    if (missing_records - before < kMissingPerLock) ++attempt;
  }
  if (attempt == kReserveAttempts) status = reservation->grow_to(bytes, &missing);
  if (!status && attempt == kReserveAttempts && missing > kMostAtOnce)
    return Status::error(StatusKind::kUnavailable, "the root holds more than max_bytes and is being trimmed");
  // Without eviction kNoSpace means full, and not that the root is still being counted.
  const bool counting = status.kind() == StatusKind::kNoSpace && status.error_number() == 0 && missing == 0;
  if (!options_.may_evict && counting) return Status::error(StatusKind::kUnavailable, status.message());
  return status;
}

Status Evictor::doubtful_sum_error() const {
  return Status::error(StatusKind::kIo, "another program removed records: the root is counted again", ENOENT,
                       root_.path);
}

// Eviction order: records that no process can hit any more, our records by policy, records of other sharers.
// While this process is below its share and the others do not answer, their records are evicted before ours.
// After kMissingPerLock missing records this returns ok, so that threads waiting for the lock get it.
Status Evictor::make_space(std::uint64_t bytes, PendingRecord* pending, Reservation* reservation,
                           int* missing_records) {
  const MutexLock lock(mutex_);
  // A reset may have happened while this thread waited for the lock. No request wants the new record any
  // more, so nothing is evicted for it.
  if (pending != nullptr && pending->epoch != records_.epoch())
    return Status::error(StatusKind::kCancelled, "the tier was reset after the op was submitted", ECANCELED);
  Progress own;
  std::uint64_t& freed = own.freed;
  freed = evict_unused_epochs(bytes, pending, reservation);
  // Until the scan ends, records outside the catalog may be older than those in it.
  const bool ordered = records_.extent() == RecordIndex::Extent::kOrder;
  if (ordered && freed < bytes && shares_.is_below() && shares_.is_overdue())
    freed += evict_peer_records(bytes - freed, false, reservation);
  Status failure;
  bool has_more = ordered;
  while (has_more && freed < bytes && own.failed < kMostNotRemovable && own.missing < kMissingPerLock) {
    Status status = evict_own(pending, reservation, &own);
    if (status.kind() == StatusKind::kDeclined) return status;
    has_more = status.kind() != StatusKind::kNotFound;
    if (has_more && !status) failure = status;
  }
  *missing_records += own.missing;
  // The other servers evict whole prompts, which we cannot: only they know which chunks belong together. A
  // write that may be declined leaves it to them; later writes find the granted space.
  const bool may_decline = pending != nullptr && pending->spared_request != 0;
  if (ordered && !has_more && failure && freed < bytes && may_decline && shares_.may_be_granted()) {
    return Status::error(StatusKind::kDeclined,
                         "the servers that hold more than their share were asked for space");
  }
  // Only when we have no record left, removable or not: otherwise our failing removals would cost the other
  // sharers their records on every write.
  if (ordered && !has_more && failure && freed < bytes)
    freed += evict_peer_records(bytes - freed, true, reservation);
  if (freed >= bytes) return Status::ok();
  if (!failure) return failure;
  if (has_more) return Status::ok();
  exhausted_.store(ordered);
  // There is room, but the sum is not corrected yet.
  if (root_.changes->suspected()) return doubtful_sum_error();
  return Status::error(StatusKind::kNoSpace, "nothing is left to evict");
}

Status Evictor::evict_own(PendingRecord* pending, Reservation* reservation, Progress* progress) {
  bool own = false;
  const std::uint32_t spared = pending != nullptr ? pending->spared_request : 0;
  const FsCatalog::Need need =
      pending == nullptr ? FsCatalog::Need{} : FsCatalog::Need{pending->tenant, pending->file_bytes};
  const std::optional<RecordIndex::Victim> victim =
      records_.take_victim(spared, &own, pending == nullptr ? nullptr : &need);
  if (own) return Status::error(StatusKind::kDeclined, "the next record to evict belongs to the same prompt");
  if (!victim && pending != nullptr && records_.has_victim()) {
    return Status::error(StatusKind::kDeclined,
                         "all records that could be evicted are within the shares of other tenants");
  }
  if (!victim) return Status::error(StatusKind::kNotFound, "no record is left to evict");
  const FsEpoch& epoch = *victim->epoch;
  const std::string path = layout::record_path(victim->record.key, victim->record.file_bytes);
  // The new record can take over the file of one of the same epoch and size.
  const bool usable = may_recycle(pending) && pending->epoch == victim->epoch &&
                      pending->file_bytes == victim->record.file_bytes;
  const SpaceLedger::Finished before = root_.space->finished();
  std::uint64_t bytes = 0;
  const std::string leaf = path.substr(0, path.rfind('/') + 1);
  int rc = usable ? recycle({epoch.directory.get(), path}, leaf, pending, &bytes) : -EAGAIN;
  if (rc < 0) rc = unlink_file(ops_, epoch.directory.get(), path, &bytes);
  if (rc == -EISDIR) rc = 0;    // a directory has that name, so it is not a record
  if (rc == 0 && bytes == 0) {  // the file was already missing
    root_.changes->add_missing();
    ++progress->missing;
  }
  reservation->adopt(bytes, before);
  evicted_bytes_.fetch_add(bytes);
  progress->freed += bytes;
  if (rc < 0) {
    ++progress->failed;
    records_.put_back(*victim);
    return Status::error(StatusKind::kIo, Status::from_errno(-rc, "evict").message(), -rc,
                         epoch.path + "/" + path);
  }
  records_.evicted(*victim);
  return Status::ok();
}

// With fsync, a record that was reported as written must never be found torn, and evicted files may reappear
// after a power failure. So their bytes are left unchanged then.
bool Evictor::may_recycle(const PendingRecord* pending) const {
  return pending != nullptr && !pending->fd && options_.fsync == FsyncMode::kNone;
}

// Reuses the file of an evicted record; `prefix` is the leaf directory in which it becomes the temporary
// of `pending`. This saves freeing and allocating an inode and blocks, which is half of the time of a write
// in a full root. Other processes that have the record open read bytes that do not match, and see that the
// name is missing. Returns -errno if the file keeps its old name. REQUIRES: may_recycle(pending). The record
// is of the same epoch as `pending` or of another namespace: after a power failure the file may have its old
// bytes under the new name, and an older epoch of this namespace may have a record of the same key. One case
// is left: a file goes to another namespace and back, with a reset in between, before the kernel writes its
// data.
int Evictor::recycle(const FileName& from, const std::string& prefix, PendingRecord* pending,
                     std::uint64_t* freed) {
  const int flags = O_WRONLY | (pending->direct ? O_DIRECT : 0);
  FileName temporary{pending->epoch->directory.get(), prefix};
  FileInfo info;
  const int moved = rename_to_temporary(ops_, from, &temporary, flags, root_.writer, &pending->fd, &info);
  if (moved < 0) return moved;
  if (pending->fd && info.size == pending->file_bytes) {
    pending->path = std::move(temporary.path);
    *freed = info.charge();
    return 0;
  }
  pending->fd.reset();
  const int rc = unlink_file(ops_, temporary.directory, temporary.path, freed);
  if (rc < 0) (void)ops_.move(temporary.directory, temporary.path, from.directory, from.path, true);
  return rc;
}

// ---- space of unused epochs and of other sharers

namespace {
// Adds each removed file to the reservation, so that no other write gets its bytes.
OnRemoved adopt_removed(SpaceLedger& space, Reservation* reservation) {
  return [&space, reservation, before = space.finished()](std::uint64_t bytes) mutable {
    reservation->adopt(bytes, before);
    before = space.finished();
  };
}
}  // namespace

std::uint64_t Evictor::evict_unused_epochs(std::uint64_t enough, PendingRecord* pending,
                                           Reservation* reservation) {
  const Nanos now = clock_.now();
  if (now < next_unused_scan_) return 0;
  const OnRemoved on_removed = adopt_removed(*root_.space, reservation);
  std::vector<OldestRecords::Source> found;
  const OldestRecords::Request request{
      enough,
      [&] { return found = unused_epochs(); },
      [&](const OldestRecords::Source& source) {
        return source.namespace_name == root_.namespace_name || !shares_.is_open(source.namespace_name);
      },
      on_removed,
      [&](const OldestRecords::Source& source, const FileName& name, const FileInfo& info) REQUIRES(mutex_) {
        std::uint64_t bytes = 0;
        if (source.namespace_name == root_.namespace_name || !may_recycle(pending) ||
            info.size != pending->file_bytes) {
          return bytes;
        }
        (void)recycle(name, layout::leaf_path(pending->leaf) + '/', pending, &bytes);
        return bytes;
      },
  };
  std::uint64_t freed = unused_records_.remove(request, stop_);
  if (freed < enough) {
    freed += remove_empty_epochs(found, on_removed);
    next_unused_scan_ = now + kScanInterval;
  }
  evicted_bytes_.fetch_add(freed);
  return freed;
}

// Removes directories and marks of unused epochs after their records were removed.
std::uint64_t Evictor::remove_empty_epochs(const std::vector<OldestRecords::Source>& dead,
                                           const OnRemoved& on_removed) {
  std::uint64_t freed = 0;
  std::string last;
  for (const OldestRecords::Source& source : dead) {
    if (source.namespace_name == last || stop_.load()) continue;
    last = source.namespace_name;
    if (last != root_.namespace_name) {
      freed += reclaim_namespace(ops_, root_.directory.get(), last, kAllBytes, false, stop_, on_removed);
    } else if (const std::shared_ptr<FsEpoch> own = records_.epoch()) {
      freed += kv_offload::reclaim_unused_epochs(ops_, root_.namespace_directory.get(), own->number, stop_,
                                                 on_removed);
    }
  }
  return freed;
}

// Lists the epochs of namespaces that no server has open, and the epochs in our namespace that a reset left
// behind.
std::vector<OldestRecords::Source> Evictor::unused_epochs() {
  std::vector<OldestRecords::Source> dead;
  std::vector<std::string> names;
  if (!list_namespaces(ops_, root_.directory.get(), &names)) return dead;
  const std::shared_ptr<FsEpoch> own = records_.epoch();
  for (const std::string& name : names) {
    const bool is_own = name == root_.namespace_name;
    if (is_own ? !own : shares_.is_open(name)) continue;  // open, possibly on another host
    int error = 0;
    const Fd directory = open_fd(ops_, root_.directory.get(), name, kOpenDirectory, 0, &error);
    std::vector<std::uint64_t> numbers;
    if (!directory || (!is_own && namespace_is_open(ops_, directory.get())) ||
        !list_epochs(ops_, directory.get(), &numbers)) {
      continue;
    }
    const std::vector<std::uint64_t> live = live_epochs(ops_, directory.get());
    for (const std::uint64_t number : numbers) {
      const bool findable = std::binary_search(live.begin(), live.end(), number);
      if (!is_own || (!findable && number != own->number)) dead.push_back({name, number, findable});
    }
  }
  return dead;
}

// Lists all epochs except our own that some process may find, or may have found before it stopped.
std::vector<OldestRecords::Source> Evictor::other_epochs() {
  std::vector<OldestRecords::Source> others;
  std::vector<std::string> names;
  const std::shared_ptr<FsEpoch> own = records_.epoch();
  if (!own || !list_namespaces(ops_, root_.directory.get(), &names)) return others;
  for (const std::string& name : names) {
    int error = 0;
    const Fd directory = open_fd(ops_, root_.directory.get(), name, kOpenDirectory, 0, &error);
    std::vector<std::uint64_t> numbers;
    if (!directory || !list_epochs(ops_, directory.get(), &numbers)) continue;
    for (const std::uint64_t number : numbers) {
      if (name != root_.namespace_name || number != own->number) others.push_back({name, number, true});
    }
  }
  return others;
}

// any: takes records of every sharer, in any amount. Otherwise only those of sharers above their share.
std::uint64_t Evictor::evict_peer_records(std::uint64_t enough, bool any, Reservation* reservation) {
  const Nanos now = clock_.now();
  const std::vector<std::uint64_t> from = any ? std::vector<std::uint64_t>() : shares_.sharers_above();
  if (!any && (from.empty() || now < next_peer_scan_)) return 0;
  const auto may_take = [&](const OldestRecords::Source& source) {
    const std::uint64_t id = sharer(source.namespace_name, source.epoch);
    return any || std::find(from.begin(), from.end(), id) != from.end();
  };
  const OldestRecords::Request request{
      enough,
      [&] {
        std::vector<OldestRecords::Source> sources = other_epochs();
        std::erase_if(sources, [&](const OldestRecords::Source& source) { return !may_take(source); });
        return sources;
      },
      may_take,
      adopt_removed(*root_.space, reservation),
      nullptr,
  };
  const std::uint64_t freed = peer_records_.remove(request, stop_);
  if (!any && freed < enough) next_peer_scan_ = now + kScanInterval;
  evicted_bytes_.fetch_add(freed);
  return freed;
}

void Evictor::reclaim_unused_epochs() {
  const std::shared_ptr<FsEpoch> own = records_.epoch();
  if (!own) return;
  evicted_bytes_.fetch_add(kv_offload::reclaim_unused_epochs(ops_, root_.namespace_directory.get(),
                                                             own->number, stop_, root_.each_removed()));
}

// ---- live sharers

void Evictor::trade() {
  if (!options_.may_evict) return;
  const bool ordered = records_.extent() == RecordIndex::Extent::kOrder;
  for (bool more = ordered && shares_.has_request(); more && !stop_.load();) {
    publish_held();
    const std::optional<LedgerRequest> request = root_.space->claim();
    more = request && evict_for_peer(*request);
  }
  shares_.ask();
}

// Returns false if it could not evict that much; the requester's request then keeps the rest.
bool Evictor::evict_for_peer(const LedgerRequest& request) {
  Reservation evicted(*root_.space);
  const std::uint64_t freed = evict_by_policy(request.bytes, &evicted);
  const bool enough = freed >= request.bytes;
  root_.space->grant(request, enough ? 0 : request.bytes - freed, &evicted);
  return enough;
}

// Evicts by our own policy for up to kLongestEviction: only it knows the chunk order within prompts and the
// latest uses. Returns the bytes freed.
std::uint64_t Evictor::evict_by_policy(std::uint64_t bytes, Reservation* evicted) {
  const Nanos give_up = clock_.now() + kLongestEviction;
  Progress own;
  while (own.freed < bytes && own.failed < kMostNotRemovable && own.missing < kMostMissing && !stop_.load() &&
         clock_.now() < give_up) {
    const MutexLock lock(mutex_);  // taken per record, so that writes continue meanwhile
    if (evict_own(nullptr, evicted, &own).kind() == StatusKind::kNotFound) break;
  }
  if (own.missing >= kMostMissing) exhausted_.store(true);
  return own.freed;
}

void Evictor::trim() {
  if (!options_.may_evict || !options_.may_trim) return;
  if (records_.extent() != RecordIndex::Extent::kOrder || !shares_.is_root_above(options_.max_bytes)) return;
  const Nanos give_up = clock_.now() + kLongestEviction;
  for (std::uint64_t trimmed = 0; trimmed < kMostTrimmed && !stop_.load();) {
    if (shares_.is_below() && !shares_.sharers_above().empty()) return;  // they trim it
    Reservation evicted(*root_.space);  // settled after each part: other sharers see the rest
    std::uint64_t missing = 0, freed = 0;
    const Status grown = evicted.grow_to(kPageBytes, &missing);
    // Without room for the ledger the sum does not fall, and this would evict the whole cache.
    if (grown || missing == 0 || is_full(grown)) return;
    const std::uint64_t part = std::min(missing, kMostAtOnce);
    {
      const MutexLock lock(mutex_);
      freed = evict_unused_epochs(part, nullptr, &evicted);
    }
    // With its own limit of time, because the search for unused epochs may take longer than the whole one.
    if (freed < part) freed += evict_by_policy(part - freed, &evicted);
    if (freed < part || clock_.now() >= give_up) return;
    trimmed += freed;
  }
}

}  // namespace kv_offload
