// SPDX-License-Identifier: Apache-2.0
// An in-memory disk behind FileOps that loses data as a real disk does: a power cut drops or tears everything
// that was not synced, in any order. It also allows damaging tens of thousands of records without a real file
// system.
//
// The model is the worst case that POSIX allows. Data is durable after fsync of the file, and a name after
// fsync of its directory. Until then, each 4 KiB page of a file, its size, and each change of a directory
// survives or is lost independently, and a page may be torn at 512 bytes. A rename within a directory is
// atomic. O_DIRECT is as volatile as the page cache (disks have caches too). No hard or symbolic links.
//
// Threads: any. power_cut() and kill() end the process on the disk: every later call fails until boot().
#pragma once

#include <condition_variable>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "backends/fs/file_ops.h"

namespace kv_offload::testing {

class SimDisk : public FileOps {
 public:
  explicit SimDisk(std::uint64_t seed = 1);

  // ---- end of the current process, and start of the next one
  void power_cut();
  void kill();  // SIGKILL: the kernel lives on, so only locks are lost
  // Ends the process in the middle of the n-th call from now that changes the disk.
  void end_after(std::uint64_t changes, bool power);
  bool ended() const;
  // REQUIRES: the process ended, and nothing uses the disk.
  void boot();
  // Plants a fault: fsync succeeds without an effect.
  void lie_about_sync() { lying_ = true; }

  // ---- content
  std::uint64_t du() const;    // as `du` reports it
  std::uint64_t peak() const;  // maximum since the last boot
  std::uint64_t changes() const;
  std::vector<std::string> files() const;  // the paths of all files
  using Bytes = std::vector<std::byte>;
  Bytes content(const std::string& path) const;
  void replace(const std::string& path, Bytes content);

  // ---- FileOps
  int open(int directory, const std::string& path, int flags, unsigned mode) override;
  void close(int fd) override;
  int replace(int fd, int by) override;
  std::int64_t preadv(int fd, const iovec* parts, int count, std::int64_t offset) override;
  std::int64_t pwritev(int fd, const iovec* parts, int count, std::int64_t offset) override;
  int move(int from_directory, const std::string& from, int to_directory, const std::string& to,
           bool keep_existing) override;
  int unlink(int directory, const std::string& path) override;
  int rmdir(int directory, const std::string& path) override;
  int mkdir(int directory, const std::string& path, unsigned mode) override;
  int fsync(int fd, bool data_only) override;
  int fstat(int fd, FileInfo* info) override;
  int stat(int directory, const std::string& path, FileInfo* info) override;
  int set_mtime(int directory, const std::string& path, std::int64_t nanos) override;
  int statvfs(int fd, SpaceInfo* info) override;
  int flock(int fd, int operation) override;
  int refresh(int, const std::string&) override { return 0; }
  int list(int fd, std::vector<DirEntry>* entries) override;

 private:
  struct Node;
  using NodePtr = std::shared_ptr<Node>;
  using Entries = std::map<std::string, NodePtr>;
  struct NameChange {
    std::string gone, made;  // either may be empty
    NodePtr node;
  };
  struct Node {
    bool directory = false;
    std::uint64_t inode = 0;
    std::uint32_t links = 1;
    std::int64_t mtime = 0;
    Bytes data, synced;           // synced: safe from a power cut
    std::set<std::size_t> dirty;  // pages
    Entries entries, synced_entries;
    std::vector<NameChange> unsynced;
    std::map<int, int> locks;  // fd -> LOCK_SH or LOCK_EX
  };
  struct Place {
    NodePtr parent, node;
    std::string name;
    int error = 0;
  };

  NodePtr make_node(bool directory);
  Place find(int directory, const std::string& path) const;
  int change();  // counts the change; -EIO if the process has ended, now or before
  void change_name(Node& directory, const std::string& gone, const std::string& made, const NodePtr& node);
  void end(bool power);
  NodePtr survivor(const NodePtr& node, std::map<const Node*, NodePtr>& known);
  Bytes surviving_data(const Node& node);
  static std::uint64_t disk_bytes(const Node& node);
  std::uint64_t du(const Node& node) const;
  static void fill(const Node& node, FileInfo* info);
  bool chance(unsigned of) { return random_() % of == 0; }

  mutable std::mutex mutex_;
  std::condition_variable unlocked_;
  std::mt19937_64 random_;
  NodePtr root_, next_root_;
  std::map<int, NodePtr> fds_;
  int next_fd_ = 1000;
  std::uint64_t next_inode_ = 1, boots_ = 1, changes_ = 0, end_at_ = 0, used_ = 0, peak_ = 0;
  bool end_by_power_ = false, ended_ = false, lying_ = false;
};

}  // namespace kv_offload::testing
