// SPDX-License-Identifier: Apache-2.0
// SharedFile: the shared memory object of one engine, by name in a tmpfs.
//
// The name appears only when the file is complete: the file is created under a private name, locked, filled
// in, then linked to the shared name. A process that loses that race opens the winner's file. Every process
// that has the file open holds a shared flock on it for life. So a file whose exclusive lock is available has
// no owner: it is a leftover, and any sweep may remove it. That is why each lock is followed by a check that
// the name still refers to the locked file.
//
// keep() gives a file another name that lets it outlive its processes. There are several such names for each
// keep_for (see RegionOptions): engines that could adopt each other's file may run concurrently. Sweeps skip
// these names. adopt() takes a kept file that no process holds and adds the engine's name until keep(). So
// the file still exists if the engine dies before keep().
//
// share() gives a file a name under which other engines find it while its engine runs: one of kMostShared
// names for each share_for. Such a name is a leftover, like any other, once no process holds the file. A file
// may be both kept and shared. It is adopted only after the shared name of its last engine was removed.
//
// Private to memory/. Not thread-safe; movable.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "memory/host_region.h"

namespace kv_offload {

inline constexpr std::string_view kSharedNamePrefix = "kv_offload-";
inline constexpr std::string_view kKeptNamePrefix = "kv_offload-kept-";
inline constexpr unsigned kMostKept = 64;  // files of one keep_for
inline constexpr std::string_view kNeighbourNamePrefix = "kv_offload-shared-";
inline constexpr unsigned kMostShared = 64;  // files of one share_for

class SharedFile {
 public:
  SharedFile() = default;
  ~SharedFile();  // releases the lock; the last holder removes the name
  SharedFile(SharedFile&& other) noexcept;
  SharedFile& operator=(SharedFile&& other) noexcept;

  // Returns the engine's name in `directory`: the prefix and a digest of the id.
  static std::string path_of(const std::string& directory, std::string_view engine_id);
  // Opens the file at `path`, or creates it with `bytes` bytes and calls fill_in(fd). Throws ResourceError
  // (another user's file, no permission, the name stays contended for 10 s) or what fill_in throws; nothing
  // is left then.
  static SharedFile open_or_create(const std::string& path, std::uint64_t bytes,
                                   const std::function<void(int fd)>& fill_in);
  // Waits until another process has created the file at `path`. Throws ResourceError after `timeout`.
  static SharedFile wait_and_open(const std::string& path, std::chrono::nanoseconds timeout);
  // Returns a kept file of this keep_for that no process holds, now also linked at `path`. Removes a file for
  // which `take_over(fd)` returns false; no other process holds it then. Returns no file (fd() < 0) if there
  // is none, if `path` exists already, or if all are held for `timeout` (*is_held is true then): a killed
  // engine needs a moment to exit. Files that were not adopted stay unchanged, even if take_over throws.
  static SharedFile adopt(const std::string& directory, std::string_view keep_for, const std::string& path,
                          const std::function<bool(int fd)>& take_over, std::chrono::nanoseconds timeout,
                          bool* is_held = nullptr);

  int fd() const { return fd_; }
  std::uint64_t size() const;
  // Removes the name; the file stays for the processes that have it open. A missing name is not an error.
  void unlink_name();
  // Gives the file a kept name unless it has one, and removes the other name, except before share(). False if
  // all kept names of this keep_for are taken: the file then has no name, or the other one only.
  bool keep(const std::string& directory, std::string_view keep_for, bool before_share = false);
  // Gives the file the first free name of this share_for instead of the engine's name. False if all are
  // taken: the file has only its kept name then, if any. REQUIRES: the file still has the engine's name.
  bool share(const std::string& directory, std::string_view share_for);
  static std::string shared_path_of(const std::string& directory, std::string_view share_for,
                                    unsigned number);

 private:
  SharedFile(int fd, std::string path);
  static SharedFile try_open(const std::string& path);
  static SharedFile try_lock_kept(const std::string& path, bool* held);
  static SharedFile try_create(const std::string& path, std::uint64_t bytes,
                               const std::function<void(int)>& fill_in);
  void close_file();

  int fd_ = -1;
  int owner_pid_ = 0;  // a forked child shares the lock and must not release it
  std::string path_;
};

// Opens another engine's shared file. Returns -1 if there is none. Otherwise `problem` is empty or says why
// this file must not be used: another user's, accessible to others, or no regular file.
int open_shared_file(const std::string& path, std::string* problem);

// For an open file; 0 if the system call fails.
std::uint64_t file_size(int fd);
std::uint64_t inode_of(int fd);
std::uint64_t memory_taken(int fd);

// Removes our files in `directory` that no process holds: either the leftovers or the kept ones. Returns
// their names.
enum class Unheld : std::uint8_t { kLeftovers, kKept };
std::vector<std::string> remove_unheld_files(const std::string& directory, Unheld which);

}  // namespace kv_offload
