// FsRoot: a root on disk, read and mended without a tier (the CLI). A serving
// process may have the root open: nothing here takes its locks for long, and
// what is removed is taken off the shared ledger.
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
#include "storage/sealing.h"

namespace kv_offload {

struct NamespaceInfo {
  std::string id;                // hex
  std::string json;              // namespace.json as it is
  std::uint64_t generation = 0;  // the newest
  std::uint64_t bytes = 0;       // on disk, all generations
  std::uint64_t records = 0;
  std::int64_t oldest_unix_nanos = 0, newest_unix_nanos = 0;  // 0: no records
  bool open = false;                                          // some process has it open
};

struct RootInfo {
  std::uint64_t bytes = 0;  // as `du`
  std::uint64_t records = 0;
  std::uint64_t temporaries = 0;
  std::vector<NamespaceInfo> namespaces;
};

struct RecordInfo {
  std::string namespace_id;  // hex
  std::uint64_t generation = 0;
  std::string key;                // hex
  std::uint64_t bytes = 0;        // of the file
  std::uint64_t named_bytes = 0;  // as its name says: of the record were it raw
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
  std::uint64_t target_bytes = 0;           // the root shall take no more, as `du`
  std::int64_t dead_before_unix_nanos = 0;  // of a namespace that nobody has open: last used before
  bool dry_run = false;                     // only tell
};

struct EvictReport {
  std::uint64_t bytes_before = 0;
  std::uint64_t bytes_freed = 0;
  std::uint64_t dead_bytes = 0;  // of these: dead namespaces, generations that a reset left
  std::uint64_t records = 0;     // removed by age, of namespaces that live
  std::vector<std::string> dead_namespaces;
};

class FsRoot {
 public:
  // Throws InvalidArgument when it is not a root of this project.
  explicit FsRoot(std::string root_dir);
  ~FsRoot();

  RootInfo stat();

  // The records of one namespace, or of all, one directory at a time: those of its newest generation and of
  // others in use (replicas that were reset, or were not). What a reset left behind is not listed.
  class Cursor {
   public:
    ~Cursor();
    Cursor(Cursor&&) noexcept;
    std::optional<RecordInfo> next();

   private:
    friend class FsRoot;
    struct Impl;
    explicit Cursor(std::unique_ptr<Impl> impl);
    std::unique_ptr<Impl> impl_;
  };
  // Throws InvalidArgument when there is no such namespace. Valid without this.
  Cursor records(const std::optional<std::string>& namespace_id);

  // Opens every record and checks all of it. repair: removes what is proven
  // wrong (not what cannot be read). progress(records done, records in all).
  // With keys what is sealed is opened, too.
  std::vector<DamagedRecord> verify(bool repair,
                                    const std::function<void(std::uint64_t, std::uint64_t)>& progress,
                                    const std::shared_ptr<const SealingKeys>& keys = nullptr);
  // Removes all generations' records of one namespace, or of all, and the
  // namespace itself when nobody has it open: (records, bytes on disk) removed.
  std::pair<std::uint64_t, std::uint64_t> purge(const std::optional<std::string>& namespace_id);

  // Makes space as the evictor of a tier does, for all processes that share the
  // root: first what nobody can hit any more (generations that a reset left
  // behind, dead namespaces), then records of all namespaces by age. Who serves
  // goes on, and finds the space. gone(bytes freed so far) may throw to end it early.
  EvictReport evict(const EvictOptions& options, const std::function<void(std::uint64_t)>& gone);

 private:
  bool is_dead(const std::string& name, std::int64_t before_unix_nanos);

  struct Impl;
  std::unique_ptr<Impl> impl_;
};

// Bytes that a directory takes on disk: as its ledger says when it is a root whose ledger can be trusted,
// else counted, as `du`. 0 when it is not there. Writes nothing.
std::uint64_t directory_usage(const std::string& path);

struct DiskProbe {
  bool o_direct = false;
  double write_bytes_per_second = 0, read_bytes_per_second = 0;
};
// Writes and reads temporary records of record_bytes, total_bytes in all, in a
// directory of its own below `directory`, removed afterwards. Throws
// ResourceError or InvalidArgument.
DiskProbe probe_disk(const std::string& directory, std::uint64_t total_bytes, std::uint64_t record_bytes);

}  // namespace kv_offload
