// SPDX-License-Identifier: Apache-2.0
#include "backends/fs/record_writer.h"

#include <fcntl.h>

#include <array>
#include <cerrno>

#include "backends/fs/layout.h"
#include "backends/fs/record_file.h"
#include "backends/fs/temporary.h"
#include "base/aligned_buffer.h"

namespace kv_offload {
namespace {

// Directories and metadata of a write: a new directory, two that may grow, one block of extents.
constexpr std::uint64_t kOverhead = 4 * kPageBytes;

// Attempts to publish a record whose name other processes keep taking.
constexpr int kPublishAttempts = 4;

// True if the name refers to this open file. A rename that reported an error may have taken effect: its
// response was lost (NFS), or a signal ended the wait for it (FUSE).
bool is_renamed(FileOps& ops, const Fd& fd, int directory, const std::string& leaf, const std::string& path) {
  FileInfo held, named;
  (void)ops.refresh(directory, leaf);
  return ops.fstat(fd.get(), &held) == 0 && ops.stat(directory, path, &named) == 0 &&
         named.inode == held.inode && named.device == held.device;
}

}  // namespace

// Removes the temporary however the write ends, even after an exception.
struct RecordWriter::PendingGuard {
  RecordWriter& writer;
  const PendingRecord& pending;
  Reservation& reservation;
  ~PendingGuard() {
    if (!pending.published) writer.discard(pending, &reservation);
  }
};

RecordWriter::RecordWriter(const FsTierOptions& options, const OpenRoot& root, RecordIndex& records,
                           Evictor& evictor, BounceBuffers& buffers, RecordForm& form)
    : options_(options),
      root_(root),
      ops_(root.ops),
      records_(records),
      evictor_(evictor),
      buffers_(buffers),
      form_(form) {}

Status RecordWriter::write(const TierOp& op, const std::shared_ptr<FsEpoch>& epoch, std::uint64_t* moved) {
  constexpr std::uint64_t kToMaxBytes = ~std::uint64_t{0};
  const auto has_nothing_to_evict = [](const Status& status) {
    return status.kind() == StatusKind::kNoSpace && status.error_number() == 0;
  };
  bool full = false;
  Status first = write_once(op, epoch, moved, &full);
  if (has_nothing_to_evict(first) && root_.space->bound_is_lowered()) {
    // A lowered bound makes room by eviction. With no record left to evict, it would only keep the device
    // from being tried again, and hide the failure from the circuit breaker.
    root_.space->raise_bound(kToMaxBytes);
    first = write_once(op, epoch, moved, &full);
  }
  if (first) root_.full_disk->set_eviction_helped(true);
  if (!full) return first;
  root_.full_disk->add_full_write();
  if (!root_.full_disk->eviction_helps()) {
    root_.space->raise_bound(kToMaxBytes);  // a lowered bound would evict on every further write
    return first;
  }
  const Status second = write_once(op, epoch, moved, &full);
  if (second || full) root_.full_disk->set_eviction_helped(second.is_ok());
  if (!root_.full_disk->eviction_helps() || has_nothing_to_evict(second))
    root_.space->raise_bound(kToMaxBytes);
  return has_nothing_to_evict(second) ? first : second;  // then report the device's failure
}

Status RecordWriter::write_once(const TierOp& op, const std::shared_ptr<FsEpoch>& epoch, std::uint64_t* moved,
                                bool* full) {
  *full = false;
  OutgoingRecord record(form_, options_.namespace_id, op);
  PendingRecord pending;
  pending.epoch = epoch;
  pending.leaf = layout::leaf_of(op.key);
  pending.file_bytes = pending.named_bytes = record.raw_bytes();
  pending.direct = root_.direct && is_aligned(op.shards);
  pending.tenant = op.entry_info.tenant;
  pending.spared_request = op.may_decline ? op.entry_info.request : 0;
  bool present = false, replace = false;
  Status status = records_.begin_write(op.key, epoch, &present, &replace);
  if (!status || present) return status;
  if (op.may_decline && records_.is_declined(op.entry_info.parent, op.entry_info.request)) {
    records_.mark_declined(op.key, op.entry_info.request, epoch);
    return Status::error(StatusKind::kDeclined, "an earlier chunk of its prompt was declined");
  }
  status = record.encode();  // before the reservation, which is for the encoded size
  if (!status) return status;
  pending.file_bytes = record.bytes();
  {
    Reservation reservation(*root_.space);
    const PendingGuard guard{*this, pending, reservation};
    status =
        evictor_.reserve(root_.charges->of_planned(pending.file_bytes) + kOverhead, &pending, &reservation);
    const bool reserved = status.is_ok();
    if (reserved) status = write_file(record, op, replace, &pending, &reservation);
    *full = is_full(status);
    if (*full && reserved) root_.space->lower_bound(reservation);
  }
  if (status.kind() == StatusKind::kDeclined) records_.mark_declined(op.key, op.entry_info.request, epoch);
  if (status) {
    const FsCatalog::Record written{op.key, pending.named_bytes, pending.charge, pending.tenant};
    status = records_.written(written, op.entry_info, epoch);
  }
  if (status) *moved = record.written();
  return status;
}

Status RecordWriter::write_file(OutgoingRecord& record, const TierOp& op, bool replace,
                                PendingRecord* pending, Reservation* reservation) {
  FsEpoch& epoch = *pending->epoch;
  const std::string path = layout::record_path(op.key, pending->named_bytes);
  const std::string shown = epoch.path + "/" + path;
  // A reused file stays in its old leaf directory, so the leaf directory of the new record may be missing.
  const Status opened =
      pending->fd ? make_leaf(epoch, pending->leaf, reservation) : open_temporary(pending, reservation);
  if (!opened) return opened;
  Status status;
  if (record.in_place()) {
    status = buffers_.write(ops_, pending->fd.get(), record.header(), op.shards, pending->direct, shown);
  } else {
    status = record.finish();
    if (status)
      status = buffers_.write_whole(ops_, pending->fd.get(), record.pieces(), pending->direct, shown);
  }
  if (status && options_.fsync != FsyncMode::kNone) {
    const int rc = ops_.fsync(pending->fd.get(), options_.fsync == FsyncMode::kData);
    if (rc < 0) status = Status::from_errno(-rc, "fsync", shown);
  }
  if (!status) return status;
  FileInfo info;
  if (const int rc = ops_.fstat(pending->fd.get(), &info); rc < 0)
    return Status::from_errno(-rc, "stat", shown);
  // Without it the record only counts as used now.
  if (op.used_unix_nanos != 0) (void)ops_.set_mtime(epoch.directory.get(), pending->path, op.used_unix_nanos);
  if (replace) {
    // Only now that the new record is complete.
    const int rc = root_.remove_file(epoch.directory.get(), path);
    if (rc < 0) return Status::from_errno(-rc, "replace", shown);
  }
  const std::uint64_t charge = root_.charges->of_written(info);
  status = publish(pending, path, charge, reservation);
  if (!status) return status;
  pending->charge = charge;
  root_.charges->add_stored(pending->named_bytes, charge);
  count_growth(epoch, pending->leaf, reservation);
  return status;
}

// Removes the temporary after a failure. If that fails, its bytes stay in the sum until the next count
// removes the file.
void RecordWriter::discard(const PendingRecord& pending, Reservation* reservation) {
  if (!pending.fd) return;
  const int directory = pending.epoch->directory.get();
  FileInfo info;
  const std::uint64_t bytes = ops_.fstat(pending.fd.get(), &info) == 0 ? info.charge() : pending.file_bytes;
  int rc = ops_.unlink(directory, pending.path);
  if (rc < 0 && rc != -ENOENT) rc = ops_.unlink(directory, pending.path);
  if (rc < 0 && rc != -ENOENT) reservation->used += bytes;
}

Status RecordWriter::open_temporary(PendingRecord* pending, Reservation* reservation) {
  FsEpoch& epoch = *pending->epoch;
  const std::string prefix = layout::leaf_path(pending->leaf) + '/';
  const int flags = O_WRONLY | (pending->direct ? O_DIRECT : 0);
  Fd fd;
  int rc = 0;
  // Three attempts: a reclaimer may remove the empty directory that was just created.
  for (int attempt = 0; attempt < 3; ++attempt) {
    rc = create_temporary(ops_, epoch.directory.get(), prefix, flags, root_.writer, &fd, &pending->path);
    if (rc != -ENOENT) break;
    if (Status status = make_leaf(epoch, pending->leaf, reservation); !status) return status;
  }
  if (rc == 0) {
    pending->fd = std::move(fd);
    return Status::ok();
  }
  Status status = Status::from_errno(-rc, "create", epoch.path + "/" + pending->path);
  // ENOENT on a write does not mean a missing record: the directory was removed (reset).
  if (rc == -ENOENT) status = Status::error(StatusKind::kIo, status.message(), ENOENT, status.path());
  return status;
}

Status RecordWriter::make_leaf(FsEpoch& epoch, std::uint32_t leaf, Reservation* reservation) {
  const std::string path = layout::leaf_path(leaf);
  FileInfo info;
  if (ops_.stat(epoch.directory.get(), path, &info) == 0) return Status::ok();
  const int rc = ops_.mkdir(epoch.directory.get(), path, 0700);
  if (rc == -EEXIST) return Status::ok();
  if (rc < 0) {
    return Status::error(rc == -ENOSPC || rc == -EDQUOT ? StatusKind::kNoSpace : StatusKind::kIo,
                         Status::from_errno(-rc, "create directory").message(), -rc, epoch.path + "/" + path);
  }
  if (ops_.stat(epoch.directory.get(), path, &info) != 0) info.disk_bytes = kPageBytes;
  reservation->used += info.disk_bytes;
  (void)epoch.leaves.update_size(leaf, info.disk_bytes);
  return Status::ok();
}

int RecordWriter::rename_to_name(const PendingRecord& pending, const std::string& path) {
  const int directory = pending.epoch->directory.get();
  const std::string leaf = layout::leaf_path(pending.leaf);
  int rc = ops_.rename(directory, pending.path, path, true);
  if (rc == -EINVAL) {
    FileInfo old;  // NFS and others do not support RENAME_NOREPLACE
    (void)ops_.refresh(directory, leaf);
    rc = ops_.stat(directory, path, &old) == 0 ? -EEXIST : ops_.rename(directory, pending.path, path, false);
  }
  return rc < 0 && is_renamed(ops_, pending.fd, directory, leaf, path) ? 0 : rc;
}

// True if a file of this length is the whole record of another process, which may have encoded it to another
// length: the length in its header decides.
bool RecordWriter::is_complete(const PendingRecord& pending, const std::string& path, std::uint64_t bytes) {
  if (bytes == pending.named_bytes) return true;
  constexpr int kFlags = O_RDONLY | O_NOFOLLOW | O_NONBLOCK;
  int error = 0;
  const Fd fd = open_fd(ops_, pending.epoch->directory.get(), path, kFlags, 0, &error);
  if (!fd) return false;
  std::array<std::byte, kRecordHeaderBytes> page;
  RecordHeader header;
  return transfer_all(ops_, fd.get(), {{page.data(), page.size()}}, Transfer::kRead, false, path) &&
         decode_header(page, &header) && header.record_bytes() == bytes &&
         kRecordHeaderBytes + header.payload_bytes == pending.named_bytes;
}

// Gives the record its name. If another process wrote the same record meanwhile, that record keeps the name.
Status RecordWriter::publish(PendingRecord* pending, const std::string& path, std::uint64_t charge,
                             Reservation* reservation) {
  FsEpoch& epoch = *pending->epoch;
  const int directory = epoch.directory.get();
  int rc = rename_to_name(*pending, path);
  for (int attempt = 1; rc == -EEXIST && attempt < kPublishAttempts; ++attempt) {
    FileInfo old;
    const int known = ops_.stat(directory, path, &old);
    if (known == 0 && !old.is_regular()) {
      return Status::error(StatusKind::kIo,
                           "the name of the record is taken by something that is not a regular file", EEXIST,
                           epoch.path + "/" + path);
    }
    if (known == 0 && is_complete(*pending, path, old.size)) {
      const int unlinked = ops_.unlink(directory, pending->path);
      if (unlinked < 0 && unlinked != -ENOENT) reservation->used += charge;
      pending->published = true;
      return Status::ok();
    }
    // Removed rather than replaced: only the process that removes a file may subtract its bytes from the sum.
    rc = root_.remove_file(directory, path);
    if (rc == 0) rc = rename_to_name(*pending, path);
  }
  if (rc < 0) {
    Status status = Status::from_errno(-rc, "rename", epoch.path + "/" + path);
    if (rc == -ENOENT) status = Status::error(StatusKind::kIo, status.message(), ENOENT, status.path());
    return status;
  }
  reservation->used += charge;
  pending->published = true;
  if (options_.fsync != FsyncMode::kFull) return Status::ok();
  const Status status = sync_names(epoch, pending->leaf);
  // The requested durability failed, so the record is removed again.
  if (!status && ops_.unlink(directory, path) == 0) reservation->used -= charge;
  return status;
}

// Makes the record's name durable, and, once per leaf directory, the name of that directory.
Status RecordWriter::sync_names(FsEpoch& epoch, std::uint32_t leaf) {
  std::vector<std::string> directories = {layout::leaf_path(leaf)};
  if (!epoch.leaves.is_durable(leaf)) directories.emplace_back(".");
  for (const std::string& name : directories) {
    int error = 0;
    const Fd fd = open_fd(ops_, epoch.directory.get(), name, O_RDONLY | O_DIRECTORY, 0, &error);
    if (fd) error = -ops_.fsync(fd.get(), false);
    if (error == 0) continue;
    const Status status = Status::from_errno(error, "fsync", epoch.path + "/" + name);
    return Status::error(status.kind() == StatusKind::kNotFound ? StatusKind::kIo : status.kind(),
                         status.message(), error, status.path());
  }
  epoch.leaves.set_durable(leaf);
  return Status::ok();
}

void RecordWriter::count_growth(FsEpoch& epoch, std::uint32_t leaf, Reservation* reservation) {
  FileInfo info;
  if (ops_.stat(epoch.directory.get(), layout::leaf_path(leaf), &info) == 0)
    reservation->used += epoch.leaves.update_size(leaf, info.disk_bytes);
}

}  // namespace kv_offload
