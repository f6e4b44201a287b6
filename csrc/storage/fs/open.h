// Opening a root and a namespace in it: every check that must fail at start,
// with a sentence, before anything is served.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "storage/fs/file_ops.h"
#include "storage/fs/generation.h"
#include "storage/fs/space.h"
#include "storage/fs/temporary.h"
#include "storage/fs/tier.h"

namespace kv_offload {

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

}  // namespace kv_offload
