// Opening a root and a namespace in it: every check that must fail at start,
// with a sentence, before anything is served.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "storage/file_ops.h"
#include "storage/fs_tier.h"
#include "storage/space.h"
#include "storage/temporary.h"

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
  std::unique_ptr<Space> space;
  std::shared_ptr<Generation> generation;
  bool direct = false;
  bool fresh = false;        // new, ours alone, counted already: nothing to scan
  std::uint64_t writer = 0;  // random, not 0; names our temporaries and our slot in the page
};

// Throws InvalidArgument or ResourceError.
OpenRoot open_root(const FsTierOptions& options, FileOps& ops);

// Opens (make: creates) g<number>; 0 or -errno.
int open_generation(FileOps& ops, int namespace_directory, const std::string& namespace_path,
                    std::uint64_t number, bool make, std::shared_ptr<Generation>* generation);

}  // namespace kv_offload
