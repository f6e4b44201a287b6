// SharedFile: the shared memory object of one engine, by name in a tmpfs.
//
// The name appears only when the file is complete: it is made under a name of
// its own, locked, filled in, then linked to the shared name; who loses that
// race takes the winner's. Whoever has the file open holds a shared flock on it
// for life, so a file whose exclusive lock can be had belongs to nobody: a
// leftover, which any sweep may remove. Hence after each lock the name is
// checked to still mean the locked file.
//
// Private to memory/. Not thread-safe; movable.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

namespace kv_offload {

inline constexpr std::string_view kSharedNamePrefix = "kv_offload-";

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

  int fd() const { return fd_; }
  std::uint64_t size() const;
  // The name goes, the file stays for those who have it. Not an error when gone.
  void unlink_name();

 private:
  SharedFile(int fd, std::string path);
  static SharedFile try_open(const std::string& path);
  static SharedFile try_create(const std::string& path, std::uint64_t bytes,
                               const std::function<void(int)>& fill_in);
  void close_file();

  int fd_ = -1;
  int owner_pid_ = 0;  // a forked child shares the lock and must not give it back
  std::string path_;
};

// Removes what is ours in `directory` and held by nobody; the names removed.
std::vector<std::string> remove_unheld_files(const std::string& directory);

}  // namespace kv_offload
