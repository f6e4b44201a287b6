// SPDX-License-Identifier: Apache-2.0
#include "backends/fs/verify.h"

#include <dirent.h>
#include <fcntl.h>

#include <cerrno>
#include <span>

#include "backends/fs/fs_epoch.h"
#include "backends/fs/layout.h"
#include "backends/fs/record_file.h"
#include "backends/fs/walk.h"
#include "tier/remote_records.h"

namespace kv_offload {
namespace {

// Bytes read and then checksummed per step, so that they are still in the CPU cache.
constexpr std::size_t kStepBytes = std::size_t{256} << 10;

// Reads in pieces, because the file may have any length.
Status read_into(int fd, std::uint64_t bytes, const std::string& path, RecordCheck* check) {
  while (check->total() < bytes) {
    std::span<std::byte> room;
    if (Status status = check->room(kStepBytes, &room); !status) return status;
    const iovec part{room.data(), std::min<std::uint64_t>(room.size(), bytes - check->total())};
    const std::int64_t read =
        posix_file_ops().preadv(fd, &part, 1, static_cast<std::int64_t>(check->total()));
    if (read == -EINTR) continue;
    if (read < 0) return Status::from_errno(static_cast<int>(-read), "read", path);
    if (read == 0) return Status::error(StatusKind::kCorrupt, "the file ends early");
    check->add(room.first(static_cast<std::size_t>(read)));
  }
  return Status::ok();
}

Status verify_open_file(const Fd& fd, const FileInfo& file, const std::string& path,
                        std::uint64_t named_bytes, const RemoteRecord& named, const EncryptionKeys* keys,
                        WholeRecord* copy) {
  if (file.size > named_bytes || file.size % kPageBytes != 0) {
    return Status::error(StatusKind::kCorrupt,
                         fmt::format("{} bytes long, its name says {}", file.size, named_bytes));
  }
  RecordCheck check(keys, copy);
  if (Status status =
          read_into(fd.get(), std::min<std::uint64_t>(file.size, kRecordHeaderBytes), path, &check);
      !status)
    return status;
  if (Status status = check.check_header(named, file.size); !status) return status;
  if (check.raw_bytes() != named_bytes) {
    return Status::error(StatusKind::kCorrupt, fmt::format("its name says {} bytes, its header {}",
                                                           named_bytes, check.raw_bytes()));
  }
  if (Status status = read_into(fd.get(), file.size, path, &check); !status) return status;
  return check.finish(named);
}

Status verify_into(const std::string& path, std::uint64_t named_bytes, const std::string& namespace_id,
                   const std::string& key, const EncryptionKeys* keys, WholeRecord* copy) {
  FileOps& ops = posix_file_ops();
  int error = 0;
  const Fd fd = open_fd(ops, AT_FDCWD, path, O_RDONLY | O_NOFOLLOW | O_NONBLOCK, 0, &error);
  if (!fd) return Status::from_errno(error, "open", path);
  FileInfo file;
  if (const int rc = ops.fstat(fd.get(), &file); rc < 0) return Status::from_errno(-rc, "stat", path);
  if (!file.is_regular()) return Status::error(StatusKind::kIo, "not a regular file", EISDIR, path);
  RemoteRecord named;
  named.namespace_id = namespace_id;
  named.key = key;
  return unless_evicted(ops, AT_FDCWD, path, file.inode,
                        verify_open_file(fd, file, path, named_bytes, named, keys, copy));
}

void add_strays(int epoch, std::uint32_t leaf, const std::string& where, std::vector<std::string>* strays) {
  FileOps& ops = posix_file_ops();
  const std::string path = layout::leaf_path(leaf);
  int error = 0;
  const Fd directory = open_fd(ops, epoch, path, kOpenDirectory, 0, &error);
  std::vector<DirEntry> entries;
  if (!directory || ops.list(directory.get(), &entries) < 0) return;
  for (const DirEntry& entry : entries) {
    if (!entry.name.ends_with(".rec") || entry.type == DT_DIR) continue;
    const auto record = layout::parse_record(entry.name);
    if (record && layout::leaf_of(record->key) == leaf) continue;
    strays->push_back(where + "/" + path + "/" + entry.name);
  }
}

}  // namespace

Status verify_record_file(const std::string& path, std::uint64_t named_bytes, const std::string& namespace_id,
                          const std::string& key, const EncryptionKeys* keys) {
  return verify_into(path, named_bytes, namespace_id, key, keys, nullptr);
}

Status read_record_file(const std::string& path, const std::string& namespace_id, const EncryptionKeys* keys,
                        WholeRecord* copy) {
  const auto named = layout::parse_record(std::string_view(path).substr(path.rfind('/') + 1));
  if (!named) return Status::error(StatusKind::kCorrupt, "its name is not that of a record", 0, path);
  return verify_into(path, named->file_bytes, namespace_id, named->key.hex(), keys, copy);
}

std::int64_t record_created(const std::string& path) {
  RecordHeader header;
  if (!read_header(posix_file_ops(), AT_FDCWD, path, &header)) return 0;
  return static_cast<std::int64_t>(header.created_unix_nanos);
}

std::vector<std::string> stray_records(int root, const std::string& namespace_name) {
  FileOps& ops = posix_file_ops();
  std::vector<std::string> strays;
  int error = 0;
  const Fd space = open_fd(ops, root, namespace_name, kOpenDirectory, 0, &error);
  if (!space) return strays;
  for (const std::uint64_t number : live_epochs(ops, space.get())) {
    const std::string name = layout::epoch_directory_name(number);
    const Fd epoch = open_fd(ops, space.get(), name, kOpenDirectory, 0, &error);
    std::vector<std::uint32_t> leaves;
    std::uint64_t ignored = 0;
    if (!epoch || !list_leaves(ops, epoch.get(), &leaves, &ignored)) continue;
    for (const std::uint32_t leaf : leaves)
      add_strays(epoch.get(), leaf, namespace_name + "/" + name, &strays);
  }
  return strays;
}

}  // namespace kv_offload
