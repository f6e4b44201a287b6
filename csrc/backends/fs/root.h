// SPDX-License-Identifier: Apache-2.0
// FsRoot: inspects and repairs a root without a tier (for the CLI). A serving process may have the root open:
// no lock is held for long, and removed bytes are subtracted from the shared ledger.
//
// Threads: one per object. Calls block on storage.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/status.h"
#include "record/encryption.h"

namespace kv_offload {

struct NamespaceInfo {
  std::string id;           // hex
  std::string json;         // namespace.json, unchanged
  std::uint64_t epoch = 0;  // the newest epoch
  std::uint64_t bytes = 0;  // on disk, all epochs
  std::uint64_t records = 0;
  std::int64_t oldest_unix_nanos = 0, newest_unix_nanos = 0;  // 0: no records
  bool open = false;                                          // some process has it open
};

// A directory of records that cannot be read.
struct UnreadableDirectory {
  std::string path, message;
};

struct RootInfo {
  std::uint64_t bytes = 0;  // as counted by `du`
  std::uint64_t records = 0;
  std::uint64_t temporaries = 0;
  std::vector<NamespaceInfo> namespaces;
  std::vector<UnreadableDirectory> unreadable;  // all figures are without their contents
};

struct RecordInfo {
  std::string namespace_id;  // hex
  std::uint64_t epoch = 0;
  std::string key;                // hex
  std::uint64_t bytes = 0;        // file size
  std::uint64_t named_bytes = 0;  // size of the raw record, as in the file name
  std::int64_t mtime_unix_nanos = 0;
  std::string path;
};

struct DamagedRecord {
  std::string path;
  StatusKind kind = StatusKind::kCorrupt;
  std::string message;
  bool removed = false;
};

struct EvictOptions {
  std::uint64_t target_bytes = 0;           // the root must not take more, as counted by `du`
  std::int64_t dead_before_unix_nanos = 0;  // a closed namespace is dead if its last use was earlier
  bool dry_run = false;                     // only report
};

struct EvictReport {
  std::uint64_t bytes_before = 0;
  std::uint64_t bytes_freed = 0;
  std::uint64_t dead_bytes = 0;  // part of bytes_freed: dead namespaces, epochs that a reset left behind
  std::uint64_t records = 0;     // removed by age, from live namespaces
  std::vector<std::string> dead_namespaces;
};

class FsRoot {
 public:
  // Throws InvalidArgument if the directory is not a root of this project, ResourceError if it cannot be
  // read.
  explicit FsRoot(std::string root_dir);
  ~FsRoot();

  RootInfo stat();
  // True if some process has a namespace open.
  bool is_open();

  // Iterates over the records of one namespace, or of all, one directory at a time: those of its newest epoch
  // and of other epochs in use (by replicas that were reset, or were not). Skips epochs that a reset left
  // unused, and directories that cannot be read.
  class Cursor {
   public:
    ~Cursor();
    Cursor(Cursor&&) noexcept;
    std::optional<RecordInfo> next();

   private:
    friend class FsRoot;
    using OnUnreadable = std::function<void(const std::string& path, const Status& status)>;
    struct Impl;
    explicit Cursor(std::unique_ptr<Impl> impl);
    std::unique_ptr<Impl> impl_;
  };
  // Throws InvalidArgument if the namespace does not exist. The cursor may outlive this object. all_epochs:
  // includes epochs that a reset left unused. strict: next() throws ResourceError for each directory that
  // cannot be read; the next call continues after that directory.
  Cursor records(const std::optional<std::string>& namespace_id, bool all_epochs = false,
                 bool strict = false);

  // Opens every record and checks all of it. repair: removes records that are proven wrong (not those that
  // cannot be read). If a server replaces such a record in the microseconds between its last check and the
  // removal, the new one is removed; that is a miss. Also reports each directory that cannot be read.
  // progress(records done, records in all). With keys, decrypts encrypted records too.
  std::vector<DamagedRecord> verify(bool repair,
                                    const std::function<void(std::uint64_t, std::uint64_t)>& progress,
                                    const std::shared_ptr<const EncryptionKeys>& keys = nullptr);
  // Removes the records of all epochs of one namespace, or of all namespaces, and each namespace itself if no
  // process has it open. Returns (records, bytes on disk) removed. Throws ResourceError if a record
  // cannot be removed, or if a directory cannot be read; all other records are removed.
  std::pair<std::uint64_t, std::uint64_t> purge(const std::optional<std::string>& namespace_id);

  // Returns the epoch that newly started processes use; none if the namespace does not exist, or if a reset
  // made the newest epoch: the next process to start makes another one then. Throws ResourceError if the
  // namespace cannot be read.
  std::optional<std::uint64_t> startup_epoch(const std::string& namespace_id);
  // Removes these records (RecordInfo::path) and returns their number; missing ones do not count. Throws
  // ResourceError if some cannot be removed; all others are removed.
  std::uint64_t remove(const std::vector<std::string>& paths);

  // Makes space like the evictor of a tier, for all processes that share the root: first the files that no
  // process can hit any more (epochs that a reset left behind, dead namespaces), then records of all
  // namespaces by age. Running servers continue and use the freed space. on_removed(bytes freed so far) may
  // throw to end it early.
  EvictReport evict(const EvictOptions& options, const std::function<void(std::uint64_t)>& on_removed);

 private:
  bool is_dead(const std::string& name, std::int64_t before_unix_nanos);

  struct Impl;
  std::unique_ptr<Impl> impl_;
};

// Returns the bytes that a directory takes on disk: from its ledger if it is a root with a trusted ledger,
// else counted like `du`. 0 if the directory does not exist. Writes nothing.
std::uint64_t directory_usage(const std::string& path);

struct DiskProbe {
  bool o_direct = false;
  double write_bytes_per_second = 0, read_bytes_per_second = 0;
};
// Measures a disk: writes and reads temporary records of record_bytes, total_bytes in all, in a new directory
// below `directory`, which is removed afterwards, like those of earlier runs that were killed. REQUIRES:
// `directory` is not a root. Throws ResourceError or InvalidArgument.
DiskProbe probe_disk(const std::string& directory, std::uint64_t total_bytes, std::uint64_t record_bytes);
// Measures the disk of a root: the same in a namespace of its own, within max_bytes and without eviction. If
// this process is killed, the next start removes the records. Returns nothing if they do not fit, or if the
// count of the root did not end within a minute.
std::optional<DiskProbe> probe_root(const std::string& root_dir, std::uint64_t max_bytes,
                                    std::uint64_t total_bytes, std::uint64_t record_bytes);

// Keeps `bytes` of max_bytes free in a root, for files of the caller that have no name. Without eviction. If
// this process is killed, the next count frees them.
class ReservedSpace {
 public:
  // Throws ResourceError if they are not free, or if the root was not counted since the machine started.
  ReservedSpace(const std::string& root_dir, std::uint64_t max_bytes, std::uint64_t bytes);
  ~ReservedSpace();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace kv_offload
