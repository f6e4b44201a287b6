// SPDX-License-Identifier: Apache-2.0
#include "backends/fs/record_reader.h"

#include <fcntl.h>

#include <cerrno>
#include <cstring>
#include <utility>

#include "backends/fs/layout.h"
#include "backends/fs/record_file.h"

namespace kv_offload {

RecordReader::RecordReader(const FsTierOptions& options, const OpenRoot& root, RecordIndex& records,
                           BounceBuffers& buffers, RecordForm& form)
    : options_(options), root_(root), ops_(root.ops), records_(records), buffers_(buffers), form_(form) {}

Status RecordReader::read(const TierOp& op, const std::shared_ptr<FsEpoch>& epoch, std::uint64_t* moved) {
  RecordIndex::Pin pin;
  if (Status begun = records_.begin_read(op.key, epoch, &pin); !begun) return begun;
  Fd opened;
  const Status status = records_.finish_read(op, epoch, read_file(op, *epoch, pin.file_bytes(), &opened));
  // Possibly removed or truncated by another program, which the sum does not include.
  if (status.kind() == StatusKind::kCorrupt || status.kind() == StatusKind::kNotFound)
    root_.changes->add_missing();
  if (status.kind() == StatusKind::kCorrupt)
    remove(op.key, epoch, pin.file_bytes(), opened, TierRemoval::Reason::kCorrupt);
  if (status.kind() == StatusKind::kNotFound)
    remove(op.key, epoch, pin.file_bytes(), opened, TierRemoval::Reason::kVanished);
  if (status) *moved = padded_payload_bytes(op.shards);
  return status;
}

Status RecordReader::read_file(const TierOp& op, const FsEpoch& epoch, std::uint64_t file_bytes, Fd* opened) {
  const std::string path = layout::record_path(op.key, file_bytes);
  const std::string shown = epoch.path + "/" + path;
  bool direct = root_.reads_direct && is_aligned(op.shards);
  // O_NONBLOCK: a pipe under the file's name must not block the thread.
  constexpr int kFlags = O_RDONLY | O_NOFOLLOW | O_NONBLOCK;
  int error = 0;
  Fd fd = open_fd(ops_, epoch.directory.get(), path, kFlags | (direct ? O_DIRECT : 0), 0, &error);
  // A directory or device has that name, or O_DIRECT is not supported here.
  if (!fd && error == EINVAL && direct) {
    direct = false;
    fd = open_fd(ops_, epoch.directory.get(), path, kFlags, 0, &error);
  }
  if (!fd) return Status::from_errno(error == ESTALE ? ENOENT : error, "open", shown);
  FileInfo info;
  if (const int rc = ops_.fstat(fd.get(), &info); rc < 0) {
    const StatusKind kind = rc == -ESTALE ? StatusKind::kNotFound : StatusKind::kIo;
    return Status::error(kind, Status::from_errno(-rc, "stat").message(), -rc, shown);
  }
  if (!info.is_regular()) return Status::error(StatusKind::kIo, "not a regular file", EISDIR, shown);
  *opened = std::move(fd);
  IncomingRecord record(form_, options_.namespace_id, op);
  Status status = record.check_length(info.size);
  if (status) {
    status = buffers_.read(ops_, opened->get(), record.pieces(), info.size, direct, shown,
                           [&](const std::byte* from, std::span<std::byte> to) {
                             if (to.data() != record.header_page().data()) return record.add(from, to);
                             if (from != to.data()) std::memcpy(to.data(), from, to.size());
                             return record.begin(info.size);
                           });
  }
  if (status) status = record.finish();
  status = unless_evicted(ops_, epoch.directory.get(), path, info.inode, std::move(status));
  if (status || !status.path().empty()) return status;
  return Status::error(status.kind(), status.message(), status.error_number(), shown);
}

Status RecordReader::remove(const ChunkKey& key, const std::shared_ptr<FsEpoch>& epoch) {
  RecordIndex::Pin pin;
  if (Status begun = records_.begin_read(key, epoch, &pin); !begun) return begun;
  // Unlinks the file first: if that fails, the record stays in the index and can be evicted.
  const std::string path = layout::record_path(key, pin.file_bytes());
  if (const int rc = root_.remove_file(epoch->directory.get(), path); rc < 0)
    return Status::from_errno(-rc, "unlink", epoch->path + "/" + path);
  records_.remove(key, epoch, TierRemoval::Reason::kEvicted);
  return Status::ok();
}

void RecordReader::remove(const ChunkKey& key, const std::shared_ptr<FsEpoch>& epoch,
                          std::uint64_t file_bytes, const Fd& opened, TierRemoval::Reason reason) {
  records_.remove(key, epoch, reason);
  if (!opened) return;  // there was no file
  // Skipped if another process has put a new record there.
  const std::string path = layout::record_path(key, file_bytes);
  const int directory = epoch->directory.get();
  FileInfo held, named;
  if (ops_.fstat(opened.get(), &held) != 0 || ops_.stat(directory, path, &named) != 0) return;
  if (named.inode != held.inode || named.device != held.device) return;
  (void)root_.remove_file(directory, path);
}

}  // namespace kv_offload
