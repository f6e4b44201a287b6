#include <fcntl.h>

#include <cerrno>

#include "base/aligned_buffer.h"
#include "storage/fs/layout.h"
#include "storage/fs/record_file.h"
#include "storage/fs/store.h"

namespace kv_offload {

Status FsStore::was_reset() {
  return Status::error(StatusKind::kCancelled, "the tier was reset after the op was submitted");
}

Status FsStore::read(const TierOp& op, const EpochPtr& epoch, std::uint64_t* moved) {
  const auto generation = std::static_pointer_cast<Generation>(epoch);
  std::optional<FsCatalogue::Ref> ref;
  {
    const MutexLock lock(mutex_);
    if (generation != generation_) return was_reset();
    ref = catalogue_.begin_read(op.key);
  }
  if (!ref) return Status::error(StatusKind::kNotFound, "no record of this key");
  std::uint64_t inode = 0;
  Status status = read_file(op, *generation, ref->file_bytes, &inode);
  {
    const MutexLock lock(mutex_);
    catalogue_.end_read(*ref);
    if (generation != generation_) return was_reset();
    if (status) {
      catalogue_.read_succeeded(op.key);
      catalogue_.hit(op.key, op.about, clock_.now());
    } else if (status.kind() == StatusKind::kIo) {
      catalogue_.read_failed(op.key, clock_.now());
    }
  }
  if (status.kind() == StatusKind::kCorrupt) drop_corrupt(op.key, generation, ref->file_bytes, inode);
  if (status.kind() == StatusKind::kNotFound) drop_vanished(op.key, generation);
  if (status) *moved = padded_payload_bytes(op.shards);
  return status;
}

Status FsStore::read_file(const TierOp& op, const Generation& generation, std::uint64_t file_bytes,
                          std::uint64_t* inode) {
  const std::string path = layout::record_path(op.key, file_bytes);
  const std::string shown = generation.path + "/" + path;
  bool direct = open_.direct && aligned(op.shards);
  // O_NONBLOCK: a pipe in the file's place must not hold the thread.
  constexpr int kFlags = O_RDONLY | O_NOFOLLOW | O_NONBLOCK;
  int error = 0;
  Fd fd = open_fd(ops_, generation.directory.get(), path, kFlags | (direct ? O_DIRECT : 0), 0, &error);
  if (!fd && error == EINVAL && direct) {  // a directory or device in its place, or no O_DIRECT here
    direct = false;
    fd = open_fd(ops_, generation.directory.get(), path, kFlags, 0, &error);
  }
  if (!fd) return Status::from_errno(error == ESTALE ? ENOENT : error, "open", shown);
  FileInfo info;
  if (const int rc = ops_.fstat(fd.get(), &info); rc < 0) {
    return Status::error(StatusKind::kIo, Status::from_errno(-rc, "stat").message(), -rc, shown);
  }
  if (!info.is_regular()) return Status::error(StatusKind::kIo, "not a regular file", EISDIR, shown);
  *inode = info.inode;
  const std::uint64_t expected = kRecordHeaderBytes + padded_payload_bytes(op.shards);
  if (info.size != expected) {
    return Status::error(StatusKind::kCorrupt, fmt::format("{} bytes long, expected {}", info.size, expected),
                         0, shown);
  }
  (direct ? direct_ops_ : buffered_ops_).fetch_add(1, std::memory_order_relaxed);
  const AlignedBuffer page(kRecordHeaderBytes);
  std::uint64_t checksum = 0;
  Status status = staging_.read(ops_, fd.get(), page.span(), op.shards, direct, shown, &checksum);
  if (status)
    status = verify_record(page.span(), options_.namespace_id, op.key, op.group, op.shards, checksum);
  status = unless_evicted(ops_, generation.directory.get(), path, info.inode, std::move(status));
  if (status || !status.path().empty()) return status;
  return Status::error(status.kind(), status.message(), status.error_number(), shown);
}

void FsStore::drop_corrupt(const ChunkKey& key, const std::shared_ptr<Generation>& generation,
                           std::uint64_t file_bytes, std::uint64_t inode) {
  {
    const MutexLock lock(mutex_);
    if (generation == generation_ && catalogue_.erase(key)) {
      removals_.push_back({key, TierRemoval::Reason::kCorrupt});
    }
  }
  // Not if another process has put a new record in its place.
  const std::string path = layout::record_path(key, file_bytes);
  FileInfo info;
  if (ops_.stat(generation->directory.get(), path, &info) != 0 || info.inode != inode) return;
  (void)remove_file(*generation, path);
}

void FsStore::drop_vanished(const ChunkKey& key, const std::shared_ptr<Generation>& generation) {
  const MutexLock lock(mutex_);
  if (generation == generation_ && catalogue_.erase(key)) {
    removals_.push_back({key, TierRemoval::Reason::kVanished});
  }
}

}  // namespace kv_offload
