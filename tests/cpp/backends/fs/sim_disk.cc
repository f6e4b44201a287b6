// SPDX-License-Identifier: Apache-2.0
#include "backends/fs/sim_disk.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <stdexcept>

#include "base/types.h"

namespace kv_offload::testing {
namespace {

constexpr std::size_t kSector = 512;

std::vector<std::string> split(const std::string& path) {
  std::vector<std::string> parts;
  std::size_t at = 0;
  while (at <= path.size()) {
    const std::size_t end = std::min(path.find('/', at), path.size());
    const std::string part = path.substr(at, end - at);
    if (part == "..") {
      parts.pop_back();
    } else if (!part.empty() && part != ".") {
      parts.push_back(part);
    }
    at = end + 1;
  }
  return parts;
}

}  // namespace

SimDisk::SimDisk(std::uint64_t seed) : random_(seed), root_(make_node(true)) {}

SimDisk::NodePtr SimDisk::make_node(bool directory) {
  auto node = std::make_shared<Node>();
  node->directory = directory;
  node->inode = next_inode_++;
  return node;
}

// ---- end and boot

void SimDisk::power_cut() {
  const std::lock_guard lock(mutex_);
  end(true);
}
void SimDisk::kill() {
  const std::lock_guard lock(mutex_);
  end(false);
}
void SimDisk::end_after(std::uint64_t changes, bool power) {
  const std::lock_guard lock(mutex_);
  end_at_ = changes_ + changes;
  end_by_power_ = power;
}
bool SimDisk::ended() const {
  const std::lock_guard lock(mutex_);
  return ended_;
}

void SimDisk::end(bool power) {
  if (ended_) return;
  ended_ = true;
  end_at_ = 0;
  std::map<const Node*, NodePtr> known;
  next_root_ = power ? survivor(root_, known) : root_;
  boots_ += power;
  unlocked_.notify_all();
}

void SimDisk::boot() {
  const std::lock_guard lock(mutex_);
  if (!ended_) throw std::logic_error("boot() without an end");
  for (const auto& [fd, node] : fds_) node->locks.clear();
  fds_.clear();
  root_ = std::move(next_root_);
  ended_ = false;
  used_ = peak_ = du(*root_);
}

SimDisk::Bytes SimDisk::surviving_data(const Node& node) {
  Bytes bytes = node.synced;
  if (node.data.size() != bytes.size() && !chance(3)) bytes.resize(node.data.size());
  for (const std::size_t page : node.dirty) {
    const std::size_t start = page * kPageBytes;
    const std::size_t end = std::min({start + kPageBytes, node.data.size(), bytes.size()});
    const unsigned fate = static_cast<unsigned>(random_() % 4);  // 0: lost, 1: torn, else written
    for (std::size_t at = start; fate != 0 && at < end; at += kSector) {
      if (fate == 1 && chance(2)) continue;
      std::copy_n(node.data.data() + at, std::min(kSector, end - at), bytes.data() + at);
    }
  }
  return bytes;
}

SimDisk::NodePtr SimDisk::survivor(const NodePtr& node, std::map<const Node*, NodePtr>& known) {
  NodePtr& made = known[node.get()];
  if (made) return made;
  made = make_node(node->directory);
  const NodePtr result = made;  // `known` may move below
  result->mtime = node->mtime;
  if (!node->directory) {
    result->data = result->synced = surviving_data(*node);
    return result;
  }
  Entries entries = node->synced_entries;
  for (const NameChange& change : node->unsynced) {
    if (chance(2)) continue;
    if (!change.gone.empty()) entries.erase(change.gone);
    if (!change.made.empty()) entries[change.made] = change.node;
  }
  for (const auto& [name, child] : entries) {
    const bool other_name = known.contains(child.get());
    NodePtr& entry = result->entries[name] = survivor(child, known);
    entry->links += other_name;
  }
  result->synced_entries = result->entries;
  return result;
}

int SimDisk::change() {
  if (ended_) return -EIO;
  ++changes_;
  if (end_at_ != 0 && changes_ >= end_at_) {
    end(end_by_power_);
    return -EIO;
  }
  return 0;
}

// ---- content

std::uint64_t SimDisk::disk_bytes(const Node& node) {
  return node.directory ? kPageBytes : round_up(node.data.size(), kPageBytes);
}
std::uint64_t SimDisk::du(const Node& node) const {
  std::uint64_t bytes = disk_bytes(node);
  for (const auto& [name, child] : node.entries) bytes += du(*child);
  return bytes;
}
std::uint64_t SimDisk::du() const {
  const std::lock_guard lock(mutex_);
  const Place place = find(AT_FDCWD, "/root");
  return place.node ? du(*place.node) : 0;
}
std::uint64_t SimDisk::peak() const {
  const std::lock_guard lock(mutex_);
  return peak_ < kPageBytes ? 0 : peak_ - kPageBytes;  // without the directory that holds the root
}
std::uint64_t SimDisk::changes() const {
  const std::lock_guard lock(mutex_);
  return changes_;
}

std::vector<std::string> SimDisk::files() const {
  const std::lock_guard lock(mutex_);
  std::vector<std::string> paths;
  const std::function<void(const Node&, const std::string&)> visit = [&](const Node& node,
                                                                         const std::string& path) {
    for (const auto& [name, child] : node.entries) {
      if (child->directory) {
        visit(*child, path + "/" + name);
      } else {
        paths.push_back(path + "/" + name);
      }
    }
  };
  visit(*root_, "");
  return paths;
}

SimDisk::Bytes SimDisk::content(const std::string& path) const {
  const std::lock_guard lock(mutex_);
  return find(AT_FDCWD, path).node->data;
}
void SimDisk::replace(const std::string& path, Bytes content) {
  const std::lock_guard lock(mutex_);
  Node& node = *find(AT_FDCWD, path).node;
  used_ -= disk_bytes(node);
  node.data = node.synced = std::move(content);
  node.dirty.clear();
  used_ += disk_bytes(node);
}

// ---- names

SimDisk::Place SimDisk::find(int directory, const std::string& path) const {
  Place place;
  place.node = root_;
  if (directory != AT_FDCWD) {
    const auto found = fds_.find(directory);
    if (found == fds_.end()) return {nullptr, nullptr, "", -EBADF};
    place.node = found->second;
  }
  for (const std::string& part : split(path)) {
    if (!place.node) return {nullptr, nullptr, "", -ENOENT};
    if (!place.node->directory) return {nullptr, nullptr, "", -ENOTDIR};
    place.parent = place.node;
    place.name = part;
    const auto child = place.parent->entries.find(part);
    place.node = child == place.parent->entries.end() ? nullptr : child->second;
  }
  place.error = place.node ? 0 : -ENOENT;
  return place;
}

void SimDisk::change_name(Node& directory, const std::string& gone, const std::string& made,
                          const NodePtr& node) {
  if (!gone.empty()) directory.entries.erase(gone);
  if (!made.empty()) {
    NodePtr& there = directory.entries[made];
    if (there) {
      --there->links;
      used_ -= disk_bytes(*there);
    }
    there = node;
  } else {
    --node->links;
    used_ -= disk_bytes(*node);
  }
  if (gone.empty()) used_ += disk_bytes(*node);
  peak_ = std::max(peak_, used_);
  directory.unsynced.push_back({gone, made, node});
}

int SimDisk::open(int directory, const std::string& path, int flags, unsigned) {
  const std::lock_guard lock(mutex_);
  if (path == "/proc/sys/kernel/random/boot_id") {  // a new id for each boot
    const NodePtr node = make_node(false);
    const std::string text = std::to_string(boots_);
    for (const char c : text) node->data.push_back(static_cast<std::byte>(c));
    fds_[next_fd_] = node;
    return next_fd_++;
  }
  if (ended_) return -EIO;
  Place place = find(directory, path);
  if (place.node && (flags & O_CREAT) != 0 && (flags & O_EXCL) != 0) return -EEXIST;
  if (!place.node && (flags & O_CREAT) != 0 && place.parent && place.error == -ENOENT) {
    if (place.parent->links == 0) return -ENOENT;
    if (const int rc = change(); rc < 0) return rc;
    place.node = make_node(false);
    change_name(*place.parent, "", place.name, place.node);
  }
  if (!place.node) return place.error;
  if ((flags & O_DIRECTORY) != 0 && !place.node->directory) return -ENOTDIR;
  if (place.node->directory && (flags & (O_WRONLY | O_RDWR)) != 0) return -EISDIR;
  fds_[next_fd_] = place.node;
  return next_fd_++;
}

void SimDisk::close(int fd) {
  const std::lock_guard lock(mutex_);
  const auto found = fds_.find(fd);
  if (found == fds_.end()) return;
  found->second->locks.erase(fd);
  fds_.erase(found);
  unlocked_.notify_all();
}

int SimDisk::replace(int fd, int by) {
  const std::lock_guard lock(mutex_);
  if (!fds_.contains(fd) || !fds_.contains(by)) return -EBADF;
  fds_[fd]->locks.erase(fd);
  fds_[fd] = fds_[by];
  std::map<int, int>& locks = fds_[by]->locks;
  if (const auto held = locks.find(by); held != locks.end())
    locks[fd] = held->second;  // one lock per open file
  unlocked_.notify_all();
  return 0;
}

int SimDisk::move(int from_directory, const std::string& from, int to_directory, const std::string& to,
                  bool keep_existing) {
  const std::lock_guard lock(mutex_);
  if (ended_) return -EIO;
  const Place source = find(from_directory, from), target = find(to_directory, to);
  if (!source.node) return source.error;
  if (target.node && keep_existing) return -EEXIST;
  if (!target.parent) return target.error;
  if (target.node && target.node->directory) return -EISDIR;
  if (const int rc = change(); rc < 0) return rc;
  if (source.parent == target.parent) {
    change_name(*source.parent, source.name, target.name, source.node);
  } else {  // a power cut may leave it in both directories, or in neither
    ++source.node->links;
    change_name(*source.parent, source.name, "", source.node);
    change_name(*target.parent, "", target.name, source.node);
  }
  return 0;
}

int SimDisk::unlink(int directory, const std::string& path) {
  const std::lock_guard lock(mutex_);
  if (ended_) return -EIO;
  const Place place = find(directory, path);
  if (!place.node) return place.error;
  if (place.node->directory) return -EISDIR;
  if (const int rc = change(); rc < 0) return rc;
  change_name(*place.parent, place.name, "", place.node);
  return 0;
}

int SimDisk::rmdir(int directory, const std::string& path) {
  const std::lock_guard lock(mutex_);
  if (ended_) return -EIO;
  const Place place = find(directory, path);
  if (!place.node) return place.error;
  if (!place.node->directory) return -ENOTDIR;
  if (!place.node->entries.empty()) return -ENOTEMPTY;
  if (const int rc = change(); rc < 0) return rc;
  change_name(*place.parent, place.name, "", place.node);
  return 0;
}

int SimDisk::mkdir(int directory, const std::string& path, unsigned) {
  const std::lock_guard lock(mutex_);
  if (ended_) return -EIO;
  const Place place = find(directory, path);
  if (place.node) return -EEXIST;
  if (!place.parent || place.error != -ENOENT || place.parent->links == 0) return -ENOENT;
  if (const int rc = change(); rc < 0) return rc;
  change_name(*place.parent, "", place.name, make_node(true));
  return 0;
}

int SimDisk::list(int fd, std::vector<DirEntry>* entries) {
  const std::lock_guard lock(mutex_);
  const auto found = fds_.find(fd);
  if (ended_ || found == fds_.end()) return -EIO;
  for (const auto& [name, node] : found->second->entries) {
    entries->push_back({name, static_cast<unsigned char>(node->directory ? DT_DIR : DT_REG)});
  }
  return 0;
}

// ---- bytes

std::int64_t SimDisk::preadv(int fd, const iovec* parts, int count, std::int64_t offset) {
  const std::lock_guard lock(mutex_);
  const auto found = fds_.find(fd);
  if (found == fds_.end()) return -EBADF;
  const Bytes& data = found->second->data;
  auto at = static_cast<std::size_t>(offset);
  std::int64_t moved = 0;
  for (int i = 0; i < count && at < data.size(); ++i) {
    const std::size_t bytes = std::min(parts[i].iov_len, data.size() - at);
    std::memcpy(parts[i].iov_base, data.data() + at, bytes);
    at += bytes;
    moved += static_cast<std::int64_t>(bytes);
  }
  return moved;
}

std::int64_t SimDisk::pwritev(int fd, const iovec* parts, int count, std::int64_t offset) {
  const std::lock_guard lock(mutex_);
  const auto found = fds_.find(fd);
  if (ended_ || found == fds_.end()) return -EIO;
  Node& node = *found->second;
  const std::uint64_t before = disk_bytes(node);
  auto at = static_cast<std::size_t>(offset);
  const std::size_t start = at;
  // The process may end in the middle: the bytes before that are in the page cache.
  const bool last = end_at_ != 0 && changes_ + 1 >= end_at_;
  std::size_t left = last ? random_() % 65536 : SIZE_MAX;
  for (int i = 0; i < count && left > 0; ++i) {
    const std::size_t bytes = std::min(parts[i].iov_len, left);
    if (node.data.size() < at + bytes) node.data.resize(at + bytes);
    std::memcpy(node.data.data() + at, parts[i].iov_base, bytes);
    for (std::size_t page = at / kPageBytes; page * kPageBytes < at + bytes; ++page) node.dirty.insert(page);
    at += bytes;
    left -= bytes;
  }
  used_ += disk_bytes(node) - before;
  peak_ = std::max(peak_, used_);
  if (const int rc = change(); rc < 0) return rc;
  return static_cast<std::int64_t>(at - start);
}

int SimDisk::fsync(int fd, bool) {
  const std::lock_guard lock(mutex_);
  const auto found = fds_.find(fd);
  if (found == fds_.end()) return -EBADF;
  if (const int rc = change(); rc < 0) return rc;
  if (lying_) return 0;
  Node& node = *found->second;
  node.synced = node.data;
  node.dirty.clear();
  node.synced_entries = node.entries;
  node.unsynced.clear();
  return 0;
}

void SimDisk::fill(const Node& node, FileInfo* info) {
  *info = {};
  info->size = node.data.size();
  info->disk_bytes = disk_bytes(node);
  info->inode = node.inode;
  info->mtime_nanos = node.mtime;
  info->mode = node.directory ? (S_IFDIR | 0700u) : (S_IFREG | 0600u);
  info->owner = ::geteuid();
  info->links = node.links;
}

int SimDisk::fstat(int fd, FileInfo* info) {
  const std::lock_guard lock(mutex_);
  const auto found = fds_.find(fd);
  if (ended_ || found == fds_.end()) return -EIO;
  fill(*found->second, info);
  return 0;
}
int SimDisk::stat(int directory, const std::string& path, FileInfo* info) {
  const std::lock_guard lock(mutex_);
  if (ended_) return -EIO;
  const Place place = find(directory, path);
  if (place.node) fill(*place.node, info);
  return place.node ? 0 : place.error;
}
int SimDisk::set_mtime(int directory, const std::string& path, std::int64_t nanos) {
  const std::lock_guard lock(mutex_);
  if (ended_) return -EIO;
  const Place place = find(directory, path);
  if (place.node) place.node->mtime = nanos;
  return place.node ? 0 : place.error;
}
int SimDisk::statvfs(int, SpaceInfo* info) {
  info->free_bytes = std::uint64_t{1} << 40;
  return 0;
}

int SimDisk::flock(int fd, int operation) {
  std::unique_lock lock(mutex_);
  const auto found = fds_.find(fd);
  if (found == fds_.end()) return -EBADF;
  const NodePtr node = found->second;
  const int mode = operation & (LOCK_SH | LOCK_EX);
  if ((operation & LOCK_UN) != 0) {
    node->locks.erase(fd);
    unlocked_.notify_all();
    return 0;
  }
  const auto free = [&] {
    return std::all_of(node->locks.begin(), node->locks.end(), [&](const auto& held) {
      return held.first == fd || (held.second == LOCK_SH && mode == LOCK_SH);
    });
  };
  if ((operation & LOCK_NB) != 0 && !free()) return -EWOULDBLOCK;
  unlocked_.wait(lock, [&] { return ended_ || free(); });
  if (ended_) return -EIO;
  node->locks[fd] = mode;
  return 0;
}

}  // namespace kv_offload::testing
