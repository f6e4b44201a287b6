// Opening a root and a namespace in it: every check that must fail at start,
// with a sentence, before anything is served.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "storage/file_ops.h"
#include "storage/fs_tier.h"
#include "storage/ledger.h"

namespace kv_offload {

// One generation's directory. Ops in flight share it, so that a reset does not
// pull the descriptor from under them.
struct Generation {
  std::uint64_t number = 0;
  Fd directory;  // with a shared flock: who reclaims old generations passes by those that are in use
  std::string path;
};

struct OpenRoot {
  std::string path;
  std::string namespace_name;
  Fd root;
  Fd namespace_directory;
  Fd open_mark;  // shared flock while the namespace is open
  std::unique_ptr<Ledger> ledger;
  std::unique_ptr<Lease> lease;
  std::shared_ptr<Generation> generation;
  bool direct = false;
  bool fresh = false;        // new, ours alone, counted already: nothing to scan
  std::uint64_t writer = 0;  // random; names our temporaries
  // The bound for records: a little below max_bytes, so that directories and
  // small files of namespaces and resets fit without asking.
  std::uint64_t metadata_bytes = 0;
};

// Throws InvalidArgument or ResourceError.
OpenRoot open_root(const FsTierOptions& options, FileOps& ops);

// A new temporary in `prefix` ("ab/" or ""), locked as ours. 0 or -errno.
int create_temporary(FileOps& ops, int directory, const std::string& prefix, int flags, std::uint64_t writer,
                     Fd* fd, std::string* path);
// A file that nobody needs any more becomes a temporary in the same directory, locked as ours, with the bytes
// that are in it. 0, *fd and *info; *fd empty when it is no plain file of ours or has other names: then *path
// is where it is now; or -errno: it is where it was.
int rename_to_temporary(FileOps& ops, int directory, const std::string& from, int flags, std::uint64_t writer,
                        Fd* fd, std::string* path, FileInfo* info);
// Opens (make: creates) g<number>; 0 or -errno.
int open_generation(FileOps& ops, int namespace_directory, const std::string& namespace_path,
                    std::uint64_t number, bool make, std::shared_ptr<Generation>* generation);

}  // namespace kv_offload
