#include "storage/fs_root.h"

#include <fcntl.h>
#include <sys/file.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <limits>

#include "base/aligned_buffer.h"
#include "storage/fs_layout.h"
#include "storage/fs_walk.h"
#include "storage/ledger.h"
#include "storage/record_file.h"

namespace kv_offload {
namespace {

constexpr int kOpenDirectory = O_RDONLY | O_DIRECTORY | O_NOFOLLOW;
constexpr std::uint64_t kAll = std::numeric_limits<std::uint64_t>::max();

Fd open_directory(int at, const std::string& path) {
  int error = 0;
  return open_fd(posix_file_ops(), at, path, kOpenDirectory, 0, &error);
}

std::uint64_t count_temporaries(int at, const std::string& name) {
  const Fd fd = open_directory(at, name);
  std::vector<DirEntry> entries;
  if (!fd || posix_file_ops().list(fd.get(), &entries) < 0) return 0;
  std::uint64_t count = 0;
  for (const DirEntry& entry : entries) {
    if (layout::is_temporary(entry.name)) {
      ++count;
    } else if (!layout::parse_record(entry.name)) {
      count += count_temporaries(fd.get(), entry.name);
    }
  }
  return count;
}

std::vector<std::string> namespaces_of(int root, const std::optional<std::string>& only,
                                       const std::string& path) {
  std::vector<std::string> names;
  (void)list_namespaces(posix_file_ops(), root, &names);
  if (!only) return names;
  if (std::find(names.begin(), names.end(), *only) == names.end()) {
    throw_invalid("there is no namespace '{}' in {}; `stat` lists those that are there", *only, path);
  }
  return {*only};
}

// In pieces: the length of a file may be anything.
Status verify_payload(int fd, const RecordHeader& header, const std::string& path) {
  const AlignedBuffer piece(std::size_t{1} << 20);
  PayloadChecksum checksum;
  for (std::uint64_t done = 0; done < header.payload_bytes;) {
    const iovec part{piece.data(), std::min<std::uint64_t>(piece.size(), header.payload_bytes - done)};
    const std::int64_t bytes =
        posix_file_ops().preadv(fd, &part, 1, static_cast<std::int64_t>(kRecordHeaderBytes + done));
    if (bytes == -EINTR) continue;
    if (bytes < 0) return Status::from_errno(static_cast<int>(-bytes), "read", path);
    if (bytes == 0) return Status::error(StatusKind::kCorrupt, "the file ends early");
    checksum.add(piece.span().first(static_cast<std::size_t>(bytes)));
    done += static_cast<std::uint64_t>(bytes);
  }
  if (checksum.value() == header.payload_checksum) return Status::ok();
  return Status::error(StatusKind::kCorrupt,
                       fmt::format("payload checksum is {:#018x}, the header says {:#018x}", checksum.value(),
                                   header.payload_checksum));
}

// Header and payload of one file, checked against each other and its name.
Status verify_file(int leaf, const std::string& name, const RecordInfo& info, const NamespaceId& id) {
  FileOps& ops = posix_file_ops();
  int error = 0;
  const Fd fd = open_fd(ops, leaf, name, O_RDONLY | O_NOFOLLOW | O_NONBLOCK, 0, &error);
  if (!fd) return Status::from_errno(error, "open", info.path);
  FileInfo file;
  if (const int rc = ops.fstat(fd.get(), &file); rc < 0) return Status::from_errno(-rc, "stat", info.path);
  if (!file.is_regular()) return Status::error(StatusKind::kIo, "not a regular file", EISDIR, info.path);
  if (file.size != info.bytes) {
    return Status::error(StatusKind::kCorrupt,
                         fmt::format("{} bytes long, its name says {}", file.size, info.bytes));
  }
  const AlignedBuffer page(kRecordHeaderBytes);
  Status status =
      transfer_all(ops, fd.get(), {{page.data(), page.size()}}, Transfer::kRead, false, info.path);
  RecordHeader header;
  if (status) status = decode_header(page.span(), &header);
  if (!status) return status;
  if (header.payload_bytes + kRecordHeaderBytes != file.size) {
    return Status::error(StatusKind::kCorrupt, fmt::format("{} bytes long, its header says {}", file.size,
                                                           header.payload_bytes + kRecordHeaderBytes));
  }
  if (header.namespace_id != id || header.key != ChunkKey::from_hex(info.key)) {
    return Status::error(StatusKind::kCorrupt, "the header is of another namespace or key");
  }
  return verify_payload(fd.get(), header, info.path);
}

NamespaceId parse_id(const std::string& hex) {
  NamespaceId id{};
  for (std::size_t i = 0; i < id.size(); ++i) id[i] = *layout::parse_hex_byte(hex.substr(2 * i, 2));
  return id;
}

}  // namespace

struct FsRoot::Impl {
  std::string path;
  Fd root;

  bool is_open(int directory) const {
    int error = 0;
    FileOps& ops = posix_file_ops();
    const Fd mark = open_fd(ops, directory, std::string(layout::kOpenFile), O_RDWR | O_NOFOLLOW, 0, &error);
    return mark && lock_file(ops, mark.get(), LOCK_EX | LOCK_NB) != 0;
  }
  std::unique_ptr<Ledger> ledger() const {
    return std::make_unique<Ledger>(posix_file_ops(), root.get(), path, std::uint64_t{1} << 62);
  }
};

struct FsRoot::Cursor::Impl {
  std::string root_path;
  Fd root;
  std::vector<std::string> names;  // those to come, the next one last
  std::string name;
  std::uint64_t generation = 0;
  Fd directory;                       // of the generation
  std::vector<std::uint32_t> leaves;  // to come
  std::vector<FoundRecord> records;   // of one leaf, to come

  bool next_namespace() {
    if (names.empty()) return false;
    name = std::move(names.back());
    names.pop_back();
    leaves.clear();
    const Fd own = open_directory(root.get(), name);
    std::vector<std::uint64_t> generations;
    if (!own || !list_generations(posix_file_ops(), own.get(), &generations) || generations.empty())
      return true;
    generation = generations.back();
    directory = open_directory(own.get(), layout::generation_name(generation));
    std::uint64_t ignored = 0;
    if (directory) (void)list_leaves(posix_file_ops(), directory.get(), &leaves, &ignored);
    std::sort(leaves.rbegin(), leaves.rend());
    return true;
  }
};

FsRoot::Cursor::Cursor(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
FsRoot::Cursor::~Cursor() = default;
FsRoot::Cursor::Cursor(Cursor&&) noexcept = default;

std::optional<RecordInfo> FsRoot::Cursor::next() {
  Impl& at = *impl_;
  while (at.records.empty()) {
    if (at.leaves.empty()) {
      if (!at.next_namespace()) return std::nullopt;
      continue;
    }
    LeafFound found;
    (void)scan_leaf(posix_file_ops(), at.directory.get(), at.leaves.back(), {}, &found);
    at.leaves.pop_back();
    at.records = std::move(found.records);
  }
  const FoundRecord record = at.records.back();
  at.records.pop_back();
  return RecordInfo{at.name,
                    at.generation,
                    record.key.hex(),
                    record.file_bytes,
                    record.mtime_nanos,
                    fmt::format("{}/{}/{}/{}", at.root_path, at.name, layout::generation_name(at.generation),
                                layout::record_path(record.key, record.file_bytes))};
}

FsRoot::FsRoot(std::string root_dir) : impl_(std::make_unique<Impl>()) {
  impl_->path = std::move(root_dir);
  int error = 0;
  impl_->root = open_fd(posix_file_ops(), AT_FDCWD, impl_->path, O_RDONLY | O_DIRECTORY, 0, &error);
  std::string text;
  if (impl_->root) {
    error = -read_text(posix_file_ops(), impl_->root.get(), std::string(layout::kRootFile), &text);
  }
  if (error != 0) {
    throw_invalid("{} is no root of kv_offload: {} ({} marks one)", impl_->path, std::strerror(error),
                  layout::kRootFile);
  }
  if (text != layout::kRootText) {
    throw_invalid("{} is a root of another format: '{}'", impl_->path, text.substr(0, 80));
  }
}

FsRoot::~FsRoot() = default;

RootInfo FsRoot::stat() {
  FileOps& ops = posix_file_ops();
  const std::atomic<bool> stop{false};
  RootInfo info;
  info.bytes = count_tree(ops, impl_->root.get(), ".", {}, stop);
  info.temporaries = count_temporaries(impl_->root.get(), ".");
  for (const std::string& name : namespaces_of(impl_->root.get(), std::nullopt, impl_->path)) {
    NamespaceInfo found;
    found.id = name;
    found.bytes = count_tree(ops, impl_->root.get(), name, {}, stop);
    const Fd directory = open_directory(impl_->root.get(), name);
    if (!directory) continue;
    (void)read_text(ops, directory.get(), std::string(layout::kNamespaceFile), &found.json);
    found.open = impl_->is_open(directory.get());
    std::vector<std::uint64_t> generations;
    (void)list_generations(ops, directory.get(), &generations);
    found.generation = generations.empty() ? 0 : generations.back();
    Cursor cursor = records(name);
    while (const auto record = cursor.next()) {
      ++found.records;
      const std::int64_t time = record->mtime_unix_nanos;
      found.oldest_unix_nanos = found.records == 1 ? time : std::min(found.oldest_unix_nanos, time);
      found.newest_unix_nanos = std::max(found.newest_unix_nanos, time);
    }
    info.records += found.records;
    info.namespaces.push_back(std::move(found));
  }
  return info;
}

FsRoot::Cursor FsRoot::records(const std::optional<std::string>& namespace_id) {
  auto impl = std::make_unique<Cursor::Impl>();
  impl->root_path = impl_->path;
  impl->root = open_directory(impl_->root.get(), ".");
  impl->names = namespaces_of(impl_->root.get(), namespace_id, impl_->path);
  std::reverse(impl->names.begin(), impl->names.end());
  return Cursor(std::move(impl));
}

std::vector<DamagedRecord> FsRoot::verify(bool repair,
                                          const std::function<void(std::uint64_t, std::uint64_t)>& progress) {
  FileOps& ops = posix_file_ops();
  std::uint64_t all = 0, done = 0;
  for (Cursor cursor = records(std::nullopt); cursor.next();) ++all;
  const std::unique_ptr<Ledger> ledger = repair ? impl_->ledger() : nullptr;
  std::vector<DamagedRecord> damaged;
  Cursor cursor = records(std::nullopt);
  while (const auto record = cursor.next()) {
    const Status status = verify_file(AT_FDCWD, record->path, *record, parse_id(record->namespace_id));
    // Vanished: evicted by a process that serves.
    if (!status && status.kind() != StatusKind::kNotFound) {
      bool removed = false;
      FileInfo info;
      if (repair && status.kind() == StatusKind::kCorrupt && ops.stat(AT_FDCWD, record->path, &info) == 0) {
        removed = ops.unlink(AT_FDCWD, record->path) == 0;
        if (removed) ledger->give_back(info.disk_bytes);
      }
      damaged.push_back({record->path, status.kind(), status.message(), removed});
    }
    if (progress) progress(++done, std::max(all, done));
  }
  return damaged;
}

std::pair<std::uint64_t, std::uint64_t> FsRoot::purge(const std::optional<std::string>& namespace_id) {
  FileOps& ops = posix_file_ops();
  const std::atomic<bool> stop{false};
  const std::unique_ptr<Ledger> ledger = impl_->ledger();
  std::uint64_t records_removed = 0, bytes = 0;
  for (const std::string& name : namespaces_of(impl_->root.get(), namespace_id, impl_->path)) {
    for (Cursor cursor = records(name); cursor.next();) ++records_removed;
    const Fd directory = open_directory(impl_->root.get(), name);
    std::vector<std::uint64_t> generations;
    if (!directory || !list_generations(ops, directory.get(), &generations)) continue;
    int error = 0;
    const std::string mark_name(layout::kOpenFile);
    const Fd mark = open_fd(ops, directory.get(), mark_name, O_RDWR | O_NOFOLLOW, 0, &error);
    const bool closed = !mark || lock_file(ops, mark.get(), LOCK_EX | LOCK_NB) == 0;
    for (const std::uint64_t generation : generations) {
      bytes += reclaim_generation(ops, directory.get(), layout::generation_name(generation), kAll, closed,
                                  stop, [&](std::uint64_t gone) { ledger->give_back(gone); });
    }
    if (!closed) continue;
    const std::uint64_t before = count_tree(ops, impl_->root.get(), name, {}, stop);
    (void)ops.unlink(directory.get(), std::string(layout::kNamespaceFile));
    (void)ops.unlink(directory.get(), mark_name);
    (void)ops.rmdir(impl_->root.get(), name);
    const std::uint64_t gone = before - std::min(before, count_tree(ops, impl_->root.get(), name, {}, stop));
    ledger->give_back(gone);
    bytes += gone;
  }
  return {records_removed, bytes};
}

}  // namespace kv_offload
