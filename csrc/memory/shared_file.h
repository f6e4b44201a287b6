// SharedFile: the shared memory object of one engine, by name in a tmpfs.
//
// The name appears only when the file is complete: it is made under a name of
// its own, locked, filled in, then linked to the shared name; who loses that
// race takes the winner's. Whoever has the file open holds a shared flock on it
// for life, so a file whose exclusive lock can be had belongs to nobody: a
// leftover, which any sweep may remove. Hence after each lock the name is
// checked to still mean the locked file.
//
// A file that is to outlive its processes gets another name with keep(), of which
// there are several for each keep_for (see RegionOptions): engines that could take over
// each other's file may run side by side. A sweep leaves these names alone. adopt() takes
// one that nobody holds and gives it the name of the engine as well, until keep(): so it
// is still there when the engine dies before that.
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

class SharedFile {
 public:
  SharedFile() = default;
  ~SharedFile();  // gives the lock back; the last holder removes the name
  SharedFile(SharedFile&& other) noexcept;
  SharedFile& operator=(SharedFile&& other) noexcept;

  // The name in `directory` for an engine: prefix and a digest of the id.
  static std::string path_of(const std::string& directory, std::string_view engine_id);
  // Takes the file at `path`, or makes it: size `bytes`, then fill_in(fd). Throws
  // ResourceError (another user's file, no permission, the name stays contended
  // for 10 s) or what fill_in throws; nothing is left then.
  static SharedFile open_or_create(const std::string& path, std::uint64_t bytes,
                                   const std::function<void(int fd)>& fill_in);
  // Waits until another process has made the file at `path`. Throws ResourceError when
  // it has not after `patience`.
  static SharedFile open_when_there(const std::string& path, std::chrono::nanoseconds patience);
  // A kept file of this keep_for that nobody holds, now also at `path`. It is removed
  // instead where `take_over(fd)` is false; nobody else holds it then. No file (fd() < 0)
  // when there is none, when `path` is another's, and where all are held for as long as
  // `patience`: an engine that is killed needs a moment to be gone. Whatever is not taken
  // stays as it is, also when take_over throws.
  static SharedFile adopt(const std::string& directory, std::string_view keep_for, const std::string& path,
                          const std::function<bool(int fd)>& take_over, std::chrono::nanoseconds patience);

  int fd() const { return fd_; }
  std::uint64_t size() const;
  // The name goes, the file stays for those who have it. Not an error when gone.
  void unlink_name();
  // It gets a kept name unless it has one, and loses the other. False when all kept names
  // of this keep_for are taken: then it has none.
  bool keep(const std::string& directory, std::string_view keep_for);

 private:
  SharedFile(int fd, std::string path);
  static SharedFile try_open(const std::string& path);
  static SharedFile try_lock_kept(const std::string& path, bool* held);
  static SharedFile try_create(const std::string& path, std::uint64_t bytes,
                               const std::function<void(int)>& fill_in);
  void close_file();

  int fd_ = -1;
  int owner_pid_ = 0;  // a forked child shares the lock and must not give it back
  std::string path_;
};

// Of an open file; 0 where it cannot be asked.
std::uint64_t file_size(int fd);
std::uint64_t memory_taken(int fd);

std::vector<KeptRegion> kept_files(const std::string& directory);

// Removes what is ours in `directory` and held by nobody, but for what is kept or, if so
// asked, only what is kept; the names removed.
enum class Unheld : std::uint8_t { kLeftovers, kKept };
std::vector<std::string> remove_unheld_files(const std::string& directory, Unheld which);

}  // namespace kv_offload
