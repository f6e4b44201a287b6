// SPDX-License-Identifier: Apache-2.0
#include "backends/fs/record_file.h"

#include <fcntl.h>

#include <algorithm>
#include <cerrno>
#include <climits>

namespace kv_offload {
namespace {

// Drops `bytes` from the front of the parts. Returns the index of the first part left.
std::size_t skip(std::vector<iovec>& parts, std::size_t first, std::size_t bytes) {
  while (first < parts.size() && bytes >= parts[first].iov_len) bytes -= parts[first++].iov_len;
  if (bytes > 0) {
    parts[first].iov_base = static_cast<std::byte*>(parts[first].iov_base) + bytes;
    parts[first].iov_len -= bytes;
  }
  return first;
}

}  // namespace

std::vector<iovec> record_parts(std::span<std::byte> header_page, std::span<const Shard> shards) {
  std::vector<iovec> parts;
  parts.reserve(shards.size() + 1);
  parts.push_back({header_page.data(), header_page.size()});
  for (const Shard& shard : shards) {
    if (!shard.empty()) parts.push_back({shard.data(), round_up(shard.size(), kPageBytes)});
  }
  return parts;
}

bool is_aligned(std::span<const Shard> shards) {
  for (const Shard& shard : shards) {
    if (reinterpret_cast<std::uintptr_t>(shard.data()) % kPageBytes != 0) return false;
  }
  return true;
}

std::vector<iovec> take_front(std::vector<iovec>* parts, std::size_t bytes) {
  std::vector<iovec> front;
  std::size_t left = bytes;
  for (const iovec& part : *parts) {
    if (left == 0) break;
    front.push_back({part.iov_base, std::min(left, part.iov_len)});
    left -= front.back().iov_len;
  }
  const std::size_t first = skip(*parts, 0, bytes - left);
  parts->erase(parts->begin(), parts->begin() + static_cast<std::ptrdiff_t>(first));
  return front;
}

Status transfer_all(FileOps& ops, int fd, std::vector<iovec> parts, Transfer direction, bool direct,
                    const std::string& path, std::int64_t from) {
  const bool reading = direction == Transfer::kRead;
  constexpr int kMaxStalls = 8;  // consecutive short transfers that move nothing
  std::size_t first = 0;
  std::int64_t offset = from;
  int stalls = 0;
  while (first < parts.size()) {
    const int count = static_cast<int>(std::min<std::size_t>(parts.size() - first, IOV_MAX));
    std::int64_t moved = reading ? ops.preadv(fd, &parts[first], count, offset)
                                 : ops.pwritev(fd, &parts[first], count, offset);
    if (moved == -EINTR) continue;
    if (moved < 0) {
      // A transfer cannot return ENOENT, which would otherwise mean a missing record.
      return Status::from_errno(static_cast<int>(-moved), reading ? "read" : "write", path);
    }
    if (moved == 0 && reading) {
      return Status::error(StatusKind::kCorrupt, fmt::format("the file ends at byte {}", offset), 0, path);
    }
    if (direct) moved = static_cast<std::int64_t>(round_down(static_cast<std::size_t>(moved), kPageBytes));
    if (moved == 0 && ++stalls >= kMaxStalls) {
      return Status::error(StatusKind::kIo, "the transfer makes no progress", EIO, path);
    }
    if (moved > 0) stalls = 0;
    first = skip(parts, first, static_cast<std::size_t>(moved));
    offset += moved;
  }
  return Status::ok();
}

Status read_header(FileOps& ops, int directory, const std::string& path, RecordHeader* header,
                   FileInfo* info) {
  // O_NONBLOCK: a pipe under the file's name must not block the thread.
  constexpr int kFlags = O_RDONLY | O_NOFOLLOW | O_NONBLOCK;
  int error = 0;
  const Fd fd = open_fd(ops, directory, path, kFlags, 0, &error);
  if (!fd) return Status::from_errno(error, "open", path);
  FileInfo found;
  if (const int rc = ops.fstat(fd.get(), &found); rc < 0) return Status::from_errno(-rc, "stat", path);
  if (!found.is_regular()) return Status::error(StatusKind::kIo, "not a regular file", EISDIR, path);
  if (info != nullptr) *info = found;
  const AlignedBuffer page(kRecordHeaderBytes);
  const Status status =
      transfer_all(ops, fd.get(), {{page.data(), page.size()}}, Transfer::kRead, false, path);
  return status ? decode_header(page.span(), header) : status;
}

Status unless_evicted(FileOps& ops, int directory, const std::string& path, std::uint64_t inode,
                      Status found) {
  // ESTALE: on NFS, after another host removed the file.
  if (found.error_number() == ESTALE)
    return Status::error(StatusKind::kNotFound, "evicted while it was read");
  if (found.kind() != StatusKind::kCorrupt) return found;
  FileInfo info;
  (void)ops.refresh(directory, path.substr(0, path.rfind('/')));
  const int rc = ops.stat(directory, path, &info);
  if (rc == 0 ? info.inode == inode : rc != -ENOENT) return found;
  return Status::error(StatusKind::kNotFound, "evicted while it was read");
}

int unlink_file(FileOps& ops, int directory, const std::string& path, std::uint64_t* freed) {
  FileInfo info;
  int rc = ops.stat(directory, path, &info);
  if (rc == 0) rc = ops.unlink(directory, path);
  if (rc < 0) return rc == -ENOENT ? 0 : rc;
  *freed += info.charge();
  return 0;
}

}  // namespace kv_offload
